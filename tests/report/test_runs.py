"""A run comes back from its folder as it was, and predictions that were changed afterwards are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.questions import toy_questions

from coral_lens.errors import CoralError
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question
from coral_lens.report.runs import Evaluation, Run, View, load_run, refuse_other_run, save_run
from coral_lens.storage.files import digest_bytes, file_name, write_record

LENS: dict[str, Any] = {
    "layer": 2,
    "gamma": 1.25,
    "base": "token",
    "model": {"name": "tiny"},
    "trace": {"gammas": [0.1]},
}


def evaluation(name: str, questions: list[Question], *, seed: int, trained_on: bool = False) -> Evaluation:
    rng = np.random.default_rng(seed)
    options = Options.of_sizes([len(q.options) for q in questions])
    return Evaluation(
        name,
        tuple(questions),
        {
            method: Predictions(
                method=method,
                model="tiny",
                task=questions[0].task,
                split=questions[0].split,
                ids=tuple(q.id for q in questions),
                answers=np.array([q.answer for q in questions]),
                offsets=options.edges,
                probs=options.softmax(rng.normal(size=options.n_rows) * 5),
            )
            for method in ("base", "temperature", "coral")
        },
        trained_on,
    )


def a_run() -> Run:
    odd = [replace(q, text=f"{q.text}\u2028 ünd\x85 \\ \"'\n") for q in toy_questions(5, seed=1)]
    named = [replace(q, task="arc", split="validation") for q in toy_questions(4)]
    evaluations = (
        evaluation("arc:validation", named, seed=1, trained_on=True),
        evaluation("my/file.jsonl", odd, seed=2),
    )
    return Run("a title", evaluations, LENS, {"command": "coral eval", "left out": {"arc": 3}})


def test_a_run_comes_back_to_the_bit(tmp_path: Path) -> None:
    run = a_run()
    save_run(run, tmp_path)
    again = load_run(tmp_path)
    assert (again.title, again.lens, again.provenance) == (run.title, run.lens, run.provenance)
    assert [(e.name, e.trained_on) for e in again.evaluations] == [("arc:validation", True), ("my/file.jsonl", False)]
    for old, new in zip(run.evaluations, again.evaluations, strict=True):
        assert new.questions == old.questions
        assert list(new.predictions) == list(old.predictions)
        for method, predictions in old.predictions.items():
            read = new.predictions[method]
            assert read.probs.tobytes() == predictions.probs.tobytes()
            assert read.answers.tolist() == predictions.answers.tolist()
            assert read.offsets.tolist() == predictions.offsets.tolist()
            assert (read.method, read.model, read.task, read.split, read.ids) == (
                method, "tiny", predictions.task, predictions.split, predictions.ids,
            )  # fmt: skip


def test_every_line_of_a_predictions_file_is_one_question_that_others_can_read(tmp_path: Path) -> None:
    run = a_run()
    save_run(run, tmp_path)
    raw = (tmp_path / "predictions" / "arc.validation.jsonl").read_bytes()
    lines = [json.loads(line) for line in raw.split(b"\n")[:-1]]
    assert [line["id"] for line in lines] == ["0", "1", "2", "3"]
    first = run.evaluations[0]
    assert lines[0]["options"] == list(first.questions[0].options)
    assert lines[0]["answer"] == first.questions[0].answer
    assert set(lines[0]["probs"]) == {"base", "temperature", "coral"}
    assert sum(lines[2]["probs"]["coral"]) == pytest.approx(1.0)


def test_saving_again_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_run(a_run(), tmp_path / name)
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) == 3
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_a_run_in_the_folder_of_another_leaves_no_predictions_of_tasks_that_it_has_not(tmp_path: Path) -> None:
    run, folder = a_run(), tmp_path / "predictions"
    view = View("coral", (1,), (), np.zeros((0, 0)), np.ones(4))
    first, second = replace(run.evaluations[0], view=view), run.evaluations[1]
    save_run(replace(run, evaluations=(first, second)), tmp_path)
    (folder / "mine.jsonl").write_text("of somebody else")
    save_run(replace(run, evaluations=(second,)), tmp_path)
    assert {p.name for p in folder.iterdir()} == {"mine.jsonl", f"{file_name(second.name)}.jsonl"}
    assert not list((tmp_path / "views").iterdir())
    assert [e.name for e in load_run(tmp_path).evaluations] == [second.name]


def test_predictions_of_another_run_that_were_changed_by_hand_stay(tmp_path: Path) -> None:
    run = a_run()
    save_run(run, tmp_path)
    edited = tmp_path / "predictions" / f"{file_name('my/file.jsonl')}.jsonl"
    edited.write_text("edited")
    save_run(replace(run, evaluations=run.evaluations[:1]), tmp_path)
    assert edited.read_text() == "edited"


@pytest.mark.parametrize("tasks", [None, [1], {"t": 1}, {"t": {"file": "../outside", "sha256": digest_bytes(b"")}}])
def test_a_record_that_names_no_files_of_its_folder_removes_nothing(tmp_path: Path, tasks: object) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("")
    write_record(folder / "run.json", {"tasks": tasks})
    save_run(a_run(), folder)
    assert outside.exists()
    assert len(load_run(folder).evaluations) == 2


def test_changed_predictions_are_refused_by_name(tmp_path: Path) -> None:
    save_run(a_run(), tmp_path)
    path = tmp_path / "predictions" / f"{file_name('my/file.jsonl')}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"answer": 1', b'"answer": 0', 1))
    with pytest.raises(CoralError, match="changed after the run") as error:
        load_run(tmp_path)
    assert str(path) in str(error.value)


def test_missing_predictions_are_refused_by_name(tmp_path: Path) -> None:
    save_run(a_run(), tmp_path)
    path = tmp_path / "predictions" / "arc.validation.jsonl"
    path.unlink()
    with pytest.raises(CoralError, match="missing") as error:
        load_run(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("content", "said"), [(None, "exist"), ("{", "damaged"), ('{"format": 9}', "format 9")])
def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CoralError, match=said):
        load_run(tmp_path)


def test_a_run_prints_as_a_table_of_its_main_scores(tmp_path: Path) -> None:
    run = load_run(Path(__file__).parents[1] / "golden" / "run")
    lines = str(run).splitlines()
    assert lines[0] == run.title
    assert lines[1].split() == ["test", "set", "method", "questions", "accuracy", "ece", "brier", "nll"]
    methods = list(run.evaluations[0].predictions)
    assert [line.split()[1] for line in lines[2 : 2 + len(methods)]] == [m.split()[0] for m in methods]
    frame = run.to_frame()
    assert frame["accuracy"][0] == score(run.evaluations[0].predictions["base"], "accuracy")
    assert len(frame) == len(methods)


def test_any_change_of_the_record_is_refused_and_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    save_run(a_run(), tmp_path)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**record, "title": "better"}), "utf-8")
    with pytest.raises(CoralError, match="does not match its digest; run `coral eval` again"):
        load_run(tmp_path)
    del record["digest"]
    path.write_text(json.dumps({**record, "title": "better"}), "utf-8")
    assert load_run(tmp_path).title == "better"


def test_a_run_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    save_run(a_run(), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text("utf-8"))
    del record["digest"]
    next(iter(record["tasks"].values()))["file"] = "../../secret"
    (tmp_path / "run.json").write_text(json.dumps(record), "utf-8")
    with pytest.raises(CoralError, match="only files of its own folder"):
        load_run(tmp_path)


@pytest.mark.parametrize("key", ["tasks", "lens", "title", "provenance"])
@pytest.mark.parametrize("value", [..., None, 3, [1], {"a": 1}])
def test_a_record_that_is_not_that_of_a_run_is_one_sentence(tmp_path: Path, key: str, value: object) -> None:
    save_run(a_run(), tmp_path)
    record = json.loads((tmp_path / "run.json").read_text("utf-8"))
    record = {k: v for k, v in record.items() if k != "digest" and (k != key or value is not ...)}
    (tmp_path / "run.json").write_text(json.dumps(record | ({} if value is ... else {key: value})), "utf-8")
    if key in ("title", "provenance") and value is not ...:
        return  # for people only
    with pytest.raises(CoralError, match="run"):
        load_run(tmp_path)


def test_a_folder_with_a_page_of_somebody_else_is_refused(tmp_path: Path) -> None:
    refuse_other_run(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    refuse_other_run(tmp_path)
    (tmp_path / "report.html").write_text("<title>Thesis</title>")
    with pytest.raises(CoralError, match=r"report\.html exists and is not ours"):
        refuse_other_run(tmp_path)
    save_run(a_run(), tmp_path)
    with pytest.raises(CoralError, match=r"report\.html exists and is not ours"):
        refuse_other_run(tmp_path)
    (tmp_path / "report.html").write_text("<title>mine · CORAL report</title>", "utf-8")
    refuse_other_run(tmp_path)
