"""A study runs along the whole line, repeats nothing, leaks nothing, and survives being killed anywhere."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.leaky import DROPPED, LEAKING, leaky_rows, training_rows, write_rows
from support.models import make_model

import coral_lens
from coral_lens.cli import printing
from coral_lens.cli.printing import show_run
from coral_lens.data.leaks import ARTICLE, REPEATED, normalised
from coral_lens.data.settings import Style
from coral_lens.engine import shard_work
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model, wrap
from coral_lens.errors import CoralError
from coral_lens.methods import lens as lens_method
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, no_options
from coral_lens.methods.registry import METHODS
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.report.figures.style import Picture
from coral_lens.report.runs import load_run
from coral_lens.report.tables.run import results_table
from coral_lens.study import evaluate as evaluating
from coral_lens.study import predictions as predicting
from coral_lens.study import run as running
from coral_lens.study.config import Study, frozen
from coral_lens.study.folders import Folders
from coral_lens.study.plan import loader, plan_study
from coral_lens.study.run import prepare_study, run_prepared
from coral_lens.study.states import OpenModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*prompts were longer than the model reads"),
    pytest.mark.usefixtures("one_thread"),
]
N = 60
"""Training questions of each task."""


def arc(number: int, *, word: str) -> dict[str, Any]:
    labels = list("ABCD")
    choices = {"text": [f"{word} {number % 7}{label}" for label in labels], "label": labels}
    key = labels[(number * 5) % 4]
    return {"id": f"q{number}", "question": f"Which {word} is number {number}?", "choices": choices, "answerKey": key}


def race(number: int, *, word: str) -> dict[str, Any]:
    return {
        "example_id": f"{word}{number // 3}.txt",
        "article": f"Of {word} {number // 3}.",
        "question": f"Who of {word} {number}?",
        "options": [f"{word} {c}{number % 5}" for c in "abcd"],
        "answer": "ABCD"[number * 3 % 4],
    }


def put(root: Path, task: str, **splits: list[dict[str, Any]]) -> None:
    for split, rows in splits.items():
        (root / task).mkdir(parents=True, exist_ok=True)
        (root / task / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ARC-Easy and RACE with a training and a test split, and OpenBookQA-like transfer questions."""
    root = tmp_path_factory.mktemp("data")
    repeated = [arc(3, word="stone"), arc(5, word="stone")]  # in other letters and with other punctuation
    repeated = [r | {"question": r["question"].upper().replace("?", " ?!"), "id": f"again {r['id']}"} for r in repeated]
    put(
        root,
        "arc_easy",
        train=[arc(i, word="stone") for i in range(N)],
        test=[arc(i, word="river") for i in range(30)] + repeated,
        validation=[arc(i, word="cloud") for i in range(8)],
    )
    shared = [race(1000 + i, word="bird") | {"article": "Of fish 0."} for i in range(2)]
    put(
        root,
        "race_question",
        train=[race(i, word="fish") for i in range(N)],
        test=[race(i, word="bird") for i in range(27)] + shared,
    )
    put(root, "arc_challenge", test=[arc(i, word="wind") for i in range(40)])
    return root


STUDY: dict[str, Any] = {
    "name": "toy",
    "models": ["tiny"],
    "mixture": [
        {
            "name": "both",
            "sources": [
                {"task": "arc_easy", "split": "train", "n": 50, "shots": 0},
                {"task": "race_question", "split": "train", "shots": 0},
            ],
        }
    ],
    "test": [
        {"task": "arc_easy", "split": "test", "shots": 0},
        {"task": "race_question", "split": "test", "shots": 0},
        {"task": "arc_challenge", "split": "test", "n": 30, "shots": 0},
    ],
    "method": [{"kind": "ridge", "name": "coral"}, {"kind": "listwise"}],
}


def study_of(**changes: Any) -> Study:
    return Study.model_validate(frozen(STUDY | changes))


@pytest.fixture(autouse=True, scope="module")
def cheap_report() -> Iterator[None]:
    """Figures are drawn in the tests of the report; here, what they say is enough. So are few resamples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "png", lambda self: b"\x89PNG" + self.alt.encode())
        patch.setattr(Picture, "svg", lambda self: f"<svg>{self.name}</svg>")
        patch.setattr(evaluating, "results_table", partial(results_table, n_boot=100))
        yield


class Opening:
    """Stands in for loading a model, and counts."""

    def __init__(self, model: Model) -> None:
        self.model, self.names, self.dtypes = model, list[str](), list[str | None]()

    def __call__(self, name: str, *, dtype: str | None = None) -> Model:
        self.names.append(name)
        self.dtypes.append(dtype)
        return self.model


def run_in(study: Study, root: Path, data: Path, opening: OpenModel) -> Path:
    prepared = prepare_study(study, data)
    return run_prepared(prepared, Folders(out=root / "out", work=root / "work", data=data), open_model=opening)


def files_of(root: Path) -> dict[str, bytes]:
    """Everything that was written, but for locks and costs."""
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    return {
        name: c for name, c in found.items() if not name.endswith((".lock", "/cost.json", "/costs.json", "/costs.md"))
    }


@pytest.fixture(scope="module")
def undisturbed(
    tiny: Model, data: Path, one_thread: None, cheap_report: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    run_in(study_of(), root, data, Opening(tiny))
    return root


# --- the whole line


def test_a_study_ends_in_tables_figures_and_a_page(undisturbed: Path) -> None:
    out = undisturbed / "out"
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert {f"tables.{kind}" for kind in ("md", "tex", "csv", "json")} | {"report.html", "study.json"} <= names
    run = "runs/tiny/both"
    assert {f"{run}/{name}" for name in ("report.html", "results.md", "run.json", "seeds.json")} <= names
    assert {"figures/improvement-0.png", f"{run}/figures/summary-ece.png"} <= names
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in names if name.endswith(".png"))
    page = (out / "report.html").read_text("utf-8")
    assert 'href="runs/tiny/both/report.html"' in page
    assert not re.findall(r"(?:src|href)=\"https?:", page)


def test_every_table_names_the_split_that_was_really_used(undisturbed: Path) -> None:
    for kind in ("md", "tex", "csv", "json"):
        text = (undisturbed / "out" / f"tables.{kind}").read_text("utf-8").replace("\\_", "_")
        for split in ("arc_easy:test", "race_question:test", "arc_challenge:test"):
            assert split in text


def test_every_method_answers_the_same_questions(undisturbed: Path) -> None:
    run = load_run(undisturbed / "out" / "runs" / "tiny" / "both")
    assert [(e.name, len(e.questions), e.trained_on) for e in run.evaluations] == [
        ("arc_easy:test", 32, True),
        ("race_question:test", 29, True),
        ("arc_challenge:test", 30, False),
    ]
    for evaluation in run.evaluations:
        rows = tuple(evaluation.predictions)
        assert rows == ("base", "temperature", "coral", "listwise", "listwise tempered")
        assert len({p.ids for p in evaluation.predictions.values()}) == 1


def test_tables_agree_with_the_report_of_the_run(undisturbed: Path) -> None:
    out = undisturbed / "out"
    with (out / "tables.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    results = json.loads((out / "runs/tiny/both/results.json").read_text("utf-8"))
    for task in results["tasks"]:
        for method, found in task["methods"].items():
            (row,) = [
                r
                for r in rows
                if (r["test"], r["method"], r["metric"], r["against"]) == (task["task"], method, "brier", "")
            ]
            assert float(row["value"]) == found["scores"]["brier"]["value"]
            assert (row["model"], row["mixture"], row["kind"]) == ("tiny", "both", task["kind"])


def test_a_run_says_what_each_method_took(undisturbed: Path) -> None:
    costs = json.loads((undisturbed / "out/runs/tiny/both/costs.json").read_text("utf-8"))["methods"]
    assert [c["method"] for c in costs] == ["base", "temperature", "coral", "listwise"]
    for cost in costs:  # all start from the shared scores, and pay for them
        assert cost["relative"] >= 1.0
        assert cost["questions_per_second"] > 0


def test_a_finished_study_is_not_done_again_and_loads_no_model(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "copy")
    before = files_of(tmp_path / "copy")

    def refuse(name: str) -> Model:
        raise AssertionError(f"{name} was loaded")

    run_in(study_of(), tmp_path / "copy", data, refuse)
    assert files_of(tmp_path / "copy") == before


def test_making_the_report_of_a_run_again_takes_nothing_from_its_study(
    undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(undisturbed, tmp_path / "copy")
    folder, before = tmp_path / "copy/out/runs/tiny/both", files_of(tmp_path / "copy/out")
    monkeypatch.setattr(printing, "results_table", partial(results_table, n_boot=100))
    show_run(load_run(folder), folder, again=True)
    assert (folder / "results.json").read_bytes() == before["runs/tiny/both/results.json"]
    # tables that are not what the study made, whoever wrote them, are made again
    (folder / "results.json").write_text('{"tasks": []}', "utf-8")
    run_in(study_of(), tmp_path / "copy", data, lambda name: pytest.fail(name))
    after = files_of(tmp_path / "copy/out")
    # the page has gathered what `coral report` added, and the mark has its digest
    gathered = ("both/report.html", "both/finished.json")
    assert [n for n in before if after[n] != before[n] and not n.endswith(gathered)] == []


def test_one_more_method_costs_no_model_and_no_fit_of_the_others(
    undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(undisturbed, tmp_path / "copy")
    fitted: list[str] = []
    usual = lens_method.load_or_fit

    def counting(store: Any, settings: Any, *rest: Any, **more: Any) -> Any:
        fitted.append(settings.lens)
        return usual(store, settings, *rest, **more)

    monkeypatch.setattr(lens_method, "load_or_fit", counting)
    more = study_of(method=[*STUDY["method"], {"kind": "ensemble"}])
    run_in(more, tmp_path / "copy", data, lambda name: pytest.fail(name))
    assert fitted == ["ensemble"]


def test_studies_that_share_their_work_share_states_and_lenses(
    undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probe 1 unchanged: the guard keeps out of training what the first study tests on, so that the lens is the same."""
    shutil.copytree(undisturbed / "work", tmp_path / "work")
    monkeypatch.setattr(lens_method, "load_or_fit", lambda *_, **__: pytest.fail("fitted again"))
    tests = [t for t in STUDY["test"] if t["task"] == "arc_challenge"]
    guard = [t for t in STUDY["test"] if t["task"] != "arc_challenge"]
    run_in(study_of(name="transfer", test=tests, guard=guard), tmp_path, data, lambda name: pytest.fail(name))
    old, new = (load_run(root / "out/runs/tiny/both") for root in (undisturbed, tmp_path))
    assert new.lens == old.lens
    assert np.array_equal(new.evaluations[0].predictions["coral"].probs, old.evaluations[2].predictions["coral"].probs)


def test_a_study_that_names_layers_takes_them_of_the_states_of_all_and_its_results_are_the_same(
    undisturbed: Path, tiny: Model, data: Path, tmp_path: Path
) -> None:
    study = study_of(layers=[1])
    run_in(study, tmp_path / "apart", data, Opening(tiny))
    shutil.copytree(undisturbed / "work", tmp_path / "shared" / "work")
    run_in(study, tmp_path / "shared", data, lambda name: pytest.fail(name))
    alone, shared = files_of(tmp_path / "apart"), files_of(tmp_path / "shared")
    states = {name for name in alone if "/states/" in name}
    assert states.isdisjoint(shared)
    assert [name for name in alone.keys() - states if alone[name] != shared.get(name)] == []


def test_states_of_some_layers_more_are_taken_and_those_that_lack_one_are_not(
    tiny: Model, data: Path, tmp_path: Path
) -> None:
    def opened(*layers: int, **more: Any) -> list[str]:
        opening = Opening(tiny)
        study = study_of(layers=layers, test=STUDY["test"][2:], method=[{"kind": "isotonic"}], **more)
        run_in(study, tmp_path, data, opening)
        return opening.names

    assert opened(0, 2) == ["tiny"]
    assert opened(2) == []
    assert opened(2, seed=1) == ["tiny"], "other questions are drawn"
    assert opened(1) == ["tiny"]
    assert opened(2, read=["answer", "context"]) == ["tiny"], "states are read elsewhere too"


# --- killed and resumed


class Killed(BaseException):
    """Not an Exception: nothing may catch it and go on."""


def killing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *, call: int, after: bool) -> None:
    """Have the n-th call of a function kill the run, before or after it does its work."""
    usual, calls = getattr(where, name), 0

    def deadly(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = usual(*arguments, **more)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(where, name, deadly)


DEATHS = [
    (running, "claim", 1, True),
    (shard_work, "gather_shard", 2, False),
    (lens_method, "load_or_fit", 2, False),
    (predicting, "write_atomic", 8, True),
    (evaluating, "write_report", 1, True),
]
"""Where the run is killed: at which call of a function, and whether before or after it; tests/faults kills it at any file."""


@pytest.mark.parametrize(("where", "name", "call", "after"), DEATHS, ids=[f"{n}-{c}" for _, n, c, _ in DEATHS])
def test_a_killed_and_resumed_study_ends_with_the_same_bytes(
    tiny: Model, data: Path, undisturbed: Path, tmp_path: Path, where: Any, name: str, call: int, after: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killing(patch, where, name, call=call, after=after)
        with pytest.raises(Killed):
            run_in(study_of(), tmp_path, data, Opening(tiny))
    run_in(study_of(), tmp_path, data, Opening(tiny))
    resumed, expected = files_of(tmp_path), files_of(undisturbed)
    assert list(resumed) == list(expected)
    assert [name for name, content in resumed.items() if content != expected[name]] == []


def test_a_folder_of_something_else_is_left_alone(tiny: Model, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine", "utf-8")
    with pytest.raises(CoralError, match="holds no study"):
        run_in(study_of(), tmp_path, data, Opening(tiny))
    with pytest.raises(CoralError, match="holds the study 'toy', not 'other'"):
        run_in(study_of(name="other"), undisturbed, data, Opening(tiny))


def test_changed_data_are_noticed(tiny: Model, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed / "work", tmp_path / "work")
    shutil.copytree(data, tmp_path / "data")
    put(tmp_path / "data", "arc_challenge", test=[arc(i, word="storm") for i in range(40)])
    with pytest.raises(CoralError, match="holds the states of other questions"):
        run_in(study_of(), tmp_path, tmp_path / "data", Opening(tiny))


def small_study(model: str = "tiny") -> Study:
    return study_of(models=[model], layers=[1], test=STUDY["test"][2:], method=[{"kind": "isotonic"}])


def test_a_dtype_that_is_asked_for_has_states_of_its_own(tiny: Model, data: Path, tmp_path: Path) -> None:
    other = make_model("llama")
    other.hf.to(torch.bfloat16)
    other = wrap(other.hf, other.tokenizer, name=other.name)
    assert other.dtype != tiny.dtype
    assert other.fingerprint == tiny.fingerprint
    run_in(small_study(), tmp_path, data, Opening(tiny))
    kept, first = files_of(tmp_path / "work"), load_run(tmp_path / "out/runs/tiny/both")
    prepared, folders = (
        prepare_study(small_study(), data),
        Folders(tmp_path / "out", tmp_path / "work", data, "bfloat16"),
    )
    run_prepared(prepared, folders, open_model=Opening(other))
    second = load_run(tmp_path / "out/runs/tiny/both")
    assert (first.lens["model"]["dtype"], second.lens["model"]["dtype"]) == ("torch.float32", "torch.bfloat16")
    probs = [run.evaluations[0].predictions["base"].probs for run in (first, second)]
    assert not np.array_equal(*probs)
    assert {k: v for k, v in files_of(tmp_path / "work").items() if k in kept} == kept
    run_in(small_study(), tmp_path, data, lambda name, dtype=None: pytest.fail(name))
    # without the name, states in two dtypes are never put together
    shutil.rmtree(next((tmp_path / "work/tiny/states").glob("arc_challenge*")))
    opening = Opening(other)
    with pytest.raises(
        CoralError, match=r"different models called .tiny. .dtype torch\.float32 against torch\.bfloat16"
    ):
        run_in(small_study(), tmp_path, data, opening)
    assert opening.dtypes == ["float32"]  # it was asked for as what is there has it


def test_a_model_whose_files_were_changed_is_looked_at_again(tiny: Model, data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights").write_text("old", "utf-8")
    study = small_study(str(tmp_path / "mine"))
    run_in(study, tmp_path, data, Opening(tiny))
    run_in(study, tmp_path, data, lambda name: pytest.fail(name))
    soon = time.time() + 60
    os.utime(tmp_path / "mine" / "weights", (soon, soon))
    run_in(study, tmp_path, data, Opening(tiny))
    with pytest.raises(CoralError, match=r"different models called .*weights \w+ against \w+"):
        run_in(study, tmp_path, data, Opening(make_model("llama", seed=1)))


# --- leaks


def test_what_a_test_set_holds_is_dropped_from_training_by_text_and_by_article(undisturbed: Path, data: Path) -> None:
    study = study_of(
        mixture=[STUDY["mixture"][0] | {"sources": [s | {"n": None} for s in STUDY["mixture"][0]["sources"]]}]
    )
    load = loader(study, data)
    plan = plan_study(study, load)
    (mixture,) = plan.mixtures
    # two questions of ARC in other letters; the three questions of the article "Of fish 0."
    assert mixture.dropped == {"arc_easy:test": 2, "race_question:test": 3, "arc_challenge:test": 0}
    assert (mixture.n_dropped, mixture.n_questions) == (5, 2 * N - 5)
    assert mixture.reasons == {REPEATED: 2, ARTICLE: 3}
    train = [q for part in mixture.parts for q in load(part.source) if q.id in part.ids]
    tested = [q for test in plan.tests for q in load(test.part.source) if q.id in test.part.ids]
    assert not {normalised(q) for q in train} & {normalised(q) for q in tested}
    assert not {q.group for q in train} & {q.group for q in tested}
    record = json.loads((undisturbed / "out" / "study.json").read_text("utf-8"))
    assert record["mixtures"]["both"]["dropped because a test set holds them too"]["race_question:test"] == 3
    assert record["mixtures"]["both"]["leak guard"][ARTICLE] == 3
    page = (undisturbed / "out" / "report.html").read_text("utf-8")
    assert "dropped because a test set holds them too · race_question:test</dt><dd>3</dd>" in page


def test_no_repeat_no_shared_article_and_no_edited_copy_is_trained_on_and_tested(tiny: Model, tmp_path: Path) -> None:
    files = {"train": training_rows(), "test": leaky_rows()}
    train, test = (str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items())
    study = study_of(
        mixture=[{"name": "file", "sources": [{"task": train, "shots": 0}]}],
        test=[{"task": test, "shots": 0}],
        method=[{"kind": "ridge"}],
    )
    run_in(study, tmp_path, tmp_path, Opening(tiny))
    run = load_run(tmp_path / "out/runs/tiny/file")
    assert run.provenance["training"]["leak guard"] == DROPPED
    assert {q.id for q in run.evaluations[0].questions} >= LEAKING, "what is tested stays, and is not trained on"
    assert run.lens["training"]["tasks"] == {"questions": len(files["train"]) - sum(DROPPED.values())}


def test_what_is_dropped_is_what_the_lens_has_not_seen(undisturbed: Path) -> None:
    run = load_run(undisturbed / "out/runs/tiny/both")
    record = json.loads((undisturbed / "out" / "study.json").read_text("utf-8"))["mixtures"]["both"]
    assert sum(run.lens["training"]["tasks"].values()) == sum(record["questions"].values())


def test_the_rest_of_a_mixture_is_tested_and_never_trained_on(tiny: Model, data: Path, tmp_path: Path) -> None:
    mixture = {
        "name": "half",
        "validation": 0.25,
        "held_out": 0.25,
        "sources": [
            {"task": "arc_easy", "split": "test", "shots": 0},
            {"task": "race_question", "split": "train", "shots": 0},
        ],
    }
    study = study_of(mixture=[mixture], test=[{"rest": "half"}], method=[{"kind": "ridge"}])
    opening = Opening(tiny)
    run_in(study, tmp_path, data, opening)
    run = load_run(tmp_path / "out/runs/tiny/half")
    assert [e.name for e in run.evaluations] == [
        "arc_easy:test held out of half",
        "race_question:train held out of half",
    ]
    assert [len(e.questions) for e in run.evaluations] == [8, 15]
    assert all(e.trained_on for e in run.evaluations)
    seen = run.lens["training"]
    assert sum(seen["tasks"].values()) == 32 + N - 8 - 15
    assert seen["settings"]["validation"] == pytest.approx(1 / 3)
    stores = [p.name for p in (tmp_path / "work" / "tiny" / "states").iterdir()]
    assert len(stores) == 2, "one store serves training and test"


def own_file(folder: Path, name: str, n: int) -> str:
    """A file of questions whose ids are its own."""
    rows = [
        {"question": f"Which {name} is number {i}?", "options": [f"{name} {i % 7}{c}" for c in "abc"], "answer": i % 3}
        for i in range(n)
    ]
    write_rows(folder / f"{name}.jsonl", rows)
    return str(folder / f"{name}.jsonl")


def test_each_of_several_files_of_a_mixture_is_a_task_that_is_called_as_the_file(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"stones": 64, "rivers": 48, "clouds": 30}
    stones, rivers, clouds = (own_file(tmp_path, name, n) for name, n in sizes.items())
    mixture = {
        "name": "mine",
        "held_out": 0.25,
        "sources": [{"task": stones, "shots": 0}, {"task": rivers, "shots": 0}],
    }
    prompted: list[set[str]] = []

    def fit_even(context: FitContext, _: None) -> Predict:
        prompted.append({q.task for q in context.train.prompted()})
        return lambda test: {"": predictions_of("even", test.states, np.full(test.states.table.options.n_rows, 1 / 3))}

    monkeypatch.setitem(METHODS, "even", Method(no_options, fit_even))
    tests, methods = [{"rest": "mine"}, {"task": clouds, "shots": 0}], [{"kind": "listwise"}, {"kind": "even"}]
    run_in(study_of(mixture=[mixture], test=tests, method=methods), tmp_path, tmp_path, Opening(tiny))
    run, names = load_run(tmp_path / "out/runs/tiny/mine"), ["questions (stones.jsonl)", "questions (rivers.jsonl)"]
    assert run.lens["training"]["tasks"] == dict(zip(names, (48, 36), strict=True)), "and so many of each are held out"
    assert prompted == [set(names)]
    assert set(run.lens["trust"]["scales"]) == set(names)
    assert {q.task for e in run.evaluations for q in e.questions} == {"questions"}, (
        "a file that is tested names no task"
    )
    stores = [ActivationStore(path.parent) for path in (tmp_path / "work").rglob("manifest.json")]
    assert {q.task for store in stores for q in store.questions} == {"questions"}, "nor do states, which others may use"


def test_a_worked_example_is_never_an_evaluated_question(data: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(data, root)
    # the third test question is a training question too, from which the shots are drawn
    put(root, "arc_challenge", test=[arc(i, word="wind") for i in range(6)], train=[arc(2, word="wind") | {"id": "t"}] * 1
        + [arc(i, word="hail") for i in range(9)])  # fmt: skip
    study = study_of(test=[{"task": "arc_challenge", "split": "test", "shots": 3}])
    load = loader(study, root)
    plan = plan_study(study, load)
    (test,) = plan.tests
    assert (test.n_questions, test.n_left_out) == (5, 1)
    asked = [q for q in load(test.part.source) if q.id in test.part.ids]
    for question in asked:
        assert question.rendered is not None
        shots = question.rendered.contexts[0].split("\n\n")[:-1]
        assert len(shots) == 3
        assert not any(other.text in shot for shot in shots for other in asked)


def test_a_test_with_shots_has_one_more_row_of_the_same_questions_without_them(
    tiny: Model, data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    shutil.copytree(data, root)
    put(root, "arc_challenge", train=[arc(i, word="hail") for i in range(9)])
    changes: dict[str, Any] = {"method": [{"kind": "ridge"}], "test": [STUDY["test"][2] | {"n": 20, "shots": 2}]}
    run_in(study_of(**changes), tmp_path / "with", root, Opening(tiny))
    plain = study_of(**changes | {"test": [STUDY["test"][2] | {"n": 20}]})
    run_in(plain, tmp_path / "plain", root, Opening(tiny))
    shown, unshown = (load_run(tmp_path / name / "out/runs/tiny/both").evaluations[0] for name in ("with", "plain"))
    assert tuple(shown.predictions) == ("base", "0-shot", "temperature", "ridge")
    assert shown.predictions["0-shot"].ids == unshown.predictions["base"].ids
    np.testing.assert_allclose(shown.predictions["0-shot"].probs, unshown.predictions["base"].probs, atol=1e-6)
    assert not np.allclose(shown.predictions["0-shot"].probs, shown.predictions["base"].probs, atol=1e-6)


def test_every_method_is_compared_with_the_base_and_corrected_for_all_of_it(undisturbed: Path) -> None:
    (table, *_) = json.loads((undisturbed / "out" / "tables.json").read_text("utf-8"))["tables"]
    compared = [c["method"] for c in table["comparisons"] if c["against"] == "base"]
    assert compared == [m for m in table["methods"] if m != "base"]
    for c in table["comparisons"]:
        assert set(c["p_values"]) == {"accuracy", "brier", "nll", "brier_top1", "nll_top1"}, "ECE ranks nothing here"
        assert all(c["p_values"][m] >= d["p_value"] for m, d in c["differences"].items() if m in ("brier", "nll"))


def test_few_training_questions_or_hidden_answers_are_refused_before_a_model_is_loaded(
    data: Path, tmp_path: Path
) -> None:
    few = [{"name": "few", "sources": [{"task": "arc_easy", "split": "train", "n": 10, "shots": 0}]}]
    with pytest.raises(CoralError, match="at least 20"):
        prepare_study(study_of(mixture=few), data)
    put(tmp_path, "commonsense_qa_cloze", test=[arc(i, word="x") | {"answerKey": ""} for i in range(3)])
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    hidden = [{"task": "commonsense_qa_cloze", "split": "test", "shots": 0}]
    with pytest.raises(CoralError, match=r"3 of 3 questions have no answer.*such as validation"):
        prepare_study(study_of(test=hidden), tmp_path)
    with pytest.raises(CoralError, match="needs its split 'validation', which is not here"):
        prepare_study(study_of(test=[{"task": "race_question", "split": "validation", "shots": 0}]), data)


# --- methods, seeds, models


def test_a_new_method_is_one_row_of_the_table(
    tiny: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the model, the training questions with states and prompts, a folder and a seed, and no test question."""

    def fit_uniform(context: FitContext, settings: None) -> Predict:
        assert settings is None
        assert context.model() is tiny
        prompted = context.train.prompted()
        assert [q.id for q in prompted] == [q.id for q in context.train.states.questions]
        assert all(q.rendered for q in prompted)

        def predict(test: QuestionSet) -> dict[str, Predictions]:
            sizes = np.diff(test.states.table.offsets)
            return {"": predictions_of("uniform", test.states, np.repeat(1.0 / sizes, sizes))}

        return predict

    monkeypatch.setitem(METHODS, "uniform", Method(no_options, fit_uniform))
    run_in(study_of(method=[{"kind": "uniform"}]), tmp_path, data, Opening(tiny))
    run = load_run(tmp_path / "out/runs/tiny/both")
    for evaluation in run.evaluations:
        assert set(evaluation.predictions["uniform"].probs.tolist()) == {0.25}
    assert "Few-shot" in (tmp_path / "out" / "tables.md").read_text("utf-8")


def test_a_method_may_adapt_only_on_what_no_test_set_holds(
    tiny: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int | None] = {}

    def fit_adapting(context: FitContext, _: None) -> Predict:
        def predict(test: QuestionSet) -> dict[str, Predictions]:
            seen[test.name] = len(test.adapt()) if test.adapt else None
            uniform = predictions_of("", test.states, np.full(len(test.states.table.logprobs), 0.25))
            return {"": uniform, " adapted": uniform} if test.adapt else {"": uniform}

        return predict

    monkeypatch.setitem(METHODS, "adapting", Method(no_options, fit_adapting))
    tests = [STUDY["test"][0] | {"adapt": "train"}, STUDY["test"][2]]
    run_in(study_of(method=[{"kind": "adapting"}], test=tests), tmp_path, data, Opening(tiny))
    # two training questions stand in the test set too
    assert seen == {"arc_easy:test": N - 2, "arc_challenge:test": None}
    run = load_run(tmp_path / "out/runs/tiny/both")
    assert ["adapting adapted" in e.predictions for e in run.evaluations] == [True, False]
    record = json.loads((tmp_path / "out" / "study.json").read_text("utf-8"))["tests"]
    assert record["arc_easy:test"]["adapted on"] == f"{N - 2} of arc_easy:train"
    assert "adapted on" not in record["arc_challenge:test"]
    with pytest.raises(CoralError, match=r"would adapt on arc_easy:test, and tests on questions of the same split"):
        prepare_study(study_of(test=[STUDY["test"][0] | {"adapt": "test"}]), data)


def test_a_method_looks_at_all_questions_before_a_model_is_loaded(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, str]] = []

    def look(questions: Sequence[Question], style: Style, settings: None) -> None:
        looked.append((len(questions), str(style)))
        assert all(q.rendered for q in questions)

    monkeypatch.setitem(METHODS, "picky", Method(no_options, lambda *_: pytest.fail("fitted"), check=look))
    prepare_study(study_of(method=[{"kind": "picky"}]), data)
    assert looked == [(49 + 57 + 32 + 29 + 30, "text")]


def test_seeds_give_a_spread_and_models_a_run_each(tiny: Model, data: Path, tmp_path: Path) -> None:
    study = study_of(models=["one", "two/three"], seeds=[3, 4, 5], method=[{"kind": "ridge"}], test=STUDY["test"][2:])
    opening = Opening(tiny)
    run_in(study, tmp_path, data, opening)
    assert opening.names == ["one", "two/three"]
    tables = json.loads((tmp_path / "out" / "tables.json").read_text("utf-8"))
    assert [t["model"] for t in tables["tables"]] == ["one", "two/three"]
    assert {i["n_cells"] for i in tables["improvements"]} == {2}
    found = tables["tables"][0]["methods"]["ridge"]
    seeds = json.loads(next((tmp_path / "out/runs/one").rglob("seeds.json")).read_text("utf-8"))
    values = seeds["scores"]["arc_challenge:test"]["ridge"]["brier"]
    assert len(values) == 3
    assert found["spread"]["brier"] == pytest.approx(np.std(values, ddof=1))
    assert found["scores"]["brier"]["value"] == pytest.approx(values[0])


def test_the_chat_template_goes_around_every_prompt(tiny: Model, data: Path, tmp_path: Path) -> None:
    tiny.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    try:
        run_in(study_of(chat=True, method=[{"kind": "ridge"}], test=STUDY["test"][2:]), tmp_path, data, Opening(tiny))
    finally:
        tiny.tokenizer.chat_template = None
    run = load_run(tmp_path / "out/runs/tiny/both")
    assert run.lens["style"] == {"kind": "text", "chat": True}


def test_a_study_is_run_from_python_and_gives_its_runs(tiny: Model, data: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "load_model", lambda _, dtype=None: tiny)
        (run,) = coral_lens.run_study(study_of(), tmp_path / "mine", data=data)
    assert [e.name for e in run.evaluations] == ["arc_easy:test", "race_question:test", "arc_challenge:test"]
    assert (tmp_path / "mine" / "report.html").exists()
    assert (tmp_path / "mine.work").is_dir()
