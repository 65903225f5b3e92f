"""The tempering of saved lenses: a correction is divided into base and lens, and never gains weight with the shift."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.lens.rules import FLOOR, steer
from coral_lens.lens.tempering import Evidence, Tempering, evidence_of, tempered
from coral_lens.ragged import Options

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
