"""What rows say of their answers: one option, several right ones, or shares of all. Which option is meant is told later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from coral_lens.data.answers import NUMBER, AnswerColumn, is_missing, read_answers
from coral_lens.data.columns import ANSWERS, Layout
from coral_lens.data.options import Asked, OptionColumn, listed, shown
from coral_lens.data.tables import Batch, Table
from coral_lens.errors import CoralError


@dataclass(frozen=True)
class Targets:
    """What some rows say of their answers."""

    column: AnswerColumn
    """All answers of all rows; a row with several has as many, one after the other, and one without has one that is missing."""
    part: str = "answer"
    """The column that they stand in, for complaints."""
    counts: Sequence[int] | None = None
    """How many answers each row has; None: one each."""
    soft: Sequence[tuple[float, ...]] | None = None
    """The share of each option, of rows that have soft answers; None: no row has."""

    def first(self, n: int) -> Targets:
        """Return those of the first rows alone."""
        m = n if self.counts is None else sum(self.counts[:n])
        c = self.column
        column = replace(
            c,
            numbers=c.numbers[:m],
            given=c.given[:m],
            options=c.options.take(range(m)),
            plain=c.plain[:m],
            several=c.several[:m],
        )
        counts = None if self.counts is None else self.counts[:n]
        return replace(self, column=column, counts=counts, soft=None if self.soft is None else self.soft[:n])


def read_targets(table: Table, batch: Batch, layout: Layout, options: OptionColumn) -> Targets:
    """Return what some rows say of their answers."""
    there = [part for part in ANSWERS if part in layout.parts]
    name = layout.parts[there[0]] if there else "answer"
    if there in ([], ["answer"]):
        given = batch.columns[name] if there else [None] * len(batch)
        if list not in set(map(type, given)):
            return Targets(read_answers(batch.numbers, given, options, is_text=table.is_text), name)
    rows = TargetRows(table, batch, layout, options)
    cells = [rows.only(i, there) for i in range(len(batch))]
    answers = [rows.answers(i, part, cell) for i, (part, cell) in enumerate(cells)]
    soft = [rows.soft(i, cell) if part == "soft" else () for i, (part, cell) in enumerate(cells)]
    counts = [len(some) for some in answers]
    spread = options.take([i for i, n in enumerate(counts) for _ in range(n)])
    numbers = [batch.numbers[i] for i, n in enumerate(counts) for _ in range(n)]
    flat = [answer for some in answers for answer in some]
    column = read_answers(numbers, flat, rows.numbered(spread, cells, counts), is_text=table.is_text)
    return Targets(column, name, counts, soft if any(soft) else None)


@dataclass(frozen=True)
class TargetRows:
    """Rows whose answers are more than one column of single answers."""

    table: Table
    batch: Batch
    layout: Layout
    options: OptionColumn

    def wrong(self, i: int, part: str, why: str) -> CoralError:
        """Return the complaint about what a row has in the column of a part."""
        return CoralError(f"{self.table.where(self.batch.numbers[i], self.layout.parts.get(part, ''))}: {why}")

    def only(self, i: int, parts: Sequence[str]) -> tuple[str, Any]:
        """Return the one part of a row that says what is right, and what it says."""
        cells = [(part, self.batch.columns[self.layout.parts[part]][i]) for part in parts]
        cells = [(part, cell) for part, cell in cells if not is_missing(cell) and cell != []]
        if len(cells) > 1:
            raise self.wrong(i, "", f"It has both `{cells[0][0]}` and `{cells[1][0]}`; give one of them.")
        return cells[0] if cells else ("answer", None)

    def answers(self, i: int, part: str, cell: Any) -> list[Any]:
        """Return the answers of a row: at least one, which may be missing."""
        if part == "soft":
            return [None]
        if part == "answer_index":
            return [self.index(i, cell)]
        if part == "answers" and isinstance(cell, str):
            cell = listed(cell)
        some = cell if isinstance(cell, list) else [cell]
        if any(isinstance(one, list | dict) for one in some):
            raise self.wrong(i, part, f"a list of right options is expected. Got {shown(cell)} instead.")
        return [one for one in some if not is_missing(one)] or [None]

    def index(self, i: int, cell: Any) -> str:
        """Return the number of an option, counted from 0, as a label that is never in doubt."""
        match = NUMBER.fullmatch(str(cell)) if not isinstance(cell, bool) else None
        n = len(self.options.texts[i])
        if match is None:
            raise self.wrong(i, "answer_index", f"a whole number is expected. Got {shown(cell)} instead.")
        if int(match[1]) >= n:
            raise self.wrong(
                i,
                "answer_index",
                f"{match[1]} is out of range: the {n} options are numbered 0 to {n - 1}. Leave it out if it is not known.",
            )
        return match[1]

    def numbered(self, options: OptionColumn, cells: Sequence[tuple[str, Any]], counts: Sequence[int]) -> OptionColumn:
        """Return the options with their numbers for labels where the answer is an `answer_index`."""
        parts = [part for (part, _), n in zip(cells, counts, strict=True) for _ in range(n)]
        if "answer_index" not in parts:
            return options
        every = [options.asked(i) for i in range(len(parts))]
        labelled = [by_number(a) if part == "answer_index" else a for a, part in zip(every, parts, strict=True)]
        return OptionColumn(options.texts, labelled)

    def soft(self, i: int, cell: Any) -> tuple[float, ...]:
        """Return the share of each option: of a list in their order, or of an object by their texts or labels."""
        asked = self.options.asked(i)
        given = listed(cell) if isinstance(cell, str) else cell
        if isinstance(given, Mapping):
            names = asked.labels if asked.labels and set(map(str, given)) <= set(asked.labels) else asked.options
            if unknown := [str(name) for name in given if str(name) not in names]:
                raise self.wrong(i, "soft", f"{unknown[0]!r} is no option ({', '.join(map(repr, names[:6]))}).")
            by_name = {str(name): share for name, share in given.items()}
            given = [by_name.get(name, 0) for name in names]
        n = len(asked.options)
        if (
            not isinstance(given, list)
            or len(given) != n
            or not all(map(is_share, given))
            or not sum(map(float, given))
        ):
            raise self.wrong(
                i, "soft", f"a share or a count for each of the {n} options is expected. Got {shown(cell)} instead."
            )
        total = sum(map(float, given))
        return tuple(float(share) / total for share in given)


def by_number(asked: Asked) -> Asked:
    """Return options whose labels are their numbers, counted from 0."""
    return replace(asked, labels=tuple(map(str, range(len(asked.options)))), truth=False)


def is_share(value: Any) -> bool:
    """Whether a value is a share or a count: a number that is not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, bool) and isfinite(number) and number >= 0
