"""The tables of a study as Markdown, LaTeX, CSV and JSON. Never computes: numbers come from `study`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from coral_lens.metrics.scores import METRICS, Score
from coral_lens.report.names import task_name
from coral_lens.report.tables.clear import RULE, verdict_of
from coral_lens.report.tables.exports import clean, csv_text, numbers
from coral_lens.report.tables.formats import (
    BOLD,
    MARKED,
    Cell,
    Row,
    interval_text,
    markdown_cell,
    note_on,
    p_text,
    percent,
)
from coral_lens.report.tables.paper import PAPER_NOTES, PaperTable, abstract_line
from coral_lens.report.tables.run import ENOUGH, may_rank
from coral_lens.report.tables.study import (
    COLUMNS,
    RELATIVE,
    TALLIED,
    Improvement,
    StudyRow,
    StudyTable,
    difference_of,
    improvements,
    row_label,
)
from coral_lens.storage.escape import for_latex, for_markdown, in_one_line

NOTES = (
    "All values × 100, with 95 % bootstrap intervals over questions (over articles, where several questions share one); ± is the "
    "standard deviation over seeds. Floor: the ECE that perfectly calibrated answers with these confidences would still show on "
    "so many questions. Zeros: questions whose correct option got probability 0; each costs an NLL of 27.6, infinite but for "
    "clipping.",
    "Brier and NLL are those of the paper's formulas, over all options; top-1: of the confidence against right or wrong.",
    f"{BOLD} {RULE}",
    f"The paired differences stand below the methods. {MARKED}",
    "Their p-values (McNemar for accuracy, bootstrap otherwise, and where questions "
    "share an article) are Holm-corrected over the tests of each table. A bootstrap's smallest p-value is set by its number of "
    "resamples: where many are equal and the smallest of a table, read `at most`.",
    "Few-shot is the unsteered model on the prompts that every method sees; where these have no worked examples, that row is "
    "called 0-shot. Each heading names the split that was really used. 0-shot beside Few-shot: the unsteered model on the same "
    "questions without worked examples; no method starts from it.",
    f"† ECE and cwECE are too noisy to rank methods below {ENOUGH:,} questions.",
)


def table_heading(table: StudyTable) -> str:
    """Return what a table is of."""
    return f"{table.test}, {table.model} ({table.kind}, {table.n_questions:,} questions, trained on {table.mixture})"


def short_heading(table: StudyTable) -> str:
    """Return what a table of a page is of, under the name for people."""
    return f"{task_name(table.test)}, {table.model}"


def column_labels(table: StudyTable) -> dict[str, str]:
    """Return the heads of the metrics."""
    arrows = {m: "↑" if METRICS[m].higher_is_better else "↓" for m in COLUMNS}
    return {m: f"{METRICS[m].label} {arrows[m]}{'' if may_rank(m, table.n_questions) else ' †'}" for m in COLUMNS}


def table_lines(table: StudyTable) -> list[Row]:
    """Return the lines of a table: one per method, then one per paired difference."""
    lines = [
        Row(
            row_label(r.method, table.shots),
            {m: score_cell(r, m, best=r.method in table.best.get(m, ())) for m in COLUMNS},
        )
        for r in table.rows
    ]
    for c in table.comparisons:
        label = " − ".join(row_label(c[part], table.shots) for part in ("method", "against"))
        lines.append(Row(label, {m: difference_cell(table, c, m) for m in COLUMNS}, difference=True))
    return lines


def score_cell(row: StudyRow, metric: str, *, best: bool) -> Cell:
    """Return a value with its interval, whether it is the best, its spread over seeds, and what else belongs to it."""
    score: Score = row.metrics.scores[metric]
    spread = f"± {percent(row.spread[metric])}" if row.spread.get(metric) else ""
    note = ", ".join(filter(None, (spread, note_on(row.metrics, metric))))
    return Cell(percent(score.value), interval_text(score.low, score.high), note, best=best)


def difference_cell(table: StudyTable, comparison: dict[str, Any], metric: str) -> Cell:
    """Return a paired difference with its interval and p-value, and whether it is clear."""
    d, p = difference_of(comparison, metric), comparison["p_values"].get(metric)
    mark = verdict_of(d, p, metric=metric, n_tests=table.n_tests).mark
    interval = interval_text(d.low, d.high, sign=True)
    return Cell(percent(d.value, sign=True), interval, p_text(p) if p is not None else "", mark=mark)


def improvement_cells(improvement: Improvement) -> list[Cell]:
    """Return the mean with the worst and the best of each metric, with a mark where ECE means little."""
    cells = []
    for m in RELATIVE:
        mark = " †" if m == "ece" and not improvement.ranks else ""
        signed = {k: percent(v[m], sign=True) for k, v in averages_of(improvement).items() if m in v}
        cells.append(
            Cell(f"{signed['mean']} %{mark}", f"{signed['worst']} to {signed['best']}") if signed else Cell("n/a")
        )
    return cells


def averages_of(improvement: Improvement) -> dict[str, dict[str, float]]:
    """Return mean, worst and best, each by metric."""
    return {"mean": improvement.means, "worst": improvement.worst, "best": improvement.best}


def improvement_rows(tables: Sequence[StudyTable]) -> list[list[Cell]]:
    """Return the summary: one line for each mixture, kind of test and method, and what the paper's abstract says."""
    averages = improvements(tables)
    ours = [
        [
            *map(Cell, (i.mixture, i.kind, row_label(i.method), str(i.n_cells))),
            *improvement_cells(i),
            *(Cell(tally_text(v)) for v in i.verdicts.values()),
        ]
        for i in averages
    ]
    unsaid = ["not tested"] * len(TALLIED)
    kinds = dict.fromkeys(i.kind for i in averages)
    return ours + [[Cell(text) for text in (*abstract_line(kind), *unsaid)] for kind in kinds]


def tally_text(counts: tuple[int, int]) -> str:
    """Return `2 better, 1 worse`."""
    said = [f"{n} {word}" for n, word in zip(counts, ("better", "worse"), strict=True) if n]
    return ", ".join(said) or "none"


IMPROVEMENT_HEADS = [
    *("trained on", "tests", "method", "models × tests", "accuracy", "ECE"),
    *(f"{METRICS[m].label}: clear" for m in TALLIED),
]
SUMMARY_NOTES = (
    "Each value's improvement relative to that of the unsteered model on the same prompts, averaged over models and tests, as "
    "the paper's abstract does, with the worst and the best; a test that stands apart has no part in it. A small unsteered ECE "
    "makes its relative change large in either direction.",
    f"Clear: in how many tables the paired difference to the unsteered model is clearly a gain or a loss. {RULE}",
)


# ------------------------------------------------------------------------------------------------------- Markdown


def study_markdown(title: str, tables: Sequence[StudyTable], paper: Sequence[PaperTable] = ()) -> str:
    """Return the summary, a section for each table, and the paper's numbers."""
    rows = [[markdown_cell(cell) for cell in row] for row in improvement_rows(tables)]
    summary = markdown_table(IMPROVEMENT_HEADS, rows)
    parts = [
        f"# {for_markdown(title)}",
        "## Relative improvement on the unsteered model",
        summary,
        "\n".join(f"- {note}" for note in SUMMARY_NOTES),
    ]
    for table in tables:
        parts += [
            f"## {for_markdown(table_heading(table))}",
            markdown_results(column_labels(table), table_lines(table)),
        ]
    parts.append("\n".join(f"- {note}" for note in NOTES))
    for printed in paper:
        parts += [f"## {for_markdown(printed.heading)}", markdown_results(printed.heads, printed.rows)]
    if paper:
        parts.append("\n".join(f"- {note}" for note in PAPER_NOTES))
    return "\n\n".join(parts) + "\n"


def markdown_results(heads: dict[str, str], rows: Sequence[Row]) -> str:
    """Return a table of results."""
    lines = [[for_markdown(row.label), *map(markdown_cell, row.cells.values())] for row in rows]
    return markdown_table(["", *heads.values()], lines)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


# ---------------------------------------------------------------------------------------------------------- LaTeX

LATEX_NOTES = tuple(note.replace(f" {MARKED}", "") for note in NOTES)
"""Marks of differences are left out: they would need one more package."""


def study_latex(tables: Sequence[StudyTable]) -> str:
    """Return a `tabular` for each table, in the form of the paper's; needs booktabs."""
    parts = ["% needs \\usepackage{booktabs}", *(f"% {note}" for note in LATEX_NOTES)]
    for table in tables:
        heads = " & ".join(["Method", *map(for_latex, column_labels(table).values())])
        lines = [
            f"% {in_one_line(table_heading(table))}",
            r"\begin{tabular}{@{}l" + "c" * len(COLUMNS) + r"@{}}",
            r"\toprule",
            rf"\multicolumn{{{len(COLUMNS) + 1}}}{{c}}{{\textbf{{{for_latex(table_heading(table))}}}}} \\",
            r"\midrule",
            rf"{heads} \\",
            r"\midrule",
        ]
        rows = table_lines(table)
        for i, row in enumerate(rows):
            if row.difference and not rows[i - 1].difference:
                lines.append(r"\midrule")
            lines.append(" & ".join([for_latex(row.label), *map(latex_cell, row.cells.values())]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def latex_cell(cell: Cell) -> str:
    r"""Return `\textbf{28.7} {\scriptsize [24.0 to 34.0]}`."""
    value = for_latex(cell.value)
    value = rf"\textbf{{{value}}}" if cell.best else rf"\underline{{{value}}}" if cell.second else value
    note = f" {cell.note}" if cell.note else ""
    return rf"{value} {{\scriptsize [{for_latex(cell.interval)}]{for_latex(note)}}}"


# --------------------------------------------------------------------------------------------------- for programs


CSV_HEAD = (
    *("model", "mixture", "test", "kind", "n_questions", "method", "against"),
    *("metric", "value", "low", "high", "spread", "p_holm"),
)


def study_csv(tables: Sequence[StudyTable]) -> str:
    """Return one line per table, method or difference, and metric, as fractions; a field without a value is empty."""
    return csv_text((CSV_HEAD, *(line for table in tables for line in csv_lines(table))))


def csv_lines(table: StudyTable) -> Iterator[list[Any]]:
    """Yield the CSV lines of one table."""
    at = [table.model, table.mixture, table.test, table.kind, table.n_questions]
    for row in table.rows:
        for name, s in row.metrics.scores.items():
            yield [*at, row.method, "", name, *numbers((s.value, s.low, s.high)), row.spread.get(name, ""), ""]
        yield [*at, row.method, "", "ece_floor", row.metrics.ece_floor, "", "", "", ""]
        yield [*at, row.method, "", "n_zero_answer", row.metrics.n_zero_answer, "", "", "", ""]
    for c in table.comparisons:
        for name, d in c["differences"].items():
            p_value = c["p_values"].get(name)
            yield [*at, c["method"], c["against"], name, d["value"], d["low"], d["high"], "", p_value]


def study_record(tables: Sequence[StudyTable]) -> dict[str, Any]:
    """Return tables and summary as plain JSON values: fractions, and null where there is no number."""
    return {
        "improvements": [
            {
                "mixture": i.mixture,
                "kind": i.kind,
                "method": i.method,
                "n_cells": i.n_cells,
                "ece_ranks": i.ranks,
                "clear": {m: {"better": up, "worse": down} for m, (up, down) in i.verdicts.items()},
                **averages_of(i),
            }
            for i in improvements(tables)
        ],
        "tables": [
            {
                "model": t.model,
                "mixture": t.mixture,
                "test": t.test,
                "kind": t.kind,
                "n_questions": t.n_questions,
                "methods": {r.method: clean(r.metrics.to_dict()) | {"spread": r.spread} for r in t.rows},
                "comparisons": list(t.comparisons),
            }
            for t in tables
        ],
    }
