"""Simulated shift: what a lens says of a part that it was fitted without, and what it learns from that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.planted import PlantedStore, brier, data_of

from coral_lens.lens.artefact import Lens
from coral_lens.lens.choose import Candidate, choose_candidate
from coral_lens.lens.do_no_harm import PlacedQuestions, fit_do_no_harm, simulate_held_out, simulate_without
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.shift import question_places
from coral_lens.lens.tempering import domains_of
from coral_lens.lens.training_data import TrainingData

TASKS = {"a": 1.0, "b": 1.0, "c": 1.0}


def chosen_of(data: TrainingData, name: str = "listwise", layers: tuple[int, ...] = (1,)) -> Candidate:
    candidate: Candidate = choose_candidate(data, name, FitSettings(layers=layers))[0]
    return candidate


def mixture_of(data: TrainingData) -> PlacedQuestions:
    at = question_places(data.layer(1), data.table.options)
    return PlacedQuestions(data, at, np.array(domains_of(data.questions, at, seed=0)))


# --------------------------------------------------------------------------------------------------------- no leaks


def test_the_answers_of_the_part_that_is_left_out_teach_its_lens_nothing() -> None:
    store = PlantedStore(60, signal={1: 2.0}, tasks=TASKS, apart=1.0)
    data = data_of(store)
    chosen = chosen_of(data)
    turned = np.array([q.task == "b" for q in store.questions])
    answers = np.where(turned, (store.table.answers + 1) % store.table.options.sizes, store.table.answers)
    residual = data.r.copy()
    residual[store.table.options.rows(turned)] = 7.0
    other = replace(data, table=replace(data.table, answers=answers), r=residual)
    plain, changed = (simulate_without(mixture_of(d), chosen, 1.0, "b") for d in (data, other))
    assert plain.evidence.lens.tobytes() == changed.evidence.lens.tobytes()
    assert plain.evidence.distance.tobytes() == changed.evidence.distance.tobytes()
    assert (plain.answers != changed.answers).all()
    # and the part that is kept does teach it
    kept = simulate_without(mixture_of(other), chosen, 1.0, "a")
    assert kept.evidence.lens.tobytes() != simulate_without(mixture_of(data), chosen, 1.0, "a").evidence.lens.tobytes()


def test_within_holds_the_validation_questions_as_the_chosen_lens_predicts_them() -> None:
    data = data_of(PlantedStore(60, signal={1: 2.0}, tasks=TASKS))
    chosen = chosen_of(data)
    found = simulate_held_out(mixture_of(data), chosen, 1.0)
    assert found.answers.tolist() == data.table.answers[data.rounds[0]].tolist()
    logits = found.evidence.base + found.evidence.lens
    expected = np.log(chosen.probs(1.0)[data.table.options.rows(data.rounds[0])])
    starts, sizes = found.evidence.options.starts, found.evidence.options.sizes
    gap = logits - expected
    assert gap == pytest.approx(np.repeat(gap[starts], sizes), abs=1e-9)  # equal but for a constant of each question


def test_with_folds_every_question_is_within_once() -> None:
    data = data_of(PlantedStore(60, signal={1: 2.0}, tasks=TASKS), FitSettings(folds=4))
    found = simulate_held_out(mixture_of(data), chosen_of(data), 1.0)
    assert found.answers.tolist() == data.table.answers.tolist()


# ----------------------------------------------------------------------------------------------------- what it shows


def test_tasks_that_lie_apart_show_their_distance_and_tasks_alike_show_none() -> None:
    shifts = {}
    for apart in (0.0, 3.0):
        data = data_of(PlantedStore(80, signal={1: 2.0}, tasks=TASKS, apart=apart))
        _, _, shown = fit_do_no_harm(data, chosen_of(data), 1.0, temper=True, seed=0)
        assert [row.part for row in shown] == ["held out", "without a", "without b", "without c"]
        assert [row.questions for row in shown] == [48, 80, 80, 80]
        shifts[apart] = [row.shift for row in shown]
    assert max(shifts[0.0]) < 1.3
    assert shifts[3.0][0] < 1.3
    assert min(shifts[3.0][1:]) > 2.0


def test_a_lens_that_is_not_to_be_tempered_simulates_nothing_but_knows_the_shift() -> None:
    data = data_of(PlantedStore(60, signal={1: 2.0}))
    shift, tempering, shown = fit_do_no_harm(data, chosen_of(data), 1.0, temper=False, seed=0)
    assert tempering is None
    assert shown == ()
    assert np.median(shift.of(question_places(data.layer(1), data.table.options))) == pytest.approx(1.0, abs=0.3)


def ratio(lens: Lens, shift: float) -> float:
    """The weight of the lens over that of the base."""
    t = lens.tempering
    assert t is not None
    s = float(np.log(shift))
    return float(np.exp(t.lens + t.lens_slope * s - t.base - t.base_slope * s))


@pytest.mark.parametrize("kind", ["listwise", "ridge"])
def test_what_does_not_carry_over_between_parts_is_not_trusted_afar(kind: str) -> None:
    """In one mixture the signal is the same everywhere; in the other each task has its own, so that it misleads in the next."""
    settings = FitSettings(lens=kind, layers=(1,), temper=True)
    same = fit_store(PlantedStore(120, signal={1: 2.5}, tasks=TASKS, apart=2.0), settings)
    own = PlantedStore(120, tasks=TASKS, apart=2.0)
    y = np.zeros(len(own.table.logprobs))
    y[own.table.options.starts + own.table.answers] = 1.0
    for i, task in enumerate(TASKS):
        rows = own.table.options.rows(np.array([q.task == task for q in own.questions]))
        own.states[1][rows, i] += (2.5 * y[rows]).astype(np.float32)
        own.states[1][rows, (i + 1) % 3] -= (2.5 * y[rows]).astype(np.float32)
    turned = fit_store(own, settings)
    far = min(row.shift for row in same.trace.simulated[1:])
    assert ratio(same, far) > 0.5
    assert ratio(turned, far) < 0.5 * ratio(same, far)
    assert ratio(turned, far) < 0.5 * ratio(turned, 1.0)


def test_on_a_new_far_task_where_the_signal_misleads_tempering_undoes_most_of_the_harm() -> None:
    """The signal holds in one training task and is nothing in the other; in the third, which is new, it is turned around."""
    tasks = {"a": 1.0, "b": 0.0}
    lens = fit_store(PlantedStore(120, signal={1: 2.5}, tasks=tasks, apart=2.0), FitSettings(layers=(1,)))
    fresh = PlantedStore(200, signal={1: 2.5}, tasks=tasks | {"c": -1.0}, apart=2.0, seed=9)
    third = np.flatnonzero([q.task == "c" for q in fresh.questions])
    assert np.median(lens.shifts(fresh)[third]) > 2.0
    scores = {method: brier(fresh, probs, third) for method, probs in lens.apply(fresh).items()}
    assert scores["listwise"] > scores["base"] + 0.1
    assert scores["listwise tempered"] - scores["base"] < 0.35 * (scores["listwise"] - scores["base"])


# ---------------------------------------------------------------------------------------------------- odd mixtures


def test_an_outlier_that_is_a_cluster_of_its_own_does_not_stop_the_fit() -> None:
    """Without the other cluster there is one question left, and nothing to fit or hold out."""
    store = PlantedStore(60, signal={1: 2.0})
    for states in store.states.values():
        states[: store.table.offsets[1]] += 50.0
    lens = fit_store(store, FitSettings(layers=(1,)))
    parts = [row.part for row in lens.trace.simulated]
    assert parts[0] == "held out"
    assert len(parts) == 2
    assert np.isfinite(lens.shifts(store)).all()


def test_a_task_of_one_group_does_not_stop_the_fit() -> None:
    """A single article is never divided, so that all its questions validate."""
    store = PlantedStore(40, signal={1: 2.0}, tasks={"a": 1.0, "b": 1.0})
    store.questions = [replace(q, group="one") if q.task == "b" else q for q in store.questions]
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert [row.part for row in lens.trace.simulated] == ["held out", "without b"]


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_states_that_are_all_alike_do_not_stop_the_fit() -> None:
    """Letters at the embedding are the same in every question."""
    store = PlantedStore(40)
    for states in store.states.values():
        states[:] = 1.0
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert [row.part for row in lens.trace.simulated] == ["held out"]
    assert all(np.isfinite(probs).all() for probs in lens.apply(store).values())


def test_the_same_seed_gives_the_same_tempering() -> None:
    first, second = (fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(layers=(1,), seed=4)) for _ in range(2))
    assert first.tempering == second.tempering
    assert first.trace.simulated == second.trace.simulated
