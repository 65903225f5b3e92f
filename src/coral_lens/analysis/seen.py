"""Which questions are the same as some that were fitted on. They are left out of tests, whatever task or form they come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from jaxtyping import Bool, Int

from coral_lens.analysis.held_out import kept
from coral_lens.errors import CoralError
from coral_lens.joined import JoinedStore
from coral_lens.records import Question
from coral_lens.splits import question_keys, shares_article

Row = tuple[str, str, str]
"""A dataset, a split and the row's own name."""


@dataclass(frozen=True)
class Seen:
    """Questions that were fitted on, in all ways in which others may be the same."""

    questions: Sequence[Question]

    def unseen(self, store: JoinedStore) -> JoinedStore:
        """Return the questions of a store that are not among these by text, by article or as a row of one dataset."""
        found = store.questions
        seen = np.isin(question_keys(found), self.keys) | self.same_article(found) | self.same_row(found)
        if seen.all():
            raise CoralError(
                f"All {len(seen)} questions to test of {found[0].task} are among those that are fitted on, or rows of the same "
                "dataset in another form; leave one of the two stores out."
            )
        return kept(store, ~seen) if seen.any() else store

    @cached_property
    def keys(self) -> Int[np.ndarray, " question"]:
        """What they are recognised by, whatever their ids are."""
        return question_keys(self.questions)

    def same_article(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions are about an article that these read too, or about an edited copy of it."""
        reads = np.array([q.group != q.id for q in questions])
        return reads & shares_article(questions, [q for q in self.questions if q.group != q.id])

    def same_row(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions come from a row of a dataset that is among these: asked by letter, say, and as cloze."""
        if {q.task for q in questions} == {q.task for q in self.questions}:
            return np.zeros(len(questions), dtype=bool)  # the text says it, and no definition need be read
        rows = [row_of(q) for q in questions]
        for question, row in zip(questions, rows, strict=True):
            other = self.rows.get(row) if row else None
            if other and (len(other.options), other.answer) != (len(question.options), question.answer):
                raise CoralError(
                    f"{question.id!r} and {other.id!r} are called the same row of one dataset, and their options differ, so that "
                    "questions fitted on cannot be told from tested ones; leave one of the two tasks out."
                )
        return np.array([row in self.rows for row in rows])

    @cached_property
    def rows(self) -> dict[Row, Question]:
        """Those that come from a dataset."""
        return {row: q for q in self.questions if (row := row_of(q))}


def row_of(question: Question) -> Row | None:
    """Return the row that a task's question was made of; None for own questions and for tasks that are not known here."""
    prefix = f"{question.task}/{question.split}/"
    data = dataset_of(question.task) if question.id.startswith(prefix) else None
    return (data, question.split, question.id.removeprefix(prefix)) if data else None


@cache
def dataset_of(task: str) -> str | None:
    """Return the dataset that a task asks about."""
    from coral_lens.task_index import is_task
    from coral_lens.tasks import definitions

    found = definitions(task) if is_task(task) else []
    return found[0].data if len(found) == 1 else None
