"""Do no harm, learned: what a lens says of a part that it was fitted without, and what it learns from that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.planted import PlantedStore, brier, data_of

from coral_lens.lens.choose import Candidate, choose_candidate
from coral_lens.lens.do_no_harm import (
    LAMBDAS,
    ONE_TASK,
    TEMPERATURES,
    USELESS,
    PlacedQuestions,
    Simulated,
    check_elsewhere,
    choose_mixture,
    fit_do_no_harm,
    fit_elsewhere,
    fit_scale,
    loss_at,
    predict_home,
    shuffled_within,
    simulate_without,
)
from coral_lens.lens.domains import domains_of
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import apply_temperature, fit_temperature
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.shift import question_places
from coral_lens.lens.training_data import TrainingData
from coral_lens.ragged import Options
from coral_lens.records import FAR

TASKS = {"a": 1.0, "b": 1.0, "c": 1.0}


def chosen_of(data: TrainingData, name: str = "listwise", layers: tuple[int, ...] = (1,)) -> Candidate:
    candidate: Candidate = choose_candidate(data, name, FitSettings(layers=layers))[0]
    return candidate


def mixture_of(data: TrainingData) -> PlacedQuestions:
    at = question_places(data.layer(1), data.table.options)
    return PlacedQuestions(data, at, np.array(domains_of(data.questions, at, seed=0)))


# --------------------------------------------------------------------------------------------------------- no leaks


def test_the_answers_of_the_part_that_is_left_out_teach_its_lens_and_its_temperature_nothing() -> None:
    store = PlantedStore(60, signal={1: 2.0}, tasks=TASKS, apart=1.0)
    data = data_of(store)
    chosen = chosen_of(data)
    turned = np.array([q.task == "b" for q in store.questions])
    answers = np.where(turned, (store.table.answers + 1) % store.table.options.sizes, store.table.answers)
    residual = data.r.copy()
    residual[store.table.options.rows(turned)] = 7.0
    other = replace(data, table=replace(data.table, answers=answers), r=residual)
    plain, changed = (simulate_without(mixture_of(d), chosen, 1.0, "b", seed=0) for d in (data, other))
    assert plain.lens.tobytes() == changed.lens.tobytes()
    assert plain.base.tobytes() == changed.base.tobytes()
    assert plain.shifts.tobytes() == changed.shifts.tobytes()
    assert (plain.y != changed.y).any()
    # and the part that is kept does teach them
    kept, before = (simulate_without(mixture_of(d), chosen, 1.0, "a", seed=0) for d in (other, data))
    assert kept.lens.tobytes() != before.lens.tobytes()
    assert kept.base.tobytes() != before.base.tobytes()


def test_the_scales_are_chosen_on_predictions_by_fits_that_did_not_see_the_question() -> None:
    data = data_of(PlantedStore(60, signal={1: 2.0}, tasks=TASKS))
    folded, candidate = predict_home(data, chosen_of(data), seed=0)
    assert folded.is_validation.all()
    mask = folded.rounds[2]
    answers = np.where(mask, (data.table.answers + 1) % data.options.sizes, data.table.answers)
    turned = replace(data, table=replace(data.table, answers=answers))
    _, again = predict_home(turned, chosen_of(data), seed=0)
    rows, others = data.options.rows(mask), data.options.rows(~mask)
    assert again.predicted.scores[rows].tobytes() == candidate.predicted.scores[rows].tobytes()
    assert again.predicted.scores[others].tobytes() != candidate.predicted.scores[others].tobytes()


# ----------------------------------------------------------------------------------------------------------- lambda


def part_of(n: int, *, trust: float, seed: int = 0) -> Simulated:
    """Questions whose answers are drawn from base * lens^trust: 1 holds, 0 knows nothing, -1 misleads."""
    rng = np.random.default_rng(seed)
    options = Options.of_sizes([4] * n)
    base, own = 0.5 * rng.normal(size=4 * n), 1.5 * rng.normal(size=4 * n)
    truth = options.softmax(base + trust * own).reshape(n, 4)
    answers = np.array([rng.choice(4, p=row) for row in truth])
    mistaken = options.softmax(base + shuffled_within(own, options, seed=seed))
    lens = options.softmax(base + own)
    return Simulated(options.softmax(base), lens, mistaken, options, options.one_hot(answers), np.ones(n))


def test_the_loss_worked_by_hand() -> None:
    """Even base, a lens of 0.9 and 0.1, and the same turned around: the Brier score but for its 1, and parts of two others."""
    options, y = Options.of_sizes([2]), np.array([1.0, 0.0])
    part = Simulated(np.array([0.5, 0.5]), np.array([0.9, 0.1]), np.array([0.1, 0.9]), options, y, np.ones(1))
    squares = 0.81 + 0.01
    without_labels, without_evidence = squares - 1.0, squares - 0.2
    assert loss_at(1.0, 1.0, part) == pytest.approx(squares - 1.8 + USELESS * (without_labels + without_evidence) / 2)
    assert loss_at(0.0, 1.0, part) == pytest.approx(0.5 - 1.0 + USELESS * (0.5 - 1.0))
    cooled = 3.0 / 4.0, 1.0 / 4.0  # at temperature 2 odds of 9 are odds of 3
    squares = cooled[0] ** 2 + cooled[1] ** 2
    expected = squares - 1.5 + USELESS * (squares - 1.0 + squares - 0.5) / 2
    assert loss_at(1.0, 2.0, part) == pytest.approx(expected)


def test_what_is_shuffled_stays_within_its_question() -> None:
    options = Options.of_sizes([2, 5, 3] * 40)
    scores = np.arange(options.n_rows, dtype=float)
    mixed = shuffled_within(scores, options, seed=1)
    assert options.sum(mixed).tolist() == options.sum(scores).tolist()
    assert options.max(mixed).tolist() == options.max(scores).tolist()
    assert (mixed != scores).mean() > 0.5


def test_a_lens_that_carries_over_is_believed_and_one_that_does_not_is_left_out() -> None:
    holds, useless, misleads = (choose_mixture([part_of(400, trust=t)]) for t in (1.0, 0.0, -1.0))
    assert holds[0] >= 0.7
    assert holds[1] > 1.0, "even so it is doubted, because of its useless twins"
    assert useless[0] <= 0.1
    assert misleads[0] == 0.0
    assert choose_mixture([]) == (0.0, 1.0)


def test_one_task_in_two_on_which_it_knows_nothing_costs_it_trust() -> None:
    good, bad = part_of(400, trust=1.0), part_of(400, trust=0.0, seed=1)
    alone, beside = (weight / temperature for weight, temperature in map(choose_mixture, ([good], [good, bad])))
    assert 0.0 < beside < 0.8 * alone


def test_over_an_even_base_the_smallest_weight_is_taken_not_the_one_that_rounding_prefers() -> None:
    part = part_of(300, trust=1.0)
    even = part._replace(base=part.options.softmax(np.zeros(part.options.n_rows)))
    weight, temperature = choose_mixture([even])
    others = [(w, t) for w in LAMBDAS for t in TEMPERATURES if np.isclose(w / t, weight / temperature)]
    assert weight == min(w for w, _ in others)


def test_files_that_do_not_lie_apart_tell_as_little_of_another_task_as_clusters_do() -> None:
    """Two halves of one set, each in a file of its own: that a lens of the one knows the other says nothing of a new task."""
    parts = [part_of(400, trust=1.0, seed=seed) for seed in range(2)]
    files, tasks = ["questions (a.jsonl)", "questions (b.jsonl)"], ["a", "b"]
    assert fit_elsewhere(files, parts)[0] <= ONE_TASK < fit_elsewhere(tasks, parts)[0]
    apart = [part._replace(shifts=3.0 * part.shifts) for part in parts]
    assert fit_elsewhere(files, apart)[0] > ONE_TASK


def test_tasks_that_were_left_out_say_whether_the_lens_answers_elsewhere() -> None:
    """A mixture of clearly better answers gives them, one of clearly worse ones does not; otherwise home decides."""
    good, bad = part_of(400, trust=1.0), part_of(400, trust=-1.0)
    assert check_elsewhere([good], 0.8, 1.5, before=False).used
    assert not check_elsewhere([bad], 0.8, 1.5, before=True).used
    left_out = check_elsewhere([good, bad], 0.0, 1.0, before=True)
    assert left_out.lens == left_out.base
    assert left_out.used
    assert not check_elsewhere([good, bad], 0.0, 1.0, before=False).used


def test_questions_of_one_article_are_one_when_answers_elsewhere_are_judged() -> None:
    part = part_of(400, trust=1.0)
    alone, grouped = (
        check_elsewhere([part._replace(groups=groups)], 0.8, 1.5, before=False).error
        for groups in ((), tuple(f"article {i // 100}" for i in range(400)))
    )
    assert grouped != pytest.approx(alone)
    assert not check_elsewhere([part._replace(groups=("one",) * 400)], 0.8, 1.5, before=False).used


# ------------------------------------------------------------------------------------------------------------ scales


def test_without_a_centre_the_scale_is_that_of_temperature_scaling() -> None:
    part = part_of(300, trust=0.4)
    logs = np.log(part.lens)
    behind = logs - part.options.spread(logs[part.y == 1.0])
    assert fit_scale(behind, part.options, None) == pytest.approx(
        1 / fit_temperature(part.lens, part.options, part.options.top(part.y)), rel=1e-3
    )


def test_a_task_of_few_questions_keeps_the_scale_of_all() -> None:
    few, many = (part_of(n, trust=0.3) for n in (3, 2000))
    scales = []
    for part in (few, many):
        logs = np.log(part.lens)
        scales.append(fit_scale(logs - part.options.spread(logs[part.y == 1.0]), part.options, centre=1.0))
    assert abs(np.log(scales[0])) < 0.5 * abs(np.log(scales[1]))


def test_an_easy_task_beside_a_hard_one_keeps_its_confidence() -> None:
    """In one task the signal is three times as strong; the lens of both is too modest there, and its own scale mends that."""
    tasks = {"easy": 3.0, "hard": 0.3}
    lens = fit_store(PlantedStore(250, signal={1: 1.2}, tasks=tasks), FitSettings(layers=(1,)))
    assert lens.trust is not None
    assert lens.trust.scales["easy"] > 1.2 * lens.trust.scales["hard"]
    fresh = PlantedStore(250, signal={1: 1.2}, tasks=tasks, seed=5)
    easy = np.flatnonzero([q.task == "easy" for q in fresh.questions])
    found, options = lens.apply(fresh), fresh.table.options

    def gap(probs: np.ndarray) -> float:
        right = options.top(probs) == fresh.table.answers
        return abs(float((options.max(probs) - right)[easy].mean()))

    assert gap(found["listwise tempered"]) < 0.6 * gap(found["listwise"])
    assert brier(fresh, found["listwise tempered"], easy) < brier(fresh, found["listwise"], easy)


# ----------------------------------------------------------------------------------------------------- what it shows


def test_tasks_that_lie_apart_show_their_distance_and_the_reach_is_as_far() -> None:
    reaches = []
    for apart in (0.0, 3.0):
        data = data_of(PlantedStore(80, signal={1: 2.0}, tasks=TASKS, apart=apart))
        _, trust, shown, _ = fit_do_no_harm(data, chosen_of(data), 1.0, temper=True, seed=0)
        assert [row.part for row in shown] == ["without a", "without b", "without c"]
        assert [row.questions for row in shown] == [80, 80, 80]
        assert trust is not None
        assert trust.reach >= max(FAR, *(row.shift for row in shown))
        reaches.append(trust.reach)
    assert reaches[1] > 2 * reaches[0]


def test_clusters_of_one_task_tell_nothing_of_what_lies_far_off() -> None:
    data = data_of(PlantedStore(160, signal={1: 2.0}))
    data.layer(1)[: data.options.n_rows // 2] += 20.0
    _, trust, shown, _ = fit_do_no_harm(data, chosen_of(data), 1.0, temper=True, seed=0)
    assert max(row.shift for row in shown) > 3.0
    assert trust is not None
    assert 0.0 < trust.elsewhere <= ONE_TASK
    near, far = trust.weights(np.array([1.0, FAR]), np.zeros(2, dtype=bool))
    assert near == trust.elsewhere
    assert far == pytest.approx(0.0)


def test_a_lens_that_is_not_to_be_tempered_simulates_nothing_but_knows_the_shift() -> None:
    data = data_of(PlantedStore(60, signal={1: 2.0}))
    shift, trust, shown, checks = fit_do_no_harm(data, chosen_of(data), 1.0, temper=False, seed=0)
    assert trust is None
    assert shown == ()
    assert not checks
    assert np.median(shift.of(question_places(data.layer(1), data.table.options))) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("kind", ["listwise", "ridge"])
def test_what_does_not_carry_over_between_tasks_is_not_trusted_elsewhere(kind: str) -> None:
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
    assert same.trust is not None
    assert turned.trust is not None
    assert same.trust.elsewhere >= 0.5
    assert turned.trust.elsewhere <= 0.2


def test_on_a_new_task_where_the_signal_misleads_most_of_the_harm_is_undone() -> None:
    """The signal holds in one training task and is nothing in the other; in the third, which is new, it is turned around."""
    tasks = {"a": 1.0, "b": 0.0}
    lens = fit_store(PlantedStore(120, signal={1: 2.5}, tasks=tasks, apart=2.0), FitSettings(layers=(1,)))
    fresh = PlantedStore(200, signal={1: 2.5}, tasks=tasks | {"c": -1.0}, apart=2.0, seed=9)
    third = np.flatnonzero([q.task == "c" for q in fresh.questions])
    scores = {method: brier(fresh, probs, third) for method, probs in lens.apply(fresh).items()}
    assert scores["listwise"] > scores["temperature"] + 0.1
    assert scores["listwise tempered"] - scores["temperature"] < 0.35 * (scores["listwise"] - scores["temperature"])


def test_far_from_home_the_answer_is_the_bases_even_if_the_fit_gave_it_no_weight() -> None:
    """What a new user met: a lens of one task, whose base weight is 0, on another far away that the base knows."""
    store = PlantedStore(150, signal={1: 2.5})
    store.table = replace(store.table, logprobs=np.random.default_rng(3).normal(size=len(store.table.logprobs)))
    lens = fit_store(store, FitSettings(layers=(1,)))
    lens = replace(lens, correction=replace(lens.correction, base_weight=0.0))
    away = PlantedStore(100, seed=4)
    away.states[1] += 40.0
    found = lens.apply(away)
    assert np.median(lens.shifts(away)) > 3.0
    expected = apply_temperature(found["base"], away.table.options, temperature=lens.control_temperature)
    assert found["listwise tempered"] == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------- odd mixtures


def test_an_outlier_that_is_a_cluster_of_its_own_does_not_stop_the_fit() -> None:
    """Without the other cluster there is one question left, and nothing to fit or hold out."""
    store = PlantedStore(60, signal={1: 2.0})
    for states in store.states.values():
        states[: store.table.offsets[1]] += 50.0
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert len(lens.trace.simulated) == 1
    assert np.isfinite(lens.shifts(store)).all()


def test_a_task_of_one_group_does_not_stop_the_fit() -> None:
    """A single article is never divided, so that all its questions validate."""
    store = PlantedStore(40, signal={1: 2.0}, tasks={"a": 1.0, "b": 1.0})
    store.questions = [replace(q, group="one") if q.task == "b" else q for q in store.questions]
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert [row.part for row in lens.trace.simulated] == ["without b"]


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_states_that_are_all_alike_do_not_stop_the_fit() -> None:
    """Letters at the embedding are the same in every question."""
    store = PlantedStore(40)
    for states in store.states.values():
        states[:] = 1.0
    lens = fit_store(store, FitSettings(layers=(1,)))
    assert lens.trace.simulated == ()
    assert lens.trust is not None
    assert lens.trust.elsewhere == 0.0, "nothing was learned of other tasks"
    assert all(np.isfinite(probs).all() for probs in lens.apply(store).values())


def test_the_same_seed_gives_the_same_trust() -> None:
    first, second = (fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(layers=(1,), seed=4)) for _ in range(2))
    assert first.trust == second.trust
    assert first.trace.simulated == second.trace.simulated
