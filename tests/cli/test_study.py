"""The demo ends with what to type next, in words that work in the reader's own shell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import coral_lens.cli.printing as printing
import coral_lens.cli.study as study
import coral_lens.data.assets as assets
import coral_lens.study.demo as demo_module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment of its own, whose commands are not on the path."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(study, "which", lambda _: None)
    return tmp_path


def test_a_command_that_is_on_the_path_is_called_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "which", lambda _: "/usr/bin/coral")
    assert study.this_command() == "coral"


def test_a_command_that_is_not_on_the_path_is_called_by_its_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = folder / ".venv" / "bin" / "coral"
    assert study.this_command() == f"{command.with_name('python')} -m coral_lens"
    command.touch()
    assert study.this_command() == ".venv/bin/coral"
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    assert study.this_command() == str(command)


def test_the_demo_ends_with_what_to_do_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".venv" / "bin" / "coral").touch()
    for name in ("embedded_model", "embedded_data"):
        monkeypatch.setattr(assets, name, lambda: folder)
    monkeypatch.setattr(demo_module, "run_demo", lambda *_, **__: None)
    monkeypatch.setattr(printing, "show_run", lambda *_, **__: print("Report: x"))
    study.demo(out=folder / "demo", full=False)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Report: x"
    assert "`.venv/bin/coral fit --train FILE --out LENS`" in said[1]
    tutorial = Path(__file__).parents[2] / study.TUTORIAL
    assert study.TUTORIAL in said[1]
    assert tutorial.exists()
