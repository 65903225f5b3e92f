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
class StatedAnswer:
    """What a model said: an option, and its confidence in it, from 0 to 1."""

    option: int
    confidence: float


def read_answer(text: str, options: Sequence[str]) -> StatedAnswer | None:
    """Return what a model said about a question with these option texts, or None where that is not clear."""
    for answer, confidence in answer_candidates(
        unicodedata.normalize("NFKC", text).replace("–", "-").replace("—", "-")
    ):
        option, stated = read_option(answer, options), read_confidence(confidence)
        if option is not None and stated is not None:
            return StatedAnswer(option, stated)
    return None


def answer_candidates(text: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of strings in which an answer and a confidence may stand."""
    for match in BOTH.finditer(text):
        lines = [line for line in text[match.end() :].splitlines() if line.strip()]
        for n in (1, 2):  # an answer and a confidence, or each on a line of its own
            if len(lines) >= n:
                yield from split_before_confidence(", ".join(lines[:n]))
    answers, confidences = ANSWER.findall(text), CONFIDENCE.findall(text)
    if confidences:
        # a reply often begins with the answer alone
        yield next(iter(answers), "") or text.strip().partition("\n")[0], confidences[0]
    for match in ANSWER.finditer(text):
        yield from split_before_confidence(match[1])
    for line in text.splitlines():
        yield from split_before_confidence(line, alone=True)


def split_before_confidence(line: str, *, alone: bool = False) -> Iterator[tuple[str, str]]:
    """Divide a line before its confidence, which has a percent sign or is its last number; `alone`: no word may follow."""
    line = line[:LONGEST].translate(WRAPPING)
    match = RANGE.search(line) or MARKED.search(line)
    if match is None:
        numbers = list(BARE.finditer(line))
        match = numbers[-1] if numbers else None
    if match is not None and not (alone and re.search(r"\w", line[match.end() :])):
        before = line[: match.start()]
        minus = before[-1:] == "-" and not before[:-1].rstrip(" ").endswith(tuple(string.ascii_letters + ")."))
        yield without_joining(before), ("-" if minus else "") + line[match.start() :]


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
    if match := RANGE.search(text):
        value = (number(match[1]) + number(match[2])) / 2
    elif match := MARKED.search(text):
        value = number(match[1])
    elif match := BARE.search(text):
        value = number(match[1])
        if value <= 1 and re.search(r"[.,]", match[1]):
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
    texts = [comparable(option) for option in options]
    named = [i for i, option in enumerate(texts) if option and option == comparable(text)]
    if match := LETTER.fullmatch(text):
        return option_of_letter(match[1], options)
    if len(named) == 1:
        return named[0]
    if match := LETTER_TEXT.fullmatch(text):
        letter, after = (match[1], match[2]) if match[1] else (match[3], match[4])
        option = option_of_letter(letter, options)
        # a letter with the text of another option says two things
        with_text = [i for i, option_text in enumerate(texts) if option_text and option_text == comparable(after)]
        return option if option is None or not with_text or option in with_text else None
    return None


def option_of_letter(letter: str, options: Sequence[str]) -> int | None:
    """Return the number of a letter, if there is such an option."""
    index = string.ascii_uppercase.find(letter.upper())
    return index if 0 <= index < len(options) else None


def comparable(text: str) -> str:
    """Return a text as it is compared: without case, punctuation at its ends and doubled spaces."""
    return " ".join(text.casefold().strip(" .,;:!?()'\"").split())
