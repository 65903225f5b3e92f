"""One rule says what is clear, and its words never contradict the interval beside them."""

import math

import pytest

from coral_lens.metrics.comparisons import Difference
from coral_lens.report.tables.averages import mean_difference
from coral_lens.report.tables.clear import Verdict, overall, verdict_of


def judged(low: float, high: float, p_holm: float | None, metric: str = "accuracy") -> Verdict:
    return verdict_of(Difference((low + high) / 2, low, high, 0.01), p_holm, metric=metric, n_tests=6)


@pytest.mark.parametrize(
    ("low", "high", "p_holm", "words", "mark"),
    [
        (0.02, 0.10, 0.049, "clearly better", "▲"),
        (-0.45, -0.025, 0.05, "not clear after correcting for 6 tests", "▽"),
        (-0.45, -0.025, 0.01, "clearly worse", "▼"),
        (-0.10, 0.20, 0.4, "not clear", ""),
        (0.02, 0.10, None, "seems better, but there are too few questions to test it", "△"),
        (-0.02, 0.10, None, "not clear: too few questions", ""),
        (math.nan, math.nan, math.nan, "not clear", ""),
    ],
)
def test_words_follow_from_the_corrected_test(
    low: float, high: float, p_holm: float | None, words: str, mark: str
) -> None:
    found = judged(low, high, p_holm)
    assert (found.words, found.mark) == (words, mark)
    assert found.clear == words.startswith("clearly")


def test_less_is_better_where_the_metric_is_an_error() -> None:
    assert judged(0.1, 0.2, 0.001, "brier").words == "clearly worse"
    assert judged(-0.2, -0.1, 0.001, "ece").words == "clearly better"


def test_a_difference_of_nothing_is_not_clear_whatever_its_p() -> None:
    assert verdict_of(Difference(0.0, 0.0, 0.0, 0.0), 0.0, metric="accuracy", n_tests=1).words == "not clear"


def test_one_word_for_several_metrics_hides_no_loss() -> None:
    gain, loss = judged(0.1, 0.2, 0.001), judged(-0.2, -0.1, 0.001)
    seems_loss, seems_gain, none = judged(-0.2, -0.1, None), judged(0.1, 0.2, None), judged(-0.1, 0.1, 0.5)
    assert overall([gain, none]) == "better"
    assert overall([gain, seems_loss]) == overall([gain, loss]) == "mixed"
    assert overall([loss, none]) == "worse"
    assert overall([seems_loss, none]) == "seems worse"
    assert overall([seems_gain, none]) == "not clear"  # a gain must be clear to count


def test_the_mean_over_tasks_has_an_interval_worked_by_hand() -> None:
    """Two separate tasks with half-widths of 3 and 4 points: the mean of both has 5 / 2 points."""
    found = mean_difference([Difference(0.10, 0.07, 0.13, 0.01), Difference(0.02, -0.02, 0.06, 0.3)])
    assert (found.value, found.low, found.high) == pytest.approx((0.06, 0.035, 0.085))
    assert found.p_value < 0.05
    alone = Difference(0.1, 0.05, 0.2, 0.02)
    assert mean_difference([alone]) is alone
