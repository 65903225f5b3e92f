"""A calibrated lens keeps its promises on questions it has never seen, and remembers those that calibrated it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore
from support.questions import toy_questions

import coral_lens
from coral_lens.data.settings import TaskOptions
from coral_lens.data.tasks import load_task
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.metrics.conformal import fit_conformal, prediction_sets
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN

SIGNAL = {1: 1.5}


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(120, signal=SIGNAL), FitSettings(layers=(1,)))


def store_of(n: int, seed: int) -> PlantedStore:
    return PlantedStore(n, signal=SIGNAL, seed=seed)


# ---------------------------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_sets_hold_the_right_option_as_often_as_stated(lens: Lens, kind: str) -> None:
    """Over five draws of 150 questions: the mean is at least 0.8, up to chance; LAC keeps close to it."""
    covered, sizes = [], []
    for seed in range(1, 6):
        calibrated, left_out = calibrate_on(lens, store_of(150, seed), Guarantees(coverage=0.8, kind=kind))
        assert left_out == 0
        fresh = store_of(300, 100 + seed)
        answers = calibrated.answers(fresh)
        sets = [a.options_in_set for a in answers]
        covered += [q.answer in s for q, s in zip(fresh.questions, sets, strict=True) if s is not None]
        sizes += [len(s) / len(q.options) for q, s in zip(fresh.questions, sets, strict=True) if s is not None]
    assert len(covered) == 1500
    assert np.mean(covered) > 0.77
    assert np.mean(sizes) < 0.9
    if kind == "lac":
        assert np.mean(covered) < 0.86


def test_answers_are_wrong_no_more_often_than_stated_unless_the_lens_abstains(lens: Lens) -> None:
    rates, answered = [], []
    for seed in range(1, 6):
        calibrated, _ = calibrate_on(lens, store_of(300, seed), Guarantees(coverage=None, risk=0.2))
        fresh = store_of(400, 100 + seed)
        answers = calibrated.answers(fresh)
        wrong = [a.answer != q.answer for a, q in zip(answers, fresh.questions, strict=True) if not a.abstain]
        rates.append(np.mean(wrong) if wrong else 0.0)
        answered.append(len(wrong))
    assert sum(rate <= 0.2 for rate in rates) >= 4  # delta is 0.1
    assert max(rates) < 0.25
    assert max(answered) > 40


def test_a_lens_that_cannot_show_the_risk_always_abstains(lens: Lens) -> None:
    calibrated, _ = calibrate_on(lens, store_of(30, 2), Guarantees(coverage=None, risk=0.01))
    assert calibrated.abstention is not None
    assert calibrated.abstention.abstains_always
    assert all(a.abstain for a in calibrated.answers(store_of(10, 3)))


def test_what_is_not_asked_for_stays_as_it_was(lens: Lens) -> None:
    first, _ = calibrate_on(lens, store_of(100, 2), Guarantees(coverage=0.8))
    second, _ = calibrate_on(first, store_of(100, 3), Guarantees(coverage=None, risk=0.3))
    assert first.abstention is None
    assert second.sets == first.sets
    assert second.abstention is not None


def test_sets_and_abstention_are_of_the_probabilities_that_the_lens_answers_with(lens: Lens) -> None:
    """The tempered ones: by hand, the threshold is the 81st smallest of 1 - p over a hundred right options."""
    store = store_of(100, 2)
    calibrated, _ = calibrate_on(lens, store, Guarantees(coverage=0.8))
    p = lens.apply(store)["listwise tempered"]
    right = p[store.table.options.starts + store.table.answers]
    assert calibrated.sets is not None
    assert calibrated.sets.threshold == pytest.approx(np.sort(1 - right)[80])
    assert calibrated.sets.n_questions == 100


# -------------------------------------------------------------------------------------------------- seen and unseen


def test_questions_that_the_lens_was_fitted_on_are_refused(lens: Lens) -> None:
    with pytest.raises(CoralError, match="fitted on all of these questions"):
        calibrate_on(lens, PlantedStore(120, signal=SIGNAL), Guarantees())


def mixed(old: PlantedStore, new: PlantedStore) -> PlantedStore:
    """Both, one after the other."""
    both = PlantedStore(1)
    both.questions = [*old.questions, *new.questions]
    columns = {
        name: np.concatenate([getattr(s.table, name) for s in (old, new)])
        for name in ("logprobs", "n_tokens", "n_chars", "n_bytes", "answers")
    }
    both.table = replace(old.table, **columns, offsets=Options.of_sizes([len(q.options) for q in both.questions]).edges)
    both.states = {layer: np.concatenate([old.states[layer], new.states[layer]]) for layer in old.states}
    return both


def test_seen_questions_among_others_are_left_out_and_counted(lens: Lens) -> None:
    old, new = PlantedStore(120, signal=SIGNAL), store_of(60, 2)
    calibrated, left_out = calibrate_on(lens, mixed(old, new), Guarantees(coverage=0.8, risk=0.3))
    alone, _ = calibrate_on(lens, new, Guarantees(coverage=0.8, risk=0.3))
    assert left_out == 120
    assert calibrated.sets == alone.sets
    assert calibrated.abstention == alone.abstention


def test_questions_that_calibrated_become_seen(lens: Lens) -> None:
    store = store_of(60, 2)
    assert not lens.is_seen(store.questions).any()
    calibrated, _ = calibrate_on(lens, store, Guarantees(coverage=0.8))
    assert calibrated.is_seen(store.questions).all()
    assert calibrated.is_seen(PlantedStore(120, signal=SIGNAL).questions).all()
    assert not calibrated.is_seen(store_of(60, 3).questions).any()
    assert not lens.is_seen(store.questions).any()


def test_a_lens_in_the_place_of_a_calibrated_one_says_that_its_promises_are_gone(lens: Lens, tmp_path: Path) -> None:
    sets, _ = calibrate_on(lens, store_of(150, 1), Guarantees(coverage=0.8))
    both, _ = calibrate_on(sets, store_of(150, 1), Guarantees(risk=0.3))
    for saved in (lens, sets, both):  # nothing is lost, so nothing is said: a warning is an error here
        saved.save(tmp_path)
    for dropping in (sets, lens):
        with pytest.warns(
            UserWarning, match="was calibrated; that was dropped with the old lens: run `coral calibrate`"
        ):
            dropping.save(tmp_path)
    assert load_lens(tmp_path).sets is None
    lens.save(tmp_path)


def test_a_lens_may_be_calibrated_again_on_the_same_questions(lens: Lens) -> None:
    store = store_of(120, 2)
    before, _ = calibrate_on(lens, store, Guarantees(coverage=0.8))
    after, left_out = calibrate_on(before, store, Guarantees(coverage=0.9, risk=0.3))
    at_once, _ = calibrate_on(lens, store, Guarantees(coverage=0.9, risk=0.3))
    assert left_out == 0
    assert (after.sets, after.abstention) == (at_once.sets, at_once.abstention)
    assert after.is_seen(store.questions).all()


def test_a_question_without_an_answer_is_refused_by_its_id(lens: Lens) -> None:
    store = store_of(30, 2)
    store.questions[7] = replace(store.questions[7], id="the seventh", answer=UNKNOWN)
    answers = store.table.answers.copy()
    answers[7] = UNKNOWN
    store.table = replace(store.table, answers=answers)
    with pytest.raises(CoralError, match="'the seventh' has no answer"):
        calibrate_on(lens, store, Guarantees())


def test_too_few_questions_for_the_coverage_are_refused(lens: Lens) -> None:
    with pytest.raises(CoralError, match=r"needs at least 19 held-out questions.* Got 10"):
        calibrate_on(lens, store_of(10, 2), Guarantees(coverage=0.95))


# ------------------------------------------------------------------------------------------------------ on the disk


def test_promises_survive_the_disk(lens: Lens, tmp_path: Path) -> None:
    calibrated, _ = calibrate_on(lens, store_of(120, 2), Guarantees(coverage=0.8, kind="raps", risk=0.3))
    calibrated.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.sets == calibrated.sets
    assert again.abstention == calibrated.abstention
    assert again.seen.tolist() == calibrated.seen.tolist()
    assert again.calibrated_on.tolist() == calibrated.calibrated_on.tolist()
    assert len(again.calibrated_on) == 120
    fresh = store_of(40, 3)
    assert again.answers(fresh) == calibrated.answers(fresh)


def test_predict_shows_the_set_and_the_flag_only_of_a_calibrated_lens(tiny: Model, tmp_path: Path) -> None:
    fitted = fit(tiny, toy_questions(30), FitSettings(layers=(1,), temper=False))
    new = toy_questions(5, seed=9)
    assert {(a.options_in_set, a.abstain) for a in fitted.predict(tiny, new)} == {(None, None)}
    held_out = extract(tiny, toy_questions(40, seed=4), tmp_path / "held out", extraction=Extraction(layers=(1,)))
    calibrated, _ = calibrate_on(fitted, held_out, Guarantees(coverage=0.8, risk=0.5))
    for answer in calibrated.predict(tiny, new):
        assert answer.options_in_set is not None
        assert answer.answer in answer.options_in_set  # nobody is shown an empty set
        assert answer.abstain in (True, False)


# ------------------------------------------------------------------------------------------------- with a real model


@pytest.fixture(scope="module")
def arc(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    questions = load_task("arc_easy", TaskOptions(split="validation", limit=60))
    return extract(smollm2, questions, tmp_path_factory.mktemp("arc"), extraction=Extraction(layers=(1,)))


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_on_real_questions_the_mean_coverage_over_random_halves_is_the_stated_one(
    arc: ActivationStore, kind: str
) -> None:
    """The expected coverage is ceil(0.9 * 31) / 31 = 0.903, whatever the model; deterministic APS has ties and more."""
    p, options, answers = base_probs(arc.table, "token"), arc.table.options, arc.table.answers
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(600):
        half = np.zeros(60, dtype=bool)
        half[rng.permutation(60)[:30]] = True
        first, second = ((options.rows(m), options.take(m)) for m in (half, ~half))
        rule = fit_conformal(p[first[0]], first[1], answers[half], coverage=0.9, kind=kind)
        sets = prediction_sets(rule, p[second[0]], second[1], keep_top=False)
        covered.append(sets[second[1].row(answers[~half])].mean())
    if kind == "lac":
        assert np.mean(covered) == pytest.approx(28 / 31, abs=0.012)
    else:
        assert 28 / 31 - 0.012 < np.mean(covered) < 0.97


def test_python_calibrates_a_lens_as_the_command_does(tiny: Model) -> None:
    lens = coral_lens.fit(tiny, toy_questions(40), coral_lens.FitSettings(layers=(2,)))
    held_out = [replace(q, text=f"Held out. {q.text}") for q in toy_questions(40, seed=5)]
    calibrated = coral_lens.calibrate(lens, tiny, held_out, coral_lens.Guarantees(coverage=0.8, risk=0.9))
    assert calibrated.sets is not None
    assert calibrated.sets.coverage == 0.8
    assert calibrated.abstention is not None
    assert lens.sets is None, "a lens is never changed in place"
    assert calibrated.is_seen(held_out).all()
