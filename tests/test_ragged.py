"""What is computed within each question is what a loop over the questions computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.ragged import Options

SIZES = (2, 5, 3)
SHAPES = st.lists(st.integers(2, 6), min_size=1, max_size=8)


def values_of(options: Options, *, width: int = 0) -> np.ndarray:
    rng = np.random.default_rng(options.n_rows)
    return rng.normal(size=(options.n_rows, width) if width else options.n_rows)


def test_sizes_starts_and_numbers_by_hand() -> None:
    options = Options.of_sizes(SIZES)
    assert options.edges.tolist() == [0, 2, 7, 10]
    assert (len(options), options.n_rows) == (3, 10)
    assert options.starts.tolist() == [0, 2, 7]
    assert options.sizes.tolist() == list(SIZES)
    assert options.question.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert options.option.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert options.of(1) == slice(2, 7)


@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize(
    ("name", "alone"),
    [("sum", lambda v: v.sum(axis=0)), ("mean", lambda v: v.mean(axis=0))],
)
@given(sizes=SHAPES)
def test_sums_and_means_are_those_of_each_question_alone(
    name: str, alone: Callable[[np.ndarray], np.ndarray], width: int, sizes: list[int]
) -> None:
    options = Options.of_sizes(sizes)
    values = values_of(options, width=width)
    expected = [alone(values[options.of(i)]) for i in range(len(options))]
    np.testing.assert_allclose(getattr(options, name)(values), expected, rtol=1e-12, atol=1e-12)


@given(sizes=SHAPES)
def test_softmax_sums_to_one_and_keeps_the_largest(sizes: list[int]) -> None:
    options = Options.of_sizes(sizes)
    scores = 50 * values_of(options)
    probs = options.softmax(scores)
    np.testing.assert_allclose(options.sum(probs), 1.0)
    for i in range(len(options)):
        assert probs[options.of(i)].argmax() == scores[options.of(i)].argmax()
        np.testing.assert_allclose(options.max(scores)[i], scores[options.of(i)].max())


@given(sizes=SHAPES)
def test_centred_values_have_no_mean_and_stay_float32(sizes: list[int]) -> None:
    options = Options.of_sizes(sizes)
    centred = options.centre(values_of(options, width=3).astype(np.float32))
    assert centred.dtype == np.float32
    np.testing.assert_allclose(options.sum(centred), 0.0, atol=1e-5)


def test_values_are_divided_by_the_sum_of_their_question() -> None:
    options = Options.of_sizes([2, 3])
    np.testing.assert_allclose(options.normalise(np.array([0.2, 0.6, 0.01, 0.01, 0.02])), [0.25, 0.75, 0.25, 0.25, 0.5])


def test_the_top_option_is_the_largest_and_of_equals_the_first() -> None:
    options = Options.of_sizes([2, 2, 2])
    assert options.top(np.array([0.2, 0.8, 0.5, 0.5, 0.1, 0.9])).tolist() == [1, 0, 1]


@given(sizes=SHAPES, seed=st.integers(0, 100))
def test_the_row_of_the_top_option_holds_the_largest_value(sizes: list[int], seed: int) -> None:
    options = Options.of_sizes(sizes)
    values = np.random.default_rng(seed).integers(0, 4, options.n_rows)  # many are equal
    assert options.top(values).tolist() == [int(values[options.of(i)].argmax()) for i in range(len(options))]
    assert values[options.row(options.top(values))].tolist() == options.max(values).tolist()


@given(sizes=SHAPES, seed=st.integers(0, 100))
def test_numbered_questions_come_in_the_order_of_their_numbers(sizes: list[int], seed: int) -> None:
    options = Options.of_sizes(sizes)
    numbers = np.random.default_rng(seed).integers(0, len(options), 5)  # in any order, and some twice
    expected = np.concatenate([np.arange(options.n_rows)[options.of(i)] for i in numbers.tolist()])
    assert options.rows_of(numbers).tolist() == options.rows_of(numbers.tolist()).tolist() == expected.tolist()
    assert options.take(numbers).sizes.tolist() == [sizes[i] for i in numbers]
    assert options.rows_of([]).tolist() == []


def test_some_questions_are_taken_with_their_rows() -> None:
    options = Options.of_sizes(SIZES)
    mask = np.array([True, False, True])
    values = np.arange(10.0)
    kept = options.take(mask)
    assert kept.sizes.tolist() == [2, 3]
    assert values[options.rows(mask)].tolist() == [0, 1, 7, 8, 9]
    assert kept.sum(values[options.rows(mask)]).tolist() == [1, 24]


def test_successive_questions_are_taken_with_rows_counted_from_the_first() -> None:
    part = Options.of_sizes(SIZES).take(slice(1, 3))
    assert part.edges.tolist() == [0, 5, 8]


def test_no_questions_at_all_have_no_sums() -> None:
    options = Options.of_sizes([])
    assert len(options) == options.n_rows == 0
    assert (
        options.sum(np.zeros(0)).tolist()
        == options.max(np.zeros(0)).tolist()
        == options.top(np.zeros(0)).tolist()
        == []
    )
