"""Temperature scaling finds the best temperature and never changes an answer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from coral_lens.lens.rules import BOUNDS, apply_temperature, fit_temperature
from coral_lens.ragged import Options


def nll_at(temperature: float, p: np.ndarray, options: Options, answers: np.ndarray) -> float:
    """The definition, question by question."""
    logs = [
        log_softmax(np.log(p[first:last]) / temperature)[answer]
        for (first, last), answer in zip(pairwise(options.edges), answers, strict=True)
    ]
    return -float(np.mean(logs))


def drawn(seed: int, *, n: int = 400, spread: float = 2.0) -> tuple[np.ndarray, Options, np.ndarray]:
    """Ragged probabilities, and answers that are drawn from them: a calibrated model."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, n)
    options = Options.of_sizes(sizes.tolist())
    p = options.softmax(rng.normal(size=options.n_rows) * spread)
    answers = np.array([rng.choice(s, p=p[o : o + s]) for s, o in zip(sizes, options.starts, strict=True)])
    return p, options, answers


def test_a_temperature_of_two_takes_the_square_root_of_the_odds() -> None:
    # odds 4 : 1 and 9 : 1 become 2 : 1 and 3 : 1
    cooled = apply_temperature(np.array([0.8, 0.2, 0.1, 0.9]), Options.of_sizes([2, 2]), temperature=2.0)
    np.testing.assert_allclose(cooled, [2 / 3, 1 / 3, 1 / 4, 3 / 4], rtol=1e-12)


def test_a_temperature_of_one_changes_nothing() -> None:
    p, options, _ = drawn(0)
    np.testing.assert_allclose(apply_temperature(p, options, temperature=1.0), p, rtol=1e-12)


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.5), (1, 3.0), (2, 20.0)])
def test_the_fitted_temperature_is_the_best_of_a_fine_grid(seed: int, spread: float) -> None:
    p, options, answers = drawn(seed, n=80, spread=spread)
    p = apply_temperature(p, options, temperature=0.6)
    fitted = fit_temperature(p, options, answers)
    best = min(nll_at(t, p, options, answers) for t in np.geomspace(*BOUNDS, 200))
    assert nll_at(fitted, p, options, answers) <= best + 1e-9


def test_by_hand_two_of_three_right_at_odds_of_four_to_one() -> None:
    # all questions have p = (0.8, 0.2), two of three have the first answer: the best odds are 2 : 1 = 4 ** (1 / 2)
    p, options = np.array([0.8, 0.2] * 3), Options.of_sizes([2] * 3)
    assert fit_temperature(p, options, np.array([0, 0, 1])) == pytest.approx(2.0, abs=1e-4)


def test_a_calibrated_model_keeps_its_temperature_and_an_overconfident_one_gets_it_back() -> None:
    p, options, answers = drawn(1, n=4000)
    assert fit_temperature(p, options, answers) == pytest.approx(1.0, abs=0.05)
    sharp = apply_temperature(p, options, temperature=0.25)
    assert fit_temperature(sharp, options, answers) == pytest.approx(4.0, rel=0.05)


def test_a_wildly_overconfident_model_is_cooled_and_not_sharpened() -> None:
    # every wrong answer is hundreds of nats behind: a clipped likelihood would be flat and send the search astray
    rng = np.random.default_rng(0)
    options = Options.of_sizes([4] * 60)
    p = options.softmax(rng.normal(size=240) * 150)
    assert fit_temperature(p, options, rng.integers(0, 4, 60)) == pytest.approx(BOUNDS[1], rel=1e-3)


def test_the_temperature_stays_within_its_bounds_where_all_are_right() -> None:
    assert fit_temperature(np.array([0.6, 0.4]), Options.of_sizes([2]), np.array([0])) == pytest.approx(
        BOUNDS[0], rel=1e-3
    )


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(-30, 0), min_size=2, max_size=5, unique=True), min_size=1, max_size=5),
    st.floats(*BOUNDS),
)
def test_no_temperature_changes_an_answer(scores: list[list[int]], temperature: float) -> None:
    options = Options.of_sizes([len(s) for s in scores])
    p = options.softmax(np.array([float(x) for s in scores for x in s]))
    scaled = apply_temperature(p, options, temperature=temperature)
    for first, last in pairwise(options.edges):
        assert scaled[first:last].argmax() == p[first:last].argmax()
        assert scaled[first:last].sum() == pytest.approx(1.0)
