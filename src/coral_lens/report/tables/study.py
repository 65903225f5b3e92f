"""The numbers of a study over all its runs: every method of every model on every test set, and what that is on average.

Reads what the reports of the runs have computed; never computes a score itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from coral_lens.metrics.comparisons import Difference
from coral_lens.metrics.scores import METRICS, Metrics
from coral_lens.report.names import method_name
from coral_lens.report.tables.averages import Z
from coral_lens.report.tables.clear import verdict_of
from coral_lens.report.tables.run import ABOUT_ALL, may_rank
from coral_lens.storage.files import read_json, read_record

COLUMNS = ABOUT_ALL.columns
"""The metrics of a study's tables."""
FEW_SHOT = "base"
"""The row that improvements are counted from: the unsteered model on the prompts that every method sees, with shots or not."""
RELATIVE = ("accuracy", "ece")
TALLIED = ("accuracy", "brier", "nll")


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One method of one model on one test set."""

    method: str
    metrics: Metrics
    spread: dict[str, float]
    """By metric: the standard deviation over seeds; empty where there is one seed."""


@dataclass(frozen=True, slots=True)
class StudyTable:
    """All methods of one model on one test set, after training on one mixture."""

    model: str
    mixture: str
    test: str
    """Its name, which holds the split that was really used."""
    kind: str
    """`held-out`, where the mixture has other questions of the same data, or `transfer`."""
    n_questions: int
    rows: tuple[StudyRow, ...]
    comparisons: tuple[dict[str, Any], ...]
    """Paired differences with Holm-corrected p-values, as the report of the run has them."""
    best: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By metric: the methods that lead all others, by the same rule as in the table of the run."""
    shots: int | None = None
    """Worked examples before each question; None where that is not known."""
    apart: bool = False
    """Whether it is left out of means."""

    @property
    def n_tests(self) -> int:
        """Tests of this table, for which its p-values are corrected."""
        return sum(len(c["p_values"]) for c in self.comparisons)

    def comparison(self, method: str) -> dict[str, Any] | None:
        """Return the comparison of a method with the few-shot row."""
        wanted = (method, FEW_SHOT)
        return next((c for c in self.comparisons if (c["method"], c["against"]) == wanted), None)


@dataclass(frozen=True, slots=True)
class Improvement:
    """What a method gained over the few-shot row on average: of each value, not of the averages, as the paper's abstract."""

    mixture: str
    kind: str
    method: str
    n_cells: int
    """Models times test sets."""
    means: dict[str, float]
    """By metric, relative to the few-shot value; positive is better."""
    worst: dict[str, float]
    best: dict[str, float]
    ranks: bool
    """Whether every test set is large enough for its ECE to mean something."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals of the means, where every table has the paired difference."""
    verdicts: dict[str, tuple[int, int]]
    """By metric: in how many tables the paired difference to the few-shot row is clearly a gain, and clearly a loss."""


def read_tables(
    folder: Path, *, model: str, mixture: str, tests: Mapping[str, Mapping[str, Any]] | None = None
) -> list[StudyTable]:
    """Return the tables of one run from its report's files; `tests` is what the study's record says of each test set."""
    results, seeds = read_json(folder / "results.json"), read_record(folder / "seeds.json")["scores"]
    tables = []
    for task in results["tasks"]:
        rows = tuple(
            StudyRow(method, Metrics.from_dict(m), spread_of(seeds[task["task"]][method]))
            for method, m in task["methods"].items()
        )
        tables.append(
            StudyTable(
                model,
                mixture,
                task["task"],
                task["kind"],
                task["n_questions"],
                rows,
                tuple(task["comparisons"]),
                {metric: tuple(methods) for metric, methods in task.get("best", {}).items()},
                **about_test((tests or {}).get(task["task"], {})),
            )
        )
    return tables


def about_test(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table takes over from the record of its test set."""
    return {"shots": test.get("shots"), "apart": test.get("apart", False)}


def tables_in(record: dict[str, Any]) -> list[StudyTable]:
    """Return the tables of a study from the record in tables.json; nothing is bold in them."""
    tables = []
    for t in record["tables"]:
        rows = tuple(
            StudyRow(method, Metrics.from_dict({k: v for k, v in m.items() if k != "spread"}), m["spread"])
            for method, m in t["methods"].items()
        )
        at = (t["model"], t["mixture"], t["test"], t["kind"], t["n_questions"])
        tables.append(StudyTable(*at, rows, tuple(t["comparisons"])))
    return tables


def spread_of(scores: dict[str, list[float]]) -> dict[str, float]:
    """Return the standard deviation of each metric over the seeds."""
    return {metric: stdev(values) for metric, values in scores.items() if len(values) > 1}


def relative(table: StudyTable, method: str, metric: str) -> float | None:
    """Return by what share a method improves on the few-shot row; None where that row is 0."""
    values = {row.method: row.metrics.scores[metric].value for row in table.rows}
    return relative_change(values[FEW_SHOT], values[method], metric)


def relative_change(before: float, after: float, metric: str) -> float | None:
    """Return the relative improvement from one value to another: positive is better whatever the metric."""
    if before == 0:
        return None
    return (after - before) / before if METRICS[metric].higher_is_better else (before - after) / before


def improvements(tables: Sequence[StudyTable]) -> list[Improvement]:
    """Average relative improvements over models and test sets, by mixture, by kind of test and by method.

    Test sets that stand apart have no part in it, unless there are no others.
    """
    tables = [t for t in tables if not t.apart] or tables
    cells = dict.fromkeys((t.mixture, t.kind, row.method) for t in tables for row in t.rows if row.method != FEW_SHOT)
    averages = []
    for mixture, kind, method in cells:
        mine = [t for t in tables if (t.mixture, t.kind) == (mixture, kind) and any(r.method == method for r in t.rows)]
        averages.append(improvement_over(mine, method, mixture=mixture, kind=kind))
    return averages


def improvement_over(tables: Sequence[StudyTable], method: str, *, mixture: str, kind: str) -> Improvement:
    """Average the relative improvements of a method over tables that all have it."""
    values = {m: [x for t in tables if (x := relative(t, method, m)) is not None] for m in RELATIVE}
    known = {m: v for m, v in values.items() if v}
    return Improvement(
        mixture=mixture,
        kind=kind,
        method=method,
        n_cells=len(tables),
        means={m: mean(v) for m, v in known.items()},
        worst={m: min(v) for m, v in known.items()},
        best={m: max(v) for m, v in known.items()},
        intervals={m: i for m in known if (i := mean_interval(tables, method, m))},
        ranks=all(may_rank("ece", t.n_questions) for t in tables),
        verdicts={m: tally([verdict(t, method, m) for t in tables]) for m in TALLIED},
    )


def verdict(table: StudyTable, method: str, metric: str) -> int:
    """Return 1 where a method is clearly better than the few-shot row, -1 where clearly worse, 0 where it is not clear."""
    comparison = table.comparison(method)
    if comparison is None:
        return 0
    difference = difference_of(comparison, metric)
    return verdict_of(difference, comparison["p_values"].get(metric), metric=metric, n_tests=table.n_tests).said


def difference_of(comparison: dict[str, Any], metric: str) -> Difference:
    """Return a difference as the report of a run has saved it; null is nan."""
    saved = {name: math.nan if x is None else x for name, x in comparison["differences"][metric].items()}
    return Difference(**saved)


def mean_interval(tables: Sequence[StudyTable], method: str, metric: str) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean relative improvement; None where a table lacks the paired difference.

    It comes from the intervals of the paired differences, with the few-shot values taken as they are. Models that answer
    the same questions may err together, so that their errors are added; those of separate test sets are independent.
    """
    errors: dict[str, float] = {}
    changes = []
    for table in tables:
        comparison, change = table.comparison(method), relative(table, method, metric)
        if comparison is None or change is None:
            return None
        before = next(r.metrics.scores[metric].value for r in table.rows if r.method == FEW_SHOT)
        d = difference_of(comparison, metric)
        errors[table.test] = errors.get(table.test, 0.0) + (d.high - d.low) / (2 * Z) / before
        changes.append(change)
    half = Z * math.hypot(*errors.values()) / len(changes)
    return None if math.isnan(half) else (mean(changes) - half, mean(changes) + half)


def tally(verdicts: Sequence[int]) -> tuple[int, int]:
    """Return how many are gains, and how many losses."""
    return sum(v > 0 for v in verdicts), sum(v < 0 for v in verdicts)


def row_label(method: str, shots: int | None = None) -> str:
    """Return a method's name for people; the base is called as in the paper, or 0-shot where there are no worked examples."""
    if method != FEW_SHOT:
        return method_name(method)
    return "0-shot" if shots == 0 else "Few-shot"
