"""Read an answer and a confidence out of what a model wrote. What is not clear is not guessed: it is a failure, and counted.

An answer is looked for, in this order, after `Answer and Confidence (0-100):`, in lines `Answer: ...` and `Confidence: ...`, and
in a line that is nothing but an answer and a confidence. The first place that can be read counts: what comes later is often
a question that the model made up. An echo of the instructions cannot be read.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCALE = r"(?:\(\s*0\s*-\s*100\s*\)\s*)?"
FLAGS = re.IGNORECASE | re.MULTILINE
BOTH = re.compile(rf"answer\s*(?:and|&)\s*(?:your\s+)?confidence\s*(?:level\s*)?{SCALE}[:=]", FLAGS)
ANSWER = re.compile(r"^\W*(?:final\s+|my\s+|the\s+)?answer\s*(?:is)?\s*[:=]\s*(.+)$", FLAGS)
CONFIDENCE = re.compile(rf"^\W*(?:my\s+)?confidence(?:\s+level)?\s*{SCALE}(?:is)?\s*[:=]\s*(.+)$", FLAGS)
NUMBER = r"(?<!\d)(?<!\d[.,])(\d{1,12}(?:[.,]\d{1,12})?)"
RANGE = re.compile(rf"{NUMBER}\s*%?\s*(?:-|to)\s*(\d{{1,12}}(?:[.,]\d{{1,12}})?)\s*(?:%|percent)", re.IGNORECASE)
MARKED = re.compile(rf"{NUMBER}\s*(?:%|percent\b|/\s*100\b|out of 100\b)", re.IGNORECASE)
BARE = re.compile(rf"{NUMBER}(?![\d%])")
WRAPPING = str.maketrans("", "", "*_`[]<>{}\"'$#|")
LEAD = re.compile(r"^(?:the\s+)?(?:correct\s+)?(?:answer|option|choice|letter)\b\s*(?:is\b)?\s*[:=]?\s*", re.IGNORECASE)
JOINING = {"with", "and", "my", "the", "confidence", "level", "of", "is", "about", "am", "at"}
"""Words that may stand between an answer and a confidence."""
LONGEST = 400
"""Characters of a line that are looked at."""
LETTER = re.compile(r"\(?([A-Za-z])\)?\s*[.):]?")
LETTER_TEXT = re.compile(r"\(?([A-Za-z])\)?\s*[.):]\s*(.+)|\(([A-Za-z])\)\s*(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Said:
    """What a model said: an option, and how sure it is, from 0 to 1."""

    option: int
    confidence: float


def read_answer(text: str, options: Sequence[str]) -> Said | None:
    """Return what a model said about a question with these option texts, or None where that is not clear."""
    for answer, confidence in candidates(unicodedata.normalize("NFKC", text).replace("–", "-").replace("—", "-")):
        option, sure = read_option(answer, options), read_confidence(confidence)
        if option is not None and sure is not None:
            return Said(option, sure)
    return None


def candidates(text: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of strings in which an answer and a confidence may stand."""
    for found in BOTH.finditer(text):
        lines = [line for line in text[found.end() :].splitlines() if line.strip()]
        for n in (1, 2):  # an answer and a confidence, or each on a line of its own
            if len(lines) >= n:
                yield from divided(", ".join(lines[:n]))
    answers, confidences = ANSWER.findall(text), CONFIDENCE.findall(text)
    if confidences:
        # a reply often begins with the answer alone
        yield next(iter(answers), "") or text.strip().partition("\n")[0], confidences[0]
    for found in ANSWER.finditer(text):
        yield from divided(found[1])
    for line in text.splitlines():
        yield from divided(line, alone=True)


def divided(line: str, *, alone: bool = False) -> Iterator[tuple[str, str]]:
    """Divide a line before its confidence: what has a percent sign, else its last number. `alone`: no word may follow."""
    line = line[:LONGEST].translate(WRAPPING)
    found = RANGE.search(line) or MARKED.search(line)
    if found is None:
        bare = list(BARE.finditer(line))
        found = bare[-1] if bare else None
    if found is not None and not (alone and re.search(r"\w", line[found.end() :])):
        before = line[: found.start()]
        minus = before[-1:] == "-" and not before[:-1].rstrip(" ").endswith(tuple(string.ascii_letters + ")."))
        yield without_joining(before), ("-" if minus else "") + line[found.start() :]


def without_joining(text: str) -> str:
    """Return a text without the signs and words at its end that lead over to a confidence."""
    while True:
        text = text.rstrip(" \t,;:=-(/")
        before, _, last = text.rpartition(" ")
        if last.casefold() not in JOINING:
            return text
        text = before


def read_confidence(text: str) -> float | None:
    """Return a confidence from 0 to 1: of a range its middle; a number up to 1 with a point and no percent sign is a share."""
    text = text.translate(WRAPPING).strip()
    if text.startswith("-"):
        return None
    if found := RANGE.search(text):
        value = (number(found[1]) + number(found[2])) / 2
    elif found := MARKED.search(text):
        value = number(found[1])
    elif found := BARE.search(text):
        value = number(found[1])
        if value <= 1 and re.search(r"[.,]", found[1]):
            value *= 100
    else:
        return None
    return value / 100 if 0 <= value <= 100 else None


def number(text: str) -> float:
    """Return a number whose decimal point may be a comma."""
    return float(text.replace(",", "."))


def read_option(text: str, options: Sequence[str]) -> int | None:
    """Return the option that a text names, by letter or by its whole text; None where that is not clear."""
    text = LEAD.sub("", text.translate(WRAPPING).strip()).strip(" ,;")
    plain = [bare(option) for option in options]
    named = [i for i, option in enumerate(plain) if option and option == bare(text)]
    if found := LETTER.fullmatch(text):
        return at(found[1], options)
    if len(named) == 1:
        return named[0]
    if found := LETTER_TEXT.fullmatch(text):
        letter, rest = (found[1], found[2]) if found[1] else (found[3], found[4])
        option = at(letter, options)
        # a letter with the text of another option says two things
        others = [i for i, other in enumerate(plain) if other and other == bare(rest)]
        return option if option is None or not others or option in others else None
    return None


def at(letter: str, options: Sequence[str]) -> int | None:
    """Return the number of a letter, if there is such an option."""
    index = string.ascii_uppercase.find(letter.upper())
    return index if 0 <= index < len(options) else None


def bare(text: str) -> str:
    """Return a text without case, punctuation at its ends and doubled spaces."""
    return " ".join(text.casefold().strip(" .,;:!?()'\"").split())
