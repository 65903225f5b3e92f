"""Smooth ECE: equal to its definition, to `relplot` where that is exact, and to nothing for the perfectly calibrated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from relplot import smECE

from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import Predictions


def binary(sure: Float[np.ndarray, " question"], right: Float[np.ndarray, " question"]) -> Predictions:
    """Predictions of two options with these confidences, of at least a half."""
    n = len(sure)
    probs = np.column_stack([sure, 1 - sure]).reshape(-1)
    answers = np.where(right == 1, 0, 1)
    return Predictions("m", "", "t", "", tuple(map(str, range(n))), answers, Options.of_sizes([2] * n).edges, probs)


def by_definition(sure: Float[np.ndarray, " question"], right: Float[np.ndarray, " question"]) -> float:
    """The integral of the smoothed residuals, with every mirror image of every residual, at the width that it equals."""
    at = (np.arange(2000) + 0.5) / 2000

    def at_width(width: float) -> float:
        total = np.zeros_like(at)
        for k in range(-2, 3):
            for image in (2 * k + sure, 2 * k - sure):
                total += np.exp(-0.5 * ((at[:, None] - image) / width) ** 2) @ (right - sure)
        return float(np.abs(total / (np.sqrt(2 * np.pi) * width)).mean() / len(sure))

    low, high = 1e-3, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if at_width(middle) > middle else (low, middle)
    return at_width(high)


def drawn(n: int, *, bias: float, seed: int = 0, most: float = 0.98) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sure = rng.uniform(0.5, most, n)
    return sure, (rng.random(n) < np.clip(sure - bias, 0, 1)).astype(float)


@pytest.mark.parametrize(("n", "bias", "most"), [(120, 0.2, 0.98), (200, 0.05, 0.98), (150, 0.3, 1.0)])
def test_it_is_what_its_definition_says(n: int, bias: float, most: float) -> None:
    sure, right = drawn(n, bias=bias, most=most)
    assert score(binary(sure, right), "smooth_ece") == pytest.approx(by_definition(sure, right), abs=5e-4)


@pytest.mark.parametrize(("n", "bias"), [(100, 0.0), (500, 0.1), (2000, 0.02), (5000, 0.3)])
def test_it_is_relplots(n: int, bias: float) -> None:
    sure, right = drawn(n, bias=bias)
    assert score(binary(sure, right), "smooth_ece") == pytest.approx(smECE(sure, right), abs=2e-3)


def test_it_is_small_for_the_calibrated_and_the_bias_for_the_biased() -> None:
    assert score(binary(*drawn(20_000, bias=0.0)), "smooth_ece") < 0.02
    assert score(binary(*drawn(20_000, bias=0.25)), "smooth_ece") == pytest.approx(0.25, abs=0.02)


@given(st.integers(1, 40), st.integers(0, 1000))
def test_it_lies_between_the_mean_gap_and_one(n: int, seed: int) -> None:
    sure, right = drawn(n, bias=0.2, seed=seed, most=1.0)
    value = score(binary(sure, right), "smooth_ece")
    assert abs((right - sure).mean()) - 1e-9 <= value <= np.abs(right - sure).mean() + 1e-9
