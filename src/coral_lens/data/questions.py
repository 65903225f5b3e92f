"""`load_questions`, the one door for questions of every kind: benchmark tasks, and the user's own files, datasets and frames.

Of one's own questions every complaint names file, line and column. Nothing is guessed: a table that can be read in two ways is
refused, and what was understood is said in one line.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from coral_lens.data.answers import WAYS, AnswerBook, Meaning, chosen, is_missing, options_named, settle
from coral_lens.data.rows import Chunk, RowReader
from coral_lens.data.settings import TableOptions, TaskOptions
from coral_lens.data.shots import with_shots
from coral_lens.data.sources import is_file, open_table
from coral_lens.data.tables import Refusals, Table
from coral_lens.data.task_index import include_tasks, is_task
from coral_lens.data.tasks import load_task
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question, checked_questions

MOST_SHOWN = 3
"""Rows that were left out and are named."""


class Questions(list[Question]):
    """Questions of one's own: a list that knows what was understood of its table."""

    summary: str = ""
    """What was understood, in one line."""


def load_questions(source: str | Path | Any, options: TaskOptions | TableOptions | None = None) -> list[Question]:
    """Return questions from a file, a saved dataset or a frame, or from a task: `arc_easy`, `arc_easy:validation`, `mmlu`.

    Files are JSON, JSON lines, CSV, TSV, parquet, Arrow or Excel workbooks, each but the last also gzipped. In Python a
    source may also be a pandas or polars frame, a `datasets.Dataset`, an Arrow table, or a list of dicts. A name is taken to
    be a file if that file exists or if the name ends like one. The guide `your-own-questions` says what columns may be called
    and how options and answers may be written; what was understood is in `summary` of the returned list.
    """
    options = TaskOptions(table=options) if isinstance(options, TableOptions) else options or TaskOptions()
    if options.include_path:
        include_tasks(options.include_path, trusted=options.trust_task_code)
    if not isinstance(source, str | Path) or is_file(source):
        if options.split:
            raise CoralError(f"{source} is a file of questions: it has no splits.")
        questions = read_questions(source, options)
        return shown_with_examples(questions, source, options) if options.num_fewshot else questions
    refuse_folder(Path(source))
    name, split = task_and_split(str(source))
    if not split:
        return load_task(name, options)
    if options.split not in (None, split):
        raise CoralError(
            f"{source!r} names the split {split!r}, but the split {options.split!r} was asked for; give one."
        )
    return load_task(name, replace(options, split=split))


def refuse_folder(source: Path) -> None:
    """Refuse a folder that is no saved dataset and has no task's name: what is meant is a file in it."""
    if os.path.isdir(source) and not is_task(str(source)):
        inside = next((f"{source / name}" for name in sorted(os.listdir(source)) if is_file(name)), None)
        raise CoralError(
            f"{source} is a folder, and not one that `datasets` saved; give a file of questions"
            f"{f', such as {inside}' if inside else ''}."
        )


def shown_with_examples(questions: Questions, source: Any, options: TaskOptions) -> Questions:
    """Return questions of one's own with the worked examples that are asked for."""
    if options.fewshot_from is None:
        raise CoralError(
            f"Worked examples for {source} must come from labelled questions: say which file (--fewshot-from train.jsonl), not "
            "the one that is measured."
        )
    assert options.num_fewshot, "asked for by the caller"
    pool = read_questions(options.fewshot_from, replace(options, limit=None))
    shown = with_shots(questions, pool, options.num_fewshot, seed=options.seed, fixed=options.fixed_shots)
    asked = Questions(shown)
    asked.summary = f"{questions.summary}, {options.num_fewshot} worked examples each"
    return asked


def task_and_split(source: str) -> tuple[str, str]:
    """Return the task and the split that `task:split` names; without a split, nothing in its place."""
    name, colon, split = source.rpartition(":")
    if not colon or is_task(source):
        return source, ""
    if not split:
        raise CoralError(f"{source!r} ends in a colon: name a split after it, such as {source}validation.")
    return name, split


def read_questions(source: Any, options: TaskOptions | None = None) -> Questions:
    """Return the questions of a table, whatever it is written as."""
    options = options or TaskOptions()
    said, refuse = options.table, Refusals(options.table.skip_bad)
    table = open_table(source, refuse, options.limit)
    reading = Reading(table, RowReader(table, said), refuse, AnswerBook(table, said.answer_base))
    with closing(table), no_collection():
        return reading.questions(options.limit)


@dataclass
class Reading:
    """A table on the way to its questions."""

    table: Table
    reader: RowReader
    refuse: Refusals
    book: AnswerBook
    chunks: list[Chunk] = field(default_factory=list)

    def questions(self, limit: int | None) -> Questions:
        """Read the table; with a limit, no further than it takes to know what the answers mean."""
        n, rest = 0, self.read()
        for chunk in rest:
            self.chunks.append(chunk if limit is None else chunk.first(limit - n))
            n += len(self.chunks[-1])
            if n == limit:
                break
        while n == limit and not self.book.is_settled() and next(rest, None):
            pass  # rows beyond the limit may tell what the answers before it mean
        meaning = settle(self.book)
        questions = Questions(chain.from_iterable(self.built(chunk, meaning) for chunk in self.chunks))
        if not questions:
            complaints = self.refuse.complaints
            why = (
                f": all {len(complaints):,} rows were left out, the first because of {complaints[0]}"
                if complaints
                else "."
            )
            raise CoralError(f"{self.table.name} holds no questions{why}")
        refuse_same_ids(self.chunks, self.table)
        questions.summary = summary_of(questions, self, meaning)
        return questions

    def read(self) -> Iterator[Chunk]:
        """Yield what the batches of the table hold, without the rows that are left out."""
        for batch in self.table.batches:
            for chunk in self.reader.chunks(batch, self.refuse):
                self.book.columns.append(chunk.answers)
                yield chunk

    def built(self, chunk: Chunk, meaning: Meaning) -> list[Question]:
        """Return the questions of some rows, now that it is known what their answers mean."""
        targets, fields = chunk.targets, chunk.fields
        options = chosen(self.book, targets.column, meaning, self.refuse, targets.part)
        if targets.counts is None and targets.soft is None and not {"kind", "descriptions"} & fields.keys():
            questions = checked_questions({**fields, "answer": [UNKNOWN if o is None else o for o in options]})
            if None not in options:
                return questions
            rows = zip(questions, options, targets.column.given, strict=True)
            return [q for q, option, given in rows if option is not None or is_missing(given)]
        return list(self.built_one_by_one(chunk, options))

    def built_one_by_one(self, chunk: Chunk, options: Sequence[int | None]) -> Iterator[Question]:
        """Yield questions that have more to be checked than plain ones: kinds, descriptions, several answers, soft ones."""
        targets, start = chunk.targets, 0
        for i, number in enumerate(chunk.numbers):
            end = start + (1 if targets.counts is None else targets.counts[i])
            given, own = targets.column.given[start:end], options[start:end]
            start = end
            if any(option is None and not is_missing(answer) for option, answer in zip(own, given, strict=True)):
                continue  # it was refused, and is left out
            right = tuple(sorted({option for option in own if option is not None}))
            answer = right[0] if len(right) == 1 else UNKNOWN
            values = {name: column[i] for name, column in chunk.fields.items()}
            try:
                yield Question(
                    **values,
                    answer=answer,
                    right=right if len(right) > 1 else (),
                    soft=targets.soft[i] if targets.soft else (),
                )
            except CoralError as error:
                self.refuse(f"{self.table.where(number)}: {error}", error)


def refuse_same_ids(chunks: Sequence[Chunk], table: Table) -> None:
    """Refuse two questions of one id, and say where both are."""
    if len(set(chain.from_iterable(chunk.fields["id"] for chunk in chunks))) == sum(map(len, chunks)):
        return
    first: dict[str, int] = {}
    for chunk in chunks:
        for identity, number in zip(chunk.fields["id"], chunk.numbers, strict=True):
            if identity in first:
                where = f"{table.name}, {table.unit}s {first[identity]} and {number}"
                raise CoralError(f"{where}: both have the id {identity!r}.")
            first[identity] = number


@contextmanager
def no_collection() -> Iterator[None]:
    """Have Python look for no garbage: among a hundred thousand new objects that all stay, it would look again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -------------------------------------------------------------------------------------------------------- what was understood


def summary_of(questions: Sequence[Question], reading: Reading, meaning: Meaning) -> str:
    """Return in one line what was understood of a table."""
    fields = [chunk.fields for chunk in reading.chunks]
    sizes = sorted({n for of in fields for n in set(map(len, of["options"]))})
    each = f"{sizes[0]} options each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} options"
    parts = [
        f"{len(questions):,} question{'s' * (len(questions) > 1)}",
        each,
        answers_in_words(questions, reading, meaning),
    ]
    kinds = Counter(chain.from_iterable(of.get("kind", ()) for of in fields))
    parts += [f"{kinds[kind]:,} of kind {kind}" for kind in ("yes-no", "score") if kinds[kind]]
    if extra := reading.reader.extra:
        parts.append(f"{len(extra)} column{'s' * (len(extra) > 1)} carried along")
    line = ", ".join(parts)
    if complaints := reading.refuse.complaints:
        named = " ".join(complaints[:MOST_SHOWN]) + (" ..." if len(complaints) > MOST_SHOWN else "")
        line += f"; {len(complaints):,} row{'s' * (len(complaints) > 1)} left out: {named}"
    return line


def answers_in_words(questions: Sequence[Question], reading: Reading, meaning: Meaning) -> str:
    """Return how the answers were read, and how many are not known."""
    unknown = sum(q.answer == UNKNOWN for q in questions)
    if unknown == len(questions):
        return "no answers"
    ways = {way for chunk in reading.chunks for way in ways_of(chunk, meaning)}
    words = [WAYS[way].format(base=meaning.base) for way in WAYS if way in ways]
    if any(chunk.targets.counts is not None for chunk in reading.chunks):
        n_soft, n_several = sum(bool(q.soft) for q in questions), sum(bool(q.right) for q in questions)
        words += [f"soft in {n_soft:,}"] if n_soft else []
        words += [f"several in {n_several:,}"] if n_several else []
    return f"answers are {' or '.join(words)}" + (f", {unknown:,} unknown" if unknown else "")


def ways_of(chunk: Chunk, meaning: Meaning) -> set[str]:
    """Return in which ways the answers of some rows were read."""
    column = chunk.answers
    if column.way:
        return {column.way}
    named = (options_named(readings, n, meaning.base) for readings, n in column)
    return {meaning.way if meaning.way in ways else next(iter(ways)) for ways in named if ways}
