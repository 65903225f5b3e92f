"""Metrics of soft answers and of scores, worked by hand; and soft answers that are none are hard ones, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.decisions import expected_level
from coral_lens.metrics.scores import METRICS, measure, metrics_for, score
from coral_lens.ragged import Options
from coral_lens.records import Predictions


def predictions(probs: list[list[float]], answers: list[int], **more: object) -> Predictions:
    ids = tuple(map(str, range(len(answers))))
    made = Predictions(
        "m", "", "t", "", ids, np.array(answers), Options.of_sizes([len(p) for p in probs]).edges, np.concatenate(probs)
    )
    return replace(made, **more)


def drawn(n: int = 60, seed: int = 0) -> Predictions:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, n)
    probs = [rng.dirichlet(np.ones(k)).tolist() for k in sizes]
    return predictions(probs, [int(rng.integers(k)) for k in sizes])


def test_the_ranked_probability_score_counts_how_far_off_the_mass_is() -> None:
    near = predictions([[0.0, 1.0, 0.0]], [0], ordered=np.array([True]))
    far = predictions([[0.0, 0.0, 1.0]], [0], ordered=np.array([True]))
    # cumulated: (0, 1, 1) and (0, 0, 1) against (1, 1, 1), over two steps
    assert score(near, "rps") == pytest.approx(1 / 2)
    assert score(far, "rps") == pytest.approx(1.0)
    assert score(predictions([[0.5, 0.3, 0.2]], [1], ordered=np.array([True])), "rps") == pytest.approx(
        (0.25 + 0.04) / 2
    )


def test_the_mean_absolute_error_is_of_the_expected_level() -> None:
    two = predictions([[0.5, 0.0, 0.5], [0.0, 0.25, 0.75]], [0, 2], ordered=np.array([True, True]))
    assert score(two, "mae") == pytest.approx((1.0 + 0.25) / 2)
    assert expected_level(np.array([0.5, 0.0, 0.5])) == 1.0


def test_only_scores_count_in_the_metrics_of_scores() -> None:
    both = predictions([[0.5, 0.5], [0.0, 0.0, 1.0]], [0, 0], ordered=np.array([False, True]))
    assert score(both, "mae") == 2.0
    assert score(both, "rps") == 1.0


def test_a_score_of_two_levels_has_half_the_brier_score() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet([1, 1], 40)
    made = predictions(p.tolist(), rng.integers(0, 2, 40).tolist(), ordered=np.ones(40, dtype=bool))
    assert score(made, "rps") == pytest.approx(score(made, "brier") / 2)


def test_soft_answers_are_measured_against_their_shares() -> None:
    soft = predictions([[0.6, 0.4]], [0], targets=np.array([0.75, 0.25]))
    assert score(soft, "brier") == pytest.approx(2 * 0.15**2)
    assert score(soft, "nll") == pytest.approx(-0.75 * np.log(0.6) - 0.25 * np.log(0.4))
    assert score(soft, "kl") == pytest.approx(0.75 * np.log(0.75 / 0.6) + 0.25 * np.log(0.25 / 0.4))
    assert score(soft, "accuracy") == 1.0
    assert score(soft, "ece") == pytest.approx(0.15)  # sure at 60 %, and right for 75 % of the annotators
    perfect = predictions([[0.75, 0.25]], [0], targets=np.array([0.75, 0.25]))
    assert score(perfect, "kl") == 0.0
    assert score(perfect, "ece") == 0.0


def test_any_of_several_right_options_is_right() -> None:
    made = predictions([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1]], [0, 1], targets=np.array([0.5, 0.0, 0.5, 0.0, 0.5, 0.5]))
    assert score(made, "accuracy") == 0.5


def test_soft_answers_of_one_are_hard_ones_to_the_bit() -> None:
    hard = drawn()
    soft = replace(hard, targets=hard.options.one_hot(hard.answers))
    for name in METRICS:
        assert score(soft, name) == score(hard, name), name
    ours, theirs = measure(soft, n_boot=50), measure(hard, n_boot=50)
    assert {name: ours.scores[name] for name in METRICS} == theirs.scores


def test_metrics_of_decisions_are_measured_only_where_they_mean_something() -> None:
    plain = drawn()
    assert set(metrics_for(plain)) == set(METRICS)
    ordered = replace(plain, ordered=np.arange(len(plain)) % 2 == 0)
    assert set(measure(ordered, n_boot=20).scores) - set(METRICS) == {"rps", "mae"}
    soft = replace(plain, targets=plain.options.normalise(np.ones(len(plain.probs))))
    assert set(measure(soft, n_boot=20).scores) - set(METRICS) == {"kl"}
    assert "smooth_ece" in measure(plain, n_boot=20, more=("smooth_ece",)).scores


def test_methods_are_compared_in_them_pair_by_pair() -> None:
    plain = replace(drawn(), ordered=np.ones(60, dtype=bool))
    sharper = replace(plain, probs=plain.options.softmax(3 * np.log(plain.probs)))
    difference = paired_difference(sharper, plain, "rps", n_boot=50)
    assert difference.value == pytest.approx(score(sharper, "rps") - score(plain, "rps"))
    assert difference.low <= difference.value <= difference.high


def test_predictions_that_are_taken_keep_targets_and_order() -> None:
    made = replace(drawn(), ordered=np.arange(60) % 3 == 0)
    soft = replace(made, targets=made.options.one_hot(made.answers))
    some = soft.take(np.array([5, 3]))
    assert some.ordered is not None
    assert some.ordered.tolist() == [False, True]
    assert some.targets is not None
    assert some.targets.tolist() == some.options.one_hot(some.answers).tolist()
