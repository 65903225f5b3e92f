"""A lens for open questions learns which of the model's own answers are right, says when none is, and keeps what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_planted import OpenPlantedStore
from support.planted import PlantedStore

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.data.settings import Style
from coral_lens.engine.model import Model
from coral_lens.engine.settings import Sampling
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.asking import STATES, ask, fit_open, remove_work, scored_open
from coral_lens.lens.calibrate import calibrate, calibrate_on
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.open_answers import open_answers
from coral_lens.lens.open_part import CandidateStates
from coral_lens.lens.publish import card
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.methods.open_answers import answers_of_lens
from coral_lens.metrics.answered import answered
from coral_lens.metrics.scores import score
from coral_lens.storage.files import SEAL, json_bytes, sealed

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(candidates=8, temperature=1.0, max_tokens=64, examples=0)
FEW = FitSettings(layers=(1, 2))


@pytest.fixture(scope="module")
def planted() -> Lens:
    return fit_store(CandidateStates(OpenPlantedStore(600), Sampling()), FitSettings()).at_home()


def toy_open(n: int, *, labelled: bool = True) -> list[OpenQuestion]:
    return [OpenQuestion(f"q{i}", f"Toy {i}?", ("x",) if labelled else (), group=str(i // 2)) for i in range(n)]


# ------------------------------------------------------------------------------------------------------- what it learns


def test_states_that_know_which_candidate_is_right_make_the_lens_better_than_weighing_alone(planted: Lens) -> None:
    fresh = OpenPlantedStore(400, seed=1)
    probs = planted.apply(fresh)[planted.method]
    found = []
    for p in (base_probs(fresh.table, planted.base_rule), probs):
        answers = answers_of_lens("", p, fresh)
        predictions = answered("", [q.id for q in fresh.questions], answers.sure, answers.right)
        found.append({metric: score(predictions, metric) for metric in ("accuracy", "auroc", "brier_top1", "ece")})
    assert planted.layers[0] in (1, 2)
    assert found[1]["auroc"] > found[0]["auroc"] + 0.05
    assert found[1]["brier_top1"] < found[0]["brier_top1"] - 0.02
    assert found[1]["ece"] < 0.1


def test_confidence_is_low_for_all_candidates_where_none_is_right(planted: Lens) -> None:
    fresh = OpenPlantedStore(400, seed=2)
    answers = open_answers(planted, fresh)
    none = np.array([q.answer == len(q.options) - 1 for q in fresh.questions])
    p_none = np.array([a.p_none for a in answers])
    assert p_none[none].mean() > 0.65 > 0.35 > p_none[~none].mean()
    for answer, question in zip(answers, fresh.questions, strict=True):
        assert sum(answer.probs) + answer.p_none == pytest.approx(1)
        assert answer.confidence == max(answer.probs)
        assert answer.answer == question.options[answer.probs.index(answer.confidence)]
        assert answer.right == (answer.answer == question.options[question.answer])
        assert sum(answer.counts) == answer.n_written == 8


def test_the_states_of_the_words_none_of_these_change_nothing(planted: Lens) -> None:
    fresh, other = OpenPlantedStore(20, seed=3), OpenPlantedStore(20, seed=3)
    edges = other.table.options.edges[1:] - 1
    for states in other.states.values():
        states[edges] = 1e3
    assert planted.apply(fresh)[planted.method] == pytest.approx(planted.apply(other)[planted.method])


def test_a_stated_risk_holds_for_the_answers_that_are_given(planted: Lens) -> None:
    calibrated, _ = calibrate_on(planted, OpenPlantedStore(500, seed=4), Guarantees(coverage=None, risk=0.25))
    answers = open_answers(calibrated, OpenPlantedStore(500, seed=5))
    given = [a for a in answers if not a.abstain]
    assert 50 < len(given) < 450
    assert np.mean([not a.right for a in given]) < 0.3
    assert min(a.confidence for a in given) > max(a.confidence for a in answers if a.abstain)


# ------------------------------------------------------------------------------------------------------ saved and loaded


def test_a_saved_lens_answers_as_before_and_its_card_says_how_it_was_fitted(planted: Lens, tmp_path: Path) -> None:
    planted.save(tmp_path / "lens")
    loaded = load_lens(tmp_path / "lens")
    fresh = OpenPlantedStore(20, seed=6)
    assert open_answers(loaded, fresh) == open_answers(planted, fresh)
    assert loaded.open is not None
    assert planted.open is not None
    assert (loaded.open.sampling, loaded.open.weighing) == (planted.open.sampling, planted.open.weighing)
    text = card(loaded)
    assert "8 answers at temperature 0.7, seed 0" in text
    assert "Fitted on the model's own candidates" in text
    assert "coral ask --lens" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"candidates": 0}, "open.sampling.candidates"),
        ({"temperature": float("1e9")}, "open.sampling.temperature"),
        ({"examples": 99}, "open.sampling.examples"),
    ],
)
def test_a_record_that_no_fit_wrote_is_refused(
    planted: Lens, tmp_path: Path, change: dict[str, float], sentence: str
) -> None:
    planted.save(tmp_path)
    record = json.loads((tmp_path / "lens.json").read_text("utf-8"))
    record["open"]["sampling"] |= change
    del record[SEAL]
    (tmp_path / "lens.json").write_bytes(json_bytes(sealed(record)))
    with pytest.raises(CoralError, match=sentence):
        load_lens(tmp_path)


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_lens_for_options_cannot_ask_and_one_for_open_questions_cannot_predict(planted: Lens, tiny: Model) -> None:
    closed = fit_store(PlantedStore(60), FitSettings(layers=(1,)))
    with pytest.raises(CoralError, match=r"fitted on questions with options.*coral predict.*--open"):
        closed.ask(tiny, "Who?")
    with pytest.raises(CoralError, match=r"fitted on open questions.*coral ask"):
        planted.check_kind(is_open=False)


class Posing(Sequence[Any]):
    """Whoever takes one of them by its number, as the checks of types in this suite do, gets another than whoever reads all."""

    def __init__(self, looked_at: Any, read: Sequence[Any]) -> None:
        self.looked_at, self.read = looked_at, read

    def __getitem__(self, _: Any) -> Any:
        return self.looked_at

    def __len__(self) -> int:
        return len(self.read)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read)


def test_questions_of_the_other_kind_are_one_sentence_in_every_call(planted: Lens, tiny: Model) -> None:
    questions = list(PlantedStore(30).questions)
    closed = replace(fit_store(PlantedStore(60), FitSettings(layers=(1,))), model=tiny.identity)
    opened = replace(planted, model=tiny.identity)
    for wrong in ([OpenQuestion("z", "Who?")], ["Who?"], [*questions, ""]):
        posing = Posing(questions[0], wrong)
        for call in (
            partial(closed.predict, tiny, posing),
            partial(calibrate, closed, tiny, posing, Guarantees(coverage=0.9)),
            partial(closed.adapt, tiny, posing),
            partial(fit, tiny, posing),
        ):
            with pytest.raises(CoralError, match=r"comes without options.*lens\.ask"):
                call()
    posing = Posing(OpenQuestion("z", "Who?"), questions)
    for call in (partial(opened.ask, tiny, posing), partial(fit_open, tiny, posing)):
        with pytest.raises(CoralError, match=r"is no open question.*lens\.predict"):
            call()


def test_what_open_questions_cannot_be_fitted_with_is_one_sentence(tiny: Model) -> None:
    with pytest.raises(CoralError, match=r"1 of 21 training questions have no answers, first 'z'"):
        fit_open(tiny, [*toy_open(20), OpenQuestion("z", "Who?")])
    with pytest.raises(CoralError, match="at least 20 labelled questions"):
        fit_open(tiny, toy_open(5))
    with pytest.raises(CoralError, match="cannot exit before"):
        fit_open(tiny, toy_open(20), FitSettings(exit_layer=1))
    for other in (FitSettings(read="auto"), FitSettings(read="listed"), FitSettings(base="pmi")):
        with pytest.raises(CoralError, match="leave --read and --base out"):
            fit_open(tiny, toy_open(20), other)
    with pytest.raises(CoralError, match="in the style 'text'"):
        fit_open(tiny, toy_open(20), FitSettings(style=Style(kind="letters")))


# ------------------------------------------------------------------------------------------------------- with a real model


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_a_fit_keeps_what_was_written_and_a_second_one_writes_nothing(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coral_lens.engine import texts

    first = fit_open(tiny, toy_open(40), FEW, sampling=SAMPLING, work_dir=tmp_path / "work", bar=False)
    monkeypatch.setattr(texts, "generate_answers", lambda *_, **__: pytest.fail("it was written before"))
    again = fit_open(tiny, toy_open(40), FEW, sampling=SAMPLING, work_dir=tmp_path / "work", bar=False)
    assert again.record() == first.record()
    assert first.trace.chosen.gamma >= 0
    (tmp_path / "work" / "search.jsonl").unlink(missing_ok=True)
    (tmp_path / "work" / "mine.txt").write_text("kept")
    remove_work(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.txt"]


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_an_answer_to_one_question_is_the_same_among_others_and_its_seen_questions_are_known(tiny: Model) -> None:
    lens = fit_open(tiny, toy_open(40), FEW, sampling=SAMPLING, bar=False)
    asked = toy_open(8, labelled=False)
    together = {a.id: a for a in ask(lens, tiny, asked)}
    name = next(iter(together))
    (alone,) = ask(lens, tiny, [q for q in asked if q.id == name])
    assert alone.candidates == together[name].candidates
    assert alone.probs == pytest.approx(together[name].probs, abs=1e-4)
    assert alone.right is None
    with scored_open(lens, tiny, asked) as store:
        assert lens.is_seen(store.questions).all(), "an open question is known by its text, whatever was written to it"
        with pytest.raises(CoralError, match=r"fitted on open questions"):
            lens.predict(tiny, [replace(q, counts=()) for q in store.questions])


def test_smollm2_writes_weighs_and_knows_what_it_knows(smollm2: Model, tmp_path: Path) -> None:
    known = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Egypt": "Cairo",
             "Norway": "Oslo", "Peru": "Lima", "Cuba": "Havana", "Poland": "Warsaw"}  # fmt: skip
    asked = [OpenQuestion(f"c{i}", f"What is the capital of {a}?", (b,)) for i, (a, b) in enumerate(known.items())]
    asked += [
        OpenQuestion(f"n{i}", f"What is the phone number of the town hall of {a}?", ("never given out",))
        for i, a in enumerate(known)
    ]
    settings = FitSettings(layers=(12, 16))
    lens = fit_open(smollm2, asked, settings, sampling=Sampling(candidates=4), work_dir=tmp_path, bar=False).at_home()
    assert (tmp_path / STATES / "manifest.json").exists()
    easy, hard = lens.ask(
        smollm2, ["What is the capital of Austria?", "What is the phone number of the town hall of Ghent?"]
    )
    assert easy.answer == "Vienna"
    assert easy.confidence > 0.5 > hard.confidence
    assert hard.p_none > 0.5
