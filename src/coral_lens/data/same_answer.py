"""When two answers in words are the same: the one rule by which candidates are merged and answers are labelled.

    case, accents     Beyoncé = beyonce                     articles       The Hague = Hague
    punctuation       U.S.A. = USA, Jay-Z = jay z, & = and  numbers        1,000 = 1000.0 = one thousand, 50% = fifty percent

Words must otherwise be the same, in the same order: an answer that says more than the known one is another answer. Signs, units
and words around a number must agree too: $5 is neither €5 nor 5, and C++ is not C. A mark that makes another letter is no accent:
パリ is Paris and バリ is Bali.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from decimal import Decimal

ARTICLES = frozenset({"a", "an", "the"})
SPELLED = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
UNITS = {word: value for value, word in enumerate(SPELLED)}
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
WRITTEN_OUT = {"%": " percent ", "&": " and "}
"""Signs that are words."""
DROPPED = re.compile(r"(?<![0-9])\.|\.(?![0-9])|['’‘`´ʼ]")
"""What is left out without a space in its place: U.S. is US, O'Neill is ONeill."""
FIGURES = re.compile(
    r"(?:(?<![\w.,-])[-+])?(?:(?<![\w.])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)(?![\w]|[.,][0-9])"
)
"""A number in figures, with its sign where it begins a word."""
FIGURE = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?")
"""One as it is after that, such as may stand before million."""
WHOLE = re.compile(r"[0-9]+")
RAISED = re.compile(r"(?<=[0-9])(?=[²³¹⁰⁴-⁻¼-¾⅐-⅞])")
"""Where a raised figure, or a fraction of one character, follows figures: 10² is not 102."""
ALIKE = str.maketrans({"´": "'", "−": "-", "⁄": "/"})
"""Signs that are written in several ways; some of them come to light only when characters are taken apart."""
SHARP = re.compile(r"(?<=[^\W\d_])#")
"""Of a note, or of a language."""
UNSAID = frozenset("|~")
"""Signs of arithmetic, for Unicode, that say nothing of an answer."""


def answer_key(text: str) -> str:
    """Return what two answers have in common exactly if they are the same; empty where a text says nothing."""
    words = list(with_values(list(words_of(text))))
    return " ".join([word for word in words if word not in ARTICLES] or words)


def same_answer(one: str, other: str) -> bool:
    """Return whether two answers are the same."""
    return answer_key(one) == answer_key(other) != ""


def words_of(text: str) -> Iterator[str]:
    """Yield the words of a text, without case, accents and punctuation; a number in figures is one word, its plain value."""
    plain = without_accents(RAISED.sub(" ", text).translate(ALIKE))
    for sign, word in WRITTEN_OUT.items():
        plain = plain.replace(sign, word)
    at = 0
    for match in FIGURES.finditer(plain):
        yield from plain_words(plain[at : match.start()])
        yield plain_figure(match[0])
        at = match.end()
    yield from plain_words(plain[at:])


def without_accents(text: str) -> str:
    """Return a text without case and accents, in the plainest of the characters that stand for the same."""
    letters = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold()).translate(ALIKE)
    plain: list[str] = []
    for character in letters:
        stands = bool(plain) and (plain[-1].isalpha() or is_mark(plain[-1]))
        if not is_mark(character) or (stands and not is_accent(character)):
            plain.append(character)
    # put together again: kana with their sound marks are letters
    return unicodedata.normalize("NFC", "".join(plain))


def is_mark(character: str) -> bool:
    """Return whether a character stands on the one before it."""
    return unicodedata.category(character) in ("Mn", "Mc")


def is_accent(mark: str) -> bool:
    """Return whether a mark only adds to its letter: an accent, or a point of Hebrew or Arabic.

    Vowels, tones and sound marks of Indic and South-East Asian scripts and of kana are of other classes, and make another letter
    of the one that they stand on.
    """
    place = unicodedata.combining(mark)
    return place == 1 or 10 <= place <= 36 or place >= 200 or "\ufe00" <= mark <= "\ufe0f"


def plain_words(text: str) -> Iterator[str]:
    """Yield the words of a text between numbers; what is left of an odd number, such as 1_000, may be figures too."""
    kept = SHARP.sub("♯", DROPPED.sub("", text))
    apart = "".join(in_words(character, before) for before, character in zip(" " + kept, kept, strict=False))
    for word in apart.split():
        yield plain_figure(word) if WHOLE.fullmatch(word) else word


def in_words(character: str, before: str) -> str:
    """Return a character as it stands in words: a letter or a mark as it is, a sign as a word of its own, all else as space."""
    if WHOLE.fullmatch(character) and is_mark(before):  # a number, as it is where a number is looked for
        return f" {character}"
    if character.isalnum() or is_mark(character):
        return character
    is_sign = unicodedata.category(character) in ("Sc", "Sm") or character == "♭"
    return f" {character} " if is_sign and character not in UNSAID else " "


def plain_figure(figure: str) -> str:
    """Return a number in figures as all of its value are written: without commas, and without zeros that say nothing."""
    sign, number = "-" if figure.startswith("-") else "", figure.lstrip("-+")
    whole, _, part = number.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return value if value == "0" else sign + value


def with_values(words: Sequence[str]) -> Iterator[str]:
    """Yield words with numbers that are spelled out as figures: twenty one as 21, two hundred and six as 206."""
    at = 0
    while at < len(words):
        end = end_of_number(words, at)
        if end == at:
            yield words[at]
            at += 1
        else:
            yield plain_figure(f"{spelled_value(words[at:end]):f}")
            at = end


def end_of_number(words: Sequence[str], at: int) -> int:
    """Return where the spelled number ends that begins at a word; the same place where none does.

    A unit may follow tens, a scale or nothing; figures may stand before a scale, as in 2.5 million; `and` may follow hundred or
    thousand. So one two is two numbers, and a hundred is one.
    """
    end, last = at, ""
    while end < len(words):
        word = words[end]
        if word in SCALES and (last or end == at):
            last, end = "scale", end + 1
        elif word in TENS and last in ("", "scale"):
            last, end = "tens", end + 1
        elif word in UNITS and (last in ("", "scale") or (last == "tens" and 0 < UNITS[word] < 10)):
            last, end = "unit", end + 1
        elif (
            word == "and" and last == "scale" and end + 1 < len(words) and words[end + 1] in UNITS.keys() | TENS.keys()
        ):
            end += 1
        elif not last and is_figure(word) and end + 1 < len(words) and words[end + 1] in SCALES:
            last, end = "unit", end + 1
        else:
            break
    return end


def is_figure(word: str) -> bool:
    """Return whether a word is a number in figures, of a length at which it can be multiplied."""
    return FIGURE.fullmatch(word) is not None


def spelled_value(words: Sequence[str]) -> Decimal:
    """Return the value of a number in words."""
    total, part = Decimal(0), Decimal(0)
    for word in words:
        if word in SCALES:
            part = (part or Decimal(1)) * SCALES[word]
            if word != "hundred":
                total, part = total + part, Decimal(0)
        elif word != "and":
            part += Decimal(word) if is_figure(word) else UNITS.get(word, 0) + TENS.get(word, 0)
    return total + part
