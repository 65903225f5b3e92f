"""A log of answers is added to nobody else's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_lens.errors import CoralError
from coral_lens.serve.log import AnswerLog


def test_a_file_of_somebody_else_is_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "mine"}\n', "utf-8")
    with pytest.raises(CoralError, match="is no log of answers, and nothing is added to it"):
        AnswerLog(file)
    assert file.read_text("utf-8") == '{"question": "mine"}\n'


@pytest.mark.parametrize("name", ["", "nowhere/log.jsonl", "nul\x00l", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(CoralError, match=r"cannot be written: .*; choose another file"):
        AnswerLog(tmp_path / name)
