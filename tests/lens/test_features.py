"""What a probe sees beyond plain states: centred within the question, and the option's rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.lens.features import N_RANKS, build_inputs, rank_features, ranks_of
from coral_lens.ragged import Options

SIZES = st.lists(st.integers(2, 7), min_size=1, max_size=6)


def drawn(sizes: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, Options]:
    rng = np.random.default_rng(seed)
    options = Options.of_sizes(sizes)
    states = rng.normal(size=(options.n_rows, 3)).astype(np.float32)
    return states, options.softmax(rng.normal(size=options.n_rows)), options


def test_ranks_and_their_features_worked_by_hand() -> None:
    p, options = np.array([0.2, 0.5, 0.3, 0.5, 0.5]), Options.of_sizes([3, 2])
    assert ranks_of(p, options).tolist() == [2, 0, 1, 0, 1]  # of two equal options the first comes first
    features = rank_features(p, options)
    assert features[:, 0].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]
    assert features[:, 1:].argmax(axis=1).tolist() == [2, 0, 1, 0, 1]
    assert features[:, 1:].sum(axis=1).tolist() == [1.0] * 5


def test_places_after_the_fourth_share_one_column() -> None:
    p = np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03])
    features = rank_features(p, Options.of_sizes([6]))
    assert features.shape == (6, 1 + N_RANKS)
    assert features[:, 1:].argmax(axis=1).tolist() == [0, 1, 2, 3, 4, 4]
    assert features[:, 0] == pytest.approx(np.arange(6) / 5)


@given(SIZES, st.integers(0, 1000))
def test_ranks_number_the_options_of_each_question_by_falling_probability(sizes: list[int], seed: int) -> None:
    _, p, options = drawn(sizes, seed)
    ranks = ranks_of(p, options)
    for a, b in pairwise(options.edges):
        assert sorted(ranks[a:b]) == list(range(b - a))
        assert (np.diff(p[a:b][np.argsort(ranks[a:b])]) <= 0).all()


@given(SIZES, st.integers(0, 1000), st.floats(0.2, 5.0))
def test_ranks_do_not_change_with_the_temperature(sizes: list[int], seed: int, temperature: float) -> None:
    _, p, options = drawn(sizes, seed)
    scaled = options.softmax(np.log(p) / temperature)
    assert ranks_of(scaled, options).tolist() == ranks_of(p, options).tolist()


def test_without_names_the_states_are_seen_as_they_are() -> None:
    states, p, options = drawn([3, 2])
    assert build_inputs(states, p, options, ()) is states


def test_centred_inputs_forget_what_all_options_of_a_question_share() -> None:
    states, p, options = drawn([3, 2, 5])
    shared = np.repeat(np.random.default_rng(1).normal(size=(3, 3)), [3, 2, 5], axis=0).astype(np.float32)
    plain, moved = (build_inputs(s, p, options, ("centred",)) for s in (states, states + shared))
    assert moved == pytest.approx(plain, abs=1e-5)
    assert plain[:3] == pytest.approx(states[:3] - states[:3].mean(axis=0), abs=1e-6)


def test_ranks_stand_beside_the_centred_states_and_are_not_centred_themselves() -> None:
    states, p, options = drawn([3, 2])
    both = build_inputs(states, p, options, ("rank", "centred"))
    assert both.dtype == states.dtype
    assert both[:, :3].tobytes() == build_inputs(states, p, options, ("centred",)).tobytes()
    assert both[:, 3:] == pytest.approx(rank_features(p, options))
