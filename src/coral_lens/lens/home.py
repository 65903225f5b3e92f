"""Where a lens is at home: on the tasks that it was fitted on, or wherever the user says so. Elsewhere it is believed less."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from coral_lens.data.leaks import question_keys
from coral_lens.data.wording import asked_as
from coral_lens.errors import CoralError
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
    if lens.trust is not None and lens.trust.everywhere:
        return np.ones(len(questions), dtype=bool)
    tasks = {source.split(":")[0] for source in lens.training.tasks} - {UNNAMED}
    named = np.array([q.task in tasks for q in questions], dtype=bool)
    return named | have_keys(lens, questions, lens.seen)


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
    if lens.trust is None or lens.trust.everywhere:
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
