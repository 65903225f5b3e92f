"""Worked examples for one's own questions, drawn as lm-eval draws them, and never the question itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from coral_lens.data.leaks import question_keys
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question

VERSION = re.compile(r"(\d+)(?: fixed)? shots")


def with_shots(
    questions: Sequence[Question], pool: Sequence[Question], n: int, *, seed: int, fixed: bool = False
) -> list[Question]:
    """Return the questions, each with n worked examples from a pool of labelled ones.

    As in lm-eval, one more is drawn where the pool holds the questions themselves, and whatever is the question itself is taken
    out. With `fixed`, the draw is the same for each: what they share is then computed once.
    """
    known = [replace(q, shots=()) for q in pool if q.answer != UNKNOWN and q.rendered is None]
    if len(known) <= n:
        raise CoralError(
            f"{n} worked examples need more than {n} labelled questions to draw from; {len(known)} are there."
        )
    own, keys = question_keys(questions).tolist(), question_keys(known).tolist()
    inside = bool(set(own) & set(keys))
    version = f"{n}{' fixed' if fixed else ''} shots"
    rng, asked = Random(seed), []
    for question, key in zip(questions, own, strict=True):
        if question.rendered is not None:
            raise CoralError(f"Question {question.id!r} brings its own prompt, which takes no worked examples.")
        if fixed:
            rng = Random(seed)
        drawn = [i for i in rng.sample(range(len(known)), n + inside) if keys[i] != key][:n]
        if len(drawn) < n:  # the question is in the pool more than once
            drawn = rng.sample([i for i in range(len(known)) if keys[i] != key], n)
        asked.append(replace(question, shots=tuple(known[i] for i in drawn), version=version))
    return asked


def n_shots(question: Question) -> int:
    """Return how many worked examples one's own question is asked with, also where these were not kept."""
    match = VERSION.fullmatch(question.version)
    return int(match[1]) if match else len(question.shots)
