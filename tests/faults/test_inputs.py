"""Hostile files are read as they were meant, or refused in one sentence. A sample of what `make torture` reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import GOLDEN, furnish, quiet

from coral_lens.data.questions import read_questions
from faults import inputs, lenses
from faults.outcomes import Tally, table
from faults.test_commands import wrong_ends
from faults.workshop import Workshop


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with quiet():
        yield


def assert_right(tally: Tally) -> None:
    assert wrong_ends([tally]) == [], table([tally])


def test_question_files(tmp_path: Path) -> None:
    assert_right(inputs.hostile_questions(tmp_path, 300))


def test_names_on_figures_that_are_drawn(tmp_path: Path) -> None:
    furnish(tmp_path / "at-0", large=False)
    with quiet(draws=True):
        tally = inputs.hostile_names(Workshop.found(tmp_path), [r"</svg><script> $\frac$ [/b] 東京 ${x}"])
    assert tally.counts["same bytes"] == 1, tally.wrong
    figures = sorted((tmp_path / "now" / "study").rglob("*.png"))
    assert figures
    assert all(len(figure.read_bytes()) > 1000 for figure in figures), "they are drawn"


def test_logs_of_lm_eval(tmp_path: Path) -> None:
    assert_right(inputs.hostile_logs(tmp_path, 25))


def test_lens_folders(tmp_path: Path) -> None:
    assert_right(lenses.hostile_lenses(GOLDEN / "lens", GOLDEN, tmp_path, 40))


def test_another_reading_than_was_written_is_seen(tmp_path: Path) -> None:
    rows = [{"id": "q0", "question": "How many?", "options": ["1", "2"], "answer": 1}]
    (tmp_path / "q.jsonl").write_bytes(inputs.written_as_jsonl(rows))
    read = read_questions(tmp_path / "q.jsonl")
    assert inputs.wrong_reading(read, rows) == ""
    assert inputs.wrong_reading([replace(read[0], answer=0)], rows) == "read [('q0', 0)] where [('q0', 1)] was written"
