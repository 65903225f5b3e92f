"""Where a lens is at home: on the tasks that it was fitted on, or wherever the user says so. Elsewhere it is believed less."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.data.leaks import question_keys
from coral_lens.data.own_files import is_file_task
from coral_lens.data.wording import asked_as
from coral_lens.errors import CoralError
from coral_lens.lens.trust import tasks_named
from coral_lens.ragged import Options
from coral_lens.records import UNNAMED, Question

if TYPE_CHECKING:
    from coral_lens.lens.artefact import Lens


def is_home(lens: Lens, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
    """Return which questions are of a task that a lens was fitted on, by its name, or are themselves such as it was fitted on.

    Questions of a file name no task: another file is another task, until the user says otherwise (`at_home`). A lens that was
    adapted to a task by labels is for that task, and its home is forgotten.
    """
    if lens.trust is not None and lens.trust.adapted:
        return np.zeros(len(questions), dtype=bool)
    if lens.everywhere or (lens.trust is not None and lens.trust.everywhere):
        return np.ones(len(questions), dtype=bool)
    tasks = {task for source in lens.training.tasks if not is_file_task(task := source.split(":")[0])}
    home = np.array([q.task in tasks for q in questions], dtype=bool)
    if not home.all():  # keys take longer than names: only of those that are not at home yet
        home[~home] = have_keys(lens, list(compress(questions, ~home)), lens.seen)
    return home


def home_tasks(
    lens: Lens,
    questions: Sequence[Question],
    states: Float[np.ndarray, "row width"],
    at_home: Bool[np.ndarray, " question"],
) -> list[str]:
    """Return the training task that each question is of at home; away from home it does not matter, and is what it names.

    A question of a file names none. Where several files were fitted on, it is of the one whose questions it lies nearest to:
    that the lens is at home was said by the user, and is granted by no distance.
    """
    tasks = tasks_named(questions)
    trust, unnamed = lens.trust, at_home & np.array([task == UNNAMED for task in tasks], dtype=bool)
    files = [i for i, task in enumerate(trust.places) if is_file_task(task)] if trust else []
    if trust is None or not files or not unnamed.any():
        return tasks
    nearest = lens.shift.nearest(states, Options.of_sizes([len(q.options) for q in questions]), files)
    return [trust.places[n] if own else task for task, n, own in zip(tasks, nearest, unnamed, strict=True)]


def have_keys(
    lens: Lens, questions: Sequence[Question], keys: Int[np.ndarray, " known"]
) -> Bool[np.ndarray, " question"]:
    """Return which questions have one of a lens's keys; where it asks about options one by one, it has the keys of these."""
    asked = [asked_as([question], lens.style) for question in questions]
    options = Options.of_sizes([len(one) for one in asked])
    found = np.isin(question_keys([one for each in asked for one in each], version=lens.keys), keys)
    return options.max(found.astype(np.int64)) > 0


def at_home(lens: Lens) -> Lens:
    """Return a lens for questions that the user says are of the kind that it was fitted on, whatever they are called.

    Prediction sets and abstention were calibrated for another trust, and are dropped.
    """
    if lens.trust is None:
        return replace(lens, everywhere=True)
    if lens.trust.everywhere:
        return lens
    if lens.trust.adapted:
        raise CoralError("The lens was adapted to a task by labels of it; for its home, use the lens before that.")
    if lens.sets or lens.abstention:
        warnings.warn(
            "The lens was calibrated for questions of any kind; at home its sets and its abstention do not hold and are "
            "left out: run `coral calibrate --home`.",
            stacklevel=3,
        )
    return replace(lens, trust=replace(lens.trust, everywhere=True), sets=None, abstention=None)
