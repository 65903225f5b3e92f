"""`coral baseline` fits what lenses are compared with, and answers every mistake in one sentence."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leaky import DROPPED, LEAKING, leaky_rows, training_rows, write_rows
from support.models import make_model
from support.questions import toy_questions
from typer.testing import CliRunner

from coral_lens.cli import app, main
from coral_lens.cli.study import NAMES, parsed, row_of, source_of
from coral_lens.data.leaks import REPEATED
from coral_lens.errors import CoralError
from coral_lens.methods.registry import BASELINES
from coral_lens.report.figures.style import Picture
from coral_lens.report.runs import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
Baseline = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, training questions, and test questions of which one is a training question."""
    root = tmp_path_factory.mktemp("baseline")
    model = make_model("llama")
    model.hf.save_pretrained(root / "tiny")
    model.tokenizer.save_pretrained(root / "tiny")
    every = toy_questions(52)
    for name, questions in (("train", every[:40]), ("test", [*every[40:], every[0]])):
        lines = [{"question": q.text, "options": q.options, "answer": q.answer} for q in questions]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return root


@pytest.fixture
def baseline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Baseline:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Picture, "png", lambda self: b"\x89PNG")
    monkeypatch.setattr(Picture, "svg", lambda self: "<svg/>")

    def run(*arguments: str) -> tuple[int, str, str]:
        words = ["--model", str(folder / "tiny"), "--train", str(folder / "train.jsonl")]
        words += ["--task", str(folder / "test.jsonl"), "--out", str(tmp_path / "run")]
        monkeypatch.setattr(sys, "argv", ["coral", "baseline", *words, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        found = capsys.readouterr()
        return int(end.value.code or 0), found.out, found.err

    return run


def test_baselines_stand_beside_base_and_temperature_with_a_report_and_costs(
    baseline: Baseline, folder: Path, tmp_path: Path
) -> None:
    code, out, err = baseline("isotonic")
    assert code == 0, err
    run = load_run(tmp_path / "run")
    (evaluation,) = run.evaluations
    assert list(evaluation.predictions) == ["base", "temperature", "isotonic"]
    assert "isotonic" in out
    assert (tmp_path / "run" / "report.html").exists()
    assert "| isotonic |" in (tmp_path / "run" / "costs.md").read_text("utf-8")
    # the question that is in both files tests, and does not train
    record = run.provenance["training"]["dropped because a test set holds them too"]
    assert record == {str(folder / "test.jsonl"): 1}
    # one more method on the same folder needs no new scores
    code, out, err = baseline("isotonic", "control-base", "--set", "lens=ridge")
    assert "no option 'lens'" in err
    assert code == 2
    code, out, err = baseline("control-base")
    assert code == 0, err
    assert "loading" not in err
    assert "control-base tempered" in load_run(tmp_path / "run").evaluations[0].predictions
    # what --set asks for is in the row's name, and all settings are in the record
    code, out, err = baseline("control-base", "--set", "lens=ridge")
    assert code == 0, err
    run = load_run(tmp_path / "run")
    assert "control-base (lens=ridge)" in run.evaluations[0].predictions
    about = run.provenance["methods"]["control-base (lens=ridge)"]
    assert (about["kind"], about["lens"], about["folds"]) == ("control-base", "ridge", 1)
    assert not {"seed", "validation", "base"} & set(about), "those are the study's"
    assert run.provenance["methods"]["temperature"] == {"kind": "temperature"}


def test_no_repeat_no_shared_article_and_no_edited_copy_is_trained_on_and_tested(
    baseline: Baseline, tmp_path: Path
) -> None:
    train = write_rows(tmp_path / "leaky-train.jsonl", training_rows())
    test = write_rows(tmp_path / "leaky-test.jsonl", leaky_rows())
    code, _, err = baseline("isotonic", "--train", str(train), "--task", str(test))
    assert code == 0, err
    run = load_run(tmp_path / "run")
    training = run.provenance["training"]
    # the files that every test here uses share a question, too
    assert training["leak guard"] == DROPPED | {REPEATED: DROPPED[REPEATED] + 1}
    assert training["questions"][str(train)] == len(training_rows()) - sum(DROPPED.values())
    (tested,) = [e for e in run.evaluations if e.name == str(test)]
    assert {q.id for q in tested.questions} >= LEAKING


def test_mistakes_are_one_sentence_and_exit_code_2(baseline: Baseline, tmp_path: Path) -> None:
    for arguments, complaint in {
        ("isotonik",): "There is no method of kind 'isotonik'. Did you mean 'isotonic'",
        ("vector-scaling",): "Vector scaling needs the same number of options everywhere",
        ("pride",): "need options that are listed in the prompt and scored by letter",
        ("isotonic", "--set", "questions"): "--set must look like questions=20",
        (
            "isotonic",
            "--base",
            "tokens",
        ): "Unknown base 'tokens'; use one of sum, token, char, pmi. Did you mean 'token'?",
        ("isotonic", "--limit", "0"): "limit must be at least 1. Got 0 instead",
        ("isotonic", "--num-fewshot", "-1"): "num_fewshot must be at least 0. Got -1 instead",
        ("isotonic", "--seed", "-1"): "seed must lie between 0 and 4294967295. Got -1 instead",
        ("isotonic", "--train", "arc_easy"): "--train arc_easy names no split; say which, such as arc_easy:train",
    }.items():
        code, _, err = baseline(*arguments)
        assert code == 2
        assert complaint in err
        assert "Traceback" not in err
        assert "loading" not in err
    (tmp_path / "run").write_text("mine", "utf-8")
    for out in (tmp_path / "run", tmp_path / "run" / "inside"):
        code, _, err = baseline("isotonic", "--out", str(out))
        assert (code, f"{tmp_path / 'run'} is a file; choose another place" in err) == (2, True)
        assert "loading" not in err
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "diary.txt").write_text("mine", "utf-8")
    code, _, err = baseline("isotonic")
    assert (code, "holds no run" in err) == (2, True)


def test_a_run_that_was_killed_before_its_record_was_written_goes_on(baseline: Baseline, tmp_path: Path) -> None:
    assert baseline("isotonic")[0] == 0
    whole = (tmp_path / "run" / "run.json").read_bytes()
    (tmp_path / "run" / "predictions").rename(tmp_path / "kept")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "kept").rename(tmp_path / "run" / "predictions")
    (tmp_path / "run" / ".run.json.649e3abb.tmp").write_bytes(whole[:9])
    assert baseline("isotonic")[0] == 0
    assert (tmp_path / "run" / "run.json").read_bytes() == whole
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_help_names_every_baseline_and_has_an_example() -> None:
    out = CliRunner().invoke(app, ["baseline", "--help"], env={"COLUMNS": "200"}).output
    assert "Example: " in re.sub(r"\x1b\[[\d;]*m", "", out)
    missing = [name for name in BASELINES if name not in ("base", "temperature") and f"`{name}`" not in NAMES]
    assert missing == []


def test_sources_and_options_are_read_as_in_other_commands() -> None:
    source = source_of("arc_easy:train", shots=2, limit=5, tested=False)
    assert source == {"task": "arc_easy", "split": "train", "n": 5, "shots": 2}
    assert source_of("arc_easy", shots=0, limit=None, tested=True)["split"] == "test"
    assert source_of("commonsense_qa", shots=0, limit=None, tested=True)["split"] == "validation"
    with pytest.raises(CoralError, match="arc_easi"):
        source_of("arc_easi:test", shots=0, limit=None, tested=True)
    assert row_of("isotonic", {}) == "isotonic"
    options = {"sigma": True, "heads": (3, 5), "sae": "there/16x", "push": "up"}
    assert row_of("iti", options) == "iti (sigma=true, heads=[3, 5], sae=16x, push=up)"
    assert parsed("samples=[1, 3]") == ("samples", (1, 3))
    assert parsed("lens=ridge") == ("lens", "ridge")
    assert parsed("crossed=true") == ("crossed", True)
