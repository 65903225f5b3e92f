"""Candidates are weighed by how often they were written and by what the model says of them; by hand, and where it must learn."""

from __future__ import annotations

import numpy as np
import pytest
from support.open_planted import OpenPlantedStore

from coral_lens.lens.rules import base_probs
from coral_lens.lens.weighing import Weighing, candidate_facts, fit_weighing, merged_entropy, none_rows
from coral_lens.records import OptionTable


def table_by_hand() -> OptionTable:
    """Two questions: candidates written 6 and 2 times, and one written 3 times of 4."""
    tokens = np.array([2, 1, 3, 1, 3])
    counts = np.array([6, 2, 0, 3, 1])
    return OptionTable(
        np.array([-4.0, -3.0, -9.0, -1.0, -9.0]),
        tokens,
        tokens,
        tokens,
        np.array([0, 3, 5]),
        np.array([0, 1]),
        counts=counts,
    )


def test_facts_of_candidates_are_those_worked_by_hand_and_none_of_these_has_none() -> None:
    facts = candidate_facts(table_by_hand())
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert facts[0] == pytest.approx([1, -2, -4, np.log(6 / 8), entropy])
    assert facts[1] == pytest.approx([1, -3, -3, np.log(2 / 8), entropy])
    # a single candidate disagrees with nothing, and what was no candidate counts among what was written
    assert facts[3] == pytest.approx([1, -1, -1, np.log(3 / 4), 0])
    assert (facts[[2, 4]] == 0).all()
    assert merged_entropy(table_by_hand()) == pytest.approx([entropy, 0])
    assert none_rows(table_by_hand().options).tolist() == [False, False, True, False, True]


def test_base_probabilities_are_the_softmax_of_weighed_facts() -> None:
    table = table_by_hand()
    p = base_probs(table, Weighing(bias=0.5, token=0.0, sum=0.0, share=1.0, spread=0.0))
    odds = np.array([np.exp(0.5) * 0.75, np.exp(0.5) * 0.25, 1.0])
    assert p[:3] == pytest.approx(odds / odds.sum())


def test_frequency_that_tells_is_given_weight_and_probabilities_are_calibrated() -> None:
    store = OpenPlantedStore(2000)
    weighing = fit_weighing(store.table, np.ones(2000, dtype=bool))
    assert weighing.share > 0.3
    p = base_probs(store.table, weighing)
    y = store.table.options.one_hot(store.table.answers)
    # cross-entropy with a bias: over the training questions, all candidates together are as probable as they are right
    candidates = ~none_rows(store.table.options)
    assert p[candidates].mean() == pytest.approx(y[candidates].mean(), abs=0.01)
    fresh = OpenPlantedStore(500, seed=1).table
    right = base_probs(fresh, weighing)[fresh.options.row(fresh.answers)]
    assert (
        -np.log(right).mean()
        < -np.log(base_probs(fresh, Weighing(*[0.0] * 5))[fresh.options.row(fresh.answers)]).mean()
    )


def test_a_fit_on_some_questions_does_not_see_the_others() -> None:
    store = OpenPlantedStore(60)
    mask = np.arange(60) < 40
    before = fit_weighing(store.table, mask)
    store.table.answers[40:] = 0
    assert fit_weighing(store.table, mask) == before
