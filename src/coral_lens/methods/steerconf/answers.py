"""Read an answer and a confidence out of what a model wrote. What is not clear is not guessed: it is a failure, and counted.

An answer is looked for, in this order, after `Answer and Confidence (0-100):`, in lines `Answer: ...` and `Confidence: ...`, and
in a line that is nothing but an answer and a confidence. The first place that can be read counts: what comes later is often
a question that the model made up. An echo of the instructions cannot be read. A number without a percent sign is a confidence
only behind a letter or an option's own text, and after `Answer and Confidence` or a comma: `B. 15` may be what B says.
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
ANY_NUMBER = re.compile(NUMBER)
HALF_NUMBER = re.compile(r"\d[\d.,/-]*\Z")
"""What may go on where a text was cut."""
JOINED = re.compile(r",|\bconfidence\b", re.IGNORECASE)
"""What leads over to a number without a percent sign that is a confidence."""
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


def read_answer(text: str, options: Sequence[str], *, finished: bool = True) -> StatedAnswer | None:
    """Return what a model said about a question with these option texts, or None where that is not clear.

    The number at the end of a text that is not `finished` may be half a number (90% was cut to 9): it is not read.
    """
    text, options = unstyled(text), [unstyled(option).translate(WRAPPING) for option in options]
    for answer, confidence in answer_candidates(text if finished else HALF_NUMBER.sub("", text), options):
        option, stated = read_option(answer, options), read_confidence(confidence)
        if option is not None and stated is not None:
            return StatedAnswer(option, stated)
    return None


def unstyled(text: str) -> str:
    """Return a text with the usual forms of its letters, digits and dashes."""
    return unicodedata.normalize("NFKC", text).replace("–", "-").replace("—", "-")


def answer_candidates(text: str, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of strings in which an answer and a confidence may stand."""
    for match in BOTH.finditer(text):
        lines = [line for line in text[match.end() :].splitlines() if line.strip()]
        for n in (1, 2):  # an answer and a confidence, or each on a line of its own
            if len(lines) >= n:
                yield from split_before_confidence(", ".join(lines[:n]), options, label="both")
    answers, confidences = ANSWER.findall(text), CONFIDENCE.findall(text)
    if confidences:
        # a reply often begins with the answer alone
        yield next(iter(answers), "") or text.strip().partition("\n")[0], confidences[0]
    for match in ANSWER.finditer(text):
        yield from split_before_confidence(match[1], options, label="answer")
    for line in text.splitlines():
        yield from split_before_confidence(line, options, label="")


def split_before_confidence(line: str, options: Sequence[str], *, label: str) -> Iterator[tuple[str, str]]:
    """Divide a line before its confidence, which has a percent sign or is its last number; `label`: what the line was called.

    An option's own text is passed over: `B. 15` and `B. about 15 km` state no confidence where that is what B says.
    """
    line = line[:LONGEST].translate(WRAPPING)
    start = after_own_text(line, options)
    marked = RANGE.search(line, start) or MARKED.search(line, start)
    match = marked or next(iter(reversed(list(BARE.finditer(line, start)))), None)
    if match is None:
        return
    before = line[: match.start()]
    answer = without_joining(before)
    loose = bool(label and marked)  # with a label and a percent sign, words may stand around the option and the number
    clear = (loose and not start) or read_option(answer, options, whole=True) is not None
    joined = JOINED.search(before, len(answer)) is not None
    if label != "both" and not loose:
        clear &= (joined or marked is not None) and not re.search(r"\w", line[match.end() :])
    if not start and any(match[1] == known[1] for option in options for known in ANY_NUMBER.finditer(option)):
        clear &= joined and marked is not None  # the number of an option: only in the form that was asked for, `B, 15%`
    if clear:
        minus = before[-1:] == "-" and not before[:-1].rstrip(" ").endswith(tuple(string.ascii_letters + ")."))
        yield answer, ("-" if minus else "") + line[match.start() :]


def after_own_text(line: str, options: Sequence[str]) -> int:
    """Return where a line goes on after the own text of an option, under its letter or alone; 0 where it begins otherwise."""
    ends = [0]
    for letter, option in zip(string.ascii_uppercase, options, strict=False):
        if words := r"\s+".join(re.escape(word) for word in comparable(option).split()):
            under = rf"(?:\(?{letter}(?:\s*[.):\-]|\s)\s*)?"
            own = rf"\W*?(?:{LEAD.pattern[1:]})?{under}\W*?{words}(?![\w%]|[.,]\d)"
            found = re.match(own, line, re.IGNORECASE)
            ends.append(found.end() if found else 0)
    return max(ends)


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


def read_option(text: str, options: Sequence[str], *, whole: bool = False) -> int | None:
    """Return the option that a text names, by letter or by its whole text; None where that is not clear.

    `whole`: behind a letter may stand the option's own text only, and no other words.
    """
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
        return option if option is None or option in with_text or not (with_text or whole) else None
    return None


def option_of_letter(letter: str, options: Sequence[str]) -> int | None:
    """Return the number of a letter, if there is such an option."""
    index = string.ascii_uppercase.find(letter.upper())
    return index if 0 <= index < len(options) else None


def comparable(text: str) -> str:
    """Return a text as it is compared: without case, punctuation at its ends and doubled spaces."""
    return " ".join(text.casefold().strip(" .,;:!?()'\"").split())
