"""What steering did on average over tasks, each mean with its interval and its test. Never formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from coral_lens.metrics.comparisons import Difference, holm
from coral_lens.report.tables.clear import Verdict, verdict_of
from coral_lens.report.tables.run import TaskTable

HEADLINE = ("accuracy", "brier", "ece")
"""The metrics that a summary speaks of."""
Z = 1.959964


@dataclass(frozen=True, slots=True)
class Average:
    """A metric before and after steering, over tasks that count alike."""

    before: float
    after: float
    difference: Difference
    verdict: Verdict


def averages(tasks: Sequence[TaskTable], *, against: str = "base") -> dict[str, Average]:
    """Return the mean over tasks of each metric of a summary; the means are tested together, as a table of their own."""
    if len(tasks) == 1:
        return {metric: average_of(tasks, metric, against, tasks[0].verdict(metric, against)) for metric in HEADLINE}
    differences = {metric: mean_difference([t.difference(metric, against) for t in tasks]) for metric in HEADLINE}
    tested = [metric for metric in HEADLINE if all(t.ranks(metric) for t in tasks)]
    p_holm = dict(zip(tested, holm([differences[m].p_value for m in tested]), strict=True))
    verdicts = {
        m: verdict_of(d, p_holm.get(m), metric=m, n_tests=len(tested)) for m, d in differences.items()
    }  # fmt: skip
    return {metric: average_of(tasks, metric, against, verdicts[metric]) for metric in HEADLINE}


def average_of(tasks: Sequence[TaskTable], metric: str, against: str, verdict: Verdict) -> Average:
    """Return the means of a metric."""
    before, after = (mean(t.values(metric, against)[i] for t in tasks) for i in (0, 1))
    difference = mean_difference([t.difference(metric, against) for t in tasks])
    return Average(before, after, difference, verdict)


def mean_difference(differences: Sequence[Difference]) -> Difference:
    """Return the mean of differences on separate questions: their errors are independent, so variances add up."""
    if len(differences) == 1:
        return differences[0]
    value, error = mean(d.value for d in differences), standard_error(differences) / len(differences)
    p_value = math.erfc(abs(value) / error / math.sqrt(2)) if error else float(value == 0)
    return Difference(value, value - Z * error, value + Z * error, p_value)


def standard_error(differences: Iterable[Difference]) -> float:
    """Return the standard error of a sum of differences on separate questions, from their 95 % intervals."""
    return math.hypot(*((d.high - d.low) / (2 * Z) for d in differences))
