"""Training data divides by group, refuses broken states by name, and standardises with training rows only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planted import WIDTH, PlantedStore, brier, data_of
from support.questions import toy_questions

from coral_lens.errors import CoralError
from coral_lens.lens.training_data import fold_masks


@settings(max_examples=30)
@given(st.integers(10, 60), st.integers(2, 5), st.integers(0, 1000))
def test_folds_share_no_question_cover_all_and_divide_no_group(n: int, n_folds: int, seed: int) -> None:
    questions = toy_questions(n)  # two questions a group
    masks = fold_masks(questions, n_folds, seed=seed)
    assert len(masks) == n_folds
    assert (np.sum(masks, axis=0) == 1).all()
    folds_of: dict[str, set[int]] = {}
    for question, fold in zip(questions, np.argmax(masks, axis=0), strict=True):
        folds_of.setdefault(question.group, set()).add(int(fold))
    assert all(len(folds) == 1 for folds in folds_of.values())
    groups = [len({q.group for q, held in zip(questions, mask, strict=True) if held}) for mask in masks]
    assert max(groups) - min(groups) <= 1


def test_folds_are_the_same_for_the_same_seed_in_any_order_of_questions() -> None:
    questions = toy_questions(30)
    masks = fold_masks(questions, 3, seed=1)
    assert all((a == b).all() for a, b in zip(masks, fold_masks(questions, 3, seed=1), strict=True))
    turned = fold_masks(questions[::-1], 3, seed=1)
    assert all((a == b[::-1]).all() for a, b in zip(masks, turned, strict=True))
    assert any((a != b).any() for a, b in zip(masks, fold_masks(questions, 3, seed=2), strict=True))


def test_more_folds_than_groups_are_refused() -> None:
    with pytest.raises(CoralError, match=r"5 folds need at least 5 groups of questions\. Got 2"):
        fold_masks(toy_questions(4), 5, seed=0)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_states_that_are_no_numbers_are_refused_by_the_name_of_their_layers(broken: float) -> None:
    store = PlantedStore(30)
    store.states[1][17, 2] = broken
    data = data_of(store)
    with pytest.raises(CoralError, match="layer 1 are not all finite"):
        data.features((1,), ())
    with pytest.raises(CoralError, match="layer 0 and 1 are not all finite"):
        data.features((0, 1), ("centred",))
    assert np.isfinite(data.features((0, 2), ())).all()


def test_layers_are_read_side_by_side() -> None:
    store = PlantedStore(30)
    both = data_of(store).features((2, 0), ())
    assert both[:, :WIDTH].tobytes() == np.ascontiguousarray(store.layer(2)).tobytes()
    assert both[:, WIDTH:].tobytes() == np.ascontiguousarray(store.layer(0)).tobytes()


def test_only_the_marked_questions_set_the_standardiser() -> None:
    store = PlantedStore(40)
    data = data_of(store)
    train = ~data.rounds[0]
    features = data.features((1,), ())
    by = data.standardiser(features, train)
    changed = features.copy()
    changed[store.table.options.rows(~train)] += 100.0
    again = data.standardiser(changed, train)
    assert (by.mean.tobytes(), by.scale.tobytes()) == (again.mean.tobytes(), again.scale.tobytes())
    z = data.sample(features, train, by).z
    assert z.mean(axis=0) == pytest.approx(np.zeros(WIDTH), abs=1e-5)
    assert z.std(axis=0) == pytest.approx(np.ones(WIDTH), abs=1e-4)


def test_a_sample_holds_the_rows_of_its_questions_in_order() -> None:
    store = PlantedStore(12)
    data = data_of(store)
    mask = np.zeros(12, dtype=bool)
    mask[[2, 7, 8]] = True
    features = data.features((0,), ())
    sample = data.sample(features, mask, data.standardiser(features, ~mask))
    options = store.table.options
    rows = np.concatenate([np.arange(*options.edges[i : i + 2]) for i in (2, 7, 8)])
    assert sample.p.tolist() == data.p[rows].tolist()
    assert sample.r.tolist() == data.r[rows].tolist()
    assert sample.answers.tolist() == store.table.answers[[2, 7, 8]].tolist()
    assert sample.options.sizes.tolist() == options.sizes[[2, 7, 8]].tolist()
    right = sample.options.starts + sample.answers
    assert sample.r[right] == pytest.approx(1.0 - sample.p[right])


def test_scores_count_the_questions_that_validate_unless_others_are_marked() -> None:
    store = PlantedStore(40)
    data = data_of(store)
    validation = np.flatnonzero(data.is_validation)
    assert data.scores(data.p, ["brier"])["brier"] == pytest.approx(brier(store, data.p, validation))
    some = np.arange(40) < 5
    assert data.scores(data.p, ["brier"], some)["brier"] == pytest.approx(brier(store, data.p, range(5)))


def test_the_questions_of_all_rounds_are_covered() -> None:
    data = data_of(PlantedStore(20))
    first, second = np.arange(20) < 3, np.arange(20) > 15
    assert replace(data, rounds=(first, second)).is_validation.tolist() == (first | second).tolist()
