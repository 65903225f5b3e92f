"""A report says where answers are the model's own and where harm cannot be excluded, of each lens by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coral_lens.records import Question
from coral_lens.report.reach import EVERYWHERE, SIDE_BY_SIDE, UNCHECKED, UNCHECKED_OPEN, Reach, reach_notes, unchecked
from coral_lens.report.runs import Evaluation, Run, View

TRUST = {"trust": {"answers": {}}}


def run_of(lens: dict[str, Any], *reaches: Reach, own: bool = False) -> Run:
    """A run of one test set, whose two questions lie near."""
    questions = tuple(Question(name, name, f"{name}?", ("a", "b"), 0) for name in "xy")
    view = View("listwise tempered", (1,), (), np.zeros((0, 4)), np.ones(2))
    sides = {SIDE_BY_SIDE: [reach.to_json() for reach in reaches]} if reaches else {}
    return Run("r", (Evaluation("new.jsonl", questions, {}, own, view),), lens, sides)


def notes_of(run: Run) -> list[str]:
    """What is said beside the number of far questions."""
    return reach_notes(run)[1:]


# ------------------------------------------------------------------------------------------------ the model's own answers


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"": False}, "The answers are the model's own: "),
        ({"": True, "arc": True, "race": False}, "The answers are the model's own on race: "),
        ({"": False, "arc": True, "race": False}, "The answers are the model's own but on arc: "),
    ],
)
def test_it_is_said_where_the_lens_does_not_answer(answers: dict[str, bool], said: str) -> None:
    (note,) = reach_notes(Run("r", (), {"trust": {"answers": answers}}))
    assert note.startswith(said)
    assert note.endswith("on held-out training questions the lens did not answer better. Its confidence is used.")


@pytest.mark.parametrize("lens", [{}, {"trust": None}, {"trust": {}}, {"trust": {"answers": {"": True, "arc": True}}}])
def test_nothing_is_said_where_it_answers_or_nothing_was_checked(lens: dict[str, Any]) -> None:
    assert reach_notes(Run("r", (), lens)) == []


def test_of_an_adapted_lens_it_is_said_that_labels_of_the_task_decided() -> None:
    adapted = {"trust": {"answers": {"": False}}, "adaptation": {"answers": {"questions": 40, "used": False}}}
    assert notes_of(run_of(adapted)) == [
        "The answers are the model's own: on the 40 labelled questions of the task the lens did not answer better. "
        "Its confidence is used."
    ]


def test_of_one_adapted_by_too_few_labels_what_held_before_them_is_said() -> None:
    (note,) = notes_of(run_of({"trust": {"answers": {"": False}}, "adaptation": {"n_questions": 7}}))
    assert "on held-out training questions" in note


# -------------------------------------------------------------------------------------------------- away from home


def test_on_a_task_that_it_was_not_fitted_on_harm_cannot_be_excluded_and_on_its_own_nothing_is_said() -> None:
    assert notes_of(run_of(TRUST)) == [f"Not fitted on new.jsonl: {UNCHECKED}."]
    assert notes_of(run_of(TRUST, own=True)) == []
    assert notes_of(run_of(TRUST | {"adaptation": {"n_questions": 40}})) == []


@pytest.mark.parametrize("lens", [{"rule": "residual", "trust": None}, {"rule": "listwise", "tempering": {}}])
def test_of_a_lens_without_trust_it_is_said_that_it_is_believed_there_all_the_same(lens: dict[str, Any]) -> None:
    """The paper's lenses, and those of release 0.1, which knew no trust."""
    assert notes_of(run_of(lens)) == [f"Not fitted on new.jsonl, and believed there as on its own tasks: {UNCHECKED}."]
    assert notes_of(run_of(lens, own=True)) == []


def test_lenses_side_by_side_are_judged_each_by_itself_and_named() -> None:
    reaches = (
        Reach("coral", trusts=False),
        Reach("listwise", home=["new.jsonl"], answers={"": False}),
        Reach("listwise (ensemble)"),
    )
    assert reach_notes(run_of(TRUST, *reaches)) == [
        "new.jsonl (listwise tempered): 0 of 2 questions are far from those that the lens was fitted on.",
        f"CORAL: not fitted on new.jsonl, and believed there as on its own tasks: {UNCHECKED}.",
        f"listwise (ensemble): not fitted on new.jsonl: {UNCHECKED}.",
        "listwise: The answers are the model's own: on held-out training questions the lens did not answer better. Its "
        "confidence is used.",
    ]


# ------------------------------------------------------------------------------------------------------------ answers


@dataclass
class Answered:
    """What answers know of how far a lens was believed."""

    trust: float | None
    home: bool


def test_a_single_answer_away_from_home_is_enough_for_the_sentence() -> None:
    harm = f"{UNCHECKED[0].upper()}{UNCHECKED[1:]}."
    assert unchecked([Answered(1.0, True), Answered(0.4, False)]) == harm
    assert unchecked([Answered(None, False)]) == f"{EVERYWHERE} {harm}"
    assert unchecked([Answered(0.4, False)], UNCHECKED_OPEN).endswith("measure it there.")


def test_at_home_there_is_none_even_where_a_question_lies_too_far_off() -> None:
    assert unchecked([Answered(1.0, True), Answered(0.2, True), Answered(None, True)]) == ""
