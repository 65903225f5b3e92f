"""Rows of CSV and TSV, however they were exported: what separates and quotes their cells is found from the first rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Protocol, runtime_checkable

from coral_lens.data._json_tables import UTF16, not_utf8
from coral_lens.data.columns import is_known
from coral_lens.data.tables import Batch, Refusals, Table
from coral_lens.errors import CoralError
from coral_lens.storage.lines import opened

SEPARATORS = ",;\t|"
HEAD = 2**16
"""Bytes that are looked at to find out how cells are separated and quoted."""
LOOKED_AT = 50
"""Rows of them."""
LINE_END = re.compile(r"\r\n|\r|\n")
LONGEST_CELL = 2**27
"""Characters of a cell: a state may be a whole document. Python's own limit is a thousandth of it."""


@dataclass(frozen=True)
class Quoting:
    """How cells are quoted that hold a separator, a quote or a line end."""

    quote: str
    escape: str | None
    """What stands before a quote inside a quoted cell; None: it is written twice."""


@runtime_checkable
class Rows(Protocol):
    """What reads rows of cells and counts lines: a `csv.reader`, which has no public type."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...


USUAL = Quoting('"', None)
"""As spreadsheets and data frames write."""
ESCAPED = Quoting('"', "\\")
"""As databases write."""
SINGLE = Quoting("'", None)


@dataclass(frozen=True)
class Dialect:
    """How a table is written."""

    separator: str
    quoting: Quoting
    skipped: int = 0
    """Lines before the header that say something else: Excel understands `sep=;`."""

    def quotes_in(self, lines: Sequence[str]) -> bool:
        """Whether a cell of these lines may be quoted or escaped."""
        text = "".join(lines)
        return self.quoting.quote in text or (self.quoting.escape or self.quoting.quote) in text

    def read(self, lines: Iterable[str]) -> Rows:
        """Return a reader of rows."""
        return csv.reader(
            lines,
            delimiter=self.separator,
            quotechar=self.quoting.quote,
            doublequote=self.quoting.escape is None,
            escapechar=self.quoting.escape,
            strict=True,
        )


def csv_table(path: Path, stem: str, refuse: Refusals, size: int) -> Table:
    """Return the rows of a table of text; its first row names the columns."""
    return Table(str(path), stem, csv_batches(path, refuse, size), is_text=True)


def csv_batches(path: Path, refuse: Refusals, size: int) -> Iterator[Batch]:
    """Yield the rows in batches."""
    with text_of(path) as (text, head), long_cells():
        dialect = find_dialect(head)
        rows = NumberedRows(islice(text, dialect.skipped, None), dialect, path, 1 + dialect.skipped)
        names: tuple[str, ...] = ()
        while not names:
            if (first := rows.take(1)) is None:
                return
            (header,), (number,) = first
            names = header_of(header, f"{path}, line {number}") if any(header) else ()
        while taken := rows.take(size):
            cells, numbers = fitted(*taken, len(names), path, refuse)
            if cells:
                yield Batch(dict(zip(names, zip(*cells, strict=True), strict=True)), numbers)


@dataclass
class NumberedRows:
    """Rows with the lines that they begin in; a cell may hold several lines.

    As long as no quote comes, a row is a line and its cells are what lies between separators; from the first quote on, Python's
    reader of CSV takes over, which reads the same in four times the time.
    """

    text: Iterator[str]
    dialect: Dialect
    path: Path
    line: int
    """The line that the next row begins in."""
    reader: Rows | None = None

    def take(self, n: int) -> tuple[list[list[str]], Sequence[int]] | None:
        """Return the next rows and their lines; None at the end."""
        if self.reader is None:
            lines, start = list(islice(self.text, n)), self.line
            if not self.dialect.quotes_in(lines):
                self.line += len(lines)
                rows = [line.rstrip("\r\n").split(self.dialect.separator) for line in lines]
                return (rows, range(start, self.line)) if rows else None
            self.reader = self.dialect.read(chain(lines, self.text))
        return self.take_quoted(self.reader, n)

    def take_quoted(self, reader: Rows, n: int) -> tuple[list[list[str]], Sequence[int]] | None:
        """Return the next rows and their lines from the reader of CSV."""
        before, start = reader.line_num, self.line
        try:
            rows = list(islice(reader, n))
        except csv.Error as error:
            line = start + reader.line_num - before - 1
            raise CoralError(f"{self.path}, line {line}: malformed CSV ({error}).") from error
        self.line += reader.line_num - before
        if self.line - start == len(rows):
            return (rows, range(start, self.line)) if rows else None
        spans = [1 + sum(len(LINE_END.findall(cell)) for cell in row) for row in rows]
        return rows, list(accumulate(spans[:-1], initial=start))


def fitted(
    rows: list[list[str]], numbers: Sequence[int], width: int, path: Path, refuse: Refusals
) -> tuple[list[list[str]], Sequence[int]]:
    """Return rows that have a cell for each column: blank ones are left out, and others that do not fit are refused."""
    if set(map(len, rows)) == {width} and all(map(any, rows)):
        return rows, numbers
    kept: list[tuple[list[str], int]] = []
    for cells, number in zip(rows, numbers, strict=True):
        if len(cells) < width or any(cells[width:]):
            if any(cells):
                refuse(f"{path}, line {number}: {len(cells)} cells, but the header has {width} columns.")
        elif any(cells):
            kept.append((cells[:width], number))
    return [cells for cells, _ in kept], [number for _, number in kept]


def header_of(cells: list[str], where: str) -> tuple[str, ...]:
    """Return the names of columns; one without a name, such as the index that pandas writes, is called by its place."""
    names = tuple(cell.strip() or f"column {i}" for i, cell in enumerate(cells, start=1))
    lowered = [name.lower() for name in names]
    if repeated := next((name for name in names if lowered.count(name.lower()) > 1), None):
        raise CoralError(f"{where}: the column {repeated!r} appears twice in the header; rename one of them.")
    return names


# ------------------------------------------------------------------------------------------------------- how it is written


def find_dialect(head: str) -> Dialect:
    """Return how a table is written: so that its header has the most columns that are known, and its rows have as many cells.

    Among ways that are equally good the first counts, which is the most common. Rare quoting must show itself: a table with
    one quote too many would fit it by chance, and is to be refused.
    """
    lines = head.splitlines(keepends=True)
    header = next((line.strip() for line in lines if line.strip()), "")
    if re.fullmatch(r"sep=.", header, re.IGNORECASE):
        return Dialect(header[-1], USUAL, skipped=1)
    quotings = [USUAL, *([ESCAPED] if r"\"" in head else []), *([SINGLE] if "'" in header else [])]
    return max((Dialect(mark, q) for q, mark in product(quotings, SEPARATORS)), key=lambda way: quality(way, lines))


def quality(dialect: Dialect, lines: list[str]) -> tuple[int, bool, int]:
    """Return how well a way to read lines fits: known columns, whether all rows are as long as the header, columns."""
    rows: list[list[str]] = []
    is_whole = True
    try:
        for row in islice(dialect.read(lines[dialect.skipped :]), LOOKED_AT):
            if any(row):
                rows.append(row)
    except csv.Error:  # the last row may be cut by the end of what is looked at, or this is not how it is written
        is_whole = False
    if not rows:
        # not read as a table, which may be malformed: that is for the reader to say
        rows = [next((line for line in lines if line.strip()), "").strip(' "\r\n').split(dialect.separator)]
    header = rows[0]
    even = is_whole and all(len(row) == len(header) for row in rows[: max(1, len(rows) - 1)])
    return sum(is_known(cell) for cell in header), even, len(header)


@contextmanager
def text_of(path: Path) -> Iterator[tuple[io.TextIOBase, str]]:
    """Yield the text of a file and its beginning; a byte that is no text is located."""
    try:
        with opened(path) as file:
            start = file.peek(HEAD)[:HEAD]
            encoding = "utf-16" if start.startswith(UTF16) else "utf-8-sig"
            head = start.decode(encoding, errors="ignore")
            with io.TextIOWrapper(file, encoding, newline="") as text:
                yield text, head
    except UnicodeDecodeError as error:
        raise CoralError(bad_byte(path, error)) from error


def bad_byte(path: Path, error: UnicodeDecodeError) -> str:
    """Say where a file has the first byte that is no text."""
    offset = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as found:
                return not_utf8(f"{path}, line {number}", line, found.start, offset, whole=line if number == 1 else b"")
            offset += len(line)
    return f"{path}: not text in {error.encoding} ({error.reason}); save the file as UTF-8."


@contextmanager
def long_cells() -> Iterator[None]:
    """Have Python's reader take long cells, as long as rows are read."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)
