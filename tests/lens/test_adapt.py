"""Thirty labels: how far a lens is believed on one new task is learned from some of its questions."""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.planted import COLUMN, PlantedStore, brier
from support.questions import toy_questions

import coral_lens
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.adapt import adapt_on
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.records import UNKNOWN, OptionTable

SIGNAL = {1: 2.0}


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}), FitSettings(layers=(1,)))


def new_task(n: int, seed: int, *, trust: float = 1.0) -> PlantedStore:
    """A task in which the signal is multiplied."""
    return PlantedStore(n, signal=SIGNAL, tasks={"questions": trust}, seed=seed)


# -------------------------------------------------------------------------------------------------------- in the lens


@pytest.mark.parametrize("trust", [1.0, -1.0])
def test_fifty_labels_help_where_the_lens_knows_and_undo_harm_where_it_misleads(lens: Lens, trust: float) -> None:
    adapted = adapt_on(lens, new_task(50, 3, trust=trust))
    fresh = new_task(300, 4, trust=trust)
    before, after = (one.apply(fresh)["listwise tempered"] for one in (lens, adapted))
    assert brier(fresh, after) < brier(fresh, before)
    assert adapted.trust is not None
    assert adapted.adaptation is not None
    assert adapted.adaptation.own
    assert not adapted.adaptation.is_left_out
    if trust < 0.0:
        assert adapted.trust.elsewhere == 0.0
        assert brier(fresh, after) < brier(fresh, lens.apply(fresh)["temperature"]) - 0.2, "its states do know"


def test_where_the_states_know_nothing_the_answers_go_back_to_the_base(lens: Lens) -> None:
    """The lens says nothing of the right options there, and is sure of it."""
    few, fresh = (PlantedStore(n, signal={}, seed=seed) for n, seed in ((80, 3), (300, 4)))
    for store in (few, fresh):
        store.states[1][:, COLUMN] *= 4.0
    adapted = adapt_on(lens, few)
    assert adapted.trust is not None
    assert adapted.trust.elsewhere == 0.0
    before, after, cooled = (
        brier(fresh, one.apply(fresh)[m])
        for one, m in ((lens, lens.method), (adapted, lens.method), (lens, "temperature"))
    )
    assert after < cooled + 0.02 < before


def test_labels_teach_a_direction_that_the_lens_does_not_know(lens: Lens) -> None:
    few, fresh = (PlantedStore(n, signal={}, seed=seed) for n, seed in ((60, 3), (300, 4)))
    for store in (few, fresh):
        store.states[1][:, COLUMN + 1] += 2.0 * store.table.options.one_hot(store.table.answers)
    adapted = adapt_on(lens, few)
    assert adapted.task_probe is not None
    assert np.argmax(np.abs(adapted.task_probe.weight)) == COLUMN + 1
    probed, without = (one.apply(fresh)[lens.method] for one in (adapted, replace(adapted, task_probe=None)))
    assert brier(fresh, probed) < brier(fresh, without) - 0.1
    assert "beside a small probe that these labels have taught" in str(adapted.adaptation)
    far = far_off(fresh)
    untaught = replace(adapted, task_probe=None).apply(far)[lens.method]
    np.testing.assert_allclose(adapted.apply(far)[lens.method], untaught, err_msg="far from its labels it says nothing")


def test_nineteen_labels_teach_no_probe(lens: Lens, tmp_path: Path) -> None:
    adapted = adapt_on(lens, new_task(19, 3))
    assert adapted.task_probe is None
    adapted.save(tmp_path / "lens")
    assert load_lens(tmp_path / "lens").task_probe is None


def test_a_lens_whose_task_probe_was_lost_is_refused(lens: Lens, tmp_path: Path) -> None:
    adapted = adapt_on(lens, new_task(50, 3))
    replace(adapted, task_probe=None).save(tmp_path / "lens")
    with pytest.raises(CoralError, match=r"holds nothing under task_probe\.weight"):
        load_lens(tmp_path / "lens")


def test_labels_of_fixed_options_are_believed(lens: Lens) -> None:
    """Without labels, options that are the same in every question take the lens out."""
    few, fresh = new_task(60, 3), new_task(60, 4)
    for store in (few, fresh):
        two = np.flatnonzero(store.table.options.sizes == 2)
        store.questions = [replace(store.questions[two[0]], id=q.id, text=q.text) for q in store.questions]
    without, after = (one.read(fresh).weights for one in (lens, adapt_on(lens, few)))
    assert without is not None
    assert after is not None
    assert without.max() == 0.0 < after.max()


# ---------------------------------------------------------------------------------- where the lens has no weight without labels


def some_of(store: PlantedStore, chosen: np.ndarray) -> PlantedStore:
    """Some of the questions of a store, by number."""
    rows, table, part = store.table.options.rows_of(chosen), store.table, copy(store)
    part.questions = [store.questions[i] for i in chosen]
    ones = np.ones(len(rows), dtype=np.int64)
    part.table = OptionTable(
        table.logprobs[rows], ones, ones, ones, table.options.take(chosen).edges, table.answers[chosen]
    )
    part.states = {layer: states[rows] for layer, states in store.states.items()}
    return part


def draw_of(store: PlantedStore, n: int, seed: int) -> PlantedStore:
    return some_of(store, np.random.default_rng(seed).permutation(len(store.questions))[:n])


def with_fixed_options(store: PlantedStore) -> PlantedStore:
    """Its questions of two options, which are the same in all."""
    part = some_of(store, np.flatnonzero(store.table.options.sizes == 2))
    part.questions = [replace(q, options=("this", "that")) for q in part.questions]
    return part


def far_off(store: PlantedStore, questions: slice = slice(None)) -> PlantedStore:
    """The same questions, some of them in a place where no training question lies."""
    marked = np.zeros(len(store.questions))
    marked[questions] = 30.0
    away = store.table.options.spread(marked)[:, None] * np.eye(8)[0]
    store.states = {layer: (states + away).astype(np.float32) for layer, states in store.states.items()}
    return store


@pytest.mark.parametrize("moved", [with_fixed_options, far_off])
@pytest.mark.parametrize("trust", [-1.0, 0.0])
def test_five_labels_never_ruin_a_task_on_which_the_lens_has_no_weight(lens: Lens, moved: Any, trust: float) -> None:
    """Lambda is what it has on other tasks; it is not what it has here, and five labels are no reason to begin with it."""
    fresh, few = moved(new_task(300, 4, trust=trust)), moved(new_task(300, 3, trust=trust))
    assert lens.trust is not None
    assert lens.trust.elsewhere > 0.4
    assert lens.read(fresh).weights.max() == 0.0  # type: ignore[union-attr]
    without, after = brier(fresh, lens.apply(fresh)[lens.method]), []
    for seed in range(20):
        adapted = adapt_on(lens, draw_of(few, 5, seed))
        assert adapted.adaptation is not None
        assert adapted.adaptation.before == 0.0
        after.append(brier(fresh, adapted.apply(fresh)[adapted.method]))
    assert np.mean(after) <= without + 0.005, (without, np.mean(after))


def test_a_few_labels_near_and_far_grant_nothing_to_what_is_far(lens: Lens) -> None:
    """The weight of the near ones is no reason to believe the lens on the far ones; twenty labels and more are."""
    far = far_off(new_task(60, 5))
    adapted, many = adapt_on(lens, far_off(new_task(7, 3), slice(4, 7))), adapt_on(lens, far)
    assert lens.trust is not None
    assert adapted.trust is not None
    assert many.trust is not None
    assert adapted.trust.reach == lens.trust.reach < many.trust.reach
    assert adapted.read(far).weights.max() == 0.0  # type: ignore[union-attr]
    assert many.read(far).weights.min() > 0.5  # type: ignore[union-attr]


def test_it_starts_from_the_weight_that_the_lens_has_here(lens: Lens) -> None:
    assert lens.trust is not None
    found = [adapt_on(one, new_task(30, 3)).adaptation for one in (lens, lens.at_home())]
    assert [one.before for one in found if one] == pytest.approx([lens.trust.elsewhere, 1.0])


# ------------------------------------------------------------------------------------------------------------- early exit


def test_a_lens_that_exits_early_is_adapted_over_what_it_answers_with() -> None:
    """Its answers fall back on even chances, and so do its labels; the temperature is what its probe needs and no more."""
    lens = fit_store(PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}), FitSettings(exit_layer=1))
    few, fresh = new_task(60, 3, trust=0.5), new_task(300, 4, trust=0.5)
    adapted = adapt_on(lens, few)
    assert adapted.trust is not None
    assert adapted.adaptation is not None
    assert adapted.adaptation.exits
    assert adapted.trust.temperature == pytest.approx(1.0, abs=0.1)
    scores = {w: brier(fresh, at_weight(adapted, w).apply(fresh)[adapted.method]) for w in np.linspace(0.1, 1.5, 15)}
    assert brier(fresh, adapted.apply(fresh)[adapted.method]) < min(scores.values()) + 0.01


def at_weight(lens: Lens, weight: float) -> Lens:
    assert lens.trust is not None
    return replace(lens, trust=replace(lens.trust, elsewhere=weight))


def test_a_lens_that_exits_early_and_misleads_is_hardly_believed() -> None:
    lens = fit_store(PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}), FitSettings(exit_layer=1))
    adapted = adapt_on(lens, new_task(80, 3, trust=-1.0))
    assert adapted.read(fresh := new_task(20, 4)).weights.tolist() == [0.1] * 20  # type: ignore[union-attr]
    assert "Weight of the lens 0.10 (0.80 without labels), beside a small probe" in str(adapted.adaptation)
    assert "left out" not in str(adapted.adaptation)
    assert (fresh.table.options.max(adapted.apply(fresh)[adapted.method]) > 1 / fresh.table.options.sizes).all(), (
        "it answers"
    )


# ------------------------------------------------------------------------------------------------------- what is kept of it


def test_the_questions_that_adapted_it_are_never_counted_and_promises_are_dropped(lens: Lens) -> None:
    calibrated, _ = calibrate_on(lens, new_task(60, 7), Guarantees(coverage=0.8))
    few = new_task(30, 3)
    adapted = adapt_on(calibrated, few)
    assert adapted.is_seen(few.questions).all()
    assert adapted.sets is None
    assert not adapted.is_home(few.questions).any()


def test_the_labels_that_adapted_it_promise_nothing_and_may_adapt_it_again(lens: Lens, tmp_path: Path) -> None:
    few, more = new_task(40, 3), new_task(60, 4)
    adapt_on(lens, few).save(tmp_path / "lens")
    adapted = load_lens(tmp_path / "lens")
    with pytest.raises(CoralError, match="fitted on or adapted by all of these questions"):
        calibrate_on(adapted, few, Guarantees(coverage=0.8))
    calibrated, left_out = calibrate_on(adapted, more, Guarantees(coverage=0.8))
    assert left_out == 0
    assert calibrated.sets is not None
    again, left_out = calibrate_on(calibrated, more, Guarantees(coverage=0.8))
    assert (again.sets, left_out) == (calibrated.sets, 0), "what calibrated it may do so again"
    assert adapt_on(adapted, few).adaptation == adapted.adaptation
    assert again.is_seen([*few.questions, *more.questions]).all()


def test_no_questions_are_no_questions_that_it_has_seen(lens: Lens, tiny: Model) -> None:
    for call, verb in ((coral_lens.adapt, "adapt"), (coral_lens.calibrate, "calibrate")):
        given = (Guarantees(),) if verb == "calibrate" else ()
        with pytest.raises(CoralError, match=f"There are no questions to {verb} the lens on"):
            call(lens, tiny, [], *given)


def test_adapting_again_starts_from_the_same_prior(lens: Lens) -> None:
    few, more = new_task(30, 3), new_task(60, 4)
    twice, once = adapt_on(adapt_on(lens, few), more), adapt_on(lens, more)
    assert twice.adaptation == once.adaptation


def test_the_papers_lens_can_be_adapted_too() -> None:
    lens = fit_store(PlantedStore(120, signal=SIGNAL), FitSettings(lens="ridge", layers=(1,)))
    adapted = adapt_on(lens, new_task(50, 3, trust=-1.0))
    assert adapted.method == "coral tempered"
    assert adapted.trust is not None
    assert adapted.trust.elsewhere == 0.0


def test_an_adapted_lens_is_saved_and_read_with_its_curve(lens: Lens, tmp_path: Path) -> None:
    adapted = adapt_on(lens, new_task(50, 3), with_curve=True)
    adapted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.adaptation == adapted.adaptation
    assert again.trust == adapted.trust
    fresh = new_task(20, 4)
    assert again.apply(fresh)[again.method].tobytes() == adapted.apply(fresh)[adapted.method].tobytes()


def test_its_card_says_that_it_is_for_one_task_and_what_labels_have_shown(lens: Lens, tmp_path: Path) -> None:
    adapted = adapt_on(lens, new_task(50, 3))
    adapted.save(tmp_path / "lens")
    card = (tmp_path / "lens" / "README.md").read_text("utf-8")
    assert "is for that task alone" in card
    assert str(adapted.adaptation) in card
    assert "harm cannot be excluded" not in card


def test_too_few_labels_unlabelled_and_seen_questions_are_refused(lens: Lens) -> None:
    with pytest.raises(CoralError, match=r"at least 5 labelled questions.*Got 4"):
        adapt_on(lens, new_task(4, 3))
    with pytest.raises(CoralError, match=r"learning curve needs at least 10 labelled questions.*Got 9"):
        adapt_on(lens, new_task(9, 3), with_curve=True)
    few = new_task(10, 3)
    few.questions[2] = replace(few.questions[2], answer=UNKNOWN)
    with pytest.raises(CoralError, match="'2' has no answer; `coral adapt` needs the right option"):
        adapt_on(lens, few)
    with pytest.raises(CoralError, match="adapt it on questions that it has not seen"):
        adapt_on(lens, PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}))
    with pytest.raises(CoralError, match="use the lens before that"):
        adapt_on(lens, new_task(10, 3)).at_home()
    calibrated = calibrate_on(adapt_on(lens, new_task(10, 3)), new_task(60, 4), Guarantees(coverage=0.8))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is refused is not warned of
        with pytest.raises(CoralError, match="use the lens before that"):
            calibrated.at_home()


def test_it_is_adapted_with_a_model_in_one_call(tiny: Model) -> None:
    lens = fit(tiny, toy_questions(40), FitSettings(layers=(1,)), bar=False)
    few = toy_questions(12, seed=5)
    assert lens.adapt(tiny, few).adaptation == coral_lens.adapt(lens, tiny, few).adaptation
