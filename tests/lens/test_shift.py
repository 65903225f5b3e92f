"""The shift is 1 for questions like the training questions, grows with the distance, and is a Mahalanobis distance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from coral_lens.lens.probes.standardise import Standardiser
from coral_lens.lens.shift import RANK, ShiftModel, fit_shift, question_places
from coral_lens.ragged import Options

WIDTH = 12


def drawn(n: int, seed: int, *, at: float = 0.0, width: int = WIDTH) -> np.ndarray:
    """Questions of a task that lies `at` so many standard deviations from 0 in every direction; columns differ in scale."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(5).normal(size=(width, width)) / np.sqrt(width) + np.eye(width)
    return ((rng.normal(size=(n, width)) + at) @ mixing * np.geomspace(0.1, 100, width)).astype(np.float32)


def fitted_on(at: np.ndarray, names: list[str], held_out: tuple[np.ndarray, list[str]]) -> ShiftModel:
    """Fit on some places and judge by others."""
    both, n = np.concatenate([at, held_out[0]]), len(at)
    model: ShiftModel = fit_shift(both, names + held_out[1], train=np.arange(n), held_out=np.arange(n, len(both)))
    return model


def fitted(n: int = 400, *, at: float = 0.0, width: int = WIDTH) -> ShiftModel:
    """One task alone."""
    held_out = drawn(n // 4, 1, at=at, width=width), ["a"] * (n // 4)
    return fitted_on(drawn(n, 0, at=at, width=width), ["a"] * n, held_out)


def test_a_place_is_the_mean_over_the_options() -> None:
    states = np.array([[1, 2], [3, 4], [5, 9], [0, 0], [4, 2]], dtype=np.float32)
    assert question_places(states, Options.of_sizes([3, 2])).tolist() == [[3.0, 5.0], [2.0, 1.0]]


def test_a_distance_worked_by_hand() -> None:
    """One direction of variance 4, the other with the rest, 1: at (2, 3) it is (2^2 / 4 + 3^2 / 1) / 2 = 5."""
    plain = Standardiser(np.zeros(2, np.float32), np.ones(2, np.float32))
    means = np.array([[0.0, 0.0], [2.0, 0.0]])
    model = ShiftModel(plain, means, np.array([[1.0], [0.0]]), np.array([4.0]), 1.0, np.array([2.5, 9.0]))
    at = np.array([[2.0, 3.0]], dtype=np.float32)
    assert model.distances(at).tolist() == [[5.0, 4.5]]
    assert model.of(at).tolist() == [0.5]  # 5 / 2.5 is 2, but the second task is nearer: 4.5 / 9


def test_with_all_directions_it_is_the_mahalanobis_distance_within_tasks() -> None:
    at = np.concatenate([drawn(300, 0), drawn(300, 1, at=2.0)])
    names = ["a"] * 300 + ["b"] * 300
    model = fitted_on(at, names, (at[::7], names[::7]))
    # eleven directions have a variance of their own, and the rest is one direction: nothing is averaged
    assert model.basis.shape == (WIDTH, WIDTH - 1)
    within = at.astype(np.float64) - np.repeat([at[:300].mean(axis=0), at[300:].mean(axis=0)], 300, axis=0)
    inverse = np.linalg.inv(within.T @ within / 600)
    new = drawn(20, 9, at=1.0).astype(np.float64)
    for j, mean in enumerate((at[:300].astype(np.float64).mean(axis=0), at[300:].astype(np.float64).mean(axis=0))):
        expected = np.einsum("qi,ij,qj->q", new - mean, inverse, new - mean) / WIDTH
        assert model.distances(new.astype(np.float32))[:, j] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("n", "width"), [(400, WIDTH), (40, WIDTH), (60, 90)])
def test_held_out_questions_of_the_same_task_show_a_shift_about_one(n: int, width: int) -> None:
    """Also with fewer questions than directions, where the training questions themselves seem much nearer."""
    model = fitted(n, width=width)
    assert np.median(model.of(drawn(500, 2, width=width))) == pytest.approx(1.0, abs=0.15)


def test_a_task_that_moves_away_shows_a_growing_shift() -> None:
    model = fitted()
    medians = [float(np.median(model.of(drawn(200, 3, at=at)))) for at in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert all(near < far for near, far in pairwise(medians))
    assert medians[0] < 1.3
    assert medians[-1] > 4.0


def test_questions_of_either_task_are_near_and_those_between_are_far() -> None:
    at = np.concatenate([drawn(300, 0), drawn(300, 1, at=8.0)])
    names = ["a"] * 300 + ["b"] * 300
    held_out = (np.concatenate([drawn(80, 2), drawn(80, 3, at=8.0)]), ["a"] * 80 + ["b"] * 80)
    model = fitted_on(at, names, held_out)
    for near in (drawn(200, 4), drawn(200, 5, at=8.0)):
        assert np.median(model.of(near)) == pytest.approx(1.0, abs=0.15)
    assert np.median(model.of(drawn(200, 6, at=4.0))) > 4.0


@settings(max_examples=20)
@given(st.integers(0, WIDTH - 1), st.sampled_from([1e-3, 7.0, 1e3]), st.floats(-50, 50))
def test_units_and_origin_of_a_column_do_not_matter(column: int, factor: float, moved: float) -> None:
    """Neurons have no units of their own."""
    parts = [drawn(200, 0), drawn(50, 1), drawn(20, 2, at=0.5)]
    plain = fitted_on(parts[0], ["a"] * 200, (parts[1], ["a"] * 50)).of(parts[2])
    scale = float(parts[0][:, column].std())
    for part in parts:
        part[:, column] = factor * (part[:, column] + moved * scale)
    again = fitted_on(parts[0], ["a"] * 200, (parts[1], ["a"] * 50)).of(parts[2])
    assert again == pytest.approx(plain, rel=2e-2)


def test_the_order_of_options_and_the_other_questions_do_not_matter() -> None:
    model = fitted()
    states, options = drawn(7, 4), Options.of_sizes([3, 4])
    together = model(states, options)
    alone = model(states[3:][[2, 0, 3, 1]], Options.of_sizes([4]))
    assert alone[0] == pytest.approx(together[1], rel=1e-4)


def test_a_task_without_held_out_questions_takes_the_distance_that_is_typical_of_all() -> None:
    at = np.concatenate([drawn(100, 0), drawn(100, 1, at=3.0)])
    model = fitted_on(at, ["a"] * 100 + ["b"] * 100, (drawn(60, 2), ["a"] * 60))
    assert np.isfinite(model.typical).all()
    assert model.typical[1] == pytest.approx(np.median(model.distances(drawn(60, 2)).min(axis=1)))


def test_states_that_never_vary_give_finite_shifts() -> None:
    """Letters at the embedding: every question looks alike."""
    same = np.ones((40, 3), dtype=np.float32)
    model = fitted_on(same, ["a"] * 40, (same[:10], ["a"] * 10))
    assert np.isfinite(model.of(same)).all()
    assert np.isfinite(model.of(same + 1)).all()


def test_directions_are_as_many_as_the_questions_can_tell() -> None:
    assert fitted(40, width=90).basis.shape == (90, 10)
    assert fitted(400, width=90).basis.shape == (90, RANK)


def test_it_comes_back_from_its_tensors_to_the_bit() -> None:
    model = fitted()
    again = ShiftModel.from_tensors(load(save(model.tensors())))
    at = drawn(30, 8, at=1.0)
    assert again.of(at).tobytes() == model.of(at).tobytes()
