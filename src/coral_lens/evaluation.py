"""Evaluate a lens on tasks: from question sources to a Run. Questions that the lens was fitted on are never counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.errors import CoralError
from coral_lens.lens import Lens
from coral_lens.progress import questions_bar
from coral_lens.records import UNKNOWN, Question
from coral_lens.runs import Evaluation

if TYPE_CHECKING:
    from coral_lens.models import Model


@dataclass(frozen=True)
class TestSet:
    """Questions under a name."""

    name: str
    questions: tuple[Question, ...]


def evaluate_lens(
    lens: Lens, model: Model, tests: Sequence[TestSet], *, work_dir: Path | None = None
) -> tuple[list[Evaluation], dict[str, int]]:
    """Return the evaluation of each test set, and how many of its questions were left out because the lens knew them."""
    lens.check(model)
    evaluations, left_out = [], {}
    trained = {task.split(":")[0] for task in lens.training["tasks"]}
    for test in tests:
        questions = unseen(lens, test)
        left_out[test.name] = len(test.questions) - len(questions)
        folder = work_dir / test.name.replace("/", "_").replace(":", ".") if work_dir else None
        with questions_bar(test.name, len(questions)) as advance:
            predictions = lens.predictions(model, questions, work_dir=folder, progress=advance)
        scored = set(predictions["base"].ids)
        asked = tuple(q for q in questions if q.id in scored)
        trained_on = any(q.task in trained for q in asked)
        evaluations.append(Evaluation(test.name, asked, predictions, trained_on))
    return evaluations, left_out


def unseen(lens: Lens, test: TestSet) -> list[Question]:
    """Return the labelled questions of a test set that the lens was not fitted on; refuse a set that has none."""
    unlabelled = [q.id for q in test.questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"{test.name}: {len(unlabelled)} questions have no answer, first {unlabelled[0]!r}; evaluation needs labels "
            "(use `coral predict` for unlabelled questions)."
        )
    kept = [q for q, seen in zip(test.questions, lens.is_seen(test.questions), strict=True) if not seen]
    if not kept:
        raise CoralError(
            f"{test.name}: all {len(test.questions)} questions were used to fit this lens; evaluate on others."
        )
    return kept
