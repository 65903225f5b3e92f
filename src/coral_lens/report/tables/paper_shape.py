"""The paper's two tables of results in its own shape, ours beside its own, and the means of its abstract.

Table 1 has a block for each benchmark, with models side by side; Table 2 a block for each model, with tasks side by side.
Columns, decimals and marks are the paper's: bold is the best value and underlined the second, whatever the intervals say.
Its NLL and Brier columns can only be those of the top label (docs/paper-audit.md), so ours are too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coral_lens.metrics.scores import METRICS
from coral_lens.report.names import last_part, task_name, told_apart
from coral_lens.report.tables.formats import Cell, Row, interval_text
from coral_lens.report.tables.paper import COLUMNS, HEADS, MODELS, load_paper_numbers, printed_cell
from coral_lens.report.tables.paper import METHODS as PAPER_METHODS
from coral_lens.report.tables.study import (
    FEW_SHOT,
    Improvement,
    StudyRow,
    StudyTable,
    improvement_over,
    row_label,
)
from coral_lens.storage.escape import for_latex, for_markdown

OURS = {"Acc": "accuracy", "ECE": "ece", "cwECE": "cwece", "NLL": "nll_top1", "Brier": "brier_top1"}
"""Our metric behind each column of the paper."""
ROWS = {"SteerConf": "steerconf", "Fewshot": FEW_SHOT, "ITI": "iti", "CCPS": "ccps", "CORAL": "coral"}
"""Our method behind each row of the paper."""
STEERING = ("MMLU", "RACE", "CommonsenseQA")
"""The benchmarks of Table 1, in its order."""
TRANSFER = ("ARC-Challenge", "HellaSwag", "OpenBookQA", "Math-MC")
"""The tasks of Table 2, in its order."""
NOTE = (
    "Values × 100 with two decimals, bold the best and underlined the second of each column, as the paper prints them; NLL and "
    "Brier are those of the top label, because the paper's columns cannot be those of its formulas. A dash: not run."
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the small tables that stand side by side: the methods of one model on one test set."""

    heading: str
    rows: tuple[Row, ...]
    about: str = ""
    """How many questions, and with how many worked examples; empty for the paper's."""
    ours: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """Panels side by side under one title."""

    title: str
    panels: tuple[Panel, ...]


# -------------------------------------------------------------------------------------------------------------- tables


def table_one(tables: Sequence[StudyTable], models: Sequence[str]) -> list[Block]:
    """Return a block for each benchmark: our models, then the paper's."""
    blocks, names = [], model_names(models)
    for task in STEERING:
        ours = [our_panel(find(tables, model, task), heading=names[model]) for model in models]
        blocks.append(Block(task, (*ours, *(paper_panel(task, model, heading=model) for model in MODELS.values()))))
    return blocks


def table_two(tables: Sequence[StudyTable], models: Sequence[str]) -> list[Block]:
    """Return a block for each of our models and each of the paper's: its four tasks."""
    ours = [
        Block(name, tuple(our_panel(find(tables, m, task), heading=task) for task in TRANSFER))
        for m, name in model_names(models).items()
    ]
    theirs = [
        Block(f"{model}, the paper's", tuple(paper_panel(task, model, heading=task) for task in TRANSFER))
        for model in MODELS.values()
    ]
    return ours + theirs


def find(tables: Sequence[StudyTable], model: str, task: str) -> StudyTable | None:
    """Return our table of a model on a task of the paper, if there is one."""
    return next((t for t in tables if t.model == model and task_name(t.test) == task), None)


def short_model(model: str) -> str:
    """Return what stands above a column: the paper's own name, or the last part of ours."""
    return MODELS.get(model, last_part(model))


def model_names(models: Sequence[str]) -> dict[str, str]:
    """Return what stands above the column of each model, and no name twice: run1/model and run2/model keep their folders."""
    return told_apart(models, short_model)


def our_panel(table: StudyTable | None, *, heading: str) -> Panel:
    """Return our numbers in the rows of the paper; a dash for what was not run."""
    by_row = {row.method: row for row in table.rows} if table else {}
    present = {name: by_row[method] for name, method in ROWS.items() if method in by_row}
    marks = {column: best_and_second(present, metric) for column, metric in OURS.items()}
    rows = []
    for name, method in ROWS.items():
        row = present.get(name)
        cells = {c: our_cell(row, metric, marks[c], name) if row else Cell("—") for c, metric in OURS.items()}
        label = row_label(method, table.shots if table else None) if method == FEW_SHOT else name
        rows.append(Row(label, cells))
    shots = "" if table is None or table.shots is None else f", {table.shots or 'no'} shots"
    about = f"{table.n_questions:,} questions{shots}" if table else "not run"
    return Panel(heading, tuple(rows), about)


def our_cell(row: StudyRow, metric: str, marks: tuple[set[str], set[str]], name: str) -> Cell:
    """Return a value with two decimals, its interval, and whether it is the best or the second."""
    score = row.metrics.scores[metric]
    interval = interval_text(score.low, score.high)
    return Cell(f"{100 * score.value:.2f}", interval, best=name in marks[0], second=name in marks[1])


def best_and_second(rows: Mapping[str, StudyRow], metric: str) -> tuple[set[str], set[str]]:
    """Return the rows that have the best value of a metric, and those that have the next."""
    sign = -1.0 if METRICS[metric].higher_is_better else 1.0
    values = {name: sign * row.metrics.scores[metric].value for name, row in rows.items()}
    first, *rest = [*sorted(set(values.values())), None]
    return (
        {name for name, value in values.items() if value == first},
        {name for name, value in values.items() if rest and value == rest[0]},
    )


def paper_panel(task: str, model: str, *, heading: str) -> Panel:
    """Return what the paper prints of one model on one task."""
    numbers = load_paper_numbers(task=task, model=model)
    cells = {
        method: {number.metric: printed_cell(number) for number in numbers if number.method == method}
        for method in PAPER_METHODS
    }
    return Panel(heading, tuple(Row(m, {c: cells[m][c] for c in COLUMNS}) for m in PAPER_METHODS), ours=False)


# --------------------------------------------------------------------------------------------------------------- means


def abstract_means(tables: Sequence[StudyTable]) -> dict[str, Improvement]:
    """Return what CORAL gains on average, as the abstract says it: over models and the benchmarks of each table.

    `held-out` is over Table 1's three benchmarks (nine cells with three models), `transfer` over Table 2's four tasks. A task
    that is in neither, such as MathQA, has no part in a mean.
    """
    coral = ROWS["CORAL"]
    means = {}
    for kind, tasks in (("held-out", STEERING), ("transfer", TRANSFER)):
        mine = [t for t in tables if task_name(t.test) in tasks and any(row.method == coral for row in t.rows)]
        if mine:
            means[kind] = improvement_over(mine, coral, mixture="", kind=kind)
    return means


# -------------------------------------------------------------------------------------------------- Markdown and LaTeX


def shape_markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown: a heading for each, and its panels as groups of columns."""
    parts = []
    for block in blocks:
        heads = ["", *(f"{for_markdown(p.heading)}: {HEADS[c]}" for p in block.panels for c in COLUMNS)]
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for rows in zip(*(panel.rows for panel in block.panels), strict=True):
            cells = [markdown_value(row.cells[c]) for row in rows for c in COLUMNS]
            lines.append("| " + " | ".join([for_markdown(rows[0].label), *cells]) + " |")
        about = "; ".join(f"{for_markdown(p.heading)}: {p.about}" for p in block.panels if p.about)
        parts.append("\n".join([f"**{for_markdown(block.title)}**" + (f" ({about})" if about else ""), "", *lines]))
    return "\n\n".join(parts) + "\n"


def markdown_value(cell: Cell) -> str:
    """Return a value with its marks and its interval."""
    value = f"**{cell.value}**" if cell.best else f"<u>{cell.value}</u>" if cell.second else cell.value
    return f"{value} [{cell.interval}]" if cell.interval else value


def shape_latex(blocks: Sequence[Block]) -> str:
    """Return the blocks as LaTeX, as the paper sets them; needs booktabs, graphicx and colortbl."""
    lines = ["% needs \\usepackage{booktabs,graphicx,colortbl,xcolor}", f"% {NOTE}"]
    for block in blocks:
        lines += [rf"\textbf{{{for_latex(block.title)}}}\\[0.25em]", r"\resizebox{\textwidth}{!}{%"]
        lines.append("\n\\hspace{1em}\n".join(panel_latex(panel) for panel in block.panels) + "%")
        lines += ["}", r"\vspace{0.25em}", ""]
    return "\n".join(lines)


def panel_latex(panel: Panel) -> str:
    """Return one panel as a `tabular`."""
    arrows = [rf"{c} $\{'uparrow' if c == 'Acc' else 'downarrow'}$" for c in COLUMNS]
    lines = [
        r"\begin{tabular}{@{}l ccccc@{}}",
        r"\toprule",
        rf"\multicolumn{{6}}{{c}}{{\textbf{{{for_latex(panel.heading)}}}}} \\",
        r"\midrule",
        " & ".join(["Method", *arrows]) + r" \\",
        r"\midrule",
    ]
    for name, row in zip(ROWS, panel.rows, strict=True):
        cells = [latex_value(row.cells[c]) for c in COLUMNS]
        colour = r"\rowcolor{blue!5} " if name == "CORAL" else ""
        lines.append(colour + " & ".join([for_latex(row.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def latex_value(cell: Cell) -> str:
    """Return a value with its marks."""
    value = for_latex(cell.value)
    return rf"\textbf{{{value}}}" if cell.best else rf"\underline{{{value}}}" if cell.second else value
