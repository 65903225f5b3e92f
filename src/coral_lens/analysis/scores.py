"""Scores with 95 % bootstrap intervals over questions: of probabilities, and of predicted residuals. Only arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from coral_lens.metrics.comparisons import Difference, resampled
from coral_lens.metrics.scores import METRICS, Score, facts_of, iter_weights, score_of
from coral_lens.ragged import Options
from coral_lens.records import Predictions

SHOWN = ("accuracy", "ece", "brier")
N_BOOT = 500
"""Resamples behind every interval: the same questions are drawn for every layer, head and setting."""


Row = TypeVar("Row")


def row_from(kind: type[Row], plain: Mapping[str, Any]) -> Row:
    """Return a row with `scores`, and perhaps a `gain`, from what a journal kept of it."""
    numbers = {"scores": Score, "gain": Difference}
    typed = {part: {m: numbers[part](**s) for m, s in plain[part].items()} for part in numbers if part in plain}
    return kind(**{**plain, **typed})


def scores_of(predictions: Predictions, names: Sequence[str] = SHOWN) -> dict[str, Score]:
    """Return some metrics with their intervals; `metrics.evaluate` would compute all of them."""
    facts = facts_of(predictions)
    draws: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for weights in iter_weights(len(predictions), n_boot=N_BOOT, seed=0, groups=predictions.groups):
        for name in names:
            draws[name].append(METRICS[name].compute(facts, weights))
    once = np.ones((1, len(predictions)))
    return {
        name: score_of(float(METRICS[name].compute(facts, once)[0]), np.concatenate(values), kind=METRICS[name].kind)
        for name, values in draws.items()
    }


@dataclass(frozen=True)
class StrengthRow:
    """Steering at one strength."""

    gamma: float
    scores: dict[str, Score]
    over_one: dict[str, Difference]
    """The scores less those at gamma = 1, on the same questions."""


def strength_rows(predictions: Mapping[float, Predictions]) -> list[StrengthRow]:
    """Score predictions at every strength, and against a strength of 1; the same questions are drawn for all."""
    drawn = resampled({str(gamma): one for gamma, one in predictions.items()}, SHOWN, n_boot=N_BOOT)
    rows, kinds = [], {metric: METRICS[metric].kind for metric in SHOWN}
    for gamma in predictions:
        mine, at_one = drawn[str(gamma)], drawn[str(1.0)]
        scores = {m: score_of(mine[m].value, mine[m].draws, kind=kind) for m, kind in kinds.items()}
        over_one = {m: mine[m].minus(at_one[m], kind=kind) for m, kind in kinds.items()}
        rows.append(StrengthRow(gamma, scores, over_one))
    return rows


def r2_draws(
    r: Float[np.ndarray, " row"],
    r_hat: Float[np.ndarray, "probe row"],
    options: Options,
    groups: Sequence[str] = (),
) -> Float[np.ndarray, "boot probe"]:
    """Return R2 of several predictions: first of the questions as they are, then of every resample, of whole groups if given."""
    # Fortran order, in which a product with the weights has always been rounded
    errors = np.asfortranarray(options.sum(((r - r_hat) ** 2).T))
    # what the variance of a resample is made of: its rows, their sum and their sum of squares
    sums = np.stack([options.sizes, options.sum(r), options.sum(r**2)], axis=1)
    draws = []
    for weights in (np.ones((1, len(options))), *iter_weights(len(options), n_boot=N_BOOT, seed=0, groups=groups)):
        n, total, squares = (weights @ sums).T
        variance = squares - total**2 / n
        draws.append(1.0 - (weights @ errors) / np.where(variance > 0, variance, np.inf)[:, None])
    return np.concatenate(draws)


def r2_scores(
    r: Float[np.ndarray, " row"],
    r_hat: Float[np.ndarray, "probe row"],
    options: Options,
    groups: Sequence[str] = (),
) -> list[Score]:
    """Return R2 of several predictions, each with its interval."""
    return scores_from(r2_draws(r, r_hat, options, groups))


def scores_from(draws: Float[np.ndarray, "boot probe"]) -> list[Score]:
    """Return a score for each column of draws, whose first row is the estimate."""
    return [score_of(float(column[0]), column[1:], kind="mean") for column in draws.T]
