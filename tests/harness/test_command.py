"""`coral lm-eval` is lm-eval's own command line with the model `coral`; its numbers are those of `coral eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.__main__
import lm_eval.tasks
import numpy as np
import pytest
from lm_eval.tasks import TaskManager
from support.lm_eval_runs import manager, real_task, write_task
from support.models import make_model
from support.questions import toy_questions

from coral_lens.cli import main
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine import extract as store
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.scoring import TOKEN_BUDGET
from coral_lens.harness import model as lm_eval_model
from coral_lens.harness.command import kinds_of, run_lm_eval
from coral_lens.harness.logs import run_of_logs
from coral_lens.harness.scoring import Shape
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.scores import score
from coral_lens.records import Question
from coral_lens.report.runs import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = toy_questions(12, seed=3)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's command line would read the definitions of all its 14,000 tasks, which takes longer than all of this."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    # its log handlers would outlive the captured streams of a test
    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def coral(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["coral", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run


def write_questions(path: Path, questions: Sequence[Question]) -> Path:
    rows = [{"id": q.id, "question": q.text, "options": list(q.options), "answer": q.answer} for q in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, another, a lens of the first, and tasks."""
    folder = tmp_path_factory.mktemp("work")
    for name, seed in (("tiny", 0), ("other", 1)):
        model = make_model("llama", seed=seed)
        model.hf.save_pretrained(folder / name)
        model.tokenizer.save_pretrained(folder / name)
    model = load_model(str(folder / "tiny"))
    replace(fit(model, toy_questions(40), FitSettings(layers=(1, 2))), gamma=1.5).save(folder / "lens")
    write_questions(folder / "toy.jsonl", ASKED)
    write_task(folder / "tasks", ASKED)
    write_task(folder / "text", ASKED, task="said", output_type="generate_until", doc_to_choice=None,
               doc_to_target="{{options[answer]}}", metrics=["exact_match"])  # fmt: skip
    return folder


def with_lens(work: Path, *arguments: str | Path, model: str = "tiny") -> list[str | Path]:
    return ["--model", "coral", "--model_args", f"pretrained={work / model},lens={work / 'lens'}", *arguments]


@pytest.mark.filterwarnings("default:With a lens:UserWarning")
def test_lm_evals_command_line_logs_what_coral_eval_measures(work: Path, coral: Any, tmp_path: Path) -> None:
    asked = with_lens(work, "--tasks", "toy", "--include_path", work / "tasks")
    steered = coral("lm-eval", "run", *asked, "--log_samples", "--output_path", tmp_path / "logs")
    assert steered.code == 0, steered.err
    assert steered.err.count("acc_norm and acc_bytes divide them by length") == 1
    measured = coral("eval", "--lens", work / "lens", "--task", work / "toy.jsonl", "--out", tmp_path / "run")
    assert measured.code == 0, measured.err
    (evaluation,) = load_run(tmp_path / "run").evaluations
    expected = evaluation.predictions["listwise tempered"]

    samples = sorted((tmp_path / "logs").rglob("samples_toy_*.jsonl"))
    again = coral("eval", "--lm-eval-samples", *samples, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    (logged,) = load_run(tmp_path / "again").evaluations
    assert list(logged.predictions) == ["sum (acc)"], "log p' is not divided by lengths"
    assert logged.predictions["sum (acc)"].probs == pytest.approx(expected.probs, abs=1e-9)
    assert logged.predictions["sum (acc)"].answers.tolist() == expected.answers.tolist()

    (results,) = (tmp_path / "logs").rglob("results_*.json")
    found = json.loads(results.read_text("utf-8"))
    names = {"acc": "accuracy", "ece": "ece", "cwece": "cwece", "brier": "brier"}
    assert {n: found["results"]["toy"][f"{n},none"] for n in names} == pytest.approx(
        {n: score(expected, ours) for n, ours in names.items()}
    )
    assert found["config"]["lens"]["gamma"] == 1.5


@pytest.mark.filterwarnings("default:With a lens:UserWarning")
def test_the_real_model_with_a_real_lens_has_the_numbers_of_coral_eval(
    smollm2: Model, coral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_model, "choose_shape", lambda _: Shape("tree", TOKEN_BUDGET))  # without a timing
    monkeypatch.setattr(store, "choose_budget", lambda _: TOKEN_BUDGET)
    train = load_questions("commonsense_qa_cloze:validation", TaskOptions(limit=30))
    fit(smollm2, train, FitSettings(layers=(16,))).save(tmp_path / "lens")
    (tmp_path / "tasks").mkdir()
    asked = ("--tasks", "arc_easy", "--include_path", real_task(tmp_path / "tasks"), "--limit", "16")
    logs = ("--log_samples", "--output_path", tmp_path / "logs")
    with_lens = f"pretrained=smollm2,lens={tmp_path / 'lens'}"
    assert coral("lm-eval", "run", "--model", "coral", "--model_args", with_lens, *asked, *logs).code == 0
    measured = coral(
        "eval", "--lens", tmp_path / "lens", "--task", "arc_easy:validation", "--limit", "16", "--out", tmp_path / "run"
    )
    assert measured.code == 0, measured.err
    (evaluation,) = load_run(tmp_path / "run").evaluations
    expected = evaluation.predictions["listwise tempered"]
    assert len(expected) == 16
    assert not np.allclose(expected.probs, evaluation.predictions["base"].probs, atol=0.01), "the lens does something"
    (samples,) = (tmp_path / "logs").rglob("samples_arc_easy_*.jsonl")
    (logged,) = run_of_logs([str(samples)]).evaluations
    assert logged.predictions["sum (acc)"].probs == pytest.approx(expected.probs, abs=1e-5)
    (results,) = (tmp_path / "logs").rglob("results_*.json")
    found = json.loads(results.read_text("utf-8"))["results"]["arc_easy"]
    for name, ours in {"acc": "accuracy", "ece": "ece", "cwece": "cwece", "brier": "brier"}.items():
        assert found[f"{name},none"] == pytest.approx(score(expected, ours), abs=1e-5)


def test_without_a_lens_the_tables_of_coral_and_hf_are_alike(work: Path, coral: Any) -> None:
    def table(model: str) -> list[str]:
        arguments = ("--model", model, "--model_args", f"pretrained={work / 'tiny'},dtype=float32", "--device", "cpu")
        found = coral("lm-eval", *arguments, "--tasks", "toy", "--include_path", work / "tasks", "--limit", "6")
        assert found.code == 0, found.err
        return [line for line in found.out.splitlines() if line.startswith("|")]

    assert table("coral") == table("hf")
    assert any("|ece " in line for line in table("hf")), "calibration is measured for every model"


def test_all_arguments_reach_lm_eval_unchanged_and_nothing_is_left_behind(
    coral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    odd = [
        "run",
        "-M",
        "coral",
        "-a",
        "pretrained=x,gamma=0",
        "-sx",
        "--tasks",
        "a,b",
        "c",
        "-h",
        "--gen_kwargs",
        "x=-1",
    ]
    assert coral("lm-eval", *odd).code == 0
    assert coral("lm-eval", "--help").code == 0
    assert coral("lm-eval").code == 0
    assert seen == [["lm-eval", *odd], ["lm-eval", "--help"], ["lm-eval"]]
    before = list(sys.argv)
    run_lm_eval(["ls", "tasks"])
    assert sys.argv == before
    assert "simple_evaluate" not in vars(lm_eval)


def complaint(outcome: Outcome) -> str:
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    last = outcome.err.rstrip().splitlines()[-1]
    assert last.startswith("coral: ")
    return last


def test_what_a_lens_cannot_correct_is_refused_before_a_model_is_loaded(
    work: Path, coral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_model, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    said = coral("lm-eval", *with_lens(work, "--tasks", "said", "--include_path", work / "text"))
    assert "Task 'said' has output_type 'generate_until'; a lens corrects multiple-choice tasks only" in complaint(said)
    kept = with_lens(work, "--tasks", "toy", "--include_path", work / "tasks", "--use_cache", tmp_path / "kept")
    assert "--use_cache keeps answers by their text alone" in complaint(coral("lm-eval", *kept))
    wrong = ("--model", "coral", "--model_args", f"pretrained={work / 'tiny'},lense=x")
    asked = ("--tasks", "toy", "--include_path", work / "tasks")
    assert "Did you mean 'lens'?" in complaint(coral("lm-eval", *wrong, *asked))


def test_a_lens_of_another_model_is_one_sentence(work: Path, coral: Any) -> None:
    asked = with_lens(work, "--tasks", "toy", "--include_path", work / "tasks", model="other")
    assert "whose weights are" in complaint(coral("lm-eval", "run", *asked))


def test_without_a_lens_text_is_generated_as_ever(work: Path, coral: Any) -> None:
    asked = ("--model_args", f"pretrained={work / 'tiny'}", "--tasks", "said", "--include_path", work / "text")
    outcome = coral("lm-eval", "--model", "coral", *asked, "--limit", "2", "--gen_kwargs", "max_gen_toks=4")
    assert outcome.code == 0, outcome.err
    assert "exact_match" in outcome.out


def test_groups_tags_and_tasks_in_place_are_looked_through(work: Path, tmp_path: Path) -> None:
    write_task(tmp_path, ASKED[:2], task="one", tag="tagged")
    write_task(tmp_path, ASKED[:2], task="two", output_type="generate_until", tag="tagged")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [one, {task: two}, {group: inner, task: [one]}]\n", "utf-8")
    index = manager(tmp_path).task_index
    one, two = ("one", "multiple_choice"), ("two", "generate_until")
    assert list(kinds_of("one", index)) == [one]
    assert list(kinds_of("tagged", index)) == [one, two]
    assert list(kinds_of("all", index)) == [one, two, one]
    assert list(kinds_of({"task": "new", "output_type": "loglikelihood"}, index)) == [("new", "loglikelihood")]
    assert list(kinds_of({"task": "one", "num_fewshot": 2}, index)) == [one]


def test_samples_stand_alone_on_the_command_line(work: Path, coral: Any, tmp_path: Path) -> None:
    assert "leave --lens and --task out" in complaint(
        coral("eval", "--lm-eval-samples", tmp_path, "--lens", work / "lens")
    )
    assert "Give --lens and --task, or --lm-eval-samples" in complaint(coral("eval", "--task", "arc_easy"))
    assert "Unexpected argument 'arc_easy'" in complaint(coral("eval", "--lens", work / "lens", "arc_easy"))
    assert "no such file" in complaint(coral("eval", "--lm-eval-samples", tmp_path / "x.jsonl"))
