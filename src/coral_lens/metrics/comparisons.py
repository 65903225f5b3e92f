"""Tests between two Predictions of the same questions, and their correction for many tests. Never ranks methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.errors import CoralError
from coral_lens.metrics.scores import Facts, Values, centred, facts_of, iter_weights, metric_named
from coral_lens.records import Predictions


@dataclass(frozen=True, slots=True)
class Difference:
    """Metric of a minus metric of b, with a 95 % interval; all nan where either has no such metric (AUROC)."""

    value: float
    low: float
    high: float
    p_value: float
    """Two-sided; below 0.05 where the interval leaves out 0, but for the rounding of one resample."""

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "n/a"
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.3f}"


def _paired_facts(a: Predictions, b: Predictions) -> tuple[Facts, Facts]:
    """Return the facts of both, or refuse to pair what was not asked the same questions."""
    pair = f"{a.method!r} and {b.method!r} cannot be compared question by question"
    if a.ids != b.ids:
        alone = sorted(set(a.ids) ^ set(b.ids))
        reason = f"{len(alone)} question(s) are in one only (first: {alone[0]!r})" if alone else "their order differs"
        raise CoralError(f"{pair}: {reason}; predict the same split with both.")
    different = np.flatnonzero(a.answers != b.answers)
    if len(different):
        raise CoralError(
            f"{pair}: {len(different)} question(s) have another answer in one than in the other "
            f"(first: {a.ids[different[0]]!r}); predict both from the same version of the task."
        )
    return facts_of(a), facts_of(b)


@dataclass(frozen=True, slots=True)
class Resampled:
    """A metric of one method, and what it is on each of the same resamples of the questions."""

    value: float
    draws: Values

    def minus(self, other: Resampled, *, kind: str) -> Difference:
        """Return the difference to another method's, both taken on the same resamples."""
        value = self.value - other.value
        kept = centred(value, self.draws - other.draws, kind=kind)
        if np.isnan(value) or not len(kept):
            return Difference(value, float("nan"), float("nan"), float("nan"))
        low, high = np.quantile(kept, [0.025, 0.975])
        # a sum over the same numbers in another order may miss 0 by rounding: that is a tie, and a tie counts on both sides
        smaller = min((kept <= 1e-12).sum(), (kept >= -1e-12).sum())
        return Difference(value, float(low), float(high), float(min(1.0, 2 * (smaller + 1) / (len(kept) + 1))))


def resampled(
    methods: Mapping[str, Predictions], metrics: Sequence[str], *, n_boot: int = 2000, seed: int = 0
) -> dict[str, dict[str, Resampled]]:
    """Return by method and metric its value and its bootstrap, every method on the same resamples of the same questions."""
    first = next(iter(methods.values()))
    chosen = {m: metric_named(m).compute for m in metrics}
    facts = {name: _paired_facts(first, p)[1] for name, p in methods.items()}
    once = np.ones((1, len(first)))
    values = {name: {m: [compute(f, once)] for m, compute in chosen.items()} for name, f in facts.items()}
    for weights in iter_weights(len(first), n_boot=n_boot, seed=seed, groups=first.groups):
        for name, f in facts.items():
            for m, compute in chosen.items():
                values[name][m].append(compute(f, weights))
    return {
        name: {m: Resampled(float(value[0]), np.concatenate(draws)) for m, (value, *draws) in by_metric.items()}
        for name, by_metric in values.items()
    }


def paired_difference(a: Predictions, b: Predictions, metric: str, *, n_boot: int = 2000, seed: int = 0) -> Difference:
    """Return the difference in a metric, with both methods resampled on the same questions at a time.

    The interval is a percentile one; for the ECEs it is shifted onto the estimate as in `scores.centred`. The p-value
    is its inversion: twice the smaller share of resamples on either side of 0. Traps: it cannot be below
    2 / (n_boot + 1), so Holm over many comparisons needs many resamples; resamples without an AUROC are left out.
    """
    both = resampled({"a": a, "b": b}, [metric], n_boot=n_boot, seed=seed)
    return both["a"][metric].minus(both["b"][metric], kind=metric_named(metric).kind)


def mcnemar(a: Predictions, b: Predictions) -> float:
    """Return McNemar's exact two-sided p-value: do the questions that only one gets right fall evenly on both?

    Trap: it takes questions for independent. Where they come in groups, `paired_difference` is the test to use.
    """
    from scipy.stats import binomtest

    of_a, of_b = _paired_facts(a, b)
    only_a, only_b = int((of_a.right > of_b.right).sum()), int((of_b.right > of_a.right).sum())
    if only_a + only_b == 0:
        return 1.0
    return float(binomtest(only_a, only_a + only_b, 0.5).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given: reject where they are at most the level for the whole table.

    A nan (a comparison that could not be made) stays nan and does not count as a test.
    """
    p = np.asarray(p_values, dtype=np.float64)
    tested = np.flatnonzero(~np.isnan(p))
    assert ((p[tested] >= 0) & (p[tested] <= 1)).all(), "p-values must lie between 0 and 1"
    order = tested[np.argsort(p[tested])]
    adjusted = p.copy()
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return [float(x) for x in adjusted]
