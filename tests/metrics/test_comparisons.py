"""Paired comparisons: numbers worked by hand, properties, and the size of the test under no difference."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.metrics.comparisons import holm, mcnemar, paired_difference
from coral_lens.metrics.scores import METRICS, score
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, Predictions


def binary(confident: Sequence[float], answers: Sequence[int], *, method: str = "a") -> Predictions:
    """Questions of two options; `confident` is the probability of option 0."""
    probs = np.stack([confident, 1 - np.asarray(confident)], axis=1)
    ids = tuple(f"q{i}" for i in range(len(answers)))
    return Predictions(
        method,
        "tiny",
        "quiz",
        "test",
        ids,
        np.asarray(answers),
        Options.of_sizes([2] * len(answers)).edges,
        probs.ravel(),
    )


def pair(n: int, *, seed: int, better: float) -> tuple[Predictions, Predictions]:
    """Two methods whose answers agree with the truth through shared and own noise; `better` favours the first."""
    rng = np.random.default_rng(seed)
    answers = rng.integers(2, size=n)
    shared = (1 - 2 * answers) * 0.5 + rng.normal(size=n)
    own = 0.5 * rng.normal(size=(2, n))
    logits = shared + own + better * np.array([[1.0], [0.0]]) * (1 - 2 * answers)
    first, second = 1 / (1 + np.exp(-2 * logits))
    return binary(first, answers), binary(second, answers, method="b")


# --- McNemar and Holm -------------------------------------------------------------------------------------------------


def test_mcnemar_counts_only_questions_that_one_method_gets_right() -> None:
    answers = [0] * 10
    a = binary([0.9] * 5 + [0.1] + [0.9] * 2 + [0.1] * 2, answers)
    b = binary([0.1] * 5 + [0.9] + [0.9] * 2 + [0.1] * 2, answers, method="b")
    assert mcnemar(a, b) == pytest.approx(2 * (1 + 6) / 2**6)  # 5 against 1
    assert mcnemar(b, a) == pytest.approx(2 * (1 + 6) / 2**6)
    assert mcnemar(a, a) == 1.0


def test_holm_worked_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_out_what_was_not_tested() -> None:
    first, untested, last = holm([0.01, float("nan"), 0.03])
    assert (first, last) == pytest.approx((0.02, 0.03))
    assert math.isnan(untested)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_keeps_the_order_and_lies_between_the_raw_values_and_bonferroni(p_values: list[float]) -> None:
    adjusted = np.array(holm(p_values))
    raw = np.array(p_values)
    assert (adjusted >= raw).all()
    assert (adjusted <= np.minimum(raw * len(raw), 1) + 1e-15).sum() >= 1  # the smallest is exactly Bonferroni's
    assert (np.diff(adjusted[np.argsort(raw)]) >= 0).all()
    assert adjusted.min() == pytest.approx(min(raw.min() * len(raw), 1))


# --- the paired bootstrap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_a_difference_is_the_difference_of_the_scores_and_turns_its_sign_with_the_order(metric: str) -> None:
    a, b = pair(200, seed=0, better=0.5)
    there, back = paired_difference(a, b, metric, n_boot=300), paired_difference(b, a, metric, n_boot=300)
    assert there.value == pytest.approx(score(a, metric) - score(b, metric), abs=1e-12)
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low), abs=1e-12)
    assert there.p_value == back.p_value
    assert there.low < there.value < there.high


@pytest.mark.parametrize("metric", METRICS)
def test_a_method_does_not_differ_from_itself(metric: str) -> None:
    a, _ = pair(50, seed=0, better=0.0)
    same = paired_difference(a, a.renamed("b"), metric, n_boot=100)
    assert (same.value, same.low, same.high, same.p_value) == (0, 0, 0, 1)


def test_the_interval_of_a_mean_is_that_of_the_paired_t_test() -> None:
    a, b = pair(400, seed=1, better=0.2)
    terms = 2 * ((1 - a.probs[a.options.row(a.answers)]) ** 2 - (1 - b.probs[b.options.row(b.answers)]) ** 2)
    found = paired_difference(a, b, "brier", n_boot=4000)
    assert found.value == pytest.approx(terms.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * terms.std() / 20, rel=0.05)


def test_pairing_sees_a_gain_that_is_hidden_in_the_spread_over_questions() -> None:
    a, b = pair(400, seed=2, better=0.3)
    paired = paired_difference(a, b, "nll", n_boot=1000)
    spread = np.hypot(*(np.log(x.probs[x.options.row(x.answers)]).std() / 20 for x in (a, b)))
    assert paired.high - paired.low < 0.6 * 2 * 1.96 * spread
    assert paired.high < 0
    assert paired.p_value == pytest.approx(2 / 1001)  # no resample reaches 0: the smallest value there is


@pytest.mark.parametrize("metric", ["brier", "ece"])
def test_without_a_difference_one_test_in_twenty_is_significant(metric: str) -> None:
    p_values = [paired_difference(*pair(150, seed=s, better=0.0), metric, n_boot=200).p_value for s in range(200)]
    assert 0.01 <= np.mean(np.array(p_values) < 0.05) <= 0.10
    assert 0.35 <= np.mean(p_values) <= 0.65


def test_the_p_value_and_the_interval_tell_the_same() -> None:
    for seed in range(30):
        found = paired_difference(*pair(150, seed=seed, better=0.15), "brier", n_boot=400)
        if abs(found.p_value - 0.05) > 0.011:  # the border is sharp only up to a resample or two
            assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)


def test_copies_of_a_question_in_one_group_make_no_difference_clearer() -> None:
    a, b = pair(120, seed=3, better=0.2)
    groups = tuple(f"article {i % 120}" for i in range(480))

    def four_times(p: Predictions, groups: tuple[str, ...]) -> Predictions:
        ids = tuple(f"q{i}" for i in range(480))
        offsets, probs = Options.of_sizes([2] * 480).edges, np.tile(p.probs, 4)
        return replace(p, ids=ids, answers=np.tile(p.answers, 4), offsets=offsets, probs=probs, groups=groups)

    once = paired_difference(a, b, "brier")
    grouped = paired_difference(four_times(a, groups), four_times(b, groups), "brier")
    apart = paired_difference(four_times(a, ()), four_times(b, ()), "brier")
    assert grouped.value == pytest.approx(once.value) == pytest.approx(apart.value)
    assert grouped.high - grouped.low == pytest.approx(once.high - once.low, rel=0.1)
    assert apart.high - apart.low == pytest.approx((once.high - once.low) / 2, rel=0.1)


def test_a_comparison_without_auroc_is_shown_as_such() -> None:
    all_right, mixed = binary([0.9, 0.8, 0.7], [0, 0, 0]), binary([0.9, 0.2, 0.7], [0, 0, 0], method="b")
    found = paired_difference(all_right, mixed, "auroc", n_boot=50)
    assert math.isnan(found.value)
    assert math.isnan(found.p_value)
    assert str(found) == "n/a"
    only_right = next(
        s for s in range(99) if math.isnan(paired_difference(mixed, mixed, "auroc", n_boot=1, seed=s).low)
    )
    assert paired_difference(mixed, mixed, "auroc", n_boot=1, seed=only_right).value == 0
    assert str(paired_difference(mixed, mixed, "accuracy", n_boot=50)) == "+0.000 [+0.000, +0.000], p = 1.000"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_only_the_same_questions_can_be_compared() -> None:
    a = binary([0.9, 0.8, 0.7], [0, 0, 0])
    shorter = binary([0.9, 0.8], [0, 0], method="b")
    shuffled = replace(a, method="b", ids=("q1", "q0", "q2"))
    relabelled = replace(a, method="b", answers=np.array([0, 1, 0]))
    for other, message in [
        (shorter, r"'a' and 'b' cannot be compared.*1 question\(s\) are in one only \(first: 'q2'\)"),
        (shuffled, r"their order differs"),
        (relabelled, r"1 question\(s\) have another answer.*first: 'q1'"),
    ]:
        with pytest.raises(CoralError, match=message):
            paired_difference(a, other, "accuracy")
        with pytest.raises(CoralError, match=message):
            mcnemar(a, other)


def test_unknown_answers_and_unknown_metrics_are_refused() -> None:
    a = binary([0.9, 0.8], [0, UNKNOWN])
    with pytest.raises(CoralError, match=r"1 of 2 questions .* have no answer"):
        mcnemar(a, a)
    with pytest.raises(CoralError, match=r"Did you mean 'brier'"):
        paired_difference(a, a, "briers")
