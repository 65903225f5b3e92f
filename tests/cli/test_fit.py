"""Commands that make lenses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coral_lens.cli import app


def test_the_lens_that_ships_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", "--lens", "general", "--questions", "none.jsonl"])
    assert "The lens general comes with the package" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
