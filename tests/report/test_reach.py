"""A report says where answers are the model's own, and says nothing where nothing was checked."""

from __future__ import annotations

from typing import Any

import pytest

from coral_lens.report.reach import kept_answers
from coral_lens.report.runs import Run


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"": False}, "The answers are the model's own: "),
        ({"": True, "arc": True, "race": False}, "The answers are the model's own on race: "),
        ({"": False, "arc": True, "race": False}, "The answers are the model's own but on arc: "),
    ],
)
def test_it_is_said_where_the_lens_does_not_answer(answers: dict[str, bool], said: str) -> None:
    (note,) = kept_answers(Run("r", (), {"trust": {"answers": answers}}))
    assert note.startswith(said)
    assert note.endswith("Its confidence is used.")


@pytest.mark.parametrize("lens", [{}, {"trust": None}, {"trust": {}}, {"trust": {"answers": {"": True, "arc": True}}}])
def test_nothing_is_said_where_it_answers_or_nothing_was_checked(lens: dict[str, Any]) -> None:
    assert kept_answers(Run("r", (), lens)) == []
