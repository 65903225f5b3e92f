"""`coral audit` from the command line: what it prints, what it writes, and one sentence for each mistake."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.audits import lines, rows
from typer.testing import CliRunner, Result

from coral_lens.cli import app
from coral_lens.report.figures.style import Picture

Run = Callable[..., Result]


@pytest.fixture
def coral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a folder with answered questions; figures are not drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Picture, "png", lambda self: b"\x89PNG")
    monkeypatch.setattr(Picture, "svg", lambda self: "<svg/>")
    lines(tmp_path / "mine.jsonl", rows(300, sharpness=2))
    lines(tmp_path / "other.jsonl", rows(300))
    return lambda *words: CliRunner().invoke(app, ["audit", *map(str, words)])


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def complaint(result: Result) -> str:
    assert result.exit_code != 0
    return f"{result.exception} {result.output}"


def test_an_audit_says_what_it_found_and_writes_its_page(coral: Run, tmp_path: Path) -> None:
    printed = said(coral("mine.jsonl", "other.jsonl", "--by", "topic", "--risk", "0.5", "--out", "out"))
    assert "On 300 questions “mine.jsonl” is right on" in printed
    assert "it is too sure by" in printed
    assert "mine.jsonl + temperature" in printed
    assert "topic: even, other.jsonl" in printed
    assert printed.endswith("Report: out/report.html")
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["n_questions"] == 300


def test_maps_are_used_on_new_rows(coral: Run, tmp_path: Path) -> None:
    said(coral("mine.jsonl", "--out", "out"))
    lines(tmp_path / "new.jsonl", [{k: v for k, v in r.items() if k != "label"} for r in rows(7, sharpness=2, seed=1)])
    assert said(coral("--apply", "out/maps.json", "new.jsonl", "--out", "new.csv")) == "7 rows in new.csv"
    with (tmp_path / "new.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == [f"q{i}" for i in range(7)]
    assert all(sum(json.loads(row["calibrated_probs"])) == pytest.approx(1) for row in found)


def test_swapped_options_are_counted(coral: Run, tmp_path: Path) -> None:
    swapped = [{k: v[::-1] if k in ("options", "probs") else v for k, v in r.items()} for r in rows(300, sharpness=2)]
    lines(tmp_path / "swapped.jsonl", swapped)
    assert "0.0 [0.0 to 1.3] % of the answers flip" in said(coral("mine.jsonl", "--swap", "swapped.jsonl"))


def test_mistakes_are_one_sentence(coral: Run, tmp_path: Path) -> None:
    assert "no such file or folder" in complaint(coral("none.jsonl"))
    assert "--precision and --risk are two ways to say one thing" in complaint(
        coral("mine.jsonl", "--precision", "0.9", "--risk", "0.1")
    )
    assert "--apply writes a table" in complaint(coral("mine.jsonl", "--apply", "maps.json"))
    assert "no column 'team'" in complaint(coral("mine.jsonl", "--by", "team"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "audit.json").write_text("mine")
    assert "exists and is not ours" in complaint(coral("mine.jsonl", "--out", "full"))
    assert (tmp_path / "full" / "audit.json").read_text() == "mine"


def test_nothing_that_is_read_is_written_over(coral: Run, tmp_path: Path) -> None:
    before = (tmp_path / "mine.jsonl").read_bytes()
    assert coral("mine.jsonl", "--out", "mine.jsonl").exit_code != 0
    said(coral("mine.jsonl", "--out", "out"))
    assert coral("--apply", "out/maps.json", "mine.jsonl", "--out", "mine.jsonl").exit_code != 0
    assert (tmp_path / "mine.jsonl").read_bytes() == before
