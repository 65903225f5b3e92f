"""Parts of stores: the questions of a task that are fitted on, and those that are only ever tested.

A question that is fitted on is left out of every test, whatever task or form it comes in there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from coral_lens.data.leaks import Guard, guard_of
from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.errors import CoralError
from coral_lens.records import TASKS_OF_FAMILY, Question, task_family

HELD_OUT = 0.3
"""Share of each task, by whole groups, that is only ever tested."""
DatasetRow = tuple[str, str, str]
"""A dataset, a split and the row's own name."""


def tasks_of(stores: Sequence[ActivationStore]) -> list[str]:
    """Return the names of the tasks, in order."""
    return list(dict.fromkeys(name for names in task_names(stores) for name in names))


def task_names(stores: Sequence[ActivationStore]) -> list[list[str]]:
    """Return the name of each question's task, store by store.

    A family such as MMLU's subjects is one task. Where stores share a name, as those of users' own files do, each is a task of
    its own, and its folder tells it from the others.
    """
    tasks = [family_names(store.questions) for store in stores]
    shared = Counter(name for names in tasks for name in set(names))
    folders = [Path(store.name).name for store in stores]
    for i, store in enumerate(stores):
        folder = folders[i] if folders.count(folders[i]) == 1 else store.name
        tasks[i] = [name if shared[name] == 1 else f"{name} ({folder})" for name in tasks[i]]
    twice = [name for name, n in Counter(name for names in tasks for name in set(names)).items() if n > 1]
    if twice:
        raise CoralError(f"Two stores are both {twice[0]}; give every --store once.")
    return tasks


def family_names(questions: Sequence[Question]) -> list[str]:
    """Return the task of each question, or its family where a store holds several of one."""
    families: dict[str, set[str]] = {}
    for q in questions:
        families.setdefault(task_family(q.task), set()).add(q.task)
    large = {name for name, members in families.items() if len(members) >= TASKS_OF_FAMILY}
    return [family if (family := task_family(q.task)) in large else q.task for q in questions]


def parts_of_task(
    stores: Sequence[ActivationStore], task: str | None, *, held_out: bool, limit: int | None = None, seed: int = 0
) -> JoinedStore:
    """Return the questions of a task, or of all, that are tested or that are not; of the latter at most `limit`, drawn."""
    masks = []
    for store, names in zip(stores, task_names(stores), strict=True):
        mine = np.array([task in (None, name) for name in names])
        masks.append(mine & (split_mask(store.questions, fraction=HELD_OUT, seed=0) == held_out))
    if limit is not None:
        flat = np.concatenate(masks)
        at = np.flatnonzero(flat)
        flat[np.random.default_rng(seed).permutation(at)[limit:]] = False
        masks = np.split(flat, np.cumsum([len(m) for m in masks])[:-1])
    parts = [Subset(store, mask) for store, mask in zip(stores, masks, strict=True) if mask.any()]
    if not parts:
        raise CoralError(f"No question of {task} is left to {'test' if held_out else 'fit'} on; give more questions.")
    return JoinedStore(parts)


# --------------------------------------------------------------------------------------- questions that were fitted on


@dataclass(frozen=True)
class Seen:
    """Questions that were fitted on, in all ways in which others may be the same."""

    questions: Sequence[Question]

    def unseen(self, store: JoinedStore) -> JoinedStore:
        """Return the questions of a store that are not among these by text, by article or as a row of one dataset."""
        questions = store.questions
        seen = self.guard.find(questions).mask | self.same_row(questions)
        if seen.all():
            raise CoralError(
                f"All {len(seen)} questions to test of {questions[0].task} are among those that are fitted on, or rows of the "
                "same dataset in another form; leave one of the two stores out."
            )
        return store.take(~seen) if seen.any() else store

    @cached_property
    def guard(self) -> Guard:
        """What recognises them by their texts and articles, whatever their ids are."""
        return guard_of(self.questions)

    def same_row(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions come from a row of a dataset that is among these: asked by letter, say, and as cloze."""
        if {q.task for q in questions} == {q.task for q in self.questions}:
            return np.zeros(len(questions), dtype=bool)  # the text says it, and no definition need be read
        rows = [dataset_row(q) for q in questions]
        for question, row in zip(questions, rows, strict=True):
            other = self.rows.get(row) if row else None
            if other and (len(other.options), other.answer) != (len(question.options), question.answer):
                raise CoralError(
                    f"{question.id!r} and {other.id!r} are called the same row of one dataset, and their options differ; then "
                    "questions fitted on cannot be told from tested ones: leave one of the two tasks out."
                )
        return np.array([row in self.rows for row in rows])

    @cached_property
    def rows(self) -> dict[DatasetRow, Question]:
        """The questions that come from a dataset, by their row in it."""
        return {row: q for q in self.questions if (row := dataset_row(q))}


def dataset_row(question: Question) -> DatasetRow | None:
    """Return the row that a task's question was made of; None for a user's own questions and for unknown tasks."""
    prefix = f"{question.task}/{question.split}/"
    data = dataset_of(question.task) if question.id.startswith(prefix) else None
    return (data, question.split, question.id.removeprefix(prefix)) if data else None


@cache
def dataset_of(task: str) -> str | None:
    """Return the dataset that a task asks about."""
    from coral_lens.data.task_index import is_task
    from coral_lens.data.tasks import definitions

    known = definitions(task) if is_task(task) else []
    return known[0].data if len(known) == 1 else None
