"""Two runs side by side: the questions that both answered, matched by id, and how their methods differ. Never formats.

Both runs become one whose methods are called `A: coral`, `B: coral`; every table and figure of a run therefore serves for two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.run import COLUMNS, Scope, in_order, subject_of

NAMES = ("A", "B")


@dataclass(frozen=True, slots=True)
class Matched:
    """A test set of each run, as far as they share questions."""

    both: Evaluation
    """The shared questions in the order of A; methods have their run's name in front."""
    names: tuple[str, str]
    """What the runs call the test set."""
    n_alone: tuple[int, int]
    """Questions that only A, and only B, has."""
    n_changed: int
    """Questions of the same id whose options or answer differ; they are left out."""


def match_runs(a: Run, b: Run) -> list[Matched]:
    """Match the test sets of two runs by their questions' ids, and refuse runs that share none."""
    left, matches = in_order(b), []
    for mine in in_order(a):
        theirs = max(left, key=lambda e: (e.name == mine.name, n_shared(mine, e)), default=None)
        if theirs and not n_shared(mine, theirs):
            theirs = max(left, key=lambda e: n_shared(mine, e))
        matched = match(mine, theirs) if theirs else None
        if matched and theirs:
            left.remove(theirs)
            matches.append(matched)
    if not matches:
        sets = [", ".join(f"{e.name} ({len(e.questions):,})" for e in run.evaluations) for run in (a, b)]
        raise CoralError(
            f"The two runs share no questions, so nothing can be compared: the first has {sets[0]}, the second {sets[1]}; "
            "evaluate both on the same tasks and splits."
        )
    return matches


def n_shared(a: Evaluation, b: Evaluation) -> int:
    """Return how many questions have the same id."""
    return len({q.id for q in a.questions} & {q.id for q in b.questions})


def is_same(a: Question, b: Question) -> bool:
    """Whether two questions of one id are one: prompts may differ, what can be answered may not."""
    return a.options == b.options and a.answer == b.answer


def match(a: Evaluation, b: Evaluation) -> Matched | None:
    """Return the questions that two test sets share; None where there are none."""
    at = {q.id: i for i, q in enumerate(b.questions)}
    known = [(i, at[q.id]) for i, q in enumerate(a.questions) if q.id in at]
    pairs = [(i, j) for i, j in known if is_same(a.questions[i], b.questions[j])]
    if not pairs:
        return None
    predictions = {}
    for method in dict.fromkeys((*a.predictions, *b.predictions)):
        for name, evaluation, numbers in zip(NAMES, (a, b), zip(*pairs, strict=True), strict=True):
            if method in evaluation.predictions:
                row = f"{name}: {method}"
                predictions[row] = evaluation.predictions[method].take(np.array(numbers)).renamed(row)
    questions = tuple(a.questions[i] for i, _ in pairs)
    both = Evaluation(a.name, questions, predictions, a.trained_on and b.trained_on)
    alone = len(a.questions) - len(known), len(b.questions) - len(known)
    return Matched(both, (a.name, b.name), alone, len(known) - len(pairs))


def joint_run(a: Run, b: Run, matched: Sequence[Matched]) -> Run:
    """Return both runs as one; it has no lens of its own."""
    return Run(f"{a.title} and {b.title}", tuple(m.both for m in matched), {"model": a.lens["model"]})


def compared_rows(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Return the rows that are compared, B's first: the same method in both, and the subjects where their names differ."""
    known = list(methods)
    mine, theirs = ([m.split(": ", 1)[1] for m in known if m.startswith(f"{name}: ")] for name in NAMES)
    pairs = [(f"B: {method}", f"A: {method}") for method in mine if method in theirs]
    subjects = subject_of(mine), subject_of(theirs)
    if all(subjects) and subjects[0] != subjects[1]:
        pairs.append((f"B: {subjects[1]}", f"A: {subjects[0]}"))
    return pairs


B_MINUS_A = Scope(COLUMNS, compared_rows)
"""The tables of two runs."""
