"""`coral ask`, `coral fit --open` and `coral calibrate` of open questions; each mistake is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.errors import CoralError
from coral_lens.lens.folder import load_lens

GOLDEN = Path(__file__).parents[1] / "golden"
WRITING = "--candidates 8 --temperature 1 --max-tokens 64 --examples 0 --layers 1"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*left out:UserWarning"),
]


def coral(*words: str | Path) -> str:
    """Run a command and return what it prints; a mistake is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
    return result.output


def open_file(path: Path, n: int, *, answered: bool = True) -> Path:
    known = {"answers": ["x", "y"]} if answered else {}
    rows = [{"question": f"Open {path.stem} {i}?", "topic": "t"} | known for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open")
    train = open_file(folder / "train.jsonl", 40)
    coral("fit", "--model", GOLDEN / "model", "--open", train, "--out", folder / "lens", *WRITING.split())
    return folder / "lens"


def test_a_fit_records_how_candidates_were_written(lens: Path) -> None:
    part = load_lens(lens).open
    assert part is not None
    assert (part.sampling.candidates, part.sampling.max_tokens, part.sampling.examples) == (8, 64, 0)
    assert list((lens.parent / "lens.work").glob("texts-*/texts-00000.jsonl"))
    assert "Fitted on the model's own candidates" in (lens / "README.md").read_text("utf-8")


def test_a_question_is_answered_with_all_that_was_written(lens: Path) -> None:
    printed = coral("ask", "--lens", lens, "Who?", "Which one?", "Why?", "When was it?")
    assert "Which one?\n" in printed
    assert printed.count("none of these") == printed.count("% sure") >= 2
    assert printed.count("Harm cannot be excluded on a task that a lens was not fitted on") == 1
    assert "coral adapt" not in printed, "it takes no open questions"


def test_a_file_is_answered_row_by_row_and_nothing_else_is_left_behind(lens: Path, tmp_path: Path) -> None:
    asked = open_file(tmp_path / "asked.jsonl", 6)
    printed = coral("ask", "--lens", lens, "--questions", asked, "--out", tmp_path / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    assert f"{len(rows)} answers in" in printed
    assert "with known answers are right" in printed
    for row in rows:
        assert row["topic"] == "t"
        assert row["confidence"] == max(row["probs"])
        assert sum(row["probs"]) + row["p_none"] == pytest.approx(1)
        assert row["right"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "asked.jsonl"]
    assert "Harm" not in printed, "the answers are known, and were measured"
    unknown = open_file(tmp_path / "unknown.jsonl", 6, answered=False)
    printed = coral("ask", "--lens", lens, "--questions", unknown, "--out", tmp_path / "answers.jsonl")
    assert "Harm cannot be excluded" in printed.splitlines()[-1]


def test_calibration_says_when_to_abstain(lens: Path, tmp_path: Path) -> None:
    held_out = open_file(tmp_path / "held.jsonl", 20)
    printed = coral("calibrate", "--lens", lens, "--questions", held_out, "--coverage", "0.8", "--risk", "0.2")
    assert "always abstains" in printed  # the model is never right
    assert load_lens(lens).abstention is not None
    assert "abstains" in coral("ask", "--lens", lens, "Which one?")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("ask --lens LENS", "Give a question, or a file"),
        ("ask --lens LENS Who? --questions asked.jsonl --out a.jsonl", "one of the two"),
        ("ask --lens LENS --questions asked.jsonl", "Say with --out"),
        ("ask --lens CLOSED Who?", r"fitted on questions with options.*--open"),
        ("ask --lens LENS --questions choices.jsonl --out a.jsonl", "these questions have options"),
        ("ask --lens LENS --questions asked.jsonl --out mine.txt", "mine.txt"),
        ("predict --lens LENS --questions choices.jsonl --out a.jsonl", r"fitted on open questions.*coral ask"),
        ("eval --lens LENS --task choices.jsonl", r"fitted on open questions.*coral ask"),
        ("adapt --lens LENS --questions choices.jsonl --out b", r"fitted on open questions.*coral ask"),
        ("calibrate --lens LENS --questions unknown.jsonl", r"has no answer; to calibrate"),
        ("fit --out new", "Give --train with questions that have options, or --open"),
        ("fit --open asked.jsonl --train choices.jsonl --out new", "Give --train"),
        ("fit --open choices.jsonl --out new", "these questions have options"),
        ("fit --open unknown.jsonl --out new", "have no answers"),
        ("fit --open asked.jsonl --out new --num-fewshot 2", "use --examples"),
        ("fit --train choices.jsonl --out new --candidates 4", "for open questions"),
        ("fit --open asked.jsonl --out new --temperature 0", "temperature must"),
        ("fit --open asked.jsonl --out new --examples 5", "examples must"),
    ],
)
def test_each_mistake_is_one_sentence(
    lens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    open_file(tmp_path / "asked.jsonl", 20)
    open_file(tmp_path / "unknown.jsonl", 20, answered=False)
    (tmp_path / "choices.jsonl").write_bytes((GOLDEN / "train.jsonl").read_bytes())
    (tmp_path / "mine.txt").write_text("mine")
    words = [{"LENS": str(lens), "CLOSED": str(GOLDEN / "lens")}.get(word, word) for word in line.split()]
    with pytest.raises(CoralError, match=sentence):
        coral(*words, *(["--model", str(GOLDEN / "model")] if words[0] == "fit" else []))
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
