"""A correction is divided into base and lens, and never gains weight with the shift: do no harm."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planted import PlantedStore
from support.questions import toy_questions

from coral_lens.lens import tempering
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import FLOOR, steer
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.tempering import (
    FEWEST_IN_PART,
    MOST_DOMAINS,
    Evidence,
    Tempering,
    domains_of,
    evidence_of,
    fit_tempering,
    tempered,
)
from coral_lens.ragged import Options
from coral_lens.records import Question

PLAIN = Tempering(0.0, 0.0, 0.0, 0.0)
SIZES = st.lists(st.integers(2, 6), min_size=1, max_size=5)


def drawn(sizes: list[int], seed: int, *, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, Options]:
    """Base logits, a lens's own logits, and the options."""
    rng = np.random.default_rng(seed)
    options = Options.of_sizes(sizes)
    return spread * rng.normal(size=options.n_rows), spread * rng.normal(size=options.n_rows), options


# ------------------------------------------------------------------------------------------------------ the formula


def test_the_formula_worked_by_hand() -> None:
    """Twice the base and half the lens at no shift; at shift e the base is as before and the lens is halved again."""
    options = Options.of_sizes([2, 2])
    base, lens = np.log([0.6, 0.4, 0.6, 0.4]), np.array([1.0, -1.0, 1.0, -1.0])
    halving = float(np.log(0.5))
    theta = (float(np.log(2)), 0.0, halving, halving)
    found = tempered(theta, Evidence(base, lens, np.array([0.0, 1.0]), options))
    near = 0.36 * np.exp(0.5) / (0.36 * np.exp(0.5) + 0.16 * np.exp(-0.5))
    far = 0.36 * np.exp(0.25) / (0.36 * np.exp(0.25) + 0.16 * np.exp(-0.25))
    assert found == pytest.approx([near, 1 - near, far, 1 - far])


@given(SIZES, st.integers(0, 1000), st.floats(0.1, 3.0), st.floats(0.1, 50.0))
def test_without_weights_and_slopes_a_listwise_lens_is_itself(
    sizes: list[int], seed: int, base_weight: float, shift: float
) -> None:
    logits, scores, options = drawn(sizes, seed)
    base = base_weight * np.log(options.softmax(logits))
    q = options.softmax(base + scores)
    found = PLAIN(evidence_of(base, q, np.full(len(sizes), shift), options))
    if min(q.min(), options.softmax(base).min()) > FLOOR:
        assert found == pytest.approx(q, rel=1e-12)
    assert np.abs(found - q).max() <= 6 * FLOOR


@given(SIZES, st.integers(0, 1000), st.floats(0.0, 3.0))
def test_without_weights_and_slopes_the_papers_lens_is_itself_but_for_clipped_options(
    sizes: list[int], seed: int, gamma: float
) -> None:
    logits, r_hat, options = drawn(sizes, seed)
    p = options.softmax(logits)
    q = steer(p, r_hat, options, gamma=gamma)
    found = PLAIN(evidence_of(np.log(p), q, np.ones(len(sizes)), options))
    assert np.abs(found - q).max() <= 6 * FLOOR
    assert (found > 0).all()


def test_an_option_that_base_and_lens_agree_to_be_hopeless_stays_so_at_any_weight() -> None:
    """A floor under the lens's probabilities alone would make 1e-12 strong evidence for the option."""
    p, options = np.array([0.6, 0.4 - 1e-12, 1e-12]), Options.of_sizes([3])
    evidence = evidence_of(np.log(p), p, np.ones(1), options)
    assert evidence.lens == pytest.approx(np.zeros(3), abs=1e-9)
    for weight in (-4.0, 0.0, 0.5, 3.0):
        assert tempered((0.0, 0.0, weight, 0.0), evidence)[2] <= 1.01 * FLOOR


def test_no_evidence_is_infinitely_strong() -> None:
    """The paper's rule clips to exactly 0; another task must still be able to find the option right."""
    evidence = evidence_of(np.log([0.5, 0.5]), np.array([1.0, 0.0]), np.ones(1), Options.of_sizes([2]))
    assert np.abs(evidence.lens).max() == pytest.approx(-np.log(FLOOR) / 2)
    assert PLAIN(evidence)[1] == pytest.approx(FLOOR, rel=1e-3)


@given(SIZES, st.integers(0, 1000))
def test_questions_no_further_than_typical_feel_no_slope(sizes: list[int], seed: int) -> None:
    logits, scores, options = drawn(sizes, seed)
    shifts = np.random.default_rng(seed).uniform(0.0, 1.0, len(sizes))
    evidence = evidence_of(logits, options.softmax(logits + scores), shifts, options)
    assert evidence.distance.tolist() == [0.0] * len(sizes)
    sloped, flat = Tempering(0.3, -1.0, -0.2, -3.0), Tempering(0.3, 0.0, -0.2, 0.0)
    assert sloped(evidence).tobytes() == flat(evidence).tobytes()


@given(st.integers(0, 1000), st.floats(-4.0, 0.0), st.lists(st.floats(0.01, 1e6), min_size=2, max_size=8))
def test_the_further_a_question_the_nearer_its_probabilities_to_the_base(
    seed: int, slope: float, shifts: list[float]
) -> None:
    """Seen in the log-odds of two options: the part that the lens adds never grows with the shift."""
    logits, scores, _ = drawn([2], seed)
    options = Options.of_sizes([2] * len(shifts))
    base, own = np.tile(logits, len(shifts)), np.tile(scores, len(shifts))
    shifts = sorted(shifts)
    evidence = evidence_of(base, options.softmax(base + own), np.array(shifts), options)
    probs = Tempering(0.0, 0.0, 0.5, slope)(evidence)
    added = np.log(probs[::2] / probs[1::2]) - np.log(options.softmax(base)[::2] / options.softmax(base)[1::2])
    assert all(abs(far) <= abs(near) + 1e-9 for near, far in pairwise(added))


# ---------------------------------------------------------------------------------------------------------- learning


def simulated(n: int, seed: int, *, trust: float, shift: float) -> tuple[Evidence, np.ndarray]:
    """Questions whose answers are drawn from base + trust * lens: 1 holds, 0 knows nothing, -1 is always wrong."""
    base, lens, options = drawn([4] * n, seed)
    truth = options.softmax(base + trust * 2 * lens).reshape(n, 4)
    answers = np.array([np.random.default_rng(seed + i).choice(4, p=row) for i, row in enumerate(truth)])
    q = options.softmax(base + 2 * lens)
    spread = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, n))
    return evidence_of(base, q, shift * spread, options), answers


def weight_at(tempering: Tempering, shift: float) -> float:
    """What the lens's evidence is multiplied by, over what the base's is."""
    s = max(float(np.log(shift)), 0.0)
    return float(np.exp(tempering.lens + tempering.lens_slope * s - tempering.base - tempering.base_slope * s))


def test_a_lens_that_holds_everywhere_keeps_its_weight() -> None:
    parts = [(*simulated(600, 1, trust=1.0, shift=1.0), 1.0), (*simulated(600, 2, trust=1.0, shift=4.0), 1.0)]
    tempering = fit_tempering(parts)
    assert weight_at(tempering, 1.0) == pytest.approx(1.0, abs=0.2)
    assert weight_at(tempering, 4.0) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("trust", [0.0, -1.0])
def test_a_lens_that_is_useless_or_wrong_afar_learns_a_steep_slope(trust: float) -> None:
    parts = [(*simulated(600, 1, trust=1.0, shift=1.0), 1.0), (*simulated(600, 2, trust=trust, shift=4.0), 1.0)]
    tempering = fit_tempering(parts)
    assert weight_at(tempering, 1.0) > 0.7
    assert weight_at(tempering, 4.0) < 0.15
    assert tempering.lens_slope < -1.0


def test_a_lens_that_is_useless_everywhere_learns_a_small_weight() -> None:
    parts = [(*simulated(600, 1, trust=0.0, shift=1.0), 1.0), (*simulated(600, 2, trust=0.0, shift=4.0), 1.0)]
    tempering = fit_tempering(parts)
    assert weight_at(tempering, 1.0) < 0.15
    assert weight_at(tempering, 4.0) < 0.15


def test_more_shift_never_means_more_trust_even_if_the_data_say_so() -> None:
    parts = [(*simulated(400, 1, trust=0.0, shift=1.0), 1.0), (*simulated(400, 2, trust=1.0, shift=4.0), 1.0)]
    tempering = fit_tempering(parts)
    assert tempering.lens_slope <= 0.0
    assert tempering.base_slope <= 0.0


@pytest.fixture(scope="module")
def fitted() -> tuple[Evidence, np.ndarray, Tempering]:
    evidence, answers = simulated(150, 3, trust=0.4, shift=1.5)
    return evidence, answers, fit_tempering([(evidence, answers, 1.0)])


@given(st.tuples(st.floats(-4.0, 3.0), st.floats(-4.0, 0.0), st.floats(-4.0, 3.0), st.floats(-4.0, 0.0)))
def test_no_other_tempering_within_the_bounds_has_a_lower_loss(
    fitted: tuple[Evidence, np.ndarray, Tempering], theta: tuple[float, ...]
) -> None:
    evidence, answers, best = fitted
    right = evidence.options.starts + answers
    ours, other = (-np.log(probs[right]).mean() for probs in (best(evidence), tempered(theta, evidence)))
    assert ours <= other + 1e-4


def test_a_part_counts_as_its_weight_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the weight is the same as three copies, but for the prior, to which copies are more questions."""
    monkeypatch.setattr(tempering, "PRIOR", 100.0)
    near, far = simulated(100, 1, trust=1.0, shift=1.0), simulated(100, 2, trust=0.0, shift=3.0)
    weighted = fit_tempering([(*near, 3.0), (*far, 1.0)])
    copied = fit_tempering([(*near, 1.0)] * 3 + [(*far, 1.0)])
    assert weight_at(weighted, 1.0) == pytest.approx(weight_at(copied, 1.0), rel=1e-2)
    assert weight_at(weighted, 3.0) == pytest.approx(weight_at(copied, 3.0), rel=5e-2, abs=1e-3)


# ------------------------------------------------------------------------------------------------------- in the lens


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(150, signal={1: 2.0}), FitSettings(layers=(1,)))


def test_a_lens_near_its_training_questions_is_tempered_without_slopes(lens: Lens) -> None:
    store = PlantedStore(40, signal={1: 2.0}, seed=5)
    p, options = lens.base_probs(store.table), store.table.options
    q = lens.steered(p, lens.correction.states(store), options)
    assert lens.tempering is not None
    near = lens.tempered(p, q, np.linspace(0.2, 1.0, 40), options)
    flat = Tempering(lens.tempering.base, 0.0, lens.tempering.lens, 0.0)
    evidence = evidence_of(lens.correction.base_part(p), q, np.full(40, 100.0), options)
    assert near == pytest.approx(flat(evidence), rel=1e-12)


def test_the_tempered_row_stands_beside_the_plain_one(lens: Lens) -> None:
    store = PlantedStore(40, signal={1: 2.0}, seed=5)
    found = lens.apply(store)
    assert list(found) == ["base", "temperature", "listwise", "listwise tempered"]
    assert lens.method == "listwise tempered"
    p, options = lens.base_probs(store.table), store.table.options
    again = lens.tempered(p, found["listwise"], lens.shifts(store), options)
    assert found["listwise tempered"].tobytes() == again.tobytes()


def test_a_lens_without_tempering_leaves_its_probabilities_to_the_bit() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(layers=(1,), temper=False))
    store = PlantedStore(20, signal={1: 2.0}, seed=5)
    found = lens.apply(store)
    assert list(found) == ["base", "temperature", "listwise"]
    p, options = lens.base_probs(store.table), store.table.options
    assert found["listwise"].tobytes() == lens.steered(p, lens.correction.states(store), options).tobytes()


# ------------------------------------------------------------------------------------------------ parts of the mixture


def of_tasks(counts: dict[str, int]) -> tuple[list[Question], np.ndarray]:
    names = [task for task, n in counts.items() for _ in range(n)]
    questions = [Question(str(i), str(i), "?", ("a", "b"), 0, task=task) for i, task in enumerate(names)]
    return questions, np.random.default_rng(0).normal(size=(len(questions), 5)).astype(np.float32)


def test_each_large_task_is_a_part() -> None:
    questions, at = of_tasks({"b": FEWEST_IN_PART, "a": FEWEST_IN_PART + 5})
    assert domains_of(questions, at, seed=0) == ["b"] * FEWEST_IN_PART + ["a"] * (FEWEST_IN_PART + 5)


def test_a_small_task_joins_a_large_one() -> None:
    questions, at = of_tasks({"a": FEWEST_IN_PART, "b": FEWEST_IN_PART, "tiny": FEWEST_IN_PART - 1, "one": 1})
    parts = domains_of(questions, at, seed=0)
    assert set(parts) == {"a", "b"}
    assert len(set(parts[2 * FEWEST_IN_PART :])) == 1


def test_many_tasks_are_left_out_together_in_a_few_parts() -> None:
    questions, at = of_tasks({f"subject {i:02}": FEWEST_IN_PART for i in range(15)} | {"tiny": 2})
    parts = domains_of(questions, at, seed=0)
    assert len(set(parts)) == MOST_DOMAINS
    for i in range(15):  # a task is never divided
        assert len(set(parts[i * FEWEST_IN_PART : (i + 1) * FEWEST_IN_PART])) == 1


@pytest.mark.parametrize("counts", [{"a": 200}, {"a": 150, "tiny": 20}])
def test_one_task_is_divided_into_clusters_that_depend_on_the_seed_alone(counts: dict[str, int]) -> None:
    questions, at = of_tasks(counts)
    at[: len(at) // 2] += 30.0
    parts = domains_of(questions, at, seed=3)
    assert parts == domains_of(questions, at, seed=3)
    assert 2 <= len(set(parts)) <= 4
    # two clouds far apart share no cluster
    assert not set(parts[: len(at) // 2]) & set(parts[len(at) // 2 :])


def test_the_unit_of_a_neuron_does_not_decide_the_clusters() -> None:
    questions, at = of_tasks({"a": 120})
    units = np.geomspace(1e-3, 1e3, 5).astype(np.float32)
    assert domains_of(questions, at * units, seed=0) == domains_of(questions, at, seed=0)


def test_few_questions_still_have_two_parts() -> None:
    questions = toy_questions(20)
    at = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    assert len(set(domains_of(questions, at, seed=0))) == 2


def test_few_questions_move_the_lens_less_than_many() -> None:
    """Six questions of a lens that deserves more trust are held back by the prior; where none is far, the slope stays 0."""
    few, many = (fit_tempering([(*simulated(n, 4, trust=4.0, shift=1.0), 1.0)]) for n in (6, 2000))
    assert abs(few.lens) < 0.75 * abs(many.lens)
    assert few.lens_slope == pytest.approx(0.0, abs=1e-3)
