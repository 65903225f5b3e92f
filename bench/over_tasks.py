"""Differences over several tasks: the mean and the worst, with paired intervals that resample the questions within each task.

A row's accuracy is compared with the model's as it is, its Brier score and ECE with temperature scaling's, x 100. Tasks stay
what they are: the intervals speak of other questions of these tasks, and not of other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pooled import resampled_in

from coral_lens.metrics.comparisons import resampled
from coral_lens.metrics.scores import centred, metric_named
from coral_lens.records import Predictions

AGAINST = {"accuracy": "base", "brier": "temperature", "ece": "temperature"}
"""What each metric is compared with."""
LABELLED = "brier, labels"
"""What labels do to the Brier score, where some have adapted the lens."""


@dataclass(frozen=True)
class Row:
    """One way to answer the questions of a task, with the model's answers and those of temperature scaling to the same ones."""

    name: str
    found: Predictions
    base: Predictions
    temperature: Predictions
    before: Predictions | None = None
    """Of a lens that labels have adapted: what it said without them."""


@dataclass(frozen=True)
class Spread:
    """A difference x 100, and what it is on each resample of the questions."""

    value: float
    draws: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval."""
        low, high = np.quantile(self.draws, [0.025, 0.975])
        return float(low), float(high)

    def __str__(self) -> str:
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(self.value, *self.interval)


def differences(row: Row, *, seed: int = 0) -> dict[str, Spread]:
    """Return the differences of a row by metric; the same seed resamples the same questions in the same way."""
    methods = {"found": row.found, "base": row.base, "temperature": row.temperature}
    by_method = resampled_in(methods, list(AGAINST), seed=seed)
    spreads = {}
    for metric, other in AGAINST.items():
        a, b = by_method["found"][metric], by_method[other][metric]
        draws = centred(a.value - b.value, a.draws - b.draws, kind=metric_named(metric).kind)
        spreads[metric] = Spread(100 * (a.value - b.value), 100 * draws)
    if row.before is not None:
        a, b = (one["brier"] for one in resampled({"a": row.found, "b": row.before}, ["brier"], seed=seed).values())
        spreads[LABELLED] = Spread(100 * (a.value - b.value), 100 * (a.draws - b.draws))
    return spreads


def mean_of(spreads: Sequence[Spread]) -> Spread:
    """Return the mean of differences, which were resampled each on its own task or together on the same one."""
    return Spread(float(np.mean([s.value for s in spreads])), np.mean([s.draws for s in spreads], axis=0))
