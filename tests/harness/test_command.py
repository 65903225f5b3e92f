"""`coral lm-eval` is lm-eval's own command line with the model `coral`; its numbers are those of `coral eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.__main__
import lm_eval.tasks
import numpy as np
import pytest
from lm_eval.tasks import TaskManager
from support.lm_eval_runs import definitions_of, manager, write_task
from support.models import make_model
from support.questions import toy_questions

from coral_lens.cli import main
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine import planned as planned_module
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.scoring import TOKEN_BUDGET
from coral_lens.harness import model as lm_eval_model
from coral_lens.harness.command import configs_of, run_lm_eval
from coral_lens.harness.logs import run_of_logs
from coral_lens.harness.scoring import Shape
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.scores import score
from coral_lens.records import Question
from coral_lens.report.runs import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = toy_questions(12, seed=3)
REAL = ("--tasks", "arc_easy", "--include_path", definitions_of("arc"))
"""lm-eval's own ARC-Easy, of which the embedded data has the validation questions."""


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
    monkeypatch.setattr(planned_module, "choose_budget", lambda *_: TOKEN_BUDGET)
    train = load_questions("commonsense_qa_cloze:validation", TaskOptions(limit=20))
    fit(smollm2, train, FitSettings(layers=(16,))).save(tmp_path / "lens")
    asked = (*REAL, "--split", "validation", "--limit", "8")
    logs = ("--log_samples", "--output_path", tmp_path / "logs")
    with_lens = f"pretrained=smollm2,lens={tmp_path / 'lens'}"
    assert coral("lm-eval", "run", "--model", "coral", "--model_args", with_lens, *asked, *logs).code == 0
    measured = coral(
        "eval", "--lens", tmp_path / "lens", "--task", "arc_easy:validation", "--limit", "8", "--out", tmp_path / "run"
    )
    assert measured.code == 0, measured.err
    (evaluation,) = load_run(tmp_path / "run").evaluations
    expected = evaluation.predictions["listwise tempered"]
    assert len(expected) == 8
    assert not np.allclose(expected.probs, evaluation.predictions["base"].probs, atol=0.01), "the lens does something"
    (samples,) = (tmp_path / "logs").rglob("samples_arc_easy_*.jsonl")
    (logged,) = run_of_logs([str(samples)]).evaluations
    assert logged.predictions["sum (acc)"].probs == pytest.approx(expected.probs, abs=1e-5)
    (results,) = (tmp_path / "logs").rglob("results_*.json")
    found = json.loads(results.read_text("utf-8"))["results"]["arc_easy"]
    for name, ours in {"acc": "accuracy", "ece": "ece", "cwece": "cwece", "brier": "brier"}.items():
        assert found[f"{name},none"] == pytest.approx(score(expected, ours), abs=1e-5)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network here")

    monkeypatch.setattr(datasets, "load_dataset", offline)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.filterwarnings("default:.*longer than the model reads")
def test_a_real_task_has_its_questions_from_the_embedded_data_and_its_examples_from_a_folder(
    work: Path, coral: Any, tmp_path: Path
) -> None:
    (tmp_path / "data" / "arc_easy").mkdir(parents=True)
    pool = [{"question": q.text, "choices": {"text": list(q.options), "label": list("ABCDE"[: len(q.options)])},
             "answerKey": "ABCDE"[q.answer], "id": q.id} for q in ASKED]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in pool)
    (tmp_path / "data" / "arc_easy" / "train.jsonl").write_text(lines, "utf-8")
    model = ("--model", "coral", "--model_args", f"pretrained={work / 'tiny'}")
    asked = (*REAL, "--split=validation", "--limit=4", f"--data={tmp_path / 'data'}", "--num_fewshot", "2")
    outcome = coral("lm-eval", *model, *asked, "--log_samples", "--output_path", tmp_path / "logs")
    assert outcome.code == 0, outcome.err
    assert "3 of 4 prompts were longer than the model reads" in outcome.err
    (samples,) = (tmp_path / "logs").rglob("samples_arc_easy_*.jsonl")
    logged = [json.loads(line)["arguments"] for line in samples.read_text("utf-8").splitlines()]
    contexts = [[row["arg_0"] for row in arguments.values()] for arguments in logged]
    options = TaskOptions(limit=4, num_fewshot=2, data_dir=tmp_path / "data")
    questions = load_questions("arc_easy:validation", options)
    assert contexts == [list(q.rendered.contexts) for q in questions if q.rendered]
    (results,) = (tmp_path / "logs").rglob("results_*.json")
    assert json.loads(results.read_text("utf-8"))["configs"]["arc_easy"]["test_split"] == "validation"


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


@pytest.mark.usefixtures("no_hub")
def test_data_that_is_nowhere_is_one_sentence_before_a_model_is_loaded(
    work: Path, coral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_model, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    said = complaint(coral("lm-eval", "run", *with_lens(work, *REAL)))
    assert "needs its split 'test'" in said
    assert "(--split validation), or give the data with --data DIR, as DIR/arc_easy/test.jsonl" in said
    shots = with_lens(work, *REAL, "--split", "validation", "--num_fewshot", "2")
    assert "worked examples from its split 'train'" in complaint(coral("lm-eval", "run", *shots))
    nowhere = with_lens(work, *REAL, "--data", tmp_path / "nowhere")
    assert "nowhere is not a folder" in complaint(coral("lm-eval", *nowhere))


TASK = ("--tasks", "toy")
TINY = ("--model", "coral", "--model_args", "pretrained=tiny")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*TINY, *TASK, "--log_samples"), "lm-eval: Specify --output_path if providing --log_samples"),
        ((*TINY, *TASK, "--samples", "[0]", "--limit", "1"), "lm-eval: If --samples is not None"),
        ((*TINY, "--tasks", "arc_esy"), "lm-eval: Tasks not found: arc_esy. Did you mean 'arc_easy'"),
        ((*TINY, "--tasks", "toy,commonsense_q"), "not found: commonsense_q. Did you mean 'commonsense_qa'"),
        ((*TINY[:2], "--model_args", "pretrained=smollm2,lnes=x", *TASK), "Did you mean 'lens'?"),
        ((*TINY[:2], "--model_args", "pretrained=tiny,lens=no/such/lens", *TASK), "no/such/lens"),
        ((*TINY[:2], "--model_args", "pretrained=tiny,lens=lens,gamma=-1", *TASK), "gamma must be a number"),
        (("--model", "corl", *TASK), "lm-eval knows no model called 'corl'. Did you mean 'coral'?"),
        (("--config", "no/such.yaml"), "lm-eval: Config file not found"),
        (("--config", "wrong.yaml"), "unexpected keyword argument 'modle'"),
        ((*TINY, *TASK, "--data"), "--data --include_path is not a folder"),
    ],
)
def test_a_mistake_in_lm_evals_arguments_is_one_sentence(
    arguments: tuple[str, ...], said: str, work: Path, coral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr(lm_eval_model, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (work / "wrong.yaml").write_text("modle: coral\n", "utf-8")
    outcome = coral("lm-eval", "run", *arguments, "--include_path", "tasks")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert said in outcome.err.rstrip().splitlines()[-1]


def test_a_failure_of_a_run_that_had_begun_keeps_its_traceback(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr(lm_eval_model.CoralLM, "loglikelihood", lambda *_, **__: int("our own bug"))
    with pytest.raises(ValueError, match="our own bug"):
        run_lm_eval(["run", *TINY, *TASK, "--include_path", "tasks"])


def test_a_lens_of_another_model_is_one_sentence(work: Path, coral: Any) -> None:
    asked = with_lens(work, "--tasks", "toy", "--include_path", work / "tasks", model="other")
    assert "is another model (weights" in complaint(coral("lm-eval", "run", *asked))


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

    def kinds_of(task: Any) -> list[tuple[str, str]]:
        return [(config["task"], config["output_type"]) for config in configs_of(task, index)]

    one, two = ("one", "multiple_choice"), ("two", "generate_until")
    assert kinds_of("one") == [one]
    assert kinds_of("tagged") == [one, two]
    assert kinds_of("all") == [one, two, one]
    assert kinds_of({"group": "all"}) == [one, two, one]
    assert kinds_of({"task": "new", "output_type": "loglikelihood"}) == [("new", "loglikelihood")]
    assert kinds_of({"task": "one", "num_fewshot": 2}) == [one]
    assert kinds_of("unknown") == []


def test_what_a_group_changes_in_its_tasks_is_seen_as_lm_eval_makes_it(tmp_path: Path) -> None:
    write_task(tmp_path, ASKED[:2], task="one", tag="tagged")
    inner = "{group: inner, num_fewshot: 3, description: X, task: [one]}"
    (tmp_path / "outer.yaml").write_text(
        f"group: outer\ntask: [{{task: one, num_fewshot: 1}}, tagged, {inner}]\nrepeats: 2\n", "utf-8"
    )
    changed = [
        (config.get("num_fewshot"), config.get("description"), config["repeats"])
        for config in configs_of("outer", manager(tmp_path).task_index)
    ]
    assert changed == [(1, None, 2), (None, None, 2), (3, "X", 2)]
    built = manager(tmp_path).load([{"group": "top", "task": [{"task": "one", "num_fewshot": 1}], "repeats": 2}])
    assert (built["tasks"]["one"].config.num_fewshot, built["tasks"]["one"].config.repeats) == (1, 2)


def test_samples_stand_alone_on_the_command_line(work: Path, coral: Any, tmp_path: Path) -> None:
    assert "leave --lens and --task out" in complaint(
        coral("eval", "--lm-eval-samples", tmp_path, "--lens", work / "lens")
    )
    assert "Give --lens and --task, or --lm-eval-samples" in complaint(coral("eval", "--task", "arc_easy"))
    assert "Unexpected argument 'arc_easy'" in complaint(coral("eval", "--lens", work / "lens", "arc_easy"))
    assert "no such file" in complaint(coral("eval", "--lm-eval-samples", tmp_path / "x.jsonl"))
