"""Recognise a question that comes again: by its text, by the article that it reads, or by an edited copy of that article."""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from coral_lens.records import CUE, Question

SIGNS = str.maketrans("\u2212\u2010\u2011\u2013\u2014\u2044\u2215", "-----//")
"""Dashes and slashes, whatever a publisher makes of them."""
NOT = "\u0338"
"""The stroke through a sign, which turns = into its opposite."""
TOKEN = re.compile(rf"\w+|[+<=>%|~\u00b1\u00d7\u00f7\u2190-\u22ff{NOT}]|\.(?=\d)|[-*/^](?=\s*(?:[\d(]|[b-hj-z]\b))")
"""A word, or a sign that makes 2 + 2 another question than 2 - 2; a dash between words is punctuation."""


def normalised(question: Question) -> str:
    """Return what is asked and the options, to find repeated questions.

    Without case, accents, punctuation, order of options, and what a template adds: `Question:`, `Answer:`, a list of the
    options under letters. So it is the same however a task or a file asks it.
    """
    text, options = without_template(question)
    return "\n".join([plain(f"{question.passage} {text}"), *sorted(map(plain, options))])


def without_template(question: Question) -> tuple[str, tuple[str, ...]]:
    """Return what is asked and what can be answered; options that are letters stand for what the text lists under them.

    Trap: keys in lenses are made of this. An ending that is no cue for an answer in English belongs to what it follows.
    """
    wording = question.wording
    if not wording.listed or question.options != tuple(string.ascii_uppercase[: len(question.options)]):
        return wording.bare, question.options
    *others, last = wording.listed
    return wording.stem, (*others, CUE.sub("", last + wording.ending))


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


def drop_repeats(train: Sequence[Question], test: Sequence[Question]) -> tuple[list[Question], int]:
    """Return the training questions that are not in the test set too, and how many were dropped."""
    held_out = {normalised(q) for q in test}
    kept = [q for q in train if normalised(q) not in held_out]
    return kept, len(train) - len(kept)


SHINGLE = 8
"""Words in a row that two texts must share to be taken for copies in that place."""
SAME_TEXT = 0.1
"""Share of its shingles that an article must have in common with others to be one of them. Of RACE's training articles, all 47
that reach it in the test split are edited copies (seen by eye); at 0.5 half of them would be missed."""


def shares_article(train: Sequence[Question], test: Sequence[Question]) -> Bool[np.ndarray, " question"]:
    """Return which training questions read an article that test questions read too, the same or an edited copy of it.

    RACE has articles in both splits that differ in a few words; a digest would not see that they are the same.
    """
    groups = {q.group for q in test}
    known = {shingle for q in first_of_articles(test) for shingle in shingles(q)}
    copies = set()
    for question in first_of_articles(train) if known else ():
        own = shingles(question)
        if own and sum(s in known for s in own) >= SAME_TEXT * len(own):
            copies.add(question.group)
    return np.array([q.group in groups or q.group in copies for q in train], dtype=bool)


def first_of_articles(questions: Sequence[Question]) -> list[Question]:
    """Return one question of each article; questions that are a group of their own have none."""
    return list({q.group: q for q in reversed(questions) if q.group != q.id}.values())


def shingles(question: Question) -> list[str]:
    """Return every run of SHINGLE words in what is read before a question and in the question."""
    words = words_of(f"{question.passage} {question.text}")
    return [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]
