"""The parts of questions in the columns of a table: texts, ids, states, kinds, options and prompts.

Rows are checked column by column, many at once; only where a check fails is the row looked for that is to be named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from coral_lens.data.columns import ANSWERS, Layout
from coral_lens.data.options import NO_YES, Asked, OptionColumn, description_of, listed, options_in, shown, text_of
from coral_lens.data.settings import KIND_WORDS, TableOptions
from coral_lens.data.tables import Batch, Table
from coral_lens.errors import CoralError
from coral_lens.records import Columns, Kind, Question, Rendered


@dataclass(frozen=True)
class RowParts:
    """Some rows of a table. Whatever is wrong with the first bad one is raised, with its place."""

    table: Table
    said: TableOptions
    """What the user says of the table."""
    batch: Batch
    layout: Layout

    def cells(self, part: str) -> Sequence[Any] | None:
        """Return what stands in the column of a part, or None where there is no such column."""
        name = self.layout.parts.get(part)
        return None if name is None else self.batch.columns[name]

    def wrong(self, i: int, part: str, why: str) -> CoralError:
        """Return the complaint about what a row has in the column of a part."""
        return CoralError(f"{self.table.where(self.batch.numbers[i], self.layout.parts.get(part, ''))}: {why}")

    def fields(self, options: OptionColumn) -> dict[str, list[Any]]:
        """Return the fields of questions but for their answers, a value for each row; what all have by default is left out."""
        found: dict[str, list[Any]] = {"id": self.ids(), "options": list(options.texts)}
        rendered = self.rendered(options)
        found |= self.texts(rendered) | self.states(found["id"])
        if options.others is not None:
            kinds, descriptions = ([getattr(o, name) for o in options.others] for name in ("kind", "descriptions"))
            found |= {"kind": kinds} if set(kinds) != {"choice"} else {}
            found |= {"descriptions": descriptions} if any(descriptions) else {}
        if rendered:
            found["rendered"] = rendered
        if not self.is_usable(found, checked=options.checked):
            self.refuse_unusable(found)
        table = Columns(self.batch.columns)
        table.file = self.table.file
        table.hidden = frozenset(column for part, column in self.layout.parts.items() if part in ANSWERS)
        return found | {"table": [table] * len(self.batch), "row": list(range(len(self.batch)))}

    def is_usable(self, found: dict[str, list[Any]], *, checked: bool) -> bool:
        """Whether all rows are questions: they have a text, two options or more that are not blank, and all of it is text."""
        texts, options = found["text"], found["options"]
        if not all(map(str.strip, texts)) or min(map(len, options)) < 2:
            return False
        if not checked and not all(map(str.strip, chain.from_iterable(options))):
            return False
        if self.table.is_text:
            return True
        try:  # JSON can escape half a character; no tokenizer and no file could take it
            "".join(chain(texts, *options, found["id"], found["group"], found.get("passage", ()))).encode()
        except UnicodeEncodeError:
            return False
        return True

    def refuse_unusable(self, found: dict[str, list[Any]]) -> None:
        """Name the first row that is no question, and say why."""
        passages = found.get("passage", [""] * len(self.batch))
        rows = zip(found["id"], found["text"], found["options"], passages, found["group"], strict=True)
        for i, (identity, text, options, passage, group) in enumerate(rows):
            if not text.strip():
                raise self.wrong(i, "question", "the question is empty.")
            try:
                Question(identity, identity, text, options)
            except CoralError as error:
                raise self.wrong(i, "options", str(error)) from error
            values = {"id": identity, "question": text, "options": "".join(options), "context": passage, "group": group}
            for part, value in values.items():
                if any("\ud800" <= character <= "\udfff" for character in value):
                    raise self.wrong(i, part, f"{value[:40]!r} holds half of a surrogate pair, which is not text.")

    # ------------------------------------------------------------------------------------------------------------- texts

    def as_texts(self, part: str) -> list[str] | None:
        """Return the texts of a part, empty where a row has none; None where no column has it."""
        cells = self.cells(part)
        if cells is None or set(map(type, cells)) == {str}:
            return None if cells is None else list(cells)
        texts = []
        for i, cell in enumerate(cells):
            try:
                texts.append("" if cell is None else state_text(cell) if part == "state" else text_of(cell))
            except CoralError as error:
                raise self.wrong(i, part, str(error)) from error
        return texts

    def texts(self, rendered: list[Rendered] | None) -> dict[str, list[str]]:
        """Return what is asked, and how to decide; where only the latter is said, it is what is asked."""
        everywhere, n = self.said.instructions or "", len(self.batch)
        questions, instructions = self.as_texts("question"), self.as_texts("instructions")
        if questions is not None and instructions is None and not everywhere:
            return {"text": questions}
        told = [text or everywhere for text in instructions or [""] * n]
        if questions is None:
            return {"text": told if any(told) else [r.contexts[0] for r in rendered or ()] or told}
        asked = [question if question.strip() else other for question, other in zip(questions, told, strict=True)]
        told = ["" if text is other else other for text, other in zip(asked, told, strict=True)]
        return {"text": asked, "instructions": told}

    def ids(self) -> list[str]:
        """Return the ids of the rows, which default to the table and the line."""
        stem, numbers, cells = self.table.stem, self.batch.numbers, self.cells("id")
        if cells is not None and set(map(type, cells)) == {str} and all(cells):
            return list(cells)
        found = []
        for i, (cell, number) in enumerate(zip(cells or [None] * len(numbers), numbers, strict=True)):
            if cell is None or cell == "":
                found.append(f"{stem}:{number}")
            elif isinstance(cell, str | int) and not isinstance(cell, bool):
                found.append(str(cell))
            elif isinstance(cell, float) and cell.is_integer():
                found.append(str(int(cell)))
            else:
                raise self.wrong(i, "id", f"a text or a whole number is expected. Got {shown(cell)} instead.")
        return found

    def states(self, ids: list[str]) -> dict[str, list[str]]:
        """Return what is read before each question, and what questions belong together: at least those about one state."""
        states, contexts, groups = (self.as_texts(part) for part in ("state", "context", "group"))
        if states is contexts is groups is None:
            return {"group": ids}
        nothing = [""] * len(ids)
        shared = [state_group(state) if state else "" for state in states or nothing]
        found = {"group": [g or s or i for g, s, i in zip(groups or nothing, shared, ids, strict=True)]}
        if states or contexts:
            both = zip(states or nothing, contexts or nothing, strict=True)
            found["passage"] = ["\n\n".join(filter(None, pair)) for pair in both]
        return found

    # ----------------------------------------------------------------------------------------------------------- options

    def kinds(self) -> list[Kind] | None:
        """Return the kind of each row; None where all are choices."""
        cells, default = self.cells("kind"), self.said.kind or "choice"
        if cells is None:
            return None if default == "choice" else [default] * len(self.batch)
        found = []
        for i, cell in enumerate(cells):
            kind = KIND_WORDS.get(str(cell).strip().lower().replace("_", "-")) if cell not in (None, "") else default
            if kind is None:
                raise self.wrong(i, "kind", f"{shown(cell)} is no kind of question; use choice, yes-no or score.")
            found.append(kind)
        return found if set(found) != {"choice"} else None

    def options(self, same: Asked | None) -> OptionColumn:
        """Return the options of each row; `same` are those of rows that have none."""
        kinds, descriptions = self.kinds(), self.cells("descriptions")
        column = self.in_columns() if self.layout.option_columns else self.in_cells(same, kinds)
        if kinds is None and descriptions is None:
            return column
        every = []
        for i in range(len(self.batch)):
            asked = replace(column.asked(i), kind=kinds[i] if kinds else "choice")
            try:
                every.append(described(asked, descriptions[i]) if descriptions else asked)
            except CoralError as error:
                raise self.wrong(i, "descriptions", str(error)) from error
        return OptionColumn([asked.options for asked in every], every)

    def in_columns(self) -> OptionColumn:
        """Return options that have columns of their own; a question may have fewer than there are columns."""
        columns = [self.batch.columns[name] for name in self.layout.option_columns]
        if all(set(map(type, column)) == {str} and all(map(str.strip, column)) for column in columns):
            return OptionColumn(list(zip(*columns, strict=True)), checked=True)
        every = []
        for i, cells in enumerate(zip(*columns, strict=True)):
            given = ["" if cell is None else cell for cell in cells]
            while given and isinstance(given[-1], str) and not given[-1].strip():
                given.pop()
            try:
                every.append(options_in(given))
            except CoralError as error:
                raise self.wrong(i, "", str(error)) from error
        is_plain = not any(asked.values for asked in every)
        return OptionColumn([asked.options for asked in every], None if is_plain else every)

    def in_cells(self, same: Asked | None, kinds: list[Kind] | None) -> OptionColumn:
        """Return options that stand in one cell each, or those that all rows have."""
        part = "options" if "options" in self.layout.parts else "continuations"
        cells = self.cells(part) or [None] * len(self.batch)
        if all(type(cell) is list and set(map(type, cell)) == {str} for cell in cells):
            return OptionColumn(list(map(tuple, cells)))
        every = []
        for i, cell in enumerate(cells):
            kind = kinds[i] if kinds else "choice"
            try:
                if cell is None or cell == "":
                    every.append(without_options(same, kind))
                else:
                    every.append(options_in(cell, kind=kind, bars=self.table.column == "column"))
            except CoralError as error:
                raise self.wrong(i, part, str(error)) from error
        return OptionColumn([asked.options for asked in every], every)

    def rendered(self, options: OptionColumn) -> list[Rendered] | None:
        """Return the exact prompts of rows that bring their own, with what is scored after them."""
        prompts, scored = self.as_texts("prompt"), self.cells("continuations")
        if prompts is None or scored is None:
            return None
        found = []
        for i, (prompt, cell) in enumerate(zip(prompts, scored, strict=True)):
            texts, n = listed(cell) if isinstance(cell, str) else cell, len(options.texts[i])
            if (
                not isinstance(texts, list)
                or len(texts) != n
                or not all(isinstance(t, str) and t.strip() for t in texts)
            ):
                reason = f"a text for each of the {n} options is expected. Got {shown(cell)} instead."
                raise self.wrong(i, "continuations", reason)
            found.append(Rendered((prompt,) * n, tuple(texts), tuple(text.strip() for text in texts)))
        return found


def without_options(same: Asked | None, kind: Kind) -> Asked:
    """Return the options of a row that has none."""
    if same is not None:
        return same
    return Asked(NO_YES, kind=kind, truth=True) if kind == "yes-no" else Asked(())


def described(asked: Asked, cell: Any) -> Asked:
    """Return options with the descriptions of a cell: a list in their order, or an object by their texts."""
    given = listed(cell) if isinstance(cell, str) else cell
    if given is None or given == []:
        return asked
    if isinstance(given, dict):
        given = [given.get(option, "") for option in asked.options]
    if not isinstance(given, list):
        raise CoralError(f"a description for each option is expected. Got {shown(cell)} instead.")
    return replace(asked, descriptions=tuple(map(description_of, given)))


def state_text(cell: Any) -> str:
    """Return a state as text; one that is JSON is written as such."""
    if isinstance(cell, dict | list):
        return json.dumps(cell, ensure_ascii=False, default=str)
    return text_of(cell)


def state_group(state: str) -> str:
    """Return what questions about one state have in common."""
    return f"state-{hashlib.sha256(state.strip().encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
