"""A confidence, and whether the answer is right, make Predictions; methods that answer differently can be compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.metrics.answered import answered, distribution_of
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score

SURE = np.array([0.9, 0.2, 0.6, 0.05])
RIGHT = np.array([True, False, False, True])


@given(st.floats(0, 1))
def test_the_answer_is_the_only_likeliest_of_a_confidence_alone(confidence: float) -> None:
    made = distribution_of(confidence)
    assert made.sum() == pytest.approx(1)
    assert made[0] == max(confidence, 1e-3)
    assert (made[1:] < made[0]).all()


def test_scores_are_those_worked_by_hand() -> None:
    predictions = answered("m", "abcd", SURE, RIGHT)
    assert score(predictions, "accuracy") == 0.5
    assert score(predictions, "brier_top1") == pytest.approx(np.mean([0.1**2, 0.2**2, 0.6**2, 0.95**2]))
    assert score(predictions, "auroc") == pytest.approx(2 / 4)


def test_methods_that_are_right_on_different_questions_are_compared_question_by_question() -> None:
    one, other = answered("a", "abcd", SURE, RIGHT), answered("b", "abcd", SURE, ~RIGHT)
    assert paired_difference(one, one, "accuracy").value == 0
    assert paired_difference(one, other, "brier_top1").value == pytest.approx(
        np.mean((RIGHT - SURE) ** 2) - np.mean((~RIGHT - SURE) ** 2)
    )
