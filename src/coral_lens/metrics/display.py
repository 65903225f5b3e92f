"""How results print: a small table in a terminal, the same in HTML in a notebook, and as a pandas frame. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from coral_lens.errors import need

if TYPE_CHECKING:
    import pandas as pd

WIDEST = 60
"""Characters of a cell that are shown; the frame has all of them."""


@dataclass(frozen=True)
class Table:
    """What a result shows of itself."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """A value for each column; what is printed of it, `cell` says."""
    notes: tuple[str, ...] = ()
    """Sentences below."""


class Shown:
    """A result that people look at: `print(result)`, a cell of a notebook, `result.to_frame()`."""

    __slots__ = ()

    def table(self) -> Table:
        """Return what is shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.table())

    def to_frame(self) -> pd.DataFrame:
        """Return the table as a pandas frame, with every value unrounded."""
        need("frames", by="to_frame()")
        import pandas as pd

        table = self.table()
        return pd.DataFrame.from_records(list(table.rows), columns=list(table.columns))


def cell(value: Any) -> str:
    """Return a value as it is printed: numbers to four digits, no None, nothing longer than a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def as_text(table: Table) -> str:
    """Return a table with aligned columns: numbers to the right, words to the left."""
    cells = [tuple(map(cell, row)) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *cells, strict=True)]
    numeric = [all(isinstance(row[i], int | float) or row[i] is None for row in table.rows) for i in range(len(widths))]

    def line(words: tuple[str, ...]) -> str:
        aligned = (w.rjust(n) if right else w.ljust(n) for w, n, right in zip(words, widths, numeric, strict=True))
        return "  ".join(aligned).rstrip()

    body = [line(table.columns), *map(line, cells)] if table.rows else []
    return "\n".join([table.title, *body, *table.notes])


def as_html(table: Table) -> str:
    """Return a table for a notebook; every text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell(v))}</td>" for v in row) + "</tr>" for row in table.rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if table.rows else ""
    return f"<div><p><strong>{escape(table.title)}</strong></p>{body}{notes}</div>"
