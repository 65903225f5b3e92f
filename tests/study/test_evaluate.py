"""Questions that a lens was fitted on are never counted as test questions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.leaky import LEAKING, leaky_rows, training_rows, write_rows
from support.leaky import LEFT_OUT as LEFT_OUT_BY_REASON
from support.models import make_model
from support.questions import toy_questions

from coral_lens.data.leaks import REPEATED, SHOWN, guard_of, guard_of_shown
from coral_lens.data.questions import read_questions
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import UNKNOWN, Question
from coral_lens.report.figures.style import Picture
from coral_lens.report.reach import SIDE_BY_SIDE, reach_notes
from coral_lens.report.runs import load_run, save_run
from coral_lens.report.tables.run import subject_of
from coral_lens.storage.files import file_name
from coral_lens.study import evaluate as module
from coral_lens.study.evaluate import LEFT_OUT, evaluate, write_run

TRAINING = 24


def of_task(questions: list[Question], task: str, split: str = "") -> list[Question]:
    return [replace(q, task=task, split=split) for q in questions]


@pytest.fixture(scope="module")
def lens(tiny: Model) -> Lens:
    return fit(tiny, of_task(toy_questions(TRAINING), "known", "train"), FitSettings(lens="ridge", layers=(1,)))


@pytest.fixture(scope="module")
def listwise(tiny: Model) -> Lens:
    return fit(tiny, of_task(toy_questions(TRAINING), "known", "train"), FitSettings(layers=(2,)))


def test_seen_questions_are_left_out_and_counted(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(8, seed=3)
    mixed = of_task([*fresh[:4], *toy_questions(TRAINING)[10:13], *fresh[4:]], "known", "validation")
    renamed = [replace(q, id=f"{i}", text=q.text.upper()) for i, q in enumerate(mixed)]
    run = evaluate(lens, tiny, renamed)
    (evaluation,) = run.evaluations
    assert evaluation.name == "known:validation", "the task and split that all of them share"
    assert run.provenance[LEFT_OUT] == {"known:validation": 3}
    assert run.provenance["leak guard"]["left out"] == {"known:validation": {REPEATED: 3}}
    assert [q.id for q in evaluation.questions] == ["0", "1", "2", "3", "7", "8", "9", "10"]
    assert tuple(evaluation.predictions) == ("base", "temperature", "coral")
    for predictions in evaluation.predictions.values():
        assert predictions.ids == tuple(q.id for q in evaluation.questions)
        assert predictions.answers.tolist() == [q.answer for q in evaluation.questions]


def test_questions_that_cannot_be_asked_shift_nothing(lens: Lens, tiny: Model) -> None:
    good = of_task(toy_questions(6, seed=3), "new")
    bad = replace(good[0], id="bad", options=("no", "y" * 300), answer=1)
    mixed = [*good[:2], bad, *good[2:]]
    with pytest.warns(UserWarning, match=r"^1 question\(s\) left out\. Question 'bad'"):
        run = evaluate(lens, tiny, mixed)
    (evaluation,), (undisturbed,) = run.evaluations, evaluate(lens, tiny, good).evaluations
    assert list(evaluation.questions) == list(undisturbed.questions)
    assert run.provenance[LEFT_OUT] == {"new": 0}, "counts what the lens knew"
    for method, expected in undisturbed.predictions.items():
        found = evaluation.predictions[method]
        assert (found.ids, found.answers.tolist()) == (expected.ids, [q.answer for q in good])
        assert found.probs.tobytes() == expected.probs.tobytes()
    with pytest.warns(UserWarning, match="'bad'"):
        answers = lens.predict(tiny, mixed)
    assert answers == lens.predict(tiny, good)


def test_a_task_counts_as_trained_on_whatever_its_split(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(4, seed=3)
    tests = {"a": of_task(fresh, "known", "validation"), "b": of_task(fresh, "strange", "validation")}
    run = evaluate(lens, tiny, tests)
    assert [(e.name, e.trained_on) for e in run.evaluations] == [("a", True), ("b", False)]
    assert run.provenance[LEFT_OUT] == {"a": 0, "b": 0}


def test_a_set_of_seen_questions_only_is_refused(lens: Lens, tiny: Model) -> None:
    with pytest.raises(CoralError, match="old: all 24 questions were used to fit"):
        evaluate(lens, tiny, {"old": toy_questions(TRAINING)})


def test_a_question_without_an_answer_is_refused_by_its_id(lens: Lens, tiny: Model) -> None:
    questions = toy_questions(5, seed=3)
    questions[2] = replace(questions[2], answer=UNKNOWN)
    with pytest.raises(CoralError, match=r"new: 1 questions have no answer, first '2'.*coral predict"):
        evaluate(lens, tiny, {"new": questions})


def test_another_model_is_refused_before_anything_is_scored(lens: Lens, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="fitted on"):
        evaluate(lens, make_model("llama", seed=1), toy_questions(4, seed=3), work_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_states_are_kept_in_a_folder_for_each_test_set(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    tests = {"task:validation": toy_questions(3, seed=3), "my/file.jsonl": toy_questions(3, seed=4)}
    first = evaluate(lens, tiny, tests, work_dir=tmp_path).evaluations
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [file_name("my/file.jsonl"), "task.validation"]
    assert file_name("my/file.jsonl") != file_name("my_file.jsonl")
    second = evaluate(lens, tiny, tests, work_dir=tmp_path).evaluations
    for a, b in zip(first, second, strict=True):
        assert a.predictions["coral"].probs.tobytes() == b.predictions["coral"].probs.tobytes()


def test_lenses_stand_side_by_side_and_the_questions_are_scored_once(
    lens: Lens, listwise: Lens, tiny: Model, tmp_path: Path
) -> None:
    (evaluation,) = evaluate([lens, listwise], tiny, toy_questions(6, seed=3), work_dir=tmp_path).evaluations
    assert tuple(evaluation.predictions) == ("base", "temperature", "coral", "listwise", "listwise tempered")
    for one in (lens, listwise):
        alone = one.predictions(tiny, evaluation.questions)
        for method in (one.plain_method, one.method):
            found = evaluation.predictions[method]
            assert found.method == method
            assert found.probs == pytest.approx(alone[method].probs, abs=1e-6)


def test_lenses_of_one_rule_are_told_apart_by_kind_and_else_by_name_or_number(
    lens: Lens, listwise: Lens, tiny: Model
) -> None:
    questions = toy_questions(6, seed=3)
    (twice,) = evaluate([lens, lens], tiny, questions).evaluations
    assert tuple(twice.predictions) == ("base", "temperature", "coral (ridge) 1", "coral (ridge) 2")
    (named,) = evaluate({"mine": lens, "b/yours": lens}, tiny, questions).evaluations
    assert tuple(named.predictions) == ("base", "temperature", "coral (mine)", "coral (b/yours)")
    both = [listwise, replace(listwise, kind="ensemble", gamma=0.0)]
    (evaluation,) = evaluate(both, tiny, questions).evaluations
    rows = (
        "listwise (listwise)",
        "listwise (listwise) tempered",
        "listwise (ensemble)",
        "listwise (ensemble) tempered",
    )
    assert tuple(evaluation.predictions) == ("base", "temperature", *rows)
    for row in rows:
        assert evaluation.predictions[row].method == row
    alone = listwise.predictions(tiny, evaluation.questions)
    assert evaluation.predictions[rows[1]].probs == pytest.approx(alone[listwise.method].probs, abs=1e-6)
    assert subject_of(evaluation.predictions) == rows[1], "what the lens answers with, as where it stands alone"
    assert subject_of(twice.predictions) == "coral (ridge) 1", "it is not tempered"


def test_each_of_several_lenses_is_judged_by_itself_whatever_their_order(
    lens: Lens, listwise: Lens, tiny: Model
) -> None:
    """The paper's lens says nothing of its trust; it used to hide what the other one had to say."""
    stranger = fit(tiny, of_task(toy_questions(TRAINING, seed=6), "other", "train"), FitSettings(layers=(2,)))
    questions = {"known": of_task(toy_questions(8, seed=3), "known")}
    for first, second in ((lens, stranger), (stranger, lens)):
        run = evaluate([first, second], tiny, questions)
        assert run.lens == stranger.record(), "the one that the report is about"
        assert run.title.endswith(stranger.name)
        assert not run.evaluations[0].trained_on
        (said,) = (note for note in reach_notes(run) if "harm cannot be excluded" in note)
        assert said.startswith("listwise: not fitted on known: ")
    assert SIDE_BY_SIDE not in evaluate(stranger, tiny, questions).provenance


def test_a_lens_has_a_row_of_temperature_of_its_own_where_its_temperature_is_another(
    lens: Lens, listwise: Lens, tiny: Model
) -> None:
    questions = toy_questions(6, seed=3)
    warm = replace(lens, control_temperature=2.0 * listwise.control_temperature)
    for both in ([warm, listwise], [listwise, warm]):
        (evaluation,) = evaluate(both, tiny, questions).evaluations
        rows = evaluation.predictions
        assert list(rows)[-1] == "temperature (coral)"
        for row, one in {"temperature": listwise, "temperature (coral)": warm}.items():
            alone = one.predictions(tiny, evaluation.questions)["temperature"]
            assert rows[row].probs == pytest.approx(alone.probs, abs=1e-6)
        assert subject_of(m for m in rows if "listwise" not in m and m != "coral") is None


def test_lenses_on_different_base_probabilities_are_refused(lens: Lens, tiny: Model) -> None:
    other = replace(lens, base="sum")
    with pytest.raises(CoralError, match="one has base token, another sum"):
        evaluate([lens, other], tiny, toy_questions(4, seed=3))


def test_the_view_of_the_listwise_lens_is_kept_unless_it_would_fill_the_disk(
    lens: Lens, listwise: Lens, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = of_task(toy_questions(5, seed=3), "new")
    (looked,) = evaluate([lens, listwise], tiny, questions).evaluations
    assert looked.view is not None
    assert (looked.view.method, looked.view.own, looked.view.layers) == (listwise.method, (2,), (2,))
    assert looked.view.changes.shape == (1, len(looked.predictions["base"].probs))
    assert len(looked.view.shift) == 5
    monkeypatch.setattr(module, "VIEW_BYTES", 1)
    (large,) = evaluate([lens, listwise], tiny, questions).evaluations
    assert large.view is not None
    assert large.view.layers == ()
    assert large.view.shift.tolist() == looked.view.shift.tolist()


# --- leaks


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Question], list[Question]]:
    """Training questions, and test questions of which some leak."""
    folder = tmp_path_factory.mktemp("leaky")
    rows = {"train": training_rows(), "test": leaky_rows()}
    train, test = (read_questions(write_rows(folder / f"{name}.jsonl", some)) for name, some in rows.items())
    return train, test


@pytest.fixture(scope="module")
def reader(files: tuple[list[Question], list[Question]], tiny: Model) -> Lens:
    return fit(tiny, files[0], FitSettings(lens="ridge", layers=(1,)))


def test_with_the_training_questions_at_hand_no_article_and_no_edited_copy_is_counted(
    reader: Lens, tiny: Model, files: tuple[list[Question], list[Question]], tmp_path: Path
) -> None:
    train, test = files
    run = evaluate(reader, tiny, {"test": test}, guard=guard_of(train))
    assert not {q.id for q in run.evaluations[0].questions} & LEAKING
    assert len(run.evaluations[0].questions) == len(test) - len(LEAKING)
    record = run.provenance["leak guard"]
    assert record["left out"] == {"test": LEFT_OUT_BY_REASON}
    assert "not checked" not in record
    assert run.provenance[LEFT_OUT] == {"test": 1}, "of these it was fitted on one"
    save_run(run, tmp_path)
    assert load_run(tmp_path).provenance == run.provenance


def test_a_lens_alone_knows_texts_and_the_run_says_that_articles_could_not_be_checked(
    reader: Lens, tiny: Model, files: tuple[list[Question], list[Question]]
) -> None:
    run = evaluate(reader, tiny, {"test": files[1]})
    assert {q.id for q in run.evaluations[0].questions} & LEAKING == LEAKING - {"again"}
    record = run.provenance["leak guard"]
    assert (record["checked"], record["left out"]) == (REPEATED, {"test": {REPEATED: 1}})
    assert record["not checked"].startswith("articles and edited copies")
    fresh = [q for q in files[1] if q.group == q.id]
    assert "not checked" not in evaluate(reader, tiny, fresh).provenance["leak guard"], "nothing reads an article here"


def test_a_worked_example_is_left_out_and_a_set_of_them_is_refused(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(6, seed=3)
    run = evaluate(lens, tiny, {"new": fresh}, guard=guard_of_shown(fresh[:2]))
    assert [q.id for q in run.evaluations[0].questions] == ["2", "3", "4", "5"]
    assert run.provenance["leak guard"]["left out"] == {"new": {SHOWN: 2}}
    with pytest.raises(CoralError, match=r"all 6 questions .* \(a worked example: 6\); set the shots to 0"):
        evaluate(lens, tiny, {"new": fresh}, guard=guard_of_shown(fresh))


def test_every_set_is_looked_at_before_anything_is_scored(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="old: all 24"):
        evaluate(lens, tiny, {"new": toy_questions(4, seed=3), "old": toy_questions(TRAINING)}, work_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["report.html", "results.json", "results.csv", "figures"])
def test_a_report_that_was_deleted_or_damaged_is_made_again_and_another_is_not(
    lens: Lens, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Picture, "png", lambda self: b"\x89PNG")
    monkeypatch.setattr(Picture, "svg", lambda self: "<svg></svg>")
    run = evaluate([lens], tiny, toy_questions(8, seed=9))
    write_run(run, tmp_path)

    def content() -> dict[str, bytes]:
        return {p.relative_to(tmp_path).as_posix(): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    first = content()
    path = next(tmp_path.glob("figures/*")) if name == "figures" else tmp_path / name
    path.write_bytes(b"other")
    write_run(run, tmp_path)
    assert content() == first
    path.unlink()
    write_run(run, tmp_path)
    assert content() == first
    monkeypatch.setattr("coral_lens.study.evaluate.write_report", lambda *_, **__: pytest.fail("it was as it was"))
    write_run(run, tmp_path)
