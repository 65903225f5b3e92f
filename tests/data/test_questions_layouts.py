"""Fifty questions load to the same fifty questions from every layout in which people have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.layouts import LAYOUTS, meant, rows

from coral_lens.data.questions import load_questions


def test_there_are_as_many_layouts_as_were_promised() -> None:
    assert len(LAYOUTS) >= 40


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_to_equal_questions(tmp_path: Path, layout: str) -> None:
    source, said = LAYOUTS[layout](tmp_path)
    questions = load_questions(source, said)
    assert questions == meant()
    assert [q.columns["subject"] for q in questions] == [row["subject"] for row in rows()]
    assert questions.summary.startswith("50 questions, 3 to 4 options, answers are ")
    assert "carried along" in questions.summary
