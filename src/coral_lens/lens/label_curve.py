"""What fewer labels of a task would have given, and how many more are still worth it. It fits on parts of the labels only."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.lens.keep_answers import ENOUGH_TO_TELL, error_of_mean
from coral_lens.lens.labelled import Labelled, Mixture, Prior, fit_mixture, gain_of, is_worse, judge, settle
from coral_lens.lens.trace import WORTH, CurvePoint, LearningCurve

FEWEST_FOR_CURVE = 10
"""Fewer labelled questions than this have no curve."""
CURVE_SIZES = (0, 5, 10, 20, 30, 50, 100, 200)
CURVE_DRAWS = 20
MOST_MORE = 10
"""Labels that gain little before they are so many times as many are hardly worth it."""


def refuse_short_curve(n_labels: int) -> None:
    """Refuse a learning curve of very few labels, of which half are the judges."""
    if n_labels < FEWEST_FOR_CURVE:
        raise CoralError(
            f"A learning curve needs at least {FEWEST_FOR_CURVE} labelled questions that the lens was not fitted on. Got "
            f"{n_labels}; adapt without it, or label more."
        )


def learning_curve(data: Labelled, prior: Prior, *, seed: int = 0) -> LearningCurve:
    """Return the Brier score on the other questions after so many labels, how many are enough, and how many more would help.

    Labels are drawn some times, in whole groups; all sizes of a draw are judged by the same questions, and compared question by
    question: Brier scores of questions differ far more than what labels make of them.
    """
    refuse_short_curve(len(data.options))
    rng, units = np.random.default_rng(seed), data.units
    counts = counts_of_units(units)
    sums, labels, judged = np.zeros((len(counts), len(units))), np.zeros(len(counts)), np.zeros(len(units))
    for _ in range(CURVE_DRAWS):
        place = rng.permutation(units.max() + 1)[units]
        rest = place >= counts[-1]
        judged += rest
        for i, count in enumerate(counts):
            drawn = data.take(place < count)
            labels[i] += len(drawn.options) / CURVE_DRAWS
            sums[i, rest] += data.take(rest).brier(after(drawn, prior))
    losses, units = sums[:, judged > 0] / judged[judged > 0], units[judged > 0]
    points = tuple(
        CurvePoint(round(n), {"brier": float(mean)}) for n, mean in zip(labels, losses.mean(axis=1), strict=True)
    )
    free = np.minimum(counts, data.n_units) >= ENOUGH_TO_TELL
    more = how_many_more(labels, losses, units, free, len(data.options))
    return LearningCurve(points, points[first_enough(losses, units)].questions, more)


def counts_of_units(units: Int[np.ndarray, " question"]) -> list[int]:
    """Return how many groups hold about 0, 5, 10, ... questions, up to half of the groups: the others are the judges."""
    n = int(units.max()) + 1
    counts = sorted({count for size in CURVE_SIZES if (count := round(size * n / len(units))) <= n // 2})
    return counts if len(counts) > 1 else [0, n // 2]


def after(drawn: Labelled, prior: Prior) -> Mixture:
    """Return the mixture as `adapt` would find it from these labels alone."""
    if not len(drawn.options):
        return Mixture(prior.weight, prior.temperature)
    prior = prior._replace(n_units=drawn.n_units)
    if not prior.is_enough:
        return fit_mixture(drawn, prior)
    judged = judge(drawn, prior)
    return settle(drawn, prior, judged.scale, worse=is_worse(drawn, gain_of(drawn, judged)))


def first_enough(losses: Float[np.ndarray, "size question"], units: Int[np.ndarray, " question"]) -> int:
    """Return the first size that is not behind the last one by more than a standard error of the paired difference."""
    behind = losses - losses[-1]
    return next(i for i, one in enumerate(behind) if one.mean() <= error_of_mean(one, units))


def how_many_more(
    labels: Float[np.ndarray, " size"],
    losses: Float[np.ndarray, "size question"],
    units: Int[np.ndarray, " question"],
    free: Bool[np.ndarray, " size"],
    n: int,
) -> int | None:
    """Return about how many labels beyond n would gain `WORTH`, from sizes that are `free`, where there are two of them.

    A few labels are held back by a narrow prior. A score that falls with them all the same would fall further; one that does not
    says nothing of what twenty and more would do.
    """
    sizes = np.flatnonzero(free) if free.sum() > 1 else np.arange(1, len(labels))
    more = labels_more(labels[sizes], losses[sizes], units, n) if len(sizes) > 1 else None
    return None if more == 0 and free.sum() < 2 else more


def labels_more(
    labels: Float[np.ndarray, " size"], losses: Float[np.ndarray, "size question"], units: Int[np.ndarray, " question"], n: int
) -> int | None:  # fmt: skip
    """Return about how many labels beyond n would gain `WORTH`, 0 where far more would not, None where that cannot be told.

    The score is taken to fall as a + b / labels; b is fitted for each question, so that its error is known.
    """
    inverse = 1.0 / labels
    away = inverse - inverse.mean()
    slopes = away @ losses / (away @ away)
    slope, error = float(slopes.mean()), error_of_mean(slopes, units)
    needed = WORTH * n * (MOST_MORE + 1) / MOST_MORE
    if slope > max(needed, error):
        return 5 * max(1, round((1.0 / (1.0 / n - WORTH / slope) - n) / 5))
    return 0 if slope + error <= needed else None
