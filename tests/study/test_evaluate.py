"""Questions that a lens was fitted on are never counted as test questions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.models import make_model
from support.questions import toy_questions

from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import UNKNOWN, Question
from coral_lens.storage.files import file_name
from coral_lens.study import evaluate as evaluation
from coral_lens.study.evaluate import TestSet as Set
from coral_lens.study.evaluate import evaluate_lenses, unseen

TRAINING = 24


def of_task(questions: list[Question], task: str, split: str = "") -> tuple[Question, ...]:
    return tuple(replace(q, task=task, split=split) for q in questions)


@pytest.fixture(scope="module")
def lens(tiny: Model) -> Lens:
    return fit(tiny, of_task(toy_questions(TRAINING), "known", "train"), FitSettings(lens="ridge", layers=(1,)))


@pytest.fixture(scope="module")
def listwise(tiny: Model) -> Lens:
    return fit(tiny, of_task(toy_questions(TRAINING), "known", "train"), FitSettings(layers=(2,)))


def test_seen_questions_are_left_out_and_counted(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(8, seed=3)
    mixed = of_task([*fresh[:4], *toy_questions(TRAINING)[10:13], *fresh[4:]], "known", "validation")
    renamed = tuple(replace(q, id=f"{i}", text=q.text.upper()) for i, q in enumerate(mixed))
    (evaluation,), left_out = evaluate_lenses([lens], tiny, [Set("known:validation", renamed)])
    assert left_out == {"known:validation": 3}
    assert [q.id for q in evaluation.questions] == ["0", "1", "2", "3", "7", "8", "9", "10"]
    assert tuple(evaluation.predictions) == ("base", "temperature", "coral")
    for predictions in evaluation.predictions.values():
        assert predictions.ids == tuple(q.id for q in evaluation.questions)
        assert predictions.answers.tolist() == [q.answer for q in evaluation.questions]


def test_questions_that_cannot_be_asked_shift_nothing(lens: Lens, tiny: Model) -> None:
    good = list(of_task(toy_questions(6, seed=3), "new"))
    bad = replace(good[0], id="bad", options=("no", "y" * 300), answer=1)
    mixed = (*good[:2], bad, *good[2:])
    with pytest.warns(UserWarning, match=r"^1 question\(s\) left out\. Question 'bad'"):
        (evaluation,), left_out = evaluate_lenses([lens], tiny, [Set("new", mixed)])
    (undisturbed,), _ = evaluate_lenses([lens], tiny, [Set("new", tuple(good))])
    assert list(evaluation.questions) == list(undisturbed.questions)
    assert left_out == {"new": 0}, "counts what the lens knew"
    for method, expected in undisturbed.predictions.items():
        found = evaluation.predictions[method]
        assert (found.ids, found.answers.tolist()) == (expected.ids, [q.answer for q in good])
        assert found.probs.tobytes() == expected.probs.tobytes()
    with pytest.warns(UserWarning, match="'bad'"):
        answers = lens.predict(tiny, mixed)
    assert answers == lens.predict(tiny, good)


def test_a_task_counts_as_trained_on_whatever_its_split(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(4, seed=3)
    tests = [Set("a", of_task(fresh, "known", "validation")), Set("b", of_task(fresh, "strange", "validation"))]
    evaluations, left_out = evaluate_lenses([lens], tiny, tests)
    assert [(e.name, e.trained_on) for e in evaluations] == [("a", True), ("b", False)]
    assert left_out == {"a": 0, "b": 0}


def test_a_set_of_seen_questions_only_is_refused(lens: Lens) -> None:
    with pytest.raises(CoralError, match="old: all 24 questions were used to fit"):
        unseen([lens], Set("old", tuple(toy_questions(TRAINING))))


def test_a_question_without_an_answer_is_refused_by_its_id(lens: Lens) -> None:
    questions = toy_questions(5, seed=3)
    questions[2] = replace(questions[2], answer=UNKNOWN)
    with pytest.raises(CoralError, match=r"new: 1 questions have no answer, first '2'.*coral predict"):
        unseen([lens], Set("new", tuple(questions)))


def test_another_model_is_refused_before_anything_is_scored(lens: Lens, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="fitted on"):
        evaluate_lenses(
            [lens], make_model("llama", seed=1), [Set("new", tuple(toy_questions(4, seed=3)))], work_dir=tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_states_are_kept_in_a_folder_for_each_test_set(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    tests = [
        Set("task:validation", tuple(toy_questions(3, seed=3))),
        Set("my/file.jsonl", tuple(toy_questions(3, seed=4))),
    ]
    first, _ = evaluate_lenses([lens], tiny, tests, work_dir=tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [file_name("my/file.jsonl"), "task.validation"]
    assert file_name("my/file.jsonl") != file_name("my_file.jsonl")
    second, _ = evaluate_lenses([lens], tiny, tests, work_dir=tmp_path)
    for a, b in zip(first, second, strict=True):
        assert a.predictions["coral"].probs.tobytes() == b.predictions["coral"].probs.tobytes()


def test_lenses_stand_side_by_side_and_the_questions_are_scored_once(
    lens: Lens, listwise: Lens, tiny: Model, tmp_path: Path
) -> None:
    tests = [Set("new", tuple(toy_questions(6, seed=3)))]
    (evaluation,), _ = evaluate_lenses([lens, listwise], tiny, tests, work_dir=tmp_path)
    assert tuple(evaluation.predictions) == ("base", "temperature", "coral", "listwise", "listwise tempered")
    for one in (lens, listwise):
        alone = one.predictions(tiny, evaluation.questions)
        for method in (one.plain_method, one.method):
            found = evaluation.predictions[method]
            assert found.method == method
            assert found.probs == pytest.approx(alone[method].probs, abs=1e-6)


def test_lenses_of_one_rule_are_told_apart_by_kind_and_else_by_number(lens: Lens, listwise: Lens, tiny: Model) -> None:
    tests = [Set("new", tuple(toy_questions(6, seed=3)))]
    twice, _ = evaluate_lenses([lens, lens], tiny, tests)
    assert tuple(twice[0].predictions) == ("base", "temperature", "coral (ridge) 1", "coral (ridge) 2")
    (evaluation,), _ = evaluate_lenses([listwise, replace(listwise, kind="ensemble", gamma=0.0)], tiny, tests)
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


def test_lenses_on_different_base_probabilities_are_refused(lens: Lens, tiny: Model) -> None:
    other = replace(lens, base="sum")
    with pytest.raises(CoralError, match="one has base token, another sum"):
        evaluate_lenses([lens, other], tiny, [Set("new", tuple(toy_questions(4, seed=3)))])


def test_the_view_of_the_listwise_lens_is_kept_unless_it_would_fill_the_disk(
    lens: Lens, listwise: Lens, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = Set("new", of_task(toy_questions(5, seed=3), "new"))
    (looked,), _ = evaluate_lenses([lens, listwise], tiny, [test])
    assert looked.view is not None
    assert (looked.view.method, looked.view.own, looked.view.layers) == (listwise.method, (2,), (2,))
    assert looked.view.changes.shape == (1, len(looked.predictions["base"].probs))
    assert len(looked.view.shift) == 5
    monkeypatch.setattr(evaluation, "VIEW_BYTES", 1)
    (large,), _ = evaluate_lenses([lens, listwise], tiny, [test])
    assert large.view is not None
    assert large.view.layers == ()
    assert large.view.shift.tolist() == looked.view.shift.tolist()
