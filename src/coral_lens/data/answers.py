"""What the answers of a table mean: places, letters, labels or texts. The whole table is read in one way, or the user is asked.

Among the options 1, 2, 3, 4 the answer 2 may be a text or a place, and places may be counted from 0 or from 1. A row alone
cannot tell; all rows together mostly can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from coral_lens.data.options import Asked, OptionColumn
from coral_lens.data.tables import Refusals, Table
from coral_lens.errors import CoralError

SUSPICIOUS = 10
"""So many numbers without a 0 are seldom chance: with four options in any order, in one file of 18."""
LETTERS = {letter: k for k in range(26) for letter in (chr(ord("A") + k), chr(ord("a") + k))}
NUMBER = re.compile(r"\s*(\d{1,4})(?:\.0)?\s*", re.ASCII)
"""A place; a column of whole numbers with gaps is written as 1.0 by data frames."""
TRUTH = {word: k for k, words in enumerate(("no n false f 0", "yes y true t 1")) for word in words.split()}
"""What the answer of a yes-no question may be called."""
WAYS = {
    "letter": "letters",
    "number": "numbers counted from {base}",
    "text": "the options' texts",
    "label": "labels",
    "truth": "yes or no",
}
"""How answers may be meant, in words. Labels and truths are never in doubt: their row itself says what they are."""
DECIDED = {"label", "truth"}
ELSEWHERE = "If the answers are in a column of another name, say which: --columns answer=NAME."
"""What is said where answers are needed and none were found."""

Readings = Mapping[str, int]
"""The option that an answer is by each way to read it; of `number`, the number as it stands there."""


# ------------------------------------------------------------------------------------------------------------ one answer


def is_missing(answer: Any) -> bool:
    """Whether there is no answer."""
    return answer is None or (isinstance(answer, str) and not answer.strip()) or answer != answer


def readings_of(answer: Any, asked: Asked, *, is_text: bool) -> Readings:
    """Return which option an answer names by each way to read it; empty where it names none."""
    if isinstance(answer, bool):
        return read_truth(answer, asked)
    if isinstance(answer, int | float):
        return read_number(answer, asked)
    if not isinstance(answer, str):
        return {}
    if asked.truth:
        truth = TRUTH.get(answer.strip().lower())
        return {} if truth is None else {"truth": truth}
    if answer.strip() in asked.labels:
        return {"label": asked.labels.index(answer.strip())}
    found: dict[str, int] = {}
    if asked.options.count(answer) == 1:
        found["text"] = asked.options.index(answer)
    if (letter := LETTERS.get(answer.strip())) is not None:
        found["letter"] = letter
    # a level that is a number is meant by its name; and only where every value is a text may a number be one
    if is_text and (match := NUMBER.fullmatch(answer)) and not (asked.kind == "score" and "text" in found):
        found["number"] = int(match[1])
    return found


def read_truth(answer: bool, asked: Asked) -> Readings:
    """Read true or false: as yes or no, or as the option that is this value or its name."""
    if asked.truth:
        return {"truth": int(answer)}
    same = [j for j, value in enumerate(asked.values) if value is answer]
    named = [j for j, option in enumerate(asked.options) if TRUTH.get(option.lower()) == int(answer)]
    only = same if len(same) == 1 else named
    if len(only) == 1:
        return {"label": only[0]}
    return {"truth": int(answer)} if asked.kind == "yes-no" else {}


def read_number(answer: int | float, asked: Asked) -> Readings:
    """Read a number: a place, a label, yes or no, or the level of a score whose levels are numbers."""
    if asked.kind == "score" and answer in asked.values:
        return {"label": asked.values.index(answer)}
    if answer != answer or answer in (float("inf"), -float("inf")) or answer != int(answer):
        return {}
    if asked.truth:
        return {"truth": int(answer)} if answer in (0, 1) else {}
    if str(int(answer)) in asked.labels:
        return {"label": asked.labels.index(str(int(answer)))}
    return {"number": int(answer)}


def options_named(readings: Readings, n: int, base: int) -> dict[str, int]:
    """Return the option by each way; a letter or number that no option has is a mistake only where nothing else fits."""
    named = {way: j - base if way == "number" else j for way, j in readings.items()}
    return {way: j for way, j in named.items() if 0 <= j < n} or named


# ------------------------------------------------------------------------------------------------------------ some answers


@dataclass(frozen=True)
class AnswerColumn:
    """The answers of some rows that follow each other, and what each may mean."""

    numbers: Sequence[int]
    """The line or row of each answer; a row with several answers has it several times."""
    given: Sequence[Any]
    options: OptionColumn
    way: str = ""
    """The one way to read all of them, where that is plain: `letter` or `number`."""
    plain: Sequence[int] = ()
    """Then what each is by it."""
    several: Sequence[Readings] = ()
    """Else the readings of each."""

    def __iter__(self) -> Iterator[tuple[Readings, int]]:
        """Yield the readings of each answer, none for one that is not known, with the number of its options."""
        readings: Iterable[Readings] = ({self.way: j} for j in self.plain) if self.way else self.several
        return zip(readings, map(len, self.options.texts), strict=True)


def read_answers(numbers: Sequence[int], given: Sequence[Any], options: OptionColumn, *, is_text: bool) -> AnswerColumn:
    """Return what some answers may mean. Where all of them are plain letters or numbers, they are not looked at one by one."""
    kinds = set(map(type, given))
    if options.is_plain and kinds == {int}:
        return AnswerColumn(numbers, given, options, "number", given)
    # an option may be a letter too: then it is not plain which is meant
    are_letters = options.is_plain and kinds == {str} and set(given) <= LETTERS.keys()
    if are_letters and no_letters(options.texts):
        return AnswerColumn(numbers, given, options, "letter", [LETTERS[answer] for answer in given])
    several = [
        {} if is_missing(answer) else readings_of(answer, options.asked(i), is_text=is_text)
        for i, answer in enumerate(given)
    ]
    return AnswerColumn(numbers, given, options, several=several)


def no_letters(texts: Sequence[tuple[str, ...]]) -> bool:
    """Whether no option is a single letter; nearly always their lengths say so already."""
    return min(map(len, chain.from_iterable(texts)), default=0) > 1 or LETTERS.keys().isdisjoint(
        chain.from_iterable(texts)
    )


# -------------------------------------------------------------------------------------------------------- the whole table


@dataclass
class AnswerBook:
    """The answers of a table, gathered some at a time, until it can be told what they mean."""

    table: Table
    base: int | None = None
    """From where numbers are counted, if the user says so."""
    columns: list[AnswerColumn] = field(default_factory=list)

    def is_settled(self) -> bool:
        """Whether no later row could change what these answers mean."""
        if self.doubtful() is not None:
            return False
        numbers = [j for j, _ in self.numbers()]
        return self.base is not None or not numbers or 0 in numbers or self.any_other()

    def numbers(self, *, only: bool = True) -> list[tuple[int, int]]:
        """Return each answer that is a number, and nothing else but for `only`, with how many options there are."""
        columns = [column for column in self.columns if column.way in ("", "number")]
        return [
            (r["number"], n) for column in columns for r, n in column if "number" in r and not (only and len(r) > 1)
        ]

    def any_other(self) -> bool:
        """Whether an answer is no number, nor may be one, so that the table is not one of numbers."""
        return any(
            column.way == "letter" or any(r and "number" not in r and not DECIDED & set(r) for r in column.several)
            for column in self.columns
        )

    def doubtful(self, base: int | None = None) -> tuple[int, dict[str, int]] | None:
        """Return the line and the readings of the first answer that may be two options."""
        for column in (column for column in self.columns if not column.way):
            for line, (readings, n) in zip(column.numbers, column, strict=True):
                named = options_named(readings, n, (self.base if base is None else base) or 0)
                if len(set(named.values())) > 1:
                    return line, named
        return None

    def counted_from(self) -> int:
        """Return from where numbers are counted: as the user says, or from 1 where one is as large as there are options."""
        if self.base is not None:
            return self.base
        numbers = self.numbers()
        return int(all(1 <= j <= n for j, n in numbers) and any(j == n for j, n in numbers))


@dataclass(frozen=True)
class Meaning:
    """What the answers of a table mean."""

    way: str
    """The way in which all of them are read; empty where each row can be read in one way only."""
    base: int
    """From where numbers are counted."""


def settle(book: AnswerBook) -> Meaning:
    """Return what the answers mean; refuse a table that can be read in two ways, or in none."""
    base = book.counted_from()
    meaning = Meaning("", base)
    if doubt := book.doubtful(base):
        meaning = Meaning(only_way(book, base, doubt), base)
    numbers = [j for j, _ in book.numbers(only=meaning.way != "number")]
    if book.base is None and base == 0 and len(numbers) >= SUSPICIOUS and 0 not in numbers and not book.any_other():
        raise CoralError(
            f"{book.table.name}: no answer is 0 and none is the last number, so they may be counted from 0 or from 1; say which "
            "with --answer-base 0 or --answer-base 1."
        )
    return meaning


def only_way(book: AnswerBook, base: int, doubt: tuple[int, dict[str, int]]) -> str:
    """Return the one way to read answers that fits all rows of a table in which some may be read in two."""
    line, named = doubt
    fitting = {"text", "letter", "number"}
    for column in book.columns:
        for readings, n in column:
            ways = set(options_named(readings, n, base))
            fitting &= ways if ways - DECIDED else fitting
    if len(fitting) == 1:
        return fitting.pop()
    either = " or ".join(f"the {way} of option {j + 1}" for way, j in named.items())
    raise CoralError(
        f"{book.table.where(line)}: the answer may be {either}, and the other {book.table.unit}s do not settle it; give the "
        "number of the right option, counted from 0, as `answer_index` in place of `answer`."
    )


def chosen(book: AnswerBook, column: AnswerColumn, meaning: Meaning, refuse: Refusals, part: str) -> list[int | None]:
    """Return the option that each answer is, or None where it is not known or was refused.

    A refused answer is told from an unknown one by what was given.
    """
    if column.way:
        options = [j - meaning.base for j in column.plain] if column.way == "number" else list(column.plain)
        if all(0 <= j < n for j, n in zip(options, map(len, column.options.texts), strict=True)):
            return list(options)
    found: list[int | None] = []
    for i, (readings, n) in enumerate(column):
        named = options_named(readings, n, meaning.base)
        option = named.get(meaning.way, next(iter(named.values()), None))
        if option is not None and 0 <= option < n:
            found.append(option)
            continue
        found.append(None)
        if not is_missing(column.given[i]):
            way = next(iter(named), "")
            reason = complaint(column.given[i], column.options.asked(i), way, meaning)
            refuse(f"{book.table.where(column.numbers[i], part)}: {reason}")
    return found


def complaint(answer: Any, asked: Asked, way: str, meaning: Meaning) -> str:
    """Say what is wrong with an answer that is no option."""
    n, shown = len(asked.options), ", ".join(repr(option) for option in asked.options[:6])
    if isinstance(answer, str) and asked.options.count(answer) > 1:
        return f"{answer!r} is the text of several options; give its number, counted from 0, as `answer_index`."
    if way == "letter":
        letters = f"the letters of the {n} options are A to {chr(ord('A') + n - 1)}"
        return f"{str(answer).strip()!r} is out of range: {letters}. Leave it out if it is not known."
    if way == "number":
        first = meaning.base
        return (
            f"{answer} is out of range: the {n} options are numbered {first} to {first + n - 1}. Leave it out if it is not "
            f"known; --answer-base {1 - first} counts from {1 - first}."
        )
    if asked.truth:
        return f"{answer!r} is neither yes nor no (true, false, 1 and 0 are read too)."
    return f"{answer!r} is neither a letter nor the text of an option ({shown})."
