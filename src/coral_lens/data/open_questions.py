"""Questions without options: what is asked, and the answers that count as right, if they are known.

They come from the same files and frames as questions with options. A file that has options is refused: they would be overlooked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coral_lens.data.columns import Layout, layout_of, named_columns
from coral_lens.data.options import listed, shown, text_of
from coral_lens.data.parts import RowParts
from coral_lens.data.same_answer import answer_key
from coral_lens.data.settings import SourceOptions
from coral_lens.data.sources import is_file, open_table
from coral_lens.data.tables import Batch, Refusals, Table
from coral_lens.errors import CoralError, nearest
from coral_lens.records import UNNAMED, Columns


@dataclass(frozen=True)
class OpenQuestion:
    """A question to which the model is to write the answer."""

    id: str
    text: str
    answers: tuple[str, ...] = ()
    """All that count as right, by `same_answer`; empty where that is not known."""
    passage: str = ""
    """Text to read before the question."""
    group: str = ""
    """The unit that must not be split between training and test; by default the question itself."""
    task: str = UNNAMED
    table: Mapping[str, Sequence[Any]] | None = field(default=None, compare=False, repr=False)
    """The columns of the table that it comes from, or of a part of it."""
    row: int = field(default=0, compare=False, repr=False)
    """Its place in them."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise CoralError(f"Question {self.id!r} is empty.")
        if silent := [answer for answer in self.answers if not answer_key(answer)]:
            raise CoralError(
                f"Question {self.id!r} has the answer {silent[0]!r}, which says nothing; give it words, or leave it out."
            )

    @property
    def columns(self) -> dict[str, Any]:
        """The row of the table that it comes from, which comes back beside its answer; empty where it comes from none."""
        return {name: values[self.row] for name, values in (self.table or {}).items()}


def as_open(questions: str | Sequence[str | OpenQuestion]) -> list[OpenQuestion]:
    """Return questions of which some may be plain texts; one alone may stand without a list."""
    several = [questions] if isinstance(questions, str) else questions
    for other in (q for q in several if not isinstance(q, str | OpenQuestion)):
        raise CoralError(
            f"The question {getattr(other, 'id', other)!r} is no open question; give its text, or an `OpenQuestion`. One that "
            "comes with options is answered by `lens.predict`."
        )
    asked = [q if isinstance(q, OpenQuestion) else OpenQuestion(str(i), q) for i, q in enumerate(several, start=1)]
    if repeated := [name for name, n in Counter(q.id for q in asked).items() if n > 1]:
        raise CoralError(f"Two questions have the id {repeated[0]!r}; a plain text has its place. Make ids unique.")
    return asked


def load_open_questions(source: str | Path | Any, options: SourceOptions | None = None) -> list[OpenQuestion]:
    """Return open questions from a file, a saved dataset or a frame, or from a list of dicts.

    A row has a `question` and, if it is known, an `answer`, or `answers`, a list of all that count as right; other columns
    are carried along. `options` sets a limit, and how the table is read.
    """
    options = options or SourceOptions()
    if isinstance(source, str | Path) and not is_file(source):
        raise CoralError(f"{source} is no file of questions; open questions are read from files, such as open.jsonl.")
    refuse = Refusals(options.table.skip_bad)
    table = open_table(source, refuse, options.limit)
    with closing(table):
        questions = list(Reading(table, options, refuse).questions())
    if not questions:
        why = f": {refuse.complaints[0]}" if refuse.complaints else "."
        raise CoralError(f"{table.name} holds no questions{why}")
    return questions


@dataclass(frozen=True)
class Reading:
    """A table on the way to its open questions."""

    table: Table
    options: SourceOptions
    refuse: Refusals

    def questions(self) -> Iterator[OpenQuestion]:
        """Yield the questions, no more than are wanted; an id that comes twice is refused."""
        first: dict[str, int] = {}
        for batch in self.table.batches:
            for question, number in self.in_batch(batch):
                if question.id in first:
                    where = f"{self.table.name}, {self.table.unit}s {first[question.id]} and {number}"
                    raise CoralError(f"{where}: both have the id {question.id!r}.")
                first[question.id] = number
                yield question
                if len(first) == self.options.limit:
                    return

    def in_batch(self, batch: Batch) -> Iterator[tuple[OpenQuestion, int]]:
        """Yield the questions of some rows, with the place of each."""
        layout = self.layout(batch)
        columns = Columns(batch.columns)
        columns.file = self.table.file
        for i, number in enumerate(batch.numbers):
            parts = RowParts(self.table, self.options.table, batch.take([i]), layout)
            try:
                yield self.question(parts, columns, i), number
            except CoralError as error:
                self.refuse(str(error), error)

    def layout(self, batch: Batch) -> Layout:
        """Return which column is what; refuse a table without questions, and one with options."""
        names = tuple(batch.columns)
        where = self.table.where(batch.numbers[0]) if self.table.column == "field" else f"{self.table.name}, header"
        layout = layout_of(names, self.options.table.columns or {}, where, noun=self.table.column)
        if "question" not in layout:
            raise CoralError(
                f"{where}: no {self.table.column} is the question; found {named_columns(names)}. Call it `question`, or say "
                f"which it is: --columns question=NAME.{nearest('question', names)}"
            )
        if "options" in layout or "continuations" in layout:
            raise CoralError(
                f"{where}: these questions have options, and open questions have none; for questions with options use `coral fit "
                "--train` and `coral predict`."
            )
        return layout

    def question(self, parts: RowParts, columns: Columns, row: int) -> OpenQuestion:
        """Return the question of one row."""
        (identity,) = parts.ids()
        states = parts.states([identity])
        (text,) = parts.as_texts("question") or [""]
        values = {"passage": states.get("passage", [""])[0], "group": states["group"][0]}
        try:
            answers = answers_in(parts)
            "".join((identity, text, *answers, *values.values())).encode()
            return OpenQuestion(identity, text, answers, table=columns, row=row, **values)
        except UnicodeEncodeError:
            raise parts.wrong(0, "question", "the row holds half of a surrogate pair, which is not text.") from None
        except CoralError as error:
            raise parts.wrong(0, "question", str(error)) from error


def answers_in(parts: RowParts) -> tuple[str, ...]:
    """Return all that counts as right in a row; a list may be JSON, or texts between bars."""
    for part in ("answers", "answer"):
        (cell,) = parts.cells(part) or [None]
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            continue
        if isinstance(cell, str) and (part == "answers" or cell.lstrip().startswith("[")):
            cell = listed(cell)
        several = list(cell) if isinstance(cell, list | tuple) else [cell]
        several = [one for one in several if not (isinstance(one, float) and one != one)]  # how frames say nothing
        if not several and cell not in ([], ()):
            continue
        try:
            return tuple(dict.fromkeys(text_of(one).strip() for one in several))
        except CoralError:
            raise CoralError(f"an answer or a list of answers is expected. Got {shown(cell)} instead.") from None
    return ()
