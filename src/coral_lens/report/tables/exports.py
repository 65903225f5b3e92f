"""A run's results table for programs: CSV and JSON, as fractions and unrounded. Never computes: see `run`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from coral_lens.report.tables.formats import kind_of
from coral_lens.report.tables.run import Comparison, ResultsTable, TaskTable
from coral_lens.storage.escape import for_csv


def csv_text(lines: Iterable[Sequence[Any]]) -> str:
    """Return lines as CSV; None becomes an empty field, and no text starts a formula."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([for_csv(value) for value in line] for line in lines)
    return out.getvalue()


def results_csv(table: ResultsTable) -> str:
    """Return one line per task, method or difference, and metric, as fractions; a field without a value is empty."""
    head = ("task", "kind", "n_questions", "method", "against", "metric", "value", "low", "high", "p_holm")
    return csv_text((head, *(line for task in table.tasks for line in task_lines(task))))


def task_lines(task: TaskTable) -> Iterator[list[Any]]:
    """Yield the CSV lines of one task."""
    at = [task.name, kind_of(task), task.n_questions]
    for method, m in task.metrics.items():
        for name, s in m.scores.items():
            yield [*at, method, "", name, *numbers((s.value, s.low, s.high)), ""]
        yield [*at, method, "", "ece_floor", m.ece_floor, "", "", ""]
        yield [*at, method, "", "n_zero_answer", m.n_zero_answer, "", "", ""]
    for c in task.comparisons:
        for name in c.differences:
            yield [*at, c.method, c.against, name, *difference_numbers(c, name)]


def difference_numbers(comparison: Comparison, metric: str) -> list[float | None]:
    """Return the difference in a metric, its interval and its corrected p-value."""
    d = comparison.differences[metric]
    return numbers((d.value, d.low, d.high, comparison.p_values.get(metric, math.nan)))


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return None for nan: neither CSV nor JSON should say nan."""
    return [None if math.isnan(x) else x for x in values]


def results_record(table: ResultsTable) -> dict[str, Any]:
    """Return the table as plain JSON values: fractions, and null where there is no number."""
    tasks = []
    for task in table.tasks:
        tasks.append(
            {
                "task": task.name,
                "kind": kind_of(task),
                "n_questions": task.n_questions,
                "methods": {method: m.to_dict() for method, m in task.metrics.items()},
                "comparisons": [clean(asdict(c)) for c in task.comparisons],
                "best": {name: sorted(methods) for name, methods in task.best.items()},
            }
        )
    return {
        "tasks": tasks,
        "n_tests": table.n_tests,
        "n_boot": table.n_boot,
        "n_paired": table.n_paired,
        "seed": table.seed,
    }


def clean(value: Any) -> Any:
    """Replace nan by None, however deep."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
