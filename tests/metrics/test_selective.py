"""The risk at half coverage: by hand, with ties, and the same as the curve's."""

from __future__ import annotations

import numpy as np
import pytest

from coral_lens.metrics.answered import answered
from coral_lens.metrics.curves import risk_coverage
from coral_lens.metrics.scores import score


def risk(sure: list[float], right: list[bool]) -> float:
    ids = [str(i) for i in range(len(sure))]
    return score(answered("m", ids, np.array(sure), np.array(right)), "risk_half")


def test_it_is_the_error_rate_of_the_surer_half() -> None:
    assert risk([0.9, 0.8, 0.7, 0.6], [True, False, False, False]) == 0.5
    assert risk([0.9, 0.8, 0.7, 0.6], [False, True, True, True]) == 0.5
    assert risk([0.9, 0.8], [True, False]) == 0.0


def test_equally_sure_answers_are_taken_in_part_and_an_odd_number_in_halves() -> None:
    assert risk([0.5] * 4, [True, False, False, False]) == 0.75
    assert risk([0.9, 0.5, 0.5], [True, False, True]) == pytest.approx((0 + 0.5 * 0.5) / 1.5)


def test_it_is_a_point_of_the_risk_coverage_curve() -> None:
    rng = np.random.default_rng(0)
    sure, right = rng.random(40), rng.random(40) < 0.5
    predictions = answered("m", list(map(str, range(40))), sure, right)
    assert score(predictions, "risk_half") == pytest.approx(risk_coverage(predictions).risk[19])
