"""A lens that would answer worse than the model keeps the model's answers, and its confidence is still worth having."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from support.planted import PlantedStore, brier

from coral_lens.lens import labelled
from coral_lens.lens.adapt import adapt_on
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.keep_answers import check_answers, check_tasks, keep_answers
from coral_lens.lens.publish import card
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import ALL
from coral_lens.lens.trust import Trust
from coral_lens.metrics.scores import Score
from coral_lens.ragged import Options
from coral_lens.records import Question


def kept(q: list[float], answer: int) -> np.ndarray:
    return keep_answers(np.array(q), np.array([answer]), np.array([True]), Options.of_sizes([len(q)]))


# ------------------------------------------------------------------------------------------------- worked by hand


def test_where_the_lens_disagrees_the_two_options_are_drawn_together() -> None:
    np.testing.assert_allclose(kept([0.6, 0.3, 0.1], 1), [0.45, 0.45, 0.1], atol=1e-5)
    np.testing.assert_allclose(kept([0.5, 0.4, 0.1], 2), [1 / 3] * 3, atol=1e-5)
    np.testing.assert_allclose(kept([0.6, 0.2, 0.15, 0.05], 2), [0.375, 0.2, 0.375, 0.05], atol=1e-5)


def test_where_they_agree_nothing_changes() -> None:
    q = [0.6, 0.3, 0.1]
    assert kept(q, 0).tolist() == q
    options = Options.of_sizes([3])
    unmarked = keep_answers(np.array(q), np.array([2]), np.array([False]), options)
    assert unmarked.tolist() == q


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6), st.integers(0, 5))
def test_the_answer_is_on_top_of_probabilities(weights: list[float], at: int) -> None:
    q, answer = np.array(weights) / sum(weights), at % len(weights)
    found = kept(q.tolist(), answer)
    assert found.sum() == pytest.approx(1.0)
    assert found.argmax() == answer
    others = np.delete(np.arange(len(q)), answer)
    order = others[np.argsort(q[others], kind="stable")]
    assert (np.diff(found[order]) >= 0.0).all()  # the lens's own order of the others stays


def test_they_are_the_nearest_that_have_it_so() -> None:
    q, answer = np.array([0.4, 0.35, 0.05, 0.2]), 3
    rules = [{"type": "eq", "fun": lambda p: p.sum() - 1.0}]
    rules += [{"type": "ineq", "fun": lambda p, j=j: p[answer] - p[j]} for j in range(3)]  # type: ignore[misc]
    nearest = minimize(lambda p: ((p - q) ** 2).sum(), q, constraints=rules, tol=1e-12).x
    np.testing.assert_allclose(kept(q.tolist(), answer), nearest, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- the check


def test_the_check_worked_by_hand() -> None:
    """Of ten answers the lens gains two and loses one: 0.1, with a standard error of sqrt(0.29 / 10)."""
    base = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    lens = base.copy()
    lens[[2, 3]], lens[0] = 1.0, 0.0
    check = check_answers(lens, base)
    assert (check.base, check.lens, check.questions) == (0.4, 0.5, 10)
    assert check.error == pytest.approx(np.sqrt(0.29 / 10))
    assert not check.used, "a gain within its standard error is none"
    assert check_answers(lens, base, before=True).used
    assert not check_answers(base, lens, before=False).used


@pytest.mark.parametrize(("gain", "used"), [(0.3, True), (-0.3, False)])
def test_clear_gains_and_losses_decide_whatever_held_before(gain: float, used: bool) -> None:
    base = (np.arange(200) % 2).astype(float)
    lens = np.where(np.arange(200) < abs(gain) * 200, float(gain > 0), base)
    assert all(check_answers(lens, base, before).used is used for before in (None, True, False))


def test_few_questions_decide_nothing_however_clear_they_are() -> None:
    lens, base = np.ones(19), np.zeros(19)
    assert not check_answers(lens, base).used
    assert check_answers(lens, base, before=True).used
    assert check_answers(base, lens, before=True).used
    assert check_answers(np.ones(20), np.zeros(20), before=False).used


def test_questions_of_one_article_are_one() -> None:
    """Worked by hand: of forty articles with four questions each, two gain all four and one loses all."""
    base, units = np.zeros(160), np.arange(160) // 4
    lens = np.isin(units, [0, 1]).astype(float)
    base[units == 2] = 1.0
    check = check_answers(lens, base, units=units)
    assert check.error == pytest.approx(np.sqrt((3 / 40 - (1 / 40) ** 2) / 40))
    assert not check.used, "0.025 is within 0.043"
    alone = check_answers(lens, base)
    assert alone.error == pytest.approx(check.error / 2)
    assert alone.used
    assert not check_answers(np.ones(160), np.zeros(160), units=np.arange(160) % 19).used, "nineteen articles"


def test_a_task_of_few_articles_is_answered_as_all_tasks_are() -> None:
    base, units = np.tile([1.0, 0.0], 100), np.arange(200)
    lens = np.where(np.arange(200) < 120, 1.0, base)
    lens[180:] = 0.0
    tasks = np.array(["good"] * 180 + ["bad"] * 20)
    assert not check_tasks(lens, base, tasks, units)["bad"].used
    units[180:] //= 2
    assert check_tasks(lens, base, tasks, units)["bad"].used


def test_a_task_in_which_the_lens_loses_keeps_the_models_answers_and_the_others_do_not() -> None:
    base = np.tile([1.0, 0.0], 100)
    lens = np.where(np.arange(200) < 120, 1.0, base)
    lens[180:] = 0.0
    tasks = np.array(["good"] * 120 + ["even"] * 60 + ["bad"] * 20)
    used = {name: check.used for name, check in check_tasks(lens, base, tasks).items()}
    assert used == {ALL: True, "good": True, "even": True, "bad": False}


# -------------------------------------------------------------------------------------------------------- a lens


def test_who_answers_depends_on_the_task_at_home_and_on_the_usual_elsewhere() -> None:
    questions = [Question(t, t, "?", ("a", "b"), task=t) for t in ("kept", "other", "kept")]
    trust = Trust(0.5, 1.5, 1.5, 1.0, answers={ALL: True, "kept": False})
    assert trust.answering(questions, np.array([True, True, False])).tolist() == [False, True, True]
    assert Trust(0.5, 1.5, 1.5, 1.0).answering(questions, np.ones(3, dtype=bool)).all(), "as before there were checks"


def useless(seed: int = 0) -> PlantedStore:
    """A model that mostly knows the answer, and states that are noise."""
    store = PlantedStore(150, signal={}, seed=seed)
    y = store.table.options.one_hot(store.table.answers)
    store.table.logprobs[:] += 3.0 * y
    return store


def tops(store: PlantedStore, probs: np.ndarray) -> list[int]:
    return store.table.options.top(probs).tolist()


def test_a_lens_that_knows_nothing_leaves_every_answer_of_a_model_that_does() -> None:
    store = useless()
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert lens.trust is not None
    assert lens.trust.answers == {ALL: False}
    assert not lens.trace.answers[ALL].used
    found = lens.at_home().apply(store)
    assert tops(store, found[lens.method]) == tops(store, found["base"])
    assert all(answer.kept for answer in lens.at_home().answers(store)), "each answer says so"
    assert "the answers stay the model's own" in card(lens)
    again = Lens.from_record(lens.record(), tensors_of(lens), None)
    assert again.trust == lens.trust
    assert again.trace.answers == lens.trace.answers


def tensors_of(lens: Lens) -> dict:
    import torch

    return lens.correction.tensors() | lens.shift.tensors() | {"training.seen": torch.from_numpy(lens.seen)}


def test_a_lens_that_knows_answers_itself() -> None:
    lens = fit_store(PlantedStore(150, signal={1: 2.0}), FitSettings(layers=(1,)))
    assert lens.trust is not None
    assert lens.trust.answers == {ALL: True}
    fresh = PlantedStore(150, signal={1: 2.0}, seed=9)
    found = lens.at_home().apply(fresh)
    assert tops(fresh, found[lens.method]) != tops(fresh, found["base"])
    assert brier(fresh, found[lens.method]) < brier(fresh, found["temperature"])


def test_a_record_without_checks_answers_as_before() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(layers=(1,)))
    record = lens.record()
    del record["trust"]["answers"], record["trace"]["answers"]
    old = Lens.from_record(record, tensors_of(lens), None)
    assert old.trust is not None
    assert old.trust.answers == {}
    assert old.trace.answers == {}


def test_a_lens_that_exits_early_always_answers() -> None:
    lens = fit_store(PlantedStore(80, signal={}), FitSettings(exit_layer=2))
    assert lens.trust is not None
    assert lens.trust.answers == {}
    assert lens.trace.answers == {}


def test_labels_of_a_task_say_who_answers_there() -> None:
    knows = fit_store(PlantedStore(150, signal={1: 2.0}), FitSettings(layers=(1,)))
    few = useless(seed=3)  # a task on which the model is good and the lens is noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            labelled, "fit_mixture", lambda *_, **__: labelled.Mixture(0.8, 1.0)
        )  # by itself it would leave the lens out
        patch.setattr(labelled, "gain_of", lambda *_, **__: Score(0.0, -1.0, 1.0))
        adapted = adapt_on(knows, few)
    assert adapted.trust is not None
    assert adapted.trust.elsewhere == 0.8
    assert adapted.trust.answers == {ALL: False}
    found = adapted.apply(few)
    assert tops(few, found[adapted.method]) == tops(few, found["base"])
    assert "The answers stay the model's own." in str(adapted.adaptation)
    good = adapt_on(knows, PlantedStore(150, signal={1: 2.0}, seed=4))
    assert good.adaptation is not None
    assert good.adaptation.answers is not None
    assert good.adaptation.answers.used
    assert good.trust is not None
    assert good.trust.answers == {ALL: True}
