"""A lens answers questions the same way wherever their states are kept, and knows those that it has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.lenses import METHODS, TRAINING
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings
from coral_lens.records import UNKNOWN


def test_questions_without_answers_are_answered_like_those_with(lens: Lens, tiny: Model) -> None:
    labelled = toy_questions(6, seed=9)
    unlabelled = [replace(q, answer=UNKNOWN) for q in labelled]
    assert lens.predict(tiny, unlabelled) == lens.predict(tiny, labelled)


def test_a_work_folder_keeps_the_states_and_a_second_call_does_not_run_the_model(
    lens: Lens, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(5, seed=9)
    steps: list[int] = []
    first = lens.predict(tiny, questions, work_dir=tmp_path / "work", progress=steps.append)
    assert sum(steps) == 5

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was run")

    for body in ("plain_body", "tree_body", "prefill"):
        monkeypatch.setattr(Model, body, refuses)
    assert lens.predict(tiny, questions, work_dir=tmp_path / "work") == first


def test_predictions_in_memory_are_those_through_a_folder_to_the_bit(
    lens: Lens, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(20, seed=9)
    kept, kept_answers = (
        lens.predictions(tiny, questions, work_dir=tmp_path / "work"),
        lens.predict(tiny, questions, work_dir=tmp_path / "work"),
    )
    assert list((tmp_path / "work").glob("shard-*"))

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file was written")

    monkeypatch.setattr("coral_lens.storage.files.os.fsync", refuses)
    monkeypatch.setattr("tempfile.mkdtemp", refuses)
    assert lens.predict(tiny, questions) == kept_answers
    found = lens.predictions(tiny, questions)
    assert list(found) == list(kept)
    for method, predictions in found.items():
        assert predictions.probs.tobytes() == kept[method].probs.tobytes()


def test_predictions_of_every_method_are_of_the_same_questions(lens: Lens, tiny: Model) -> None:
    questions = [replace(q, task="toys", split="test") for q in toy_questions(7, seed=9)]
    predictions = lens.predictions(tiny, questions)
    assert tuple(predictions) == METHODS[lens.kind]
    for method, p in predictions.items():
        assert (p.method, p.model, p.task, p.split) == (method, "tiny-llama", "toys", "test")
        assert p.ids == tuple(q.id for q in questions)
        assert p.answers.tolist() == [q.answer for q in questions]


def test_no_questions_are_refused(lens: Lens, tiny: Model) -> None:
    with pytest.raises(CoralError, match="no questions"):
        lens.predict(tiny, [])


def test_the_lens_recognises_the_questions_it_was_fitted_or_chosen_on(lens: Lens) -> None:
    known, unknown = toy_questions(TRAINING), toy_questions(10, seed=5)
    disguised = [
        replace(q, id=f"new {q.id}", text=q.text.upper(), options=q.options[::-1], answer=UNKNOWN) for q in known
    ]
    assert lens.is_seen(known).all()
    assert lens.is_seen(disguised).all()
    assert not lens.is_seen(unknown).any()
    assert lens.is_seen([known[3], unknown[0], known[39]]).tolist() == [True, False, True]
    asked = [replace(q, text=f"Question: {q.text}\nAnswer:") for q in known]
    assert lens.is_seen(asked).all()


def test_the_style_of_the_questions_is_part_of_the_lens(tiny: Model, tmp_path: Path) -> None:
    fitted = fit(tiny, toy_questions(20), FitSettings(style=Style("letters"), layers=(1,)))
    fitted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.style == Style("letters")
    again.predict(tiny, toy_questions(3, seed=9), work_dir=tmp_path / "work")
    assert ActivationStore(tmp_path / "work").manifest["style"] == "letters"


def test_a_lens_fits_on_a_screen_and_says_how_it_did() -> None:
    lens = load_lens(Path(__file__).parents[1] / "golden" / "lens")
    lines = str(lens).splitlines()
    assert lines[0] == f"Lens for model: {lens.name}"
    assert lines[1].split()[:2] == ["method", "accuracy"]
    assert [line.split()[0] for line in lines[2:-2]] == [m.split()[0] for m in lens.trace.validation]
    assert lines[-2:] == [
        "48 questions of “questions”: fitted on 38, chosen on 10 others.",
        "The scores are fractions, of the questions it was chosen on.",
    ]
    assert len(repr(lens)) < 2000
    assert lens.to_frame()["accuracy"][0] == lens.trace.validation["base"]["accuracy"].value
    assert lens._repr_html_().count("<tr>") == 1 + len(lens.trace.validation)


def test_an_answer_prints_every_option_and_in_a_list_one_line() -> None:
    answer = Answer("q7", 1, "a blue whale", 0.732, (0.268, 0.732), (0.6, 0.4), 1.04, (0, 1), False)
    assert repr([answer]) == "[<q7: a blue whale (73% sure, shift 1.0)>]"
    assert str(answer).splitlines() == [
        "q7: a blue whale (73% sure, shift 1.0)",
        "option  chosen  before  after  in set",
        "     0      no     0.6  0.268     yes",
        "     1     yes     0.4  0.732     yes",
    ]
    assert answer.to_frame()["after"].tolist() == [0.268, 0.732]
