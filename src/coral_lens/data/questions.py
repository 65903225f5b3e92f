"""The user's own questions from JSONL, CSV or TSV, and `load_questions`, the one door for questions of every kind.

Files are validated line by line, and every complaint names file and line. Nothing is guessed: a file that is not
understood is refused.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from coral_lens.data.settings import TaskOptions
from coral_lens.data.task_index import is_task
from coral_lens.data.tasks import load_task
from coral_lens.errors import CoralError, nearest
from coral_lens.records import UNKNOWN, Question
from coral_lens.storage.lines import iter_lines, parse_json

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".csv", ".tsv")
_FILE_SUFFIXES = (".jsonl", *_TABLES, ".gz")
_SEPARATORS = ",;\t"
_SUSPICIOUS = 10
"""So many numbers without a 0 are seldom chance: with four options in any order, in one file of 18."""
_FIELDS = "id, context, group, question, options, answer or answer_index"
_COLUMNS = _FIELDS.replace("options", "options or option_a, option_b, ...")
_LETTER_COLUMN = re.compile(r"(?:option_)?([a-z])")

Record = tuple[int, dict[str, Any]]
"""A line number and the fields found there."""


def _encodable(text: str) -> str:
    # JSON can escape half a character; no tokenizer and no file could take it
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it holds half of a surrogate pair, which is not text")
    return text


_Text = Annotated[str, AfterValidator(_encodable)]


class _Row(BaseModel):
    """One question as it stands in a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: _Text
    options: list[_Text | int | float]
    answer: int | _Text | None = None
    answer_index: int | None = None
    id: _Text | int | None = None
    group: _Text | int | None = None
    context: _Text | None = None


def load_questions(source: str | Path, options: TaskOptions | None = None) -> list[Question]:
    """Return questions from a JSONL, CSV or TSV file, or from a task: `arc_easy`, `arc_easy:validation`, `mmlu`.

    A name is taken for a file if that file exists or if it ends in .jsonl, .csv, .tsv or .gz. Of the options only
    `limit` concerns a file; its questions have no shots and no splits.
    """
    options = options or TaskOptions()
    if is_file(source):
        if options.split or options.num_fewshot:
            raise CoralError(
                f"{source} is a file of questions: it has no splits, and its questions are asked without shots."
            )
        return _collect(Path(source), options.limit)
    name, split = task_and_split(str(source))
    if not split:
        return load_task(name, options)
    if options.split not in (None, split):
        raise CoralError(
            f"{source!r} names the split {split!r}, but the split {options.split!r} was asked for; give one."
        )
    return load_task(name, replace(options, split=split))


def task_and_split(source: str) -> tuple[str, str]:
    """Return the task and the split that `task:split` names; without a split, nothing in its place."""
    name, colon, split = source.rpartition(":")
    if not colon or is_task(source):
        return source, ""
    if not split:
        raise CoralError(f"{source!r} ends in a colon: name a split after it, such as {source}validation.")
    return name, split


def read_questions(path: str | Path) -> list[Question]:
    """Return the questions of a JSONL, CSV or TSV file, each of them optionally gzipped.

    Fields: `question`, `options`, and optionally `answer` or `answer_index`, `id`, `group`, `context`. In a table,
    options are a JSON list or separated by `|`, or they stand in columns `option_a`, `option_b`, ... or `A`, `B`, ...
    Its columns are separated by commas, semicolons or tabs: by that which makes `question` a column of the header.

    `answer` is the number of the option, counted from 0; or the exact text of an option; or a letter. Ten numbers or
    more of which none is 0 are refused, because they may be counted from 1. In a table everything is text, so `1` may
    be a number or the text of an option, and so may `B` be a letter everywhere. Where the two name different options,
    the whole file is read in the one way that fits all of its answers; if both ways fit, or neither does, it is
    refused. `answer_index` is always a number, counted from 0. No answer, null or an empty text: unknown.
    """
    return _collect(Path(path), None)


def is_file(source: str | Path) -> bool:
    """Whether a source is taken for a file of questions rather than for a task."""
    # os.path, because a long or odd task name is then simply not a file
    return str(source).lower().endswith(_FILE_SUFFIXES) or (os.path.exists(source) and not os.path.isdir(source))


@dataclass(frozen=True, slots=True)
class _Line:
    """A question as its line alone says it, and what its answer may mean."""

    number: int
    question: Question
    readings: dict[str, int]
    """Of an answer that is a text: the option that it is by each way to read it. Empty for a number and for no answer."""
    by_index: bool
    """Whether the answer is an `answer_index`, about which nothing is in doubt."""

    @property
    def in_doubt(self) -> bool:
        return len(set(self.readings.values())) > 1

    def read_as(self, reading: str) -> _Line:
        if not self.readings:
            return self
        answer = self.readings[reading]
        return replace(self, question=replace(self.question, answer=answer), readings={reading: answer})


def _collect(path: Path, limit: int | None) -> list[Question]:
    lines = _iter_lines(path)
    taken = list(islice(lines, limit))
    if not taken:
        raise CoralError(f"{path} holds no questions.")
    others: Iterable[_Line] = lines
    if any(line.in_doubt for line in taken):
        others = list(lines)
        reading = _only_reading(path, chain(taken, others))
        taken, others = ([line.read_as(reading) for line in some] for some in (taken, others))
    _refuse_numbers_from_1(path, chain(taken, others))
    return [line.question for line in taken]


def _only_reading(path: Path, lines: Iterable[_Line]) -> str:
    """Return the one way to read answers that fits all lines of a file in which some may be read in two."""
    fitting, doubtful = set(_READINGS), None
    for line in lines:
        fitting &= set(line.readings or fitting)
        doubtful = doubtful or (line if line.in_doubt else None)
    assert doubtful is not None, "asked only where a line is in doubt"
    if len(fitting) == 1:
        return fitting.pop()
    ways = " or ".join(f"the {name} of option {j + 1}" for name, j in doubtful.readings.items())
    raise CoralError(
        f"{path}, line {doubtful.number}: the answer may be {ways}, and the other lines do not settle it; give the number of "
        "the right option, counted from 0, as `answer_index` in place of `answer`."
    )


def _refuse_numbers_from_1(path: Path, lines: Iterable[_Line]) -> None:
    """Refuse a file whose answers are all numbers and none of them 0; the first other answer ends the search."""
    numbers = 0
    for line in lines:
        if line.question.answer == UNKNOWN or line.by_index:
            continue
        ways = set(line.readings) or {"number"}
        if line.question.answer == 0 or "number" not in ways:
            return
        # where the number is the text of its option too, it says nothing of the others
        numbers += ways == {"number"}
    if numbers >= _SUSPICIOUS:
        place = "column" if _is_table(path) else "field"
        raise CoralError(
            f"{path}: no answer is 0, so the numbers may be counted from 1, but they are read as counted from 0; write "
            f"letters or the options' texts, or call the {place} answer_index if they are counted from 0."
        )


def _is_table(path: Path) -> bool:
    return _ending(path) in _TABLES


def _ending(path: Path) -> str:
    """Return the ending of a file without its .gz, in lower case; a spreadsheet may write it in capitals."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _iter_lines(path: Path) -> Iterator[_Line]:
    # a name without an ending may be a pipe
    if _ending(path) not in ("", *_JSON_LINES, *_TABLES) and not path.is_dir():
        raise CoralError(f"{path}: only .jsonl, .csv and .tsv files are read (also with .gz).")
    seen: dict[str, int] = {}
    any_first = False
    is_table = _is_table(path)
    for number, fields in (_csv_records if is_table else _json_records)(path):
        line = _line(path, number, fields, digits_are_index=is_table, any_first=any_first)
        any_first = any_first or line.question.answer == 0
        if line.question.id in seen:
            first, identity = seen[line.question.id], line.question.id
            raise CoralError(f"{path}, lines {first} and {number}: both have the id {identity!r}.")
        seen[line.question.id] = number
        yield line


def _line(path: Path, number: int, fields: dict[str, Any], *, digits_are_index: bool, any_first: bool) -> _Line:
    """Return what a line says; `any_first`: whether a line before it has the first option for its answer."""
    where = f"{path}, line {number}"
    try:
        row = _Row.model_validate(fields)
    except ValidationError as error:
        raise CoralError(f"{where}: {_complaint(error, fields)}") from error
    if not row.question.strip():
        raise CoralError(f"{where}: the question is empty.")
    options = tuple(str(option) for option in row.options)
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    identity = f"{name}:{number}" if row.id in (None, "") else str(row.id)
    answer = row.answer if row.answer_index is None else row.answer_index
    try:
        if row.answer_index is not None and row.answer not in (None, ""):
            raise CoralError("It has both `answer` and `answer_index`; give one of them.")
        readings = _readings(answer, options, digits_are_index=digits_are_index)
        question = Question(
            id=identity,
            group=identity if row.group in (None, "") else str(row.group),
            text=row.question,
            options=options,
            passage=row.context or "",
        )
        # afterwards, so that options which cannot be used are named before an answer that does not fit them
        from_1 = row.answer_index is None and not any_first
        question = replace(question, answer=_answer(answer, options, readings, perhaps_from_1=from_1))
    except CoralError as error:
        raise CoralError(f"{where}: {error}") from error
    return _Line(number, question, readings, by_index=row.answer_index is not None)


def _complaint(error: ValidationError, fields: dict[str, Any]) -> str:
    """Say what is wrong with a row, in one sentence."""
    complaints = error.errors(include_url=False, include_input=False)
    # a misspelt field is both unknown and missing: name the spelling
    first = min(complaints, key=lambda e: e["type"] != "extra_forbidden")
    name = str(first["loc"][0]) if first["loc"] else "?"
    if first["type"] == "missing":
        present = ", ".join(map(repr, fields)) or "nothing"
        return f"the field {name!r} is missing; found {present}."
    if first["type"] == "extra_forbidden":
        return f"unknown field {name!r}; fields that are read: {_FIELDS}.{nearest(name, _Row.model_fields)}"
    return f"the field {name!r} cannot be used: {first['msg']}."


def _as_text(answer: str, options: tuple[str, ...]) -> int | None:
    return options.index(answer) if options.count(answer) == 1 else None


def _as_letter(answer: str, options: tuple[str, ...]) -> int | None:
    letter = answer.strip().upper()
    return ord(letter) - ord("A") if len(letter) == 1 and letter.isascii() and letter.isalpha() else None


def _as_number(answer: str, options: tuple[str, ...]) -> int | None:
    digits = answer.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 4 else None


_READINGS: dict[str, Callable[[str, tuple[str, ...]], int | None]] = {
    "text": _as_text,
    "letter": _as_letter,
    "number": _as_number,
}
"""How an answer that is a text may be meant. Only a table's number is a text: JSON has numbers of its own."""


def _readings(answer: int | str | None, options: tuple[str, ...], *, digits_are_index: bool) -> dict[str, int]:
    """Return which option a text names by each way to read it."""
    if not isinstance(answer, str) or not answer:
        return {}
    ways = {name: read(answer, options) for name, read in _READINGS.items() if name != "number" or digits_are_index}
    named = {name: j for name, j in ways.items() if j is not None}
    # a letter or number that no option has is a mistake only where nothing else fits
    return {name: j for name, j in named.items() if j < len(options)} or named


def _answer(
    answer: int | str | None, options: tuple[str, ...], readings: dict[str, int], *, perhaps_from_1: bool
) -> int:
    """Return the index of the right option, by the first way that its own line allows."""
    if answer is None or answer == "":
        return UNKNOWN
    if isinstance(answer, str):
        if options.count(answer) > 1:
            raise CoralError(
                f"The answer {answer!r} is the text of several options; give its number, counted from 0, as `answer_index`."
            )
        if not readings:
            shown = ", ".join(repr(option) for option in options[:6])
            raise CoralError(f"The answer {answer!r} is neither a letter nor the text of an option ({shown}).")
        way, number = next(iter(readings.items()))
        if way == "letter" and number >= len(options):
            last = chr(ord("A") + len(options) - 1)
            raise CoralError(
                f"The answer {answer.strip()!r} is out of range: the letters of the {len(options)} options are A to "
                f"{last}. Leave it out if it is not known."
            )
        answer = number
    if not 0 <= answer < len(options):
        hint = "Leave it out if it is not known."
        if perhaps_from_1 and answer == len(options):
            hint = "Answers are counted from 0; if yours are counted from 1, write letters or the options' texts."
        raise CoralError(
            f"The answer {answer} is out of range: the {len(options)} options are numbered 0 to {len(options) - 1}. "
            + hint
        )
    return answer


def _json_records(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise CoralError(f"{path}, line {number}: malformed JSON ({error}).") from error
        if not isinstance(fields, dict):
            raise CoralError(
                f"{path}, line {number}: each line must be one JSON object. Got a {type(fields).__name__} instead."
            )
        yield number, fields


def _csv_records(path: Path) -> Iterator[Record]:
    lines = (line for _, line in _lines(path))
    before = list(_through_header(lines))
    reader = csv.reader(chain(before, lines), delimiter=_separator(before), strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise CoralError(f"{path}, line {reader.line_num}: malformed CSV ({_malformed(error)}).") from error
        if cells is None:
            return
        number, start = start, reader.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _header(path, number, cells)
            continue
        if len(cells) != len(header):
            raise CoralError(f"{path}, line {number}: {len(cells)} cells, but the header has {len(header)} columns.")
        yield number, _csv_fields(dict(zip(header, cells, strict=True)))


def _malformed(error: csv.Error) -> str:
    # Python's own sentence advises its programmer
    if "new-line character" in str(error):
        return "a carriage return stands alone in it; save the file with the line ends of Unix or of Windows"
    return str(error)


def _through_header(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines up to the first that is not blank."""
    for line in lines:
        yield line
        if line.strip():
            return


def _separator(lines: list[str]) -> str:
    """Return what separates the columns: that by which `question` is one, or else that by which they are most."""
    header = lines[-1] if lines else ""
    # not read as CSV, which may be malformed: that is for the reader to say
    names = {mark: [name.strip(' "\r\n').lower() for name in header.split(mark)] for mark in _SEPARATORS}
    return max(names, key=lambda mark: ("question" in names[mark], len(names[mark])))


def _header(path: Path, number: int, cells: list[str]) -> list[str]:
    """Return the column names: fields in lower case, options as single letters."""
    names = [cell.strip().lower() for cell in cells]
    letters = [m[1] for name in names if (m := _LETTER_COLUMN.fullmatch(name))]
    known = [*_Row.model_fields, "option_a", "option_b"]
    where = f"{path}, line {number}"
    for name in names:
        if name not in _Row.model_fields and not _LETTER_COLUMN.fullmatch(name):
            raise CoralError(
                f"{where}: unknown column {name!r}; columns that are read: {_COLUMNS}.{nearest(name, known)}"
            )
    if len(set(names)) != len(names) or len(set(letters)) != len(letters):
        raise CoralError(f"{where}: a column appears twice in the header.")
    if "question" not in names or ("options" in names) == bool(letters):
        raise CoralError(
            f"{where}: the header needs `question`, and either `options` or columns `option_a`, `option_b`, ..."
        )
    if sorted(letters) != [chr(ord("a") + i) for i in range(len(letters))]:
        raise CoralError(
            f"{where}: the option columns must be a, b, c, ... without a gap. Got {', '.join(letters)} instead."
        )
    return [m[1] if (m := _LETTER_COLUMN.fullmatch(name)) else name for name in names]


def _csv_fields(cells: dict[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: cell for name, cell in cells.items() if len(name) > 1}
    if "options" in cells:
        fields["options"] = _split_options(cells["options"])
    else:
        texts = [cells[name] for name in sorted(n for n in cells if len(n) == 1)]
        while texts and not texts[-1].strip():
            texts.pop()  # a question may have fewer options than there are columns
        fields["options"] = texts
    if "answer_index" in fields:
        index = fields["answer_index"].strip()
        # what is no number is refused with the other fields
        fields["answer_index"] = _as_number(index, ()) if _as_number(index, ()) is not None else index or None
    return fields


def _split_options(cell: str) -> list[Any]:
    if cell.lstrip().startswith("["):
        try:
            listed = parse_json(cell)
        except ValueError:
            listed = None
        if isinstance(listed, list):
            return listed
    return [part.strip() for part in cell.split("|")] if cell.strip() else []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text), decoding line by line so that a bad byte can be located."""
    offset = 0
    for number, line in iter_lines(path):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CoralError(
                f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at offset {offset + error.start}); save "
                "the file as UTF-8."
            ) from error
        offset += len(line)
