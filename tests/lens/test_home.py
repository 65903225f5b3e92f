"""Home is a task of the training by its name, or what the user says; nothing else is, however near it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.planted import PlantedStore

from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings, Guarantees

TASKS = {"a": 1.0, "b": 1.0}


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(120, signal={1: 2.0}, tasks=TASKS), FitSettings(layers=(1,)))


def renamed(store: PlantedStore, task: str) -> PlantedStore:
    store.questions = [replace(q, task=task) for q in store.questions]
    return store


def test_home_is_a_task_of_the_training_by_its_name(lens: Lens) -> None:
    """The same questions at the same place: named otherwise, they are believed less."""
    home, away = (renamed(PlantedStore(60, signal={1: 2.0}, seed=3), task) for task in ("a", "other"))
    assert lens.is_home(home.questions).all()
    assert not lens.is_home(away.questions).any()
    assert np.median(lens.shifts(away)) < 1.5, "a small shift grants nothing"
    assert lens.trust is not None
    weights = {task: lens.read(store).weights for task, store in (("a", home), ("other", away))}
    assert weights["a"] is not None
    assert weights["other"] is not None
    assert np.median(weights["a"]) == 1.0
    assert np.median(weights["other"]) == lens.trust.elsewhere < 1.0


def test_another_file_is_another_task_and_the_same_questions_are_home() -> None:
    lens = fit_store(PlantedStore(120, signal={1: 2.0}), FitSettings(layers=(1,)))
    assert "questions" in lens.training.tasks
    assert not lens.is_home(PlantedStore(60, seed=3).questions).any()
    assert lens.is_home(PlantedStore(120, signal={1: 2.0}).questions).all()


def test_the_user_may_say_that_questions_are_of_the_same_kind(lens: Lens) -> None:
    store = PlantedStore(60, signal={1: 2.0}, seed=3)
    assert lens.at_home().is_home(store.questions).all()
    assert [a.trust for a in lens.at_home().answers(store)].count(1.0) > 50
    assert max(a.trust or 0.0 for a in lens.answers(store)) < 1.0


def test_what_was_promised_for_other_questions_is_dropped_at_home(lens: Lens) -> None:
    calibrated, _ = calibrate_on(lens, PlantedStore(60, signal={1: 2.0}, seed=3), Guarantees(coverage=0.8))
    with pytest.warns(UserWarning, match="coral calibrate --home"):
        assert calibrated.at_home().sets is None
