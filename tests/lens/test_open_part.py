"""The state of `none of these` is the mean candidate's, whatever the text's own states are."""

from __future__ import annotations

import numpy as np
import pytest
from support.open_planted import OpenPlantedStore
from support.planted import COLUMN

from coral_lens.engine.settings import Sampling
from coral_lens.lens.open_part import CandidateStates, OpenPart, chosen_options
from coral_lens.lens.weighing import Weighing, none_rows
from coral_lens.ragged import Options


def test_none_of_these_has_the_mean_state_of_the_candidates_and_the_store_stays_as_it_was() -> None:
    store = OpenPlantedStore(30)
    before = store.states[1].copy()
    rows = none_rows(store.table.options)
    seen = CandidateStates(store, Sampling()).layer(1)
    assert seen[rows, :-1] == pytest.approx(np.tile(before[~rows].mean(axis=0), (rows.sum(), 1)), abs=1e-5)
    assert (seen[~rows, :-1] == before[~rows]).all()
    assert (seen[:, -1] == ~rows).all(), "the intercept"
    assert (store.states[1] == before).all()
    assert before[rows, COLUMN].min() > 20 > seen[rows, COLUMN].max()


def test_other_questions_get_the_reference_of_the_training_candidates() -> None:
    train, test = OpenPlantedStore(30), OpenPlantedStore(5, seed=1)
    wanted = CandidateStates(train, Sampling()).reference((1, 2))
    part = OpenPart(Sampling(), Weighing(*[0.0] * 5), wanted)
    assert part.states(test).layer(2)[none_rows(test.table.options)][0] == pytest.approx(wanted[2], abs=1e-5)
    assert part.stacked((2, 1))[1] == pytest.approx(wanted[1])


def test_none_of_these_is_never_the_answer() -> None:
    options = Options.of_sizes([3, 2])
    probs = np.array([0.1, 0.2, 0.7, 0.05, 0.95])
    assert chosen_options(probs, options, is_open=True).tolist() == [1, 0]
    assert chosen_options(probs, options, is_open=False).tolist() == [2, 1]


def test_how_candidates_are_written_is_part_of_what_a_lens_was_fitted_on() -> None:
    store = OpenPlantedStore(5)
    manifests = [CandidateStates(store, Sampling(candidates=n)).manifest for n in (4, 8)]
    assert manifests[0] != manifests[1]
    assert manifests[0]["sampling"]["candidates"] == 4
