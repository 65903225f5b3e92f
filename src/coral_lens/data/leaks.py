"""The one guard against leaks: which questions come again on the other side, by text, by article, or as a worked example.

Whoever divides questions, fits on some or tests on others asks a `Guard`; it marks and counts and never drops anything itself.
Keys are all that a lens keeps of its questions: enough to recognise one again, not to read it.
"""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from coral_lens.records import Question, without_cue

REPEATED = "the same question"
ARTICLE = "the same article"
COPY = "an edited copy of an article"
SHOWN = "a worked example"
REASONS = (REPEATED, ARTICLE, COPY, SHOWN)
"""Why a question leaks; the first that applies is counted."""

Check = Callable[[Sequence[Question]], Bool[np.ndarray, " question"]]
"""Marks the questions that leak for one reason."""


@dataclass(frozen=True)
class Leaks:
    """Which questions leak, and why."""

    first: Int[np.ndarray, " question"]
    """Of each question the place in REASONS of the first that applies; their number where none does."""

    @property
    def mask(self) -> Bool[np.ndarray, " question"]:
        """Which of them leak."""
        return self.first < len(REASONS)

    @property
    def counts(self) -> dict[str, int]:
        """How many leak for each reason, each counted once; reasons without any are not named."""
        numbers = np.bincount(self.first, minlength=len(REASONS))
        return {reason: int(n) for reason, n in zip(REASONS, numbers, strict=False) if n}

    def __or__(self, other: Leaks) -> Leaks:
        return Leaks(np.minimum(self.first, other.first))

    def kept(self, questions: Sequence[Question]) -> list[Question]:
        """Return those of the questions that do not leak."""
        return [q for q, leaks in zip(questions, self.mask, strict=True) if not leaks]


@dataclass(frozen=True)
class Guard:
    """Recognises questions that another side holds too, as far as it knows that side."""

    checks: tuple[tuple[str, Check], ...] = ()
    """Reasons and what marks them."""

    def __add__(self, other: Guard) -> Guard:
        return Guard(self.checks + other.checks)

    @property
    def checked(self) -> list[str]:
        """The reasons that it can recognise; of a lens that keeps only keys, no article is known."""
        known = {reason for reason, _ in self.checks}
        return [reason for reason in REASONS if reason in known]

    def find(self, questions: Sequence[Question]) -> Leaks:
        """Return which questions leak."""
        first = np.full(len(questions), len(REASONS))
        for reason, check in self.checks:
            first = np.where(check(questions), np.minimum(first, REASONS.index(reason)), first)
        return Leaks(first)


def guard_of(questions: Sequence[Question]) -> Guard:
    """Return a guard against questions that are at hand: their texts, their articles, and edited copies of these."""
    return Guard(((REPEATED, repeats_of(questions)), (ARTICLE, readers_of(questions)), (COPY, copies_of(questions))))


def guard_of_shown(questions: Sequence[Question]) -> Guard:
    """Return a guard against questions that prompts may show as worked examples, with their answers."""
    return Guard(((SHOWN, repeats_of(questions)),))


def repeats_of(others: Sequence[Question]) -> Check:
    """Return what marks questions of the same text, however it is asked."""
    keys = np.unique(question_keys(others))
    return lambda questions: np.isin(question_keys(questions), keys)


def readers_of(others: Sequence[Question]) -> Check:
    """Return what marks questions of the same group.

    A question that is a group of its own reads no article: two such are not the same for being called the same.
    """
    articles = {q.group for q in others if q.group != q.id}
    groups = {q.group for q in others}
    return lambda questions: np.array(
        [q.group in (articles if q.group == q.id else groups) for q in questions], dtype=bool
    )


SHINGLE = 8
"""Words in a row that two texts must share to be taken for copies in that place."""
SAME_TEXT = 0.1
"""Share of its shingles that an article must have in common with others to be one of them. Of RACE's training articles, all 47
that reach it in the test split are edited copies (seen by eye); at 0.5 half of them would be missed."""


def copies_of(others: Sequence[Question]) -> Check:
    """Return what marks questions that read an edited copy of an article.

    RACE has articles in both splits that differ in a few words; a digest would not see that they are the same.
    """
    known = {shingle for q in first_of_articles(others) for shingle in shingles(q)}

    def check(questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        copies = {q.group for q in first_of_articles(questions) if is_copy(q, known)} if known else set()
        return np.array([q.group in copies for q in questions], dtype=bool)

    return check


def is_copy(question: Question, known: set[str]) -> bool:
    """Whether enough of what a question reads stands in other articles."""
    own = shingles(question)
    return bool(own) and sum(s in known for s in own) >= SAME_TEXT * len(own)


def first_of_articles(questions: Sequence[Question]) -> list[Question]:
    """Return one question of each article; questions that are a group of their own have none."""
    return list({q.group: q for q in reversed(questions) if q.group != q.id}.values())


def shingles(question: Question) -> list[str]:
    """Return every run of SHINGLE words in what is read before a question and in the question."""
    words = words_of(f"{question.passage} {question.text}")
    return [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]


# ------------------------------------------------------------------------------------------------------------ texts

SIGNS = str.maketrans("\u2212\u2010\u2011\u2013\u2014\u2044\u2215", "-----//")
"""Dashes and slashes, whatever a publisher makes of them."""
NOT = "\u0338"
"""The stroke through a sign, which turns = into its opposite."""
TOKEN = re.compile(rf"\w+|[+<=>%|~\u00b1\u00d7\u00f7\u2190-\u22ff{NOT}]|\.(?=\d)|[-*/^](?=\s*(?:[\d(]|[b-hj-z]\b))")
"""A word, or a sign that makes 2 + 2 another question than 2 - 2; a dash between words is punctuation."""


def normalised(question: Question) -> str:
    """Return what is asked and the options, to find repeated questions.

    Without case, accents, punctuation, order of options, and what a template adds: `Question:`, `Answer:`, a list of the
    options under letters. So it is the same however a task or a file asks it, and an open one whatever the model wrote to it.
    """
    text, options = without_template(question)
    options = () if question.is_open else options
    return "\n".join([plain(f"{question.passage} {text}"), *sorted(map(plain, options))])


def without_template(question: Question) -> tuple[str, tuple[str, ...]]:
    """Return what is asked and what can be answered; options that are letters stand for what the text lists under them.

    Trap: keys in lenses are made of this. An ending that is no cue for an answer in English belongs to what it follows.
    """
    wording = question.wording
    if not wording.listed or question.options != tuple(string.ascii_uppercase[: len(question.options)]):
        return wording.bare, question.options
    *others, last = wording.listed
    return wording.stem, (*others, without_cue(last + wording.ending))


def plain(text: str) -> str:
    """Return the words and mathematical signs of a text in lower case, without accents and punctuation."""
    return " ".join(TOKEN.findall(unaccented(text).translate(SIGNS)))


def words_of(text: str) -> list[str]:
    """Return the words of a text alone."""
    return re.findall(r"\w+", unaccented(text).replace(NOT, ""))


def unaccented(text: str) -> str:
    """Return a text in lower case, without accents."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in letters if c == NOT or not unicodedata.combining(c))


def first_normalised(question: Question) -> str:
    """Return what the keys in the first lenses are made of: the words of a question as a task's template has them."""
    passage, text, *options = (" ".join(words_of(t)) for t in (question.passage, question.text, *question.options))
    return "\n".join([passage, text, *sorted(options)])


NORMALISED: dict[int, Callable[[Question], str]] = {1: first_normalised, 2: normalised}
"""What keys are made of, by their version; a lens knows the version of those that it has."""
KEYS = max(NORMALISED)


def question_keys(questions: Sequence[Question], *, version: int = KEYS) -> Int[np.ndarray, " question"]:
    """Return a 63-bit key of each question's normalised text: enough to recognise it again, not to read it."""
    digests = (hashlib.sha256(NORMALISED[version](q).encode()).digest() for q in questions)
    return np.array([int.from_bytes(d[:8], "big") >> 1 for d in digests], dtype=np.int64)
