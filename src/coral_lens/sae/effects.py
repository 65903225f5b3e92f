"""What ablations do to accuracy, ECE and Brier: per feature, on average, and beside randomly drawn features. Only arithmetic.

Every change is against the run with the reconstruction in place, question by question, and every interval is a bootstrap
over questions in which all features see the same resamples. One ablation moves few questions, so single changes are
noise by themselves: the distribution of random features says how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import BaseRule
from coral_lens.metrics.scores import METRICS, facts_of, iter_weights
from coral_lens.records import OptionTable, Predictions

CHANGES = ("accuracy", "ece", "brier")
N_BOOT = 400


@dataclass(frozen=True)
class AblationScores:
    """Log-probabilities of the options of questions, row by row: unpatched, reconstructed, and without each feature."""

    ids: tuple[str, ...]
    table: OptionTable
    """The scores of the model as it is."""
    reconstructed: Float[np.ndarray, " row"]
    ablated: Float[np.ndarray, "feature row"]
    features: Int[np.ndarray, " feature"]
    groups: tuple[str, ...] = ()
    """The groups of the questions, as in Predictions."""

    def predictions(self, logprobs: Float[np.ndarray, " row"], rule: str, name: str = "") -> Predictions:
        """Return probabilities from log-probabilities of the same options."""
        t = self.table
        table = OptionTable(logprobs, t.n_tokens, t.n_chars, t.n_bytes, t.offsets, t.answers)
        return Predictions(name, "", "", "", self.ids, t.answers, t.offsets, base_probs(table, rule), self.groups)


@dataclass(frozen=True)
class Changes:
    """Changes of a metric by ablation: one row per feature, and under resampled questions."""

    values: Float[np.ndarray, " feature"]
    draws: Float[np.ndarray, "feature boot"]


def changes_of(scores: AblationScores, rule: BaseRule, *, n_boot: int = N_BOOT, seed: int = 0) -> dict[str, Changes]:
    """Return the change of each metric by each feature."""
    n = len(scores.ids)
    drawn = iter_weights(n, n_boot=n_boot, seed=seed, groups=scores.groups)
    weights = np.concatenate([np.ones((1, n)), *drawn])
    before = facts_of(scores.predictions(scores.reconstructed, rule))
    start = {name: METRICS[name].compute(before, weights) for name in CHANGES}
    changes = {name: np.zeros((len(scores.features), len(weights))) for name in CHANGES}
    for j, logprobs in enumerate(scores.ablated):
        if np.array_equal(logprobs, scores.reconstructed):
            continue
        facts = facts_of(scores.predictions(logprobs, rule))
        for name in CHANGES:
            changes[name][j] = METRICS[name].compute(facts, weights) - start[name]
    return {name: Changes(of_metric[:, 0], of_metric[:, 1:]) for name, of_metric in changes.items()}


def interval(value: float, draws: Float[np.ndarray, " boot"]) -> dict[str, float]:
    """Return a value with its 95 % interval; the draws are shifted onto it, since resampling itself raises an ECE."""
    low, high = np.quantile(draws - np.median(draws) + value, [0.025, 0.975])
    return {"value": value, "low": float(min(low, value)), "high": float(max(high, value))}


def summary(changes: Changes, features: Sequence[int] | Int[np.ndarray, " chosen"]) -> dict[str, Any]:
    """Return the mean change over some features with its interval, and the quartiles of the changes."""
    at = np.asarray(features, dtype=np.int64)
    values = changes.values[at]
    first, median, third = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "n_features": len(at),
        "mean": interval(float(values.mean()), changes.draws[at].mean(axis=0)),
        "quartiles": [float(first), float(median), float(third)],
        "largest": float(np.abs(values).max()),
        "unmoved": int((values == 0).sum()),
    }


def compare(changes: Changes, chosen: Sequence[int], random: Sequence[int], *, seed: int = 0) -> dict[str, float]:
    """Return the mean change by chosen features less that by random ones, and where chosen ones lie among the random.

    The interval is over questions and over the draw of random features, which another seed would change. `low_random` and
    `high_random` hold the middle 95 % of the random features' changes, `below` and `above` are the shares of chosen ones
    beyond them, and `rank` is the mean share of random changes that a chosen one exceeds, ties counting half: 0.5 by chance.
    """
    a, b = np.asarray(chosen, dtype=np.int64), np.asarray(random, dtype=np.int64)
    by_chosen, by_random = changes.values[a], changes.values[b]
    n_boot = changes.draws.shape[1]
    counts = np.random.default_rng(seed).multinomial(len(b), np.full(len(b), 1 / len(b)), size=n_boot)
    drawn = (counts.T * changes.draws[b]).sum(axis=0) / len(b)
    low, high = np.quantile(by_random, [0.025, 0.975])
    exceeded = (by_chosen[:, None] > by_random).mean() + (by_chosen[:, None] == by_random).mean() / 2
    return {
        **interval(float(by_chosen.mean() - by_random.mean()), changes.draws[a].mean(axis=0) - drawn),
        "low_random": float(low),
        "high_random": float(high),
        "below": float((by_chosen < low).mean()),
        "above": float((by_chosen > high).mean()),
        "rank": float(exceeded),
    }


def effects(
    scores: AblationScores, groups: Mapping[str, Sequence[int]], rule: BaseRule, *, n_boot: int = N_BOOT, seed: int = 0
) -> dict[str, Any]:
    """Return the report of an ablation; `groups` names rows of features, `random` among them or not."""
    changes = changes_of(scores, rule, n_boot=n_boot, seed=seed)
    runs = {"unpatched": scores.table.logprobs, "reconstructed": scores.reconstructed}
    facts = {name: facts_of(scores.predictions(logprobs, rule)) for name, logprobs in runs.items()}
    even = np.ones((1, len(scores.ids)))
    report: dict[str, Any] = {
        "n_questions": len(scores.ids),
        "base": rule,
        "runs": {
            name: {m: float(METRICS[m].compute(of_run, even)[0]) for m in CHANGES} for name, of_run in facts.items()
        },
        "features": {
            str(feature): {m: interval(float(changes[m].values[j]), changes[m].draws[j]) for m in CHANGES}
            for j, feature in enumerate(scores.features.tolist())
        },
        "groups": {name: {m: summary(changes[m], rows) for m in CHANGES} for name, rows in groups.items() if len(rows)},
    }
    if groups.get("random"):
        report["against random"] = {
            name: {m: compare(changes[m], rows, groups["random"], seed=seed) for m in CHANGES}
            for name, rows in groups.items()
            if name != "random" and len(rows)
        }
    return report
