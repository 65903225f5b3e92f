"""From the batches of a table to chunks of questions whose answers are still to be understood, without the rows left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coral_lens.data.answers import AnswerColumn
from coral_lens.data.columns import Layout, layout_of, named_columns
from coral_lens.data.options import NO_YES, Asked
from coral_lens.data.parts import RowParts
from coral_lens.data.settings import TableOptions
from coral_lens.data.tables import Batch, Refusals, Table
from coral_lens.data.targets import Targets, read_targets
from coral_lens.errors import CoralError, nearest


@dataclass(frozen=True)
class Chunk:
    """Some rows as parts of questions, before it is known what their answers mean."""

    numbers: Sequence[int]
    fields: dict[str, list[Any]]
    """Fields of questions by their names, a value for each row: `id`, `text`, `options` and others."""
    targets: Targets
    """What they say of their answers."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def answers(self) -> AnswerColumn:
        """The answers of all rows that have some."""
        return self.targets.column

    def first(self, n: int) -> Chunk:
        """Return the first rows alone."""
        if n >= len(self):
            return self
        fields = {name: values[:n] for name, values in self.fields.items()}
        return Chunk(self.numbers[:n], fields, self.targets.first(n))


@dataclass
class RowReader:
    """Reads the rows of one table."""

    table: Table
    options: TableOptions
    layouts: dict[tuple[str, ...], Layout] = field(default_factory=dict)

    @property
    def extra(self) -> tuple[str, ...]:
        """The columns that are carried along."""
        return tuple(dict.fromkeys(name for layout in self.layouts.values() for name in layout.extra))

    def chunks(self, batch: Batch, refuse: Refusals) -> Iterator[Chunk]:
        """Yield a batch as parts of questions; around rows that are left out, in several pieces."""
        layout = self.layout(batch)
        todo = [batch]
        while todo:
            piece = todo.pop()
            try:
                yield self.chunk(piece, layout)
            except CoralError as error:
                if not refuse.skip or len(piece) == 1:
                    refuse(str(error), error)
                else:
                    middle = len(piece) // 2
                    todo += [piece.take(range(middle, len(piece))), piece.take(range(middle))]

    def chunk(self, batch: Batch, layout: Layout) -> Chunk:
        """Return some rows as parts of questions; whatever is wrong with the first bad one is raised, with its place."""
        parts = RowParts(self.table, self.options, batch, layout)
        options = parts.options(self.same_options(layout))
        return Chunk(batch.numbers, parts.fields(options), read_targets(self.table, batch, layout, options))

    def layout(self, batch: Batch) -> Layout:
        """Return which column is what; in rows of JSON a later one may bring new names, but no part may move."""
        names = tuple(batch.columns)
        if names in self.layouts:
            return self.layouts[names]
        where = self.table.where(batch.numbers[0]) if self.table.column == "field" else f"{self.table.name}, header"
        layout = layout_of(names, self.options.columns or {}, where, noun=self.table.column)
        self.refuse_incomplete(layout, names, where)
        for other in self.layouts.values():
            if moved := [p for p, column in layout.parts.items() if other.parts.get(p, column) != column]:
                raise CoralError(
                    f"{where}: the {moved[0]} stands in {layout.parts[moved[0]]!r} from here on, and in "
                    f"{other.parts[moved[0]]!r} before; say which is meant: --columns {moved[0]}=NAME."
                )
        self.layouts[names] = layout
        return layout

    def refuse_incomplete(self, layout: Layout, names: Sequence[str], where: str) -> None:
        """Refuse a table in which no column is the question, or none has options."""
        noun, found = self.table.column, named_columns(names)
        if not any(part in layout for part in ("question", "instructions", "prompt")) and not self.options.instructions:
            raise CoralError(
                f"{where}: no {noun} is the question; found {found}. Call it `question`, or say which it is: --columns "
                f"question=NAME.{nearest('question', names)}"
            )
        if (
            not any(part in layout for part in ("options", "continuations", "kind"))
            and self.same_options(layout) is None
        ):
            raise CoralError(
                f"{where}: no {noun} has the options; found {found}. Call it `options`, or have columns `option_a`, `option_b`, "
                "..., or say which they are: --columns options=NAME. If all questions have the same, give --classes or --kind "
                "yes-no."
            )

    def same_options(self, layout: Layout) -> Asked | None:
        """Return the options of every question that brings none; None where there are no such."""
        kind = self.options.kind or "choice"
        if self.options.classes:
            described = tuple(self.options.classes.values())
            return Asked(tuple(self.options.classes), descriptions=described if any(described) else (), kind=kind)
        if names := self.table.classes.get(layout.parts.get("answer", "")):
            return Asked(names, labels=tuple(map(str, range(len(names)))), kind=kind)
        return Asked(NO_YES, kind=kind, truth=True) if kind == "yes-no" else None
