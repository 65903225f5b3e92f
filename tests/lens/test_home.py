"""Home is a task of the training by its name, or what the user says; nothing else is, however near it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore

from coral_lens.lens import home
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.lens.trace import ELSEWHERE
from coral_lens.records import Question

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


# ------------------------------------------------------------------------------------------------------------- own files

EASY, HARD = "questions (easy.jsonl)", "questions (hard.jsonl)"
FILES = {EASY: 3.0, HARD: 0.3}


@pytest.fixture(scope="module")
def of_files() -> Lens:
    """A lens of an easy file and a hard one, whose questions lie apart."""
    return fit_store(PlantedStore(250, signal={1: 1.2}, tasks=FILES, apart=2.0), FitSettings(layers=(1,)))


def test_each_file_of_a_mixture_has_its_own_scale_its_own_check_and_is_left_out_as_a_task(of_files: Lens) -> None:
    trust = of_files.trust
    assert trust is not None
    assert trust.scales[EASY] > 1.2 * trust.scales[HARD]
    assert set(trust.answers) == {"", EASY, HARD, ELSEWHERE}
    assert [part.part for part in of_files.trace.simulated] == [f"without {EASY}", f"without {HARD}"]
    assert trust.places == (EASY, HARD)


def test_a_hard_file_in_the_mixture_does_not_cost_new_questions_of_the_easy_one_their_confidence(
    of_files: Lens,
) -> None:
    """New files name no task: said to be at home, each question has the scale of the file that it lies nearest to."""
    fresh = PlantedStore(250, signal={1: 1.2}, tasks=FILES, apart=2.0, seed=5)
    easy, named = np.array([q.task == EASY for q in fresh.questions]), of_files.apply(fresh)
    unnamed = of_files.at_home().apply(renamed(fresh, "questions"))
    options = fresh.table.options
    right = options.top(unnamed["listwise tempered"]) == fresh.table.answers

    def gap(probs: np.ndarray) -> float:
        return abs(float((options.max(probs) - right)[easy].mean()))

    assert of_files.trust is not None
    pooled = replace(of_files, trust=replace(of_files.trust, places=())).at_home().apply(fresh)
    assert gap(unnamed["listwise tempered"]) < 0.6 * gap(pooled["listwise tempered"])
    assert named.keys() == unnamed.keys()


def test_a_file_is_not_at_home_for_having_the_name_of_a_training_file(of_files: Lens) -> None:
    fresh = PlantedStore(20, tasks=FILES, apart=2.0, seed=5)
    assert not of_files.is_home(fresh.questions).any()
    assert not of_files.is_home(renamed(fresh, "questions").questions).any()


def test_what_is_at_home_by_its_name_needs_no_keys(lens: Lens, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    usual = home.question_keys

    def counted(questions: Sequence[Question], *, version: int) -> np.ndarray:
        hashed.append(len(questions))
        return usual(questions, version=version)

    monkeypatch.setattr(home, "question_keys", counted)
    named = renamed(PlantedStore(30, seed=3), "a").questions
    assert lens.is_home(named).all()
    assert hashed == []
    assert (
        lens.is_home([*named, *renamed(PlantedStore(4, seed=4), "other").questions]).tolist()
        == [True] * 30 + [False] * 4
    )
    assert hashed == [4]


def test_a_lens_of_several_files_is_saved_with_their_places_and_one_of_a_file_without(
    of_files: Lens, lens: Lens, tmp_path: Path
) -> None:
    of_files.save(tmp_path / "files")
    assert load_lens(tmp_path / "files").trust == of_files.trust
    assert "places" not in lens.record()["trust"]
