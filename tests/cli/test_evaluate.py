"""`coral eval` counts no question that its lens was fitted on or that its prompts show, and says what it could not check."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.leaky import LEAKING, leaky_rows, training_rows, write_rows
from support.models import make_model
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.evaluate import trust_line, worked_examples
from coral_lens.cli.options import Asking
from coral_lens.data.leaks import REPEATED, SHOWN, question_keys
from coral_lens.data.questions import read_questions
from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.fit import fit
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings
from coral_lens.report.figures.style import Picture
from coral_lens.report.reach import EVERYWHERE
from coral_lens.report.runs import Run, load_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*prompts were longer than the model reads"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a lens, and test questions of which some leak."""
    root = tmp_path_factory.mktemp("eval")
    model = make_model("llama")
    model.hf.save_pretrained(root / "tiny")
    model.tokenizer.save_pretrained(root / "tiny")
    train = write_rows(root / "train.jsonl", training_rows())
    write_rows(root / "test.jsonl", leaky_rows())
    fit(model, read_questions(train), FitSettings(lens="ridge", layers=(1,))).save(root / "lens")
    return root


def evaluated(folder: Path, out: Path, *arguments: str, lens: Path | None = None) -> tuple[Run, str]:
    words = ["eval", "--lens", lens or folder / "lens", "--model", folder / "tiny", "--out", out, *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "png", lambda self: b"\x89PNG")
        patch.setattr(Picture, "svg", lambda self: "<svg/>")
        result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_run(out), " ".join(result.stdout.split())


def test_a_repeated_question_is_left_out_and_articles_are_said_to_be_unchecked(folder: Path, tmp_path: Path) -> None:
    test = str(folder / "test.jsonl")
    run, said = evaluated(folder, tmp_path / "run", "--task", test)
    assert {q.id for q in run.evaluations[0].questions} & LEAKING == LEAKING - {"again"}
    assert run.provenance["leak guard"]["left out"] == {test: {REPEATED: 1}}
    assert "test.jsonl: 1 questions were left out, because the lens was fitted on them." in said
    assert "Not checked: articles and edited copies of them: a lens keeps only the keys of its questions." in said


def test_questions_that_only_adapted_or_calibrated_a_lens_are_not_said_to_have_fitted_it(
    folder: Path, tmp_path: Path
) -> None:
    lens, questions = load_lens(folder / "lens"), read_questions(folder / "test.jsonl")
    own = question_keys([q for q in questions if q.id not in LEAKING][:2], version=lens.keys)
    for ways, known in {
        "fitted or calibrated": replace(lens, calibrated_on=own),
        "fitted, adapted or calibrated": replace(lens, calibrated_on=own[:1], adapted_on=own[1:]),
    }.items():
        known.save(tmp_path / ways)
        _, said = evaluated(
            folder, tmp_path / f"{ways} run", "--task", str(folder / "test.jsonl"), lens=tmp_path / ways
        )
        assert f"test.jsonl: 3 questions were left out, because the lens was {ways} on them." in said


def test_two_lenses_of_one_kind_are_called_by_their_folders(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder / "lens", tmp_path / name / "mine")
    both = ("--lens", str(tmp_path / "b" / "mine"), "--task", str(folder / "test.jsonl"))
    run, said = evaluated(folder, tmp_path / "run", *both, lens=tmp_path / "a" / "mine")
    assert tuple(run.evaluations[0].predictions) == ("base", "temperature", "coral (a/mine)", "coral (b/mine)")
    assert "(b/mine)" in said


def arc(number: int, word: str) -> dict[str, Any]:
    choices = {"text": [f"{word} {number}{label}" for label in "ABCD"], "label": list("ABCD")}
    return {"id": f"{word}{number}", "question": f"Which {word} is {number}?", "choices": choices, "answerKey": "B"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ARC-Easy whose training split, from which worked examples are drawn, holds two test questions."""
    root = tmp_path_factory.mktemp("data")
    (root / "arc_easy").mkdir()
    tested = [arc(i, "river") for i in range(8)]
    splits = {"test": tested, "train": [arc(i, "stone") for i in range(6)] + [r | {"id": "again"} for r in tested[:2]]}
    for split, rows in splits.items():
        write_rows(root / "arc_easy" / f"{split}.jsonl", [r | {"id": f"{r['id']}-{i}"} for i, r in enumerate(rows)])
    return root


def test_what_prompts_may_show_as_a_worked_example_is_left_out(folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--task", "arc_easy:test", "--data", str(data))
    run, said = evaluated(folder, tmp_path / "shots", *arguments, "--num-fewshot", "1")
    assert len(run.evaluations[0].questions) == 6
    assert run.provenance["leak guard"] == {
        "checked": f"{REPEATED}, {SHOWN}",
        "left out": {"arc_easy:test": {SHOWN: 2}},
    }
    assert "ARC-Easy: 2 questions were left out, each is a worked example." in said
    run, _ = evaluated(folder, tmp_path / "none", *arguments)
    assert len(run.evaluations[0].questions) == 8
    assert run.provenance["leak guard"] == {"checked": REPEATED, "left out": {}}


def test_worked_examples_come_from_the_split_that_the_task_names_and_only_with_shots(data: Path) -> None:
    asked = Asking(num_fewshot=2, limit=3, data_dir=data)
    assert len(worked_examples("arc_easy:test", asked)) == 8, "all of the split, however few are asked"
    assert worked_examples("arc_easy:test", Asking(data_dir=data)) == []
    assert worked_examples("my.jsonl", asked) == []


# -------------------------------------------------------------------------------------------------------- early exit


def test_eval_and_predict_say_what_an_early_exit_saves_and_loses(folder: Path, tmp_path: Path) -> None:
    asked, early = folder / "test.jsonl", tmp_path / "early"
    fit(make_model("llama"), read_questions(folder / "train.jsonl"), FitSettings(exit_layer=1)).save(early)
    model = ("--model", folder / "tiny")
    for words in (
        ("predict", "--lens", early, *model, "--questions", asked, "--out", tmp_path / "answers.jsonl"),
        ("eval", "--lens", early, *model, "--task", asked),
    ):
        result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert re.search(r"Early exit: .* \([01] of \d, \d+%\) .* accuracy is .* the whole model's", result.stdout)


# ------------------------------------------------------------------------------------------- files of somebody else


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, CoralError | SystemExit)
    assert result.exit_code
    return str(result.exception) + result.output


def test_predict_replaces_neither_its_questions_nor_anything_else_it_has_not_written(
    folder: Path, tmp_path: Path
) -> None:
    own = shutil.copy(folder / "test.jsonl", tmp_path / "test.jsonl")
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "answers.work").mkdir()
    (tmp_path / "answers.work" / "notes").write_text("mine")
    words = ("predict", "--lens", folder / "lens", "--model", folder / "tiny", "--questions", own, "--out")
    before = own.read_bytes()
    assert "would be replaced" in refused(*words, own)
    assert "not written by this command" in refused(*words, tmp_path / "thesis.tex")
    assert own.read_bytes() == before
    for _ in range(2):  # over what it wrote itself
        result = CliRunner().invoke(app, [*map(str, words), str(tmp_path / "answers")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "answers.work" / "notes").read_text() == "mine"
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_eval_refuses_a_page_of_somebody_else_before_it_computes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    words = ("eval", "--lens", folder / "lens", "--task", folder / "test.jsonl", "--out", tmp_path)
    assert "exists and is not ours" in refused(*words)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# ----------------------------------------------------------------------------------------------------------- predict


def predicted(folder: Path, out: Path, *arguments: str) -> str:
    """The last line of `coral predict` with a ridge, on questions that it was not fitted on."""
    words = ["predict", "--lens", folder / "lens", "--model", folder / "tiny", "--out", out, *arguments]
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip().splitlines()[-1]


def test_a_lens_that_is_believed_everywhere_says_so_unless_the_questions_are_said_to_be_its_own(
    folder: Path, tmp_path: Path
) -> None:
    """The paper's lenses have no trust that could be low, and said nothing."""
    asked = ("--questions", str(folder / "test.jsonl"))
    last = predicted(folder, tmp_path / "answers.jsonl", *asked)
    assert f"{EVERYWHERE} Harm cannot be excluded" in last
    assert "of a task that it was not fitted on" in last
    assert "Harm" not in predicted(folder, tmp_path / "answers.jsonl", *asked, "--home")
    said = evaluated(folder, tmp_path / "run", "--task", str(folder / "test.jsonl"))[1]
    assert "Not fitted on test.jsonl, and believed there as on its own tasks: harm cannot be excluded" in said
    said = evaluated(folder, tmp_path / "home", "--task", str(folder / "test.jsonl"), "--home")[1]
    assert "harm cannot be excluded" not in said


def answer_of(trust: float | None, *, home: bool = True, kept: bool = False, shift: float = 1.0) -> Answer:
    return Answer("q", 0, "a", 0.9, (0.9, 0.1), (0.6, 0.4), shift, trust=trust, home=home, kept=kept)


def test_questions_of_its_own_task_that_lie_too_far_off_are_not_those_of_another() -> None:
    faded, gone, away = answer_of(0.3, shift=3.0), answer_of(0.0, shift=4.0), answer_of(0.0, home=False)
    line = trust_line([answer_of(1.0), faded, gone, away, away], is_own=False)
    assert line.startswith(
        "2 of 5 questions are far from those that the lens was fitted on; 2 are of a task that it was not fitted on; "
        "2 are of its own task, but too far off for it to be fully believed; "
        "3 are answered by the model alone, scaled by temperature. Harm cannot be excluded"
    )
    assert "Harm" not in trust_line([answer_of(1.0), faded, gone], is_own=False)


def test_answers_that_stay_the_models_own_are_counted() -> None:
    line = trust_line([answer_of(1.0, kept=True), answer_of(1.0, kept=True), answer_of(1.0)], is_own=False)
    assert line.endswith("; 2 are answered as by the model alone, with the lens's confidence.")
    assert "answered as by" not in trust_line([answer_of(1.0)], is_own=False)


def test_on_a_task_whose_labels_adapted_the_lens_nothing_is_away() -> None:
    assert trust_line([answer_of(0.4, home=False)], is_own=True) == (
        "0 of 1 questions are far from those that the lens was fitted on."
    )
