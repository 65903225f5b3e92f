"""The `coral` command does the whole line, and answers every mistake with one sentence and exit code 2."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.models import make_model
from support.questions import toy_questions
from typer.main import get_command
from typer.testing import CliRunner

from coral_lens.cli import app, main
from coral_lens.data import assets, tasks
from coral_lens.data.questions import load_questions
from coral_lens.data.tasks import AvailableTask
from coral_lens.engine import extract as store_module
from coral_lens.engine import loading, shard_work
from coral_lens.engine import self_check as doctor
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.engine.self_check import Finding
from coral_lens.errors import CoralError
from coral_lens.lens import publish as hub
from coral_lens.lens.folder import load_lens
from coral_lens.records import UNKNOWN, Question
from coral_lens.report.runs import load_run
from coral_lens.storage.settings import parse_layers

CORAL = str(Path(sys.executable).parent / "coral")
FOREIGN = ("lm-eval",)
"""Commands whose arguments, help included, are those of another program."""


def paths_of(command: Any, *above: str) -> list[tuple[str, ...]]:
    """Every command that does something, by the words that call it."""
    inner = getattr(command, "commands", {}) or {}
    return [p for name, one in inner.items() for p in paths_of(one, *above, name)] or [above]


COMMANDS = paths_of(get_command(app))
TRAINING = 40


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one sentence of a failed command."""
        assert self.code == (130 if "Interrupted" in self.err else 2), self.err
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("coral: ")]
        assert self.err.rstrip().endswith(line), "the sentence comes last"
        return line


Coral = Callable[..., Outcome]


@pytest.fixture
def coral(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Coral:
    """Run the command in this process, exactly as the installed script does."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["coral", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def save_model(model: Model, folder: Path) -> Path:
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", seed=1), tmp_path_factory.mktemp("models") / "other")


def rows(questions: Sequence[Question]) -> list[dict[str, Any]]:
    return [
        {"id": q.id, "question": q.text, "options": list(q.options)}
        | ({} if q.answer == UNKNOWN else {"answer": q.answer})
        for q in questions
    ]


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
    return path


@dataclass(frozen=True)
class Work:
    """A folder in which a lens was fitted and measured."""

    model: Path
    folder: Path
    fitted: Outcome
    measured: Outcome

    @property
    def lens(self) -> Path:
        return self.folder / "lens"


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Fit and eval, once for all tests."""
    folder = tmp_path_factory.mktemp("work")
    train = write(folder / "train.jsonl", rows(toy_questions(TRAINING)))
    # three of the test questions were trained on
    mixed = rows([*toy_questions(12, seed=3), *toy_questions(3)])
    test = write(folder / "test.jsonl", [{**row, "id": f"t{i}"} for i, row in enumerate(mixed)])
    runner = CliRunner()

    def run(*arguments: str | Path) -> Outcome:
        result = runner.invoke(app, [*map(str, arguments)], catch_exceptions=False)
        return Outcome(result.exit_code, result.stdout, result.stderr)

    fitted = run("fit", "--model", model, "--train", train, "--out", folder / "lens", "--layers", "1-2")
    measured = run("eval", "--lens", folder / "lens", "--task", test, "--out", folder / "run")
    return Work(model, folder, fitted, measured)


# ----------------------------------------------------------------------------------------------------------- the line


def test_fit_makes_a_lens_and_says_what_was_chosen(work: Work) -> None:
    assert work.fitted.code == 0
    lens = load_lens(work.lens)
    assert lens.kind == "listwise"
    assert set(lens.layers) < {1, 2}
    assert lens.training.tasks == {"questions": TRAINING}
    assert lens.model["name"] == str(work.model)
    assert f"Chosen: {lens.name}" in " ".join(work.fitted.out.split())
    for word in ("base", "temperature", "listwise tempered", "accuracy", "Brier"):
        assert word in work.fitted.out
    brier = lens.trace.validation[lens.method]["brier"]
    assert f"{100 * brier.value:.1f}" in work.fitted.out
    assert f"{100 * brier.low:.1f} to {100 * brier.high:.1f}" in work.fitted.out
    good = lens.trace.as_good
    assert f"{len(good)} of 2 layers tried are within one standard error of the best" in " ".join(
        work.fitted.out.split()
    )
    assert (work.folder / "lens.work" / "manifest.json").exists()


def test_eval_leaves_out_known_questions_and_writes_a_run_with_a_report(work: Work) -> None:
    assert work.measured.code == 0
    said = " ".join(work.measured.out.split())
    assert "3 questions were left out, because the lens was fitted on them" in said
    run = load_run(work.folder / "run")
    (evaluation,) = run.evaluations
    assert [q.id for q in evaluation.questions] == [f"t{i}" for i in range(12)]
    assert set(evaluation.predictions) == {"base", "temperature", "listwise", "listwise tempered"}
    assert not evaluation.trained_on, "another file is another task"
    assert evaluation.view is not None
    n_far = int((evaluation.view.shift >= 1.5).sum())
    assert f"{n_far} of 12 questions are far from those that the lens was fitted on." in said
    assert "harm cannot be excluded" in said
    assert run.lens["layers"] == list(load_lens(work.lens).layers)
    assert "<html" in (work.folder / "run" / "report.html").read_text("utf-8")


def test_report_of_two_runs_compares_them(work: Work, coral: Coral, tmp_path: Path) -> None:
    run = work.folder / "run"
    outcome = coral("report", run, run, "--out", tmp_path / "both")
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "both" / "comparison.json").read_text("utf-8"))
    differences = [d["value"] for t in record["tests"] for c in t["comparisons"] for d in c["differences"].values()]
    assert differences
    assert set(differences) == {0.0}
    assert "Nothing: both runs name the same" in (tmp_path / "both" / "report.html").read_text("utf-8")
    assert "--out is for a comparison" in coral("report", run, "--out", tmp_path).complaint


def test_analyse_confidence_writes_tables_and_figures_beside_the_run(work: Work, coral: Coral, tmp_path: Path) -> None:
    run = work.folder / "run"
    outcome = coral("analyse", "confidence", run, "--out", tmp_path / "found")
    assert outcome.code == 0, outcome.err
    names = {path.name for path in (tmp_path / "found").iterdir()}
    stems = {name.rsplit(".", 1)[0] for name in names}
    assert {stem.split("-")[0] for stem in stems} >= {"reliability", "risk", "histogram"}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("csv", "json", "svg", "png")}
    assert "no method 'corl'" in coral("analyse", "confidence", run, "--method", "corl").complaint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "other files" in coral("analyse", "confidence", run, "--out", tmp_path / "mine").complaint


def test_report_makes_the_same_page_again(work: Work, coral: Coral, tmp_path: Path) -> None:
    run = Path(shutil.copytree(work.folder / "run", tmp_path / "run"))
    page = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    outcome = coral("report", run)
    assert outcome.code == 0
    assert str(run / "report.html") in outcome.out.replace("\n", "")
    assert (run / "report.html").read_bytes() == page


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_predict_writes_a_line_with_the_stated_fields_for_every_question(
    work: Work, coral: Coral, tmp_path: Path, suffix: str
) -> None:
    questions = toy_questions(6, seed=4, labelled=False)
    asked = tmp_path / f"new{suffix}"
    if suffix == ".csv":
        with asked.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["id", "question", "options"])
            table.writerows([q.id, q.text, "|".join(q.options)] for q in questions)
    else:
        write(asked, rows(questions))
    outcome = coral("predict", "--lens", work.lens, "--questions", asked, "--out", tmp_path / "answers.jsonl")
    assert outcome.code == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    assert [a["id"] for a in answers] == [q.id for q in questions]
    for answer, question in zip(answers, questions, strict=True):
        known = {"id", "answer", "option", "confidence", "probs", "base_probs", "shift", "options_in_set", "abstain"}
        assert set(answer) == known | {"trust", "question", "options"}, "the columns of the input come first"
        assert answer["shift"] > 0
        assert (answer["options_in_set"], answer["abstain"]) == (None, None), "the lens was not calibrated for them"
        assert len(answer["probs"]) == len(answer["base_probs"]) == len(question.options)
        assert sum(answer["probs"]) == pytest.approx(1.0)
        assert sum(answer["base_probs"]) == pytest.approx(1.0)
        assert answer["confidence"] == max(answer["probs"]) == answer["probs"][answer["answer"]]
        assert answer["option"] == question.options[answer["answer"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([asked.name, "answers.jsonl"])
    n_far, last = sum(a["shift"] >= 1.5 for a in answers), outcome.out.strip().splitlines()[-1]
    assert last.startswith(f"{n_far} of 6 questions are far from those that the lens was fitted on")
    assert "Harm cannot be excluded" in last


@pytest.mark.filterwarnings("default:The lens was fitted on states:UserWarning")
def test_predict_computes_in_the_arithmetic_of_the_lens_unless_told_otherwise(
    work: Work, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    usual = loading.load_model

    def load(*arguments: Any, dtype: str | None = None, **others: Any) -> Model:
        asked.append(dtype)
        return usual(*arguments, dtype=dtype, **others)

    monkeypatch.setattr(loading, "load_model", load)
    train = write(tmp_path / "train.jsonl", rows(toy_questions(TRAINING)))
    ask = write(tmp_path / "ask.jsonl", rows(toy_questions(2, seed=9)))
    line = ("--questions", ask, "--out", tmp_path / "answers.jsonl")
    fitted = coral(
        "fit", "--model", work.model, "--train", train, "--out", tmp_path / "lens", "--layers", "1", "--dtype", "mixed"
    )
    assert fitted.code == 0, fitted.err
    assert coral("predict", "--lens", tmp_path / "lens", *line).code == 0
    other = coral("predict", "--lens", tmp_path / "lens", *line, "--dtype", "bfloat16")
    assert other.code == 0
    assert re.search("computed in mixed, and .* computes in bfloat16", " ".join(other.err.split()))
    assert asked == ["mixed", "mixed", "bfloat16"]


def test_predict_keeps_a_journal_of_many_questions_and_goes_on_with_it(
    work: Work, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(150, seed=4, labelled=False)))
    command = ("predict", "--lens", work.lens, "--questions", asked, "--out")
    assert coral(*command, tmp_path / "few.jsonl").code == 0
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)  # now they are many
    usual, calls = shard_work.gather_shard, []

    def deadly(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return usual(*arguments)

    monkeypatch.setattr(shard_work, "gather_shard", deadly)
    assert "Interrupted" in coral(*command, tmp_path / "many.jsonl").complaint
    journal = tmp_path / "many.jsonl.work" / "journal.jsonl"
    assert journal.read_bytes().count(b"\n") == 2
    assert not (tmp_path / "many.jsonl").exists()
    assert coral(*command, tmp_path / "many.jsonl").code == 0
    assert len(calls) > 4
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "few.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["few.jsonl", "many.jsonl", "new.jsonl"]


def test_extract_keeps_the_layers_asked_for_and_says_so(model: Path, coral: Coral, tmp_path: Path) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(9)))
    outcome = coral(
        "extract", asked, "--model", model, "--out", tmp_path / "states", "--layers", "0,2-3", "--limit", "5"
    )
    assert outcome.code == 0
    assert "5 questions, 3 layers" in outcome.out
    store = ActivationStore(tmp_path / "states")
    assert store.layers == (0, 2, 3)
    assert len(store.table) == 5


def test_the_style_is_part_of_the_lens_and_predict_uses_it(model: Path, coral: Coral, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(toy_questions(20)))
    options = ("--lens", "ridge", "--layers", "1", "--style", "letters", "--base", "sum", "--criterion", "nll")
    options += ("--seed", "3")
    assert coral("fit", "--model", model, "--train", train, "--out", tmp_path / "lens", *options).code == 0
    lens = load_lens(tmp_path / "lens")
    assert (str(lens.style), lens.base) == ("letters", "sum")
    assert lens.training.settings["criterion"] == "nll"
    assert lens.training.settings["seed"] == 3
    assert lens.kind == "ridge"


def test_every_option_of_fit_reaches_the_settings(model: Path, coral: Coral, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(toy_questions(30)))
    options = ("--layers", "1-2", "--folds", "3", "--top-layers", "2", "--inputs", "centred, rank", "--scale-base")
    options += ("--no-temper", "--learning-curve", "--depth", "2")
    outcome = coral("fit", "--model", model, "--train", train, "--out", tmp_path / "lens", *options)
    assert outcome.code == 0, outcome.err
    lens = load_lens(tmp_path / "lens")
    asked = lens.training.settings
    assert (asked["folds"], asked["top_layers"], asked["inputs"], asked["depth"]) == (3, 2, ["centred", "rank"], 2)
    assert (asked["scale_base"], asked["temper"], asked["learning_curve"]) == (True, False, True)
    assert (lens.layers, lens.correction.inputs, lens.method) == ((1, 2), ("centred", "rank"), "listwise")
    assert lens.trace.learning_curve is not None
    assert f"{lens.trace.learning_curve.enough} training questions would have been enough" in outcome.out


def test_calibrate_gives_predict_its_sets_and_abstention(work: Work, coral: Coral, tmp_path: Path) -> None:
    for name in ("lens", "lens.work"):
        shutil.copytree(work.folder / name, tmp_path / name)
    lens, kept = tmp_path / "lens", {p.name for p in (tmp_path / "lens.work").iterdir()}
    mixed = rows([*toy_questions(60, seed=8), *toy_questions(2)])
    held_out = write(tmp_path / "held-out.jsonl", [{**row, "id": f"c{i}"} for i, row in enumerate(mixed)])
    n_known = int(load_lens(lens).is_seen(load_questions(held_out)).sum())
    promised = ("--coverage", "0.8", "--risk", "0.9")
    outcome = coral("calibrate", "--lens", lens, "--questions", held_out, *promised)
    assert outcome.code == 0, outcome.err
    assert n_known >= 2
    assert f"{n_known} questions were left out, because the lens was fitted on them" in outcome.out
    calibrated = load_lens(lens)
    assert calibrated.sets is not None
    assert calibrated.abstention is not None
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(6, seed=4, labelled=False)))
    assert coral("predict", "--lens", lens, "--questions", asked, "--out", tmp_path / "answers.jsonl").code == 0
    for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines():
        answer = json.loads(line)
        assert set(answer["options_in_set"]) <= set(range(len(answer["probs"])))
        assert answer["abstain"] in (True, False)
    assert {p.name for p in (tmp_path / "lens.work").iterdir()} == kept, "the activations of the fit are not touched"
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["answers.jsonl", "held-out.jsonl", "lens", "lens.work", "new.jsonl"]
    known = coral("eval", "--lens", lens, "--task", held_out).complaint
    assert "all 62 questions were used to fit, adapt or calibrate this lens" in known


def test_questions_that_the_user_says_are_of_the_same_kind_are_at_home(
    work: Work, coral: Coral, tmp_path: Path
) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(6, seed=4, labelled=False)))
    out = tmp_path / "answers.jsonl"
    outcome = coral("predict", "--lens", work.lens, "--questions", asked, "--out", out, "--home")
    assert outcome.code == 0, outcome.err
    assert 1.0 in [json.loads(line)["trust"] for line in out.read_text("utf-8").splitlines()]
    assert "cannot be excluded" not in outcome.out, "the user has said whose task it is"
    measured = coral("eval", "--lens", work.lens, "--task", work.folder / "test.jsonl", "--home")
    assert "harm cannot be excluded" not in measured.out
    lens = Path(shutil.copytree(work.lens, tmp_path / "lens"))
    held_out = write(tmp_path / "held-out.jsonl", rows(toy_questions(60, seed=8)))
    assert coral("calibrate", "--lens", lens, "--questions", held_out, "--home").code == 0
    trust = load_lens(lens).trust
    assert trust is not None
    assert trust.everywhere
    few = write(tmp_path / "few.jsonl", rows(toy_questions(12, seed=9)))
    at_home = coral("adapt", "--lens", lens, "--questions", few, "--out", tmp_path / "forgetful")
    assert at_home.code == 0, at_home.err
    assert "adapting makes it forget that task, and the lens as it was fitted is better there" in at_home.err


def test_adapt_makes_a_lens_of_a_task_from_a_few_labels(work: Work, coral: Coral, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", rows(toy_questions(40, seed=8)))
    out = tmp_path / "adapted"
    outcome = coral("adapt", "--lens", work.lens, "--questions", few, "--out", out, "--learning-curve")
    assert outcome.code == 0, outcome.err
    adapted = load_lens(out)
    assert adapted.adaptation is not None
    said = " ".join(outcome.out.split())
    assert str(adapted.adaptation) in said
    assert "better than temperature alone by" in said
    assert "than a standard error over" in said
    assert "makes it forget" not in outcome.err, "it is another task"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted", "few.jsonl"]
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(6, seed=4, labelled=False)))
    predicted = coral("predict", "--lens", out, "--questions", asked, "--out", tmp_path / "answers.jsonl")
    assert predicted.code == 0
    assert "Harm cannot be excluded" not in predicted.out
    assert (
        "use the lens before that"
        in coral(
            "predict", "--lens", out, "--questions", asked, "--out", tmp_path / "answers.jsonl", "--home"
        ).complaint
    )
    assert "is not a lens" in coral("adapt", "--lens", work.lens, "--questions", few, "--out", tmp_path).complaint
    short = ("--questions", few, "--out", tmp_path / "short", "--limit", "9", "--learning-curve")
    assert "needs at least 10 labelled questions" in coral("adapt", "--lens", work.lens, *short).complaint


def test_a_lens_is_adapted_on_another_model_only_where_that_is_said(work: Work, coral: Coral, tmp_path: Path) -> None:
    fitted = load_lens(work.lens)
    replace(fitted, model=fitted.model | {"weights": "0" * 64}).save(tmp_path / "lens")
    few = write(tmp_path / "few.jsonl", rows(toy_questions(12, seed=8)))
    asked = ("adapt", "--lens", tmp_path / "lens", "--questions", few, "--out", tmp_path / "adapted")
    assert "is another model" in coral(*asked).complaint
    outcome = coral(*asked, "--other-model")
    assert outcome.code == 0, outcome.err
    assert "in spite of other weights" in load_lens(tmp_path / "adapted").training.overrides[0]


def test_calibrating_on_training_or_unlabelled_questions_is_refused(work: Work, coral: Coral, tmp_path: Path) -> None:
    lens = Path(shutil.copytree(work.lens, tmp_path / "lens"))
    before = {p.name: p.read_bytes() for p in lens.iterdir()}
    unlabelled = write(tmp_path / "new.jsonl", rows(toy_questions(3, seed=4, labelled=False)))
    assert "has no answer" in coral("calibrate", "--lens", lens, "--questions", unlabelled).complaint
    known = coral("calibrate", "--lens", lens, "--questions", work.folder / "train.jsonl").complaint
    assert "fitted on all of these questions" in known
    assert {p.name: p.read_bytes() for p in lens.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lens", "new.jsonl"], "refused before anything is scored"


def test_lenses_of_several_kinds_are_measured_side_by_side(work: Work, coral: Coral, tmp_path: Path) -> None:
    train, test = work.folder / "train.jsonl", work.folder / "test.jsonl"
    options = ("--lens", "ridge", "--layers", "1-2")
    assert coral("fit", "--model", work.model, "--train", train, "--out", tmp_path / "paper", *options).code == 0
    lenses = ("--lens", tmp_path / "paper", "--lens", work.lens)
    outcome = coral("eval", *lenses, "--task", test, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    (evaluation,) = load_run(tmp_path / "run").evaluations
    assert tuple(evaluation.predictions) == ("base", "temperature", "coral", "listwise", "listwise tempered")


def test_an_overridden_fingerprint_is_recorded_in_the_run(
    work: Work, other_model: Path, coral: Coral, tmp_path: Path
) -> None:
    where = ("--lens", work.lens, "--model", other_model, "--other-model")
    assert coral("eval", *where, "--task", work.folder / "test.jsonl", "--out", tmp_path / "run").code == 0
    (note,) = load_run(tmp_path / "run").provenance["overridden"]
    assert str(work.model) in note
    assert str(other_model) in note
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(3)))
    assert coral("predict", *where, "--questions", asked, "--out", tmp_path / "answers.jsonl").code == 0


def test_push_uploads_a_whole_lens_and_nothing_else(
    work: Work, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = []

    def upload(folder: Path, repo: str, *, private: bool) -> str:
        files = {f.name: f.read_bytes() for f in folder.iterdir()}
        pushed.append((files, load_lens(folder).model["name"], repo, private))
        return "https://hub.example/me/my-lens"

    monkeypatch.setattr(hub, "push_to_hub", upload)
    assert coral("push", work.lens, "me/my-lens").code == 0
    assert coral("push", work.lens, "me/my-lens", "--public").code == 0
    assert [(name, repo, private) for _, name, repo, private in pushed] == [
        (work.model.name, "me/my-lens", True),
        (work.model.name, "me/my-lens", False),
    ]
    files = pushed[0][0]
    assert not any(str(work.model).encode() in content for content in files.values()), "no path of this machine is sent"
    for name in ("lens.safetensors", "README.md"):
        assert files[name] == (work.lens / name).read_bytes()
    assert "is not a lens" in coral("push", tmp_path, "me/my-lens").complaint


def test_doctor_reports_what_it_found_and_fails_where_a_check_fails(
    model: Path, coral: Coral, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = coral("doctor", model)
    assert healthy.code == 0
    assert "LlamaForCausalLM" in healthy.out
    assert "BAD" not in healthy.out
    monkeypatch.setattr(doctor, "examine", lambda _: [Finding("heart", "missing", ok=False)])
    sick = coral("doctor", model)
    assert re.search(r"BAD.* heart: +missing", sick.out)
    assert "failed a check" in sick.complaint


def test_an_edited_file_and_the_same_lens_says_what_to_do(model: Path, coral: Coral, tmp_path: Path) -> None:
    asked = rows(toy_questions(24))
    train, fit = write(tmp_path / "train.jsonl", asked), ("--lens", "ridge", "--out", tmp_path / "lens")
    assert coral("fit", "--train", train, "--model", model, *fit).code == 0
    fewer = coral("fit", "--train", train, "--model", model, *fit, "--layers", "1")
    assert fewer.code == 0, "states of all layers are those of one, too"
    write(train, asked[:-1])
    complaint = coral("fit", "--train", train, "--model", model, *fit).complaint
    assert f"{tmp_path / 'lens.work'} holds the states of other questions" in complaint
    assert "delete that folder to compute them anew" in complaint


def test_tasks_without_data_says_how_to_get_it(coral: Coral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "available_tasks", lambda _: [])
    monkeypatch.setattr(assets, "embedded_data", lambda: None)
    outcome = coral("tasks")
    assert outcome.out.startswith("No task's data is on this machine.\n`coral assets` fetches")
    found = [AvailableTask("arc_easy", {"test": 2376}, "embedded", "")]
    monkeypatch.setattr(tasks, "available_tasks", lambda _: found)
    monkeypatch.setattr(assets, "embedded_data", lambda: Path())
    assert coral("tasks", "arc_eazy").out.strip().endswith("Did you mean 'arc_easy'?")


def test_show_prints_the_prompt_the_options_and_their_tokens(model: Path, coral: Coral, tmp_path: Path) -> None:
    row = {"question": "What is wet?", "options": ["fire", "water"], "answer": 1, "id": "wet"}
    path = write(tmp_path / "questions.jsonl", [row, row | {"id": "again"}])
    text = """\
--- question wet, the prompt:
Question: What is wet?
Answer:
--- scored after it:
  0  " fire"
* 1  " water"
"""
    assert coral("show", path, "--limit", "1").out == text
    with_tokens = coral("show", path, "--limit", "1", "--model", model).out
    assert with_tokens.startswith(text)
    assert "option 0: 5 tokens" in with_tokens, "the tiny tokenizer reads bytes"
    assert "A. fire" in coral("show", path, "--style", "letters").out
    assert "give --model" in coral("show", path, "--apply-chat-template").complaint


def test_tasks_lists_what_contains_the_word(coral: Coral, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        AvailableTask("arc_easy", {"test": 2376}, "embedded", "CC BY-SA 4.0"),
        AvailableTask("piqa", {"test": 1}, "embedded", "AFL-3.0"),
    ]
    monkeypatch.setattr(tasks, "available_tasks", lambda _: found)
    outcome = coral("tasks", "arc")
    assert outcome.code == 0
    assert "arc_easy" in outcome.out
    assert "test 2,376" in outcome.out
    assert "piqa" not in outcome.out


def test_the_demo_without_its_assets_says_how_to_get_them(
    coral: Coral, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assets, "embedded_model", lambda: None)
    assert "coral assets" in coral("demo", "--out", tmp_path / "demo").complaint
    assert not (tmp_path / "demo").exists()


# ---------------------------------------------------------------------------------------------------------- bad input

GOOD = {"question": "Which?", "options": ["this", "that"], "answer": 0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b'{"question": "caf\xe9"}\n', "line 1: not UTF-8"),
        (b'{"question": "Which?", "options": ["a", "b"], "answer": 0}\n{"question": \n', "line 2: malformed JSON"),
        (json.dumps({**GOOD, "answer": 3}).encode(), "3 is out of range"),
        (json.dumps({**GOOD, "answer": -1}).encode(), "line 1, field 'answer': -1 is out of range"),
        (json.dumps({**GOOD, "options": ["this"]}).encode(), "has 1 option(s)"),
        (json.dumps({**GOOD, "options": ["this", " "]}).encode(), "empty option (number 2)"),
        ((json.dumps({**GOOD, "id": "q"}) + "\n").encode() * 2, "lines 1 and 2: both have the id 'q'"),
        (b"", "holds no questions"),
        (json.dumps(GOOD).encode(), "at least 20 labelled questions"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_place(
    model: Path, coral: Coral, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_bytes(content)
    complaint = coral("fit", "--model", model, "--train", path, "--out", tmp_path / "lens").complaint
    assert said in complaint
    assert not (tmp_path / "lens").exists()


def test_a_file_without_read_permission_is_one_sentence(
    model: Path, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train.jsonl", [GOOD])
    real = Path.open

    def denied(self: Path, *arguments: Any, **rest: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(self, *arguments, **rest)

    monkeypatch.setattr(Path, "open", denied)  # root may read everything, so that chmod would prove nothing
    complaint = coral("fit", "--model", model, "--train", path, "--out", tmp_path / "lens").complaint
    assert f"{path} cannot be read: Permission denied" in complaint


def test_the_same_id_in_two_files_is_refused(model: Path, coral: Coral, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", rows(toy_questions(12)))
    files = ("--train", tmp_path / "a.jsonl", "--train", tmp_path / "b.jsonl")
    assert "'0' comes twice" in coral("fit", "--model", model, *files, "--out", tmp_path / "lens").complaint


def test_an_unknown_task_is_answered_with_the_nearest_names(model: Path, coral: Coral, tmp_path: Path) -> None:
    complaint = coral("fit", "--model", model, "--train", "arc_chalenge", "--out", tmp_path / "lens").complaint
    assert "no task called 'arc_chalenge'" in complaint
    assert "Did you mean 'arc_challenge'" in complaint


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such.gguf", "empty folder"])
def test_an_unknown_model_is_one_sentence_with_its_name(coral: Coral, tmp_path: Path, name: str) -> None:
    if name == "empty folder":
        name = str(tmp_path)
    assert name in coral("doctor", name).complaint


def test_a_lens_for_another_model_is_refused_with_both_fingerprints(
    work: Work, other_model: Path, coral: Coral, tmp_path: Path
) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(3)))
    where = ("--lens", work.lens, "--model", other_model)
    complaints = [
        coral("predict", *where, "--questions", asked, "--out", tmp_path / "answers.jsonl").complaint,
        coral("eval", *where, "--task", asked).complaint,
    ]
    for complaint in complaints:
        assert str(work.model) in complaint
        assert load_lens(work.lens).model["weights"][:12] in complaint
        assert str(other_model) in complaint
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_folder_that_is_no_lens_or_no_run_is_refused(coral: Coral, tmp_path: Path) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(3)))
    nothing = ("predict", "--lens", tmp_path, "--questions", asked, "--out", tmp_path / "answers.jsonl")
    assert "is not a lens" in coral(*nothing).complaint
    assert "run.json does not exist" in coral("report", tmp_path).complaint


def test_a_damaged_lens_is_refused(work: Work, coral: Coral, tmp_path: Path) -> None:
    lens = Path(shutil.copytree(work.lens, tmp_path / "lens"))
    raw = bytearray((lens / "lens.safetensors").read_bytes())
    raw[-1] ^= 1
    (lens / "lens.safetensors").write_bytes(raw)
    assert "damaged" in coral("eval", "--lens", lens, "--task", tmp_path / "none.jsonl").complaint


@pytest.mark.parametrize("text", ["twelve", "1-", "-1", "3-1", "1,,2", "", "1.5", "²", "1-2-3", "99999"])
def test_layers_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(CoralError, match="must look like 0,16 or 12-20"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("text", "layers"), [("3", (3,)), ("0,16", (0, 16)), ("2-4", (2, 3, 4)), ("4, 1 - 2,2", (1, 2, 4))]
)
def test_layers_are_numbers_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--layers", "first"), "--layers must look like"),
        (("--layers", "2-9"), "Layer 4 does not exist"),
        (("--data", "no such folder"), "--data no such folder is not a folder"),
        (("--style", "prose"), "Unknown style 'prose'"),
        (("--lens", "listwize"), "Did you mean 'listwise'"),
        (("--inputs", "centered"), "Did you mean 'centred'"),
        (("--folds", "21"), "folds must lie between 0 and 20"),
        (("--depth", "5"), "depth must lie between 1 and 4"),
        (("--lens", "ensemble", "--top-layers", "2"), "averages probes of single layers"),
        (("--temper", "--then-temperature"), "has its own temperature"),
        (("--limit", "0"), "limit must be at least 1"),
        (("--dtype", "float8"), "Unknown dtype 'float8'"),
        (("--apply-chat-template",), "no chat template"),
        (("--out", "."), "exists and is not a lens"),
    ],
)
def test_a_bad_option_is_one_sentence_and_leaves_nothing_behind(
    model: Path, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", rows(toy_questions(20)))
    assert said in coral("fit", "--model", model, "--train", "train.jsonl", "--out", "lens", *options).complaint
    assert [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]


def test_the_current_folder_cannot_become_a_lens_even_if_it_is_empty(
    model: Path, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write(tmp_path / "train.jsonl", rows(toy_questions(20)))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "--out . has no name" in coral("fit", "--model", model, "--train", train, "--out", ".").complaint


def test_an_out_folder_with_other_files_is_never_replaced(model: Path, coral: Coral, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(toy_questions(20)))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "wedding.jpg").write_bytes(b"x")
    complaint = coral("fit", "--model", model, "--train", train, "--out", tmp_path / "photos").complaint
    assert "exists and is not a lens" in complaint
    assert (tmp_path / "photos" / "wedding.jpg").read_bytes() == b"x"


def test_evaluating_on_training_or_unlabelled_questions_is_refused(work: Work, coral: Coral, tmp_path: Path) -> None:
    unlabelled = write(tmp_path / "new.jsonl", rows(toy_questions(3, seed=4, labelled=False)))
    assert "have no answer" in coral("eval", "--lens", work.lens, "--task", unlabelled).complaint
    known = coral("eval", "--lens", work.lens, "--task", work.folder / "train.jsonl").complaint
    assert f"all {TRAINING} questions were used to fit, adapt or calibrate this lens" in known


def test_changed_predictions_are_refused_by_report(work: Work, coral: Coral, tmp_path: Path) -> None:
    run = Path(shutil.copytree(work.folder / "run", tmp_path / "run"))
    (path,) = (run / "predictions").iterdir()
    path.write_bytes(path.read_bytes().replace(b"Toy", b"Boy", 1))
    assert "was changed after the run" in coral("report", run).complaint


def test_a_store_of_other_questions_is_refused_and_kept(model: Path, coral: Coral, tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", rows(toy_questions(4)))
    second = write(tmp_path / "second.jsonl", rows(toy_questions(4, seed=1)))
    assert coral("extract", first, "--model", model, "--out", tmp_path / "states").code == 0
    complaint = coral("extract", second, "--model", model, "--out", tmp_path / "states").complaint
    assert "states holds the states of other questions" in complaint
    assert "delete that folder to compute them anew, or choose another" in complaint
    assert len(ActivationStore(tmp_path / "states").questions) == 4


def test_a_full_disk_is_one_sentence(
    model: Path, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(4)))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    complaint = coral("extract", asked, "--model", model, "--out", tmp_path / "states").complaint
    assert "no space left on the disk" in complaint


def test_a_full_disk_anywhere_else_is_one_sentence_too(coral: Coral, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tasks, "available_tasks", full)
    assert "No space left on the disk" in coral("tasks").complaint


# ------------------------------------------------------------------------------------------------------ other processes

SLOW = """
import signal, sys, time
from coral_lens.engine import extract as store, shard_work
from coral_lens.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to Ctrl-C

store.SHARD_BYTES = 1
real = shard_work.gather_shard

def slow(*arguments, **rest):
    time.sleep(0.3)
    return real(*arguments, **rest)

shard_work.gather_shard = slow
main()
"""


def test_an_interrupted_run_says_so_and_goes_on_to_the_same_bytes(
    model: Path, coral: Coral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = write(tmp_path / "new.jsonl", rows(toy_questions(150)))
    command = ("extract", asked, "--model", model, "--out")
    journal = tmp_path / "states" / "journal.jsonl"
    arguments = [sys.executable, "-c", SLOW, *map(str, command), str(tmp_path / "states")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    complaint = Outcome(process.returncode, out, err).complaint
    assert "Interrupted. Finished work is kept" in complaint
    kept = journal.read_bytes()
    assert kept.count(b"\n") >= 2

    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)
    assert coral(*command, tmp_path / "undisturbed").code == 0
    assert coral(*command, tmp_path / "states").code == 0
    resumed, whole = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("states", "undisturbed"))
    assert resumed == whole
    assert len(kept) < len(whole["journal.jsonl"])
    assert whole["journal.jsonl"].startswith(kept)


def run_coral(*arguments: str | Path) -> Outcome:
    done = subprocess.run([CORAL, *map(str, arguments)], capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_the_installed_command_refuses_a_malformed_line_without_a_traceback(model: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [*rows(toy_questions(20)), '{"question": '])
    complaint = run_coral("fit", "--model", model, "--train", train, "--out", tmp_path / "lens").complaint
    assert f"{train}, line 21: malformed JSON" in complaint


def test_the_installed_command_refuses_an_unknown_base_score_with_the_nearest(model: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(toy_questions(20)))
    options = ("--train", train, "--out", tmp_path / "lens", "--base", "tokens")
    assert "Did you mean 'token'" in run_coral("fit", "--model", model, *options).complaint


HELP = """
import sys
sys.argv = ["coral", *sys.argv[1:]]
from coral_lens.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
import coral_lens
HEAVY = {"torch", "transformers", "lm_eval", "numpy", "scipy", "datasets", "sklearn", "matplotlib"}
print("IMPORTED", *sorted(HEAVY & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [("--help",), ("fit", "--help")])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=True)
    assert "Usage: coral" in done.stdout
    assert done.stdout.splitlines()[-1] == "IMPORTED"


def test_an_answer_needs_nothing_that_only_reports_benchmarks_and_fits_need(work: Work, tmp_path: Path) -> None:
    new = write(tmp_path / "new.jsonl", [{"question": "2 + 2?", "options": ["3", "4"]}])
    arguments = ("predict", "--lens", work.lens, "--questions", new, "--out", tmp_path / "answers.jsonl")
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=True)
    assert (tmp_path / "answers.jsonl").exists()
    program = "import sys, transformers.generation.candidate_generator as _; print('sklearn' in sys.modules)"
    theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    # older versions of transformers import it by themselves
    allowed = {"torch", "transformers", "numpy", "scipy"} | ({"sklearn"} if "True" in theirs else set())
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= allowed


# -------------------------------------------------------------------------------------------------------------- help


def test_help_and_the_reference_list_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "<bool>" not in result.output
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text("utf-8")
    for name, *rest in COMMANDS:
        assert re.search(rf"\b{name}\b", result.output)
        assert f"| [`coral {' '.join([name, *rest])}`]" in reference


def write_study(folder: Path, model: str | Path, **files: Path) -> Path:
    text = f"""
name = "toy"
models = ["{model}"]
layers = [1, 2]
mixture = [{{ name = "mine", sources = [{{ task = "{files["train"]}", shots = 0 }}] }}]
test = [{{ task = "{files["test"]}", shots = 0 }}]
method = [{{ kind = "ridge" }}]
"""
    path = folder / "toy.toml"
    path.write_text(text, "utf-8")
    return path


def test_run_lists_the_ready_made_studies_and_asks_for_one(coral: Coral) -> None:
    listed = coral("run", "--list")
    assert listed.code == 0, listed.err
    assert len(listed.out.splitlines()) == 11
    assert "probe1-small     The paper's Probe 1, scaled for SmolLM2 on 2 cores." in listed.out.splitlines()
    assert "Give a study" in coral("run").complaint


def test_run_runs_a_study_to_its_report_and_checks_it_first(
    coral: Coral, model: Path, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"train": work.folder / "train.jsonl", "test": work.folder / "test.jsonl"}
    checked = coral("run", write_study(tmp_path, "no/such-model", **files), "--check")
    assert checked.code == 0, checked.err
    assert "loading" not in checked.err
    # three training questions are in the test set too
    assert re.search(r"mine 3 37 /.*", " ".join(checked.out.split()))
    assert not (tmp_path / "toy").exists()
    done = coral("run", write_study(tmp_path, model, **files))
    assert done.code == 0, done.err
    assert "Report: toy/report.html" in done.out
    assert "loading" in done.err
    again = coral("run", write_study(tmp_path, model, **files))
    assert again.code == 0
    assert "loading" not in again.err, "finished work is not done again"
    assert again.out == done.out
    assert load_run(next((tmp_path / "toy" / "runs").glob("*/mine"))).evaluations[0].name == str(files["test"])


def test_a_mistake_in_a_study_is_one_sentence_before_a_model_is_loaded(
    coral: Coral, work: Work, tmp_path: Path
) -> None:
    files = {"train": work.folder / "train.jsonl", "test": work.folder / "test.jsonl"}
    study = write_study(tmp_path, "no/such-model", **files)
    study.write_text(study.read_text("utf-8").replace("layers", "layrs"), "utf-8")
    outcome = coral("run", study)
    assert "'layrs' here. Did you mean 'layers'" in outcome.complaint
    assert "loading" not in outcome.err
    assert "is not a folder" in coral("run", study, "--data", tmp_path / "nowhere").complaint


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in FOREIGN], ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    said = " ".join(re.sub(r"[│|]", " ", result.output).split())
    assert re.search(rf"Example: coral {' '.join(command)}\b", said)
    assert "<bool>" not in said, "a flag takes no value"


def test_the_command_the_package_and_the_citation_have_one_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text("utf-8"))
    assert (result.exit_code, result.output) == (0, f"coral-lens {project['version']}\n")
    assert citation["version"] == project["version"]
    assert (citation["title"], citation["license"], citation["keywords"]) == (
        project["name"],
        project["license"],
        project["keywords"],
    )


@pytest.mark.parametrize(
    ("typed", "completed"), [("coral ev", "eval"), ("coral sae st", "steer"), ("coral fit --trai", "--train")]
)
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    asked = {"_CORAL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    result = CliRunner().invoke(app, [], env=asked, prog_name="coral")
    assert result.output.split() == [completed]
