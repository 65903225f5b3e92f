"""A results table for programs: CSV and JSON, as fractions and unrounded. Never computes: numbers come from `tables`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from coral_lens.report.tables.formats import kind_of
from coral_lens.report.tables.run import ResultsTable


def csv_text(table: ResultsTable) -> str:
    """Return one line per task, method or difference, and metric, as fractions; a field without a value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["task", "kind", "n_questions", "method", "against", "metric", "value", "low", "high", "p_holm"])
    for task in table.tasks:
        head = [task.name, kind_of(task), task.n_questions]
        for method, m in task.metrics.items():
            for name, s in m.scores.items():
                writer.writerow([*head, method, "", name, *numbers((s.value, s.low, s.high)), ""])
            writer.writerow([*head, method, "", "ece_floor", m.ece_floor, "", "", ""])
            writer.writerow([*head, method, "", "n_zero_answer", m.n_zero_answer, "", "", ""])
        for c in task.comparisons:
            for name, d in c.differences.items():
                values = numbers((d.value, d.low, d.high, c.p_values.get(name, math.nan)))
                writer.writerow([*head, c.method, c.against, name, *values])
    return out.getvalue()


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return None for nan: neither CSV nor JSON should say nan."""
    return [None if math.isnan(x) else x for x in values]


def json_ready(table: ResultsTable) -> dict[str, Any]:
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
