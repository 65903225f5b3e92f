"""What people get wrong at the command line is answered with what they may have meant, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import GOLDEN
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.options import Machine
from coral_lens.errors import nearest

ROWS = "".join(json.dumps({"question": f"{i}?", "options": ["a", "b"], "gold_label": i % 2}) + "\n" for i in range(20))
FIT = "fit --out made --model model"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as somebody has it: questions whose answers are called otherwise, a model, a lens, and a folder of files."""
    (tmp_path / "train.jsonl").write_text(ROWS, "utf-8")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("", "utf-8")
    (tmp_path / "files" / "some.csv").write_text("", "utf-8")
    (tmp_path / "empty").mkdir()
    for name in ("model", "lens"):
        (tmp_path / name).symlink_to(GOLDEN / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"{FIT} --train trian.jsonl", "No such file or directory. Did you mean 'train.jsonl'?"),
        (f"{FIT} --train nowhere.csv", "nowhere.csv cannot be read: No such file or directory. Check the path."),
        (f"{FIT} --train data/train.jsonl", "There is no folder data; check the path."),
        (f"{FIT} --train files", "files is a folder, and not one that `datasets` saved; give a file of questions, such as "),
        (f"{FIT} --train files", str(Path("files", "some.csv"))),
        ("show empty", "empty is a folder, and not one that `datasets` saved; give a file of questions."),
        (f"{FIT} --train ARC_Easy", "Did you mean 'arc_easy'"),
        (f"{FIT} --train train.jsonl", "If the answers are in a column of another name, say which: --columns answer=NAME."),
        ("calibrate --lens lens --questions train.jsonl", "`coral calibrate` needs the right option of each. If the answers"),
        ("calibrate --lens lens --questions train.jsonl --risk 20", "both excluded. Got 20.0 instead. For 20 % write 0.2."),
        ("calibrate --lens lens --questions train.jsonl --risk 1.5", "For 1.5 % write 0.015."),
        (f"{FIT} --train train.jsonl --device gpu", "call it cuda (NVIDIA and AMD), mps (Apple) or xpu (Intel)"),
        ("eval --lens model --task train.jsonl", "it has no lens.json; give a folder that `coral fit` made."),
        ("predict --lens genral --questions train.jsonl --out new.jsonl", "Did you mean 'general'?"),
        ("audit files", "files cannot be read: Is a directory. Give a file in it."),
        ("audit train.jsonl --risk 0.1 --precision 0.9", "two ways to say one thing"),
        ("report nowhere", "there is no nowhere; check the path."),
        ("report lens", "lens is a folder of another kind; check the path."),
        ("report train.jsonl", "train.jsonl is a file, and a folder is wanted here; check the path."),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_the_next_step(
    folder: Path, line: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "open", pytest.fail)
    assert sentence in str(CliRunner().invoke(app, line.split()).exception)


@pytest.mark.parametrize("line", ["doctor train.jsonl", f"{FIT} --train labelled.jsonl --model train.jsonl"])
def test_a_file_in_place_of_a_model_is_no_model(folder: Path, line: str) -> None:
    (folder / "labelled.jsonl").write_text(ROWS.replace("gold_label", "answer"), "utf-8")
    assert "train.jsonl is a file, and no model" in str(CliRunner().invoke(app, line.split()).exception)


def test_a_device_that_is_not_here_is_named_before_anything_is_loaded(folder: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "model", "--device", "hpu"])
    assert "--device hpu cannot be used here" in str(result.exception)
    assert "loading" not in result.output


def test_a_model_without_a_chat_template_is_said_of_the_model(folder: Path) -> None:
    (folder / "labelled.jsonl").write_text(ROWS.replace("gold_label", "answer"), "utf-8")
    line = f"{FIT} --train labelled.jsonl --apply-chat-template"
    assert str(CliRunner().invoke(app, line.split()).exception).startswith("Model 'model' has no chat template; ")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("fit --task train.jsonl --out made", "--train"),
        ("eval --lens lens --questions train.jsonl", "--task"),
        ("predict --train train.jsonl --out new.jsonl", "--questions"),
        ("fit train.jsonl --out made", "as --train"),
    ],
)
def test_each_command_says_what_it_calls_its_questions(line: str, hint: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert hint in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize("command", ["", "fit ", "sae train "])
def test_h_is_short_for_help(command: str) -> None:
    assert "--help" in CliRunner().invoke(app, f"{command}-h".split()).output


def test_nearest_names_are_found_in_any_case() -> None:
    assert nearest("ARC_Easy", ["rac", "arc_easy"]) == " Did you mean 'arc_easy'?"
    assert nearest("MMLU", ["mmlu", "Mmlu_pro"]) == " Did you mean 'mmlu', 'Mmlu_pro'?"
