"""A run in the terminal: whether it helped, in sentences and one small table; or all of its tables. Only lays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coral_lens.metrics.scores import METRICS
from coral_lens.report.headline import Glance, glances, headline
from coral_lens.report.names import method_name
from coral_lens.report.tables.averages import HEADLINE
from coral_lens.report.tables.formats import Cell, Row, column_label, notes_of, percent, table_rows, task_heading
from coral_lens.report.tables.run import ResultsTable, TaskTable
from coral_lens.storage.escape import for_terminal, in_one_line

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH, WIDE = 80, 100
"""Columns of a log, which is no terminal: in short, and in full."""
STYLES = {"better": "green", "worse": "red", "seems worse": "red", "mixed": "yellow"}
KEY = (
    "▲ clearly better, ▼ clearly worse, △ ▽ only its interval leaves out 0 (no test, or not clear in it). Values × 100; "
    "--full prints all tables."
)


def plain_console() -> Console:
    """Return a console that takes texts as they are: `[/b]` and `:smile:` in a name are no marks."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


# --- in short ---------------------------------------------------------------------------------------------------------


def in_short(table: ResultsTable) -> Group:
    """Return the sentences of the page's head and one table, for 80 columns."""
    from rich.console import Group
    from rich.text import Text

    def parts() -> Iterator[RenderableType]:
        for sentence in headline(table):
            yield Text(for_terminal(f"{sentence}\n"))
        seen = glances(table)
        yield glance_table(seen) if seen else plain_table(table)
        if seen:
            yield Text(KEY, style="dim")

    return Group(*parts())


def glance_table(tasks: list[Glance]) -> Table:
    """Return a line for each task: its metrics before and after, and one word."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("before→after", overflow="fold")
    shown.add_column("questions", justify="right")
    for metric in HEADLINE:
        shown.add_column(METRICS[metric].label, no_wrap=True)
    shown.add_column("", no_wrap=True)
    for task in tasks:
        cells = (
            Text(f"{percent(c.before)}→{percent(c.after)} {c.verdict.mark}", style=mark_style(c.verdict.mark))
            for c in task.changes
        )
        word = Text(task.word, style=STYLES.get(task.word, ""))
        shown.add_row(Text(in_one_line(f"{task.title} ({task.kind})")), f"{task.n_questions:,}", *cells, word)
    return shown


def mark_style(mark: str) -> str:
    """Return the colour of a value by its mark."""
    return "green" if mark == "▲" else "red" if mark and mark in "▼▽" else ""


def plain_table(table: ResultsTable) -> Table:
    """Return the main scores of every method, where nothing is compared."""
    from rich.table import Table
    from rich.text import Text

    shown = Table("task", "method", box=None, pad_edge=False)
    for head in ("questions", *(METRICS[m].label for m in HEADLINE)):
        shown.add_column(head, justify="right")
    for task in table.tasks:
        for method, metrics in task.metrics.items():
            values = (percent(metrics.scores[m].value) for m in HEADLINE)
            shown.add_row(
                Text(in_one_line(task.title)), Text(in_one_line(method_name(method))), f"{task.n_questions:,}", *values
            )
    return shown


# --- in full ----------------------------------------------------------------------------------------------------------


def in_full(table: ResultsTable) -> Group:
    """Return one table per task and the notes, for a terminal of 80 columns."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    notes = [Padding(Text(in_one_line(note), style="dim"), (0, 0, 0, 1)) for note in notes_of(table)]
    return Group(*(rich_table(task) for task in table.tasks), *notes)


def rich_table(task: TaskTable) -> Table:
    """Return a task's table for the terminal, with the interval of a value under it."""
    heads = [column_label(task, name) for name in task.columns]
    return rows_table(task_heading(task), heads, table_rows(task))


def rows_table(title: str, heads: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return rows of cells as a table for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    named = Text(in_one_line(title), style="bold not italic") if title else None
    shown = Table(title=named, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    shown.add_column("", overflow="fold", min_width=11, max_width=14)
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = (rich_cell(cell, between="~" if row.difference else "–") for cell in row.cells.values())
        shown.add_row(Text(in_one_line(row.label).replace(" − ", " −\n")), *cells)
    return shown


def rich_cell(cell: Cell, *, between: str) -> Text:
    """Return a cell of two or three lines: value, interval, note; the interval is short, to fit a narrow terminal."""
    from rich.text import Text

    text = Text(cell.value, style="bold green" if cell.best else "")
    if cell.mark:
        text.append(f" {cell.mark}", style=mark_style(cell.mark))
    for line in filter(None, (cell.interval.replace(" to ", between), cell.note)):
        text.append(f"\n{line}", style="dim not bold")
    return text
