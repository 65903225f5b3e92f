"""What fewer labels would have given, and how many more are worth it."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted import in_articles, planted_labels

from coral_lens.errors import CoralError
from coral_lens.lens import label_curve
from coral_lens.lens.label_curve import after, first_enough, how_many_more, labels_more, learning_curve
from coral_lens.lens.labelled import Labelled, Mixture, Prior, fit_mixture
from coral_lens.lens.trace import LearningCurve


def curve_of(data: Labelled, before: float) -> LearningCurve:
    return learning_curve(data, Prior(before, data.n_units))


def test_it_begins_without_labels_and_falls_where_they_teach() -> None:
    curve = curve_of(planted_labels(200, trust=1.2), 0.1)
    assert [point.questions for point in curve.points] == [0, 5, 10, 20, 30, 50, 100]
    scores = [point.scores["brier"] for point in curve.points]
    assert scores[-1] < scores[0] - 0.02


def test_sizes_are_compared_question_by_question() -> None:
    """A hundredth of a point for every question is clear, however much the questions differ."""
    hard = np.random.default_rng(0).uniform(0.0, 2.0, 100)
    assert first_enough(np.array([hard + 0.01, hard]), np.arange(100)) == 1
    assert first_enough(np.array([hard, hard + 0.01]), np.arange(100)) == 0


@pytest.mark.parametrize("trust", [1.2, -1.0])
def test_labels_that_gain_much_are_not_called_needless(trust: float) -> None:
    """Where the lens is better than it is believed, or worse: twenty labels and more gain several points over none."""
    curve = curve_of(planted_labels(120, trust=trust), 0.3)
    assert curve.points[0].scores["brier"] - curve.points[-1].scores["brier"] > 0.02
    assert curve.enough > 0


def test_a_size_that_shows_harm_leaves_the_lens_out_as_adapting_does() -> None:
    drawn = planted_labels(20, trust=0.0, seed=25)
    assert fit_mixture(drawn, Prior(1.5, 20))[0] > 0.0
    assert after(drawn, Prior(1.5, 200))[0] == 0.0
    assert after(drawn.take(np.arange(20) < 10), Prior(1.5, 200))[0] > 0.5, "ten are too few to show it"


def test_labels_are_drawn_in_whole_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    data = in_articles(planted_labels(120, trust=0.5), 12)
    drawn: list[tuple[str, ...]] = []
    monkeypatch.setattr(label_curve, "after", lambda part, _: (drawn.append(part.groups), Mixture(0.5, 1.0))[1])
    curve = curve_of(data, 0.5)
    assert [point.questions for point in curve.points] == [0, 10, 20, 30, 50]
    assert all(groups.count(name) == 10 for groups in drawn for name in groups)


def test_the_number_of_labels_that_are_worth_it_worked_by_hand() -> None:
    """0.5 + 1 / n after n labels: from a hundred on there is 0.01 to gain, half of it by a hundred more."""
    labels, units = np.array([20.0, 50.0]), np.arange(30)
    hard = np.random.default_rng(0).uniform(0.0, 1.0, 30)
    losses = hard + 1.0 / labels[:, None]
    assert labels_more(labels, losses, units, 100) == 100
    assert labels_more(labels, losses, units, 300) == 0, "0.0033 is all there is to gain"
    assert labels_more(labels, losses, units, 190) == 0, "0.0053 is there, and ten times as many gain 0.0048 of it"


def test_a_curve_in_noise_promises_nothing() -> None:
    rng = np.random.default_rng(0)
    assert labels_more(np.array([20.0, 50.0]), rng.normal(size=(2, 50)), np.arange(50), 100) is None
    assert labels_more(np.array([20.0, 50.0]), np.ones((2, 50)), np.arange(50), 100) == 0


def test_it_wants_ten_labels() -> None:
    with pytest.raises(CoralError, match=r"learning curve needs at least 10 labelled questions.*Got 9"):
        curve_of(planted_labels(9, trust=1.0), 0.5)
    curve = curve_of(planted_labels(10, trust=1.0), 0.5)
    assert [point.questions for point in curve.points] == [0, 5]
    assert curve.more is None


@pytest.mark.parametrize(("n", "articles"), [(30, 30), (50, 50), (120, 12), (120, 1)])
def test_a_flat_curve_of_labels_that_are_held_back_does_not_call_more_of_them_needless(n: int, articles: int) -> None:
    """Ten labels, or ten of twelve articles, may move the weight little; those of one article are one."""
    data = planted_labels(n, trust=0.3, seed=1)
    assert curve_of(in_articles(data, articles), 0.3).more is None


def test_only_sizes_that_are_not_held_back_say_that_more_labels_are_needless() -> None:
    flat, units = np.ones((3, 40)), np.arange(40)
    labels = np.array([0.0, 20.0, 40.0])
    assert how_many_more(labels, flat, units, np.array([False, True, True]), 80) == 0
    assert how_many_more(labels, flat, units, np.array([False, False, True]), 80) is None
    falls = flat + np.array([0.5, 0.5, 0.2])[:, None]
    assert how_many_more(labels, falls, units, np.array([False, False, True]), 80), "where few teach, more do"
