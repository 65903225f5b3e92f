"""How many questions would have been enough: fewer and fewer training questions, the same validation questions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.planted import PlantedStore, brier, data_of

from coral_lens.lens import learning_curve as module
from coral_lens.lens.choose import choose_candidate, fit_recipe
from coral_lens.lens.fit import fit_store
from coral_lens.lens.learning_curve import brier_by_question, first_as_good, learning_curve
from coral_lens.lens.settings import FitSettings


def test_the_first_that_is_behind_by_less_than_a_standard_error_worked_by_hand() -> None:
    """Differences 2, 0, 2, 0: mean 1, deviation 1, four questions, so a standard error of 0.5."""
    last = np.array([1.0, 2.0, 3.0, 4.0])
    behind = last + np.array([2.0, 0.0, 2.0, 0.0])
    as_good = last + np.array([2.0, -2.0, 2.0, 0.0])  # 0.5 behind, with a standard error of 0.83
    assert first_as_good([behind, behind, as_good, last]) == 2
    assert first_as_good([behind, last]) == 1
    assert first_as_good([last - 1.0, behind, last]) == 0  # better than all is good enough
    assert first_as_good([last]) == 0


def test_the_brier_score_of_each_question_is_that_of_the_plain_formula() -> None:
    store = PlantedStore(20)
    data = data_of(store)
    mask = np.arange(20) % 3 == 0
    ours = brier_by_question(data, data.p, mask)
    assert ours == pytest.approx([brier(store, data.p, [i]) for i in np.flatnonzero(mask)])


@pytest.mark.parametrize("name", ["ridge", "listwise"])
def test_it_ends_at_the_lens_that_was_chosen_and_begins_worse(name: str) -> None:
    data = data_of(PlantedStore(200, signal={1: 2.0}))
    chosen, _ = choose_candidate(data, name, FitSettings(layers=(1,)))
    best = chosen.best("brier")
    curve = learning_curve(data, chosen, best.gamma, seed=0)
    points = curve.points
    assert [point.questions for point in points] == [16, 32, 64, 112, 160]
    assert points[-1].scores["brier"] == pytest.approx(best.scores["brier"], abs=5e-3)
    assert points[0].scores["brier"] > points[-1].scores["brier"] + 0.02
    assert curve.enough in {point.questions for point in points}
    assert curve.enough > 16


def test_each_size_holds_the_questions_of_the_smaller_ones_and_never_a_validation_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = data_of(PlantedStore(50))
    chosen, _ = choose_candidate(data, "ridge", FitSettings(layers=(1,)))
    seen: list[np.ndarray] = []

    def recorded(d, recipe, train, stop):
        seen.append(train)
        return fit_recipe(d, recipe, train, stop)

    monkeypatch.setattr(module, "fit_recipe", recorded)
    curve = learning_curve(data, chosen, 1.0, seed=0)
    assert [int(train.sum()) for train in seen] == [4, 8, 16, 28, 40]
    assert all((big[small]).all() for small, big in pairwise(seen))
    assert not any((train & data.rounds[0]).any() for train in seen)
    assert (seen[-1] == ~data.rounds[0]).all()
    assert curve.enough == 4  # where nothing changes, the least is enough
    again: list[np.ndarray] = seen.copy()
    seen.clear()
    learning_curve(data, chosen, 1.0, seed=1)
    assert (seen[0] != again[0]).any()


def test_the_scores_are_those_of_the_validation_questions_alone() -> None:
    """At gamma 0 every point is the base, scored on them."""
    store = PlantedStore(60, signal={1: 2.0})
    data = data_of(store)
    chosen, _ = choose_candidate(data, "ridge", FitSettings(layers=(1,)))
    points = learning_curve(data, chosen, 0.0, seed=0).points
    expected = brier(store, data.p, np.flatnonzero(data.rounds[0]))
    assert [point.scores["brier"] for point in points] == pytest.approx([expected] * 5)


def test_a_lens_keeps_its_curve_only_if_asked() -> None:
    store = PlantedStore(40, signal={1: 2.0})
    settings = {"lens": "ridge", "layers": (1,)}
    assert fit_store(store, FitSettings(**settings)).trace.learning_curve is None  # type: ignore[arg-type]
    curve = fit_store(store, FitSettings(learning_curve=True, **settings)).trace.learning_curve  # type: ignore[arg-type]
    assert curve is not None
    assert len(curve.points) == 5
