"""A table of rows from anywhere, in batches of columns: what every reader of files and frames gives, and all it gives.

A batch is small enough to be forgotten: however long a table is, only what is made of it is kept. What its columns mean is not
said here (`columns`, `questions`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from coral_lens.errors import CoralError

BATCH = 4096
"""Rows of a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows that follow each other."""

    columns: Mapping[str, Sequence[Any]]
    """By name in the order of the source, a value for each row; None where a row has none."""
    numbers: Sequence[int]
    """The line or row of each, for complaints."""

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return some of the rows alone."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return Batch(columns, [self.numbers[i] for i in rows])


@dataclass
class Refusals:
    """What happens to a row that cannot be read: it is an error, or it is left out and counted."""

    skip: bool = False
    """Whether rows are left out (`--skip-bad`)."""
    complaints: list[str] = field(default_factory=list)
    """What was wrong with the rows that were left out."""

    def __call__(self, complaint: str, cause: Exception | None = None) -> None:
        """Refuse a row, or count it."""
        if not self.skip:
            raise CoralError(complaint) from cause
        self.complaints.append(complaint)


@dataclass(frozen=True)
class Table:
    """Rows with the names of their columns, and what complaints call them."""

    name: str
    """The file, or what else was given."""
    stem: str
    """What the ids of rows begin with that have none of their own."""
    batches: Iterator[Batch]
    unit: Literal["line", "row"] = "line"
    """What its numbers count."""
    column: Literal["column", "field"] = "column"
    """What a named part of a row is called."""
    is_text: bool = False
    """Whether every value is a text, as in CSV, where 1 may be a number or the text of an option."""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of columns that hold the numbers of classes: the names of these."""
    file: str = ""
    """The file that it is read from; empty where it was in memory already."""

    def close(self) -> None:
        """Close what it is read from, before its end."""
        if isinstance(self.batches, Generator):
            self.batches.close()

    def where(self, number: int, column: str = "") -> str:
        """Return the place of a row, or of what a column has there, for a complaint."""
        place = f"{self.name}, {self.unit} {number}"
        return f"{place}, {self.column} {column!r}" if column else place


def batches_of_rows(rows: Iterable[tuple[int, Mapping[str, Any]]], size: int) -> Iterator[Batch]:
    """Yield numbered rows, each with names of its own, as batches of columns."""
    numbered = iter(rows)
    while chunk := list(islice(numbered, size)):
        names = dict.fromkeys(name for _, row in chunk for name in row)
        yield Batch({name: [row.get(name) for _, row in chunk] for name in names}, [number for number, _ in chunk])


def exploded(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rows without nesting: each of several `questions` about one state, and the parts of a question that is an object.

    So decisions may stand together as requests to a server have them; all else that their row says holds for each.
    """
    for number, row in rows:
        inner = row.get("questions")
        if isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
            shared = {name: value for name, value in row.items() if name not in ("questions", "id")}
            own = row["id"] if row.get("id") not in (None, "") else number
            for k, one in enumerate(inner, start=1):
                yield number, {**shared, **one, "id": f"{own}.{one.get('id', one.get('name', k))}"}
        elif isinstance(row.get("question"), dict) and "stem" in row["question"]:
            parts = row["question"]
            others = {name: value for name, value in row.items() if name != "question"}
            yield number, {"question": parts["stem"], **{k: v for k, v in parts.items() if k != "stem"}, **others}
        else:
            yield number, row
