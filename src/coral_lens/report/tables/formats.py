"""A run's results table for people: the cells of every rendering, and Markdown. Never computes: see `run`.

People read percent: times 100, with one decimal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coral_lens.metrics.scores import Metrics, metric_named
from coral_lens.report.names import method_name
from coral_lens.report.tables.clear import RULE
from coral_lens.report.tables.run import ENOUGH, Comparison, ResultsTable, TaskTable
from coral_lens.storage.escape import for_markdown


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table, as text in parts that each renderer puts together in its own way."""

    value: str
    interval: str = ""
    note: str = ""
    best: bool = False
    second: bool = False
    """Underlined, as in the paper's own tables."""
    mark: str = ""
    """Of a difference: what `clear` says of it, in one character."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a method, or the difference between two."""

    label: str
    cells: dict[str, Cell]
    """By metric."""
    difference: bool = False


def percent(x: float, *, sign: bool = False) -> str:
    """Return a fraction as percent with one decimal and a true minus sign, or n/a."""
    if math.isnan(x):
        return "n/a"
    # adding 0.0 turns a rounded -0.0 into 0.0
    return format(round(100 * x, 1) + 0.0, "+.1f" if sign else ".1f").replace("-", "−")


def interval_text(low: float, high: float, *, sign: bool = False) -> str:
    """Return `24.0 to 34.0`."""
    return f"{percent(low, sign=sign)} to {percent(high, sign=sign)}"


def note_on(metrics: Metrics, metric: str) -> str:
    """Return what belongs beside a value: the noise floor of an ECE, the answers of probability 0 of an NLL."""
    n_zero = metrics.n_zero_answer
    if metric == "ece":
        return f"floor {percent(metrics.ece_floor)}"
    return f"{n_zero:,} zero{'s' if n_zero > 1 else ''}" if metric == "nll" and n_zero else ""


def p_text(p: float) -> str:
    """Return a p-value as readers expect it."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def table_rows(task: TaskTable) -> list[Row]:
    """Return the lines of a task's table: one per method, then one per comparison."""
    return [method_row(task, m) for m in task.metrics] + [comparison_row(task, c) for c in task.comparisons]


def method_row(task: TaskTable, method: str) -> Row:
    """Return a method's line: the noise floor stands beside its ECE, answers of probability 0 beside its NLL."""
    metrics, cells = task.metrics[method], {}
    for name in task.columns:
        score = metrics.scores[name]
        cells[name] = Cell(
            value=percent(score.value),
            interval=interval_text(score.low, score.high),
            note=note_on(metrics, name),
            best=method in task.best[name],
        )
    return Row(method_name(method), cells)


def comparison_row(task: TaskTable, comparison: Comparison) -> Row:
    """Return the line of a difference."""
    cells = {}
    for name in task.columns:
        d = comparison.differences[name]
        cells[name] = Cell(
            value=percent(d.value, sign=True),
            interval=interval_text(d.low, d.high, sign=True),
            note=p_text(comparison.p_values[name]) if name in comparison.p_values else "",
            mark=task.judged(comparison, name).mark,
        )
    return Row(f"{method_name(comparison.method)} − {method_name(comparison.against)}", cells, difference=True)


def task_heading(task: TaskTable) -> str:
    """Return a task's name, its relation to the training questions and its size."""
    return f"{task.title} ({kind_of(task)}, {task.n_questions:,} questions)"


def kind_of(task: TaskTable) -> str:
    """Say whether the lens learned from other questions of the task, or never saw it."""
    return "held-out" if task.trained_on else "transfer"


def column_label(task: TaskTable, metric: str) -> str:
    """Return a column's head: the metric, its better direction, and a mark where it must not rank."""
    arrow = "↑" if metric_named(metric).higher_is_better else "↓"
    return f"{metric_named(metric).label} {arrow}" + ("" if task.ranks(metric) else " †")


BOLD = (
    "Bold: the best of its column, where it leads every other method by a paired 95 % interval that leaves out 0 and, where "
    "the lead is tested, clearly."
)
"""What bold means in the tables of runs and of studies."""
MARKED = "Differences are marked ▲ clearly better, ▼ clearly worse; △ ▽ where they are not clear but the interval leaves out 0."


def notes_of(table: ResultsTable) -> list[str]:
    """Return what a reader must know to read the numbers, as sentences."""
    notes = [
        f"All values × 100, with 95 % bootstrap intervals over questions ({table.n_boot:,} resamples); ↑ higher and "
        f"↓ lower is better. {BOLD}",
        RULE,
        "Floor: the ECE that perfectly calibrated answers with these confidences would still show on so many questions.",
    ]
    if any(m.n_zero_answer for task in table.tasks for m in task.metrics.values()):
        notes.append(
            "Zeros: questions whose correct option got probability 0; each costs an NLL of 27.6, infinite but for clipping."
        )
    if table.n_tests:
        notes.append(
            f"Differences are paired, question by question ({table.n_paired:,} resamples); p-values (McNemar for accuracy, "
            f"bootstrap otherwise, and where questions share an article) are Holm-corrected over the tests of each table (up "
            f"to {table.n_tests}). {MARKED}"
        )
    if any(not task.ranks("ece") for task in table.tasks):
        notes.append(f"† ECE and cwECE are too noisy to rank methods below {ENOUGH:,} questions, and are not tested.")
    if any("mae" in task.columns for task in table.tasks):
        notes.append(
            "RPS and MAE are of scores: MAE is in hundredths of a level between the expected and the right one."
        )
    if any("kl" in task.columns for task in table.tasks):
        notes.append(
            "Soft answers: Brier, NLL and KL are against their shares; right is whatever has the largest of these."
        )
    exact = [f"{t.title} is {t.name}" for t in table.tasks if t.title != t.name]
    return [*notes, *([f"Exact names: {'; '.join(exact)}."] if exact else [])]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def results_markdown(table: ResultsTable) -> str:
    """Return a Markdown section per task, and the notes."""
    parts = []
    for task in table.tasks:
        heads = ["", *(column_label(task, m) for m in task.columns)]
        lines = [
            f"### {for_markdown(task_heading(task))}",
            "",
            "| " + " | ".join(heads) + " |",
            "|---" * len(heads) + "|",
        ]
        for row in table_rows(task):
            lines.append("| " + " | ".join([for_markdown(row.label), *map(markdown_cell, row.cells.values())]) + " |")
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {for_markdown(note)}" for note in notes_of(table)))
    return "\n\n".join(parts) + "\n"


def markdown_cell(cell: Cell) -> str:
    """Return `**28.7** [24.0 to 34.0] (note)`; Markdown has no underline of its own."""
    plain = for_markdown(cell.value)
    value = f"**{plain}**" if cell.best else f"<u>{plain}</u>" if cell.second else plain
    parts = (cell.mark, cell.interval and f"[{cell.interval}]", cell.note and f"({cell.note})")
    return " ".join([value, *filter(None, parts)])
