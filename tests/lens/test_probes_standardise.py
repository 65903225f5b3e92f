"""Standardising, chunks of rows, R squared: against scikit-learn and by hand; and probes learn from states in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from support.planted import planted_rows, ragged_folds

from coral_lens.lens.probes.mlp import LayerData, MlpSettings, fit_mlp
from coral_lens.lens.probes.ridge import fit_ridge_folds, fit_ridge_path
from coral_lens.lens.probes.standardise import fit_standardiser, r_squared
from coral_lens.storage import arrays

SMALL = MlpSettings(hidden=(16, 8), max_epochs=8, batch_size=32)


# ------------------------------------------------------------------------------------------------------- standardiser


def test_standardised_training_states_have_mean_zero_and_scale_one() -> None:
    states = (planted_rows(500)[0] * 7 + 3).astype(np.float32)
    z = fit_standardiser(states)(states)
    np.testing.assert_allclose(z.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(z.std(axis=0), 1.0, atol=1e-5)
    np.testing.assert_allclose(z, StandardScaler().fit_transform(states), atol=1e-4)


def test_other_states_are_standardised_with_training_statistics() -> None:
    train, other = np.array([[0.0], [2.0]], np.float32), np.array([[5.0]], np.float32)
    assert fit_standardiser(train)(other).tolist() == [[4.0]]  # (5 - 1) / 1


@pytest.mark.parametrize("value", [0.0, 0.1, -3e4])
def test_a_constant_column_is_centred_and_not_blown_up(value: float) -> None:
    states = np.column_stack([np.full(50, value), np.arange(50)]).astype(np.float32)
    standardiser = fit_standardiser(states)
    assert standardiser.scale[0] == 1.0
    assert np.abs(standardiser(states)[:, 0]).max() < 1e-2
    assert standardiser(states + np.float32([0.5, 0]))[0, 0] == pytest.approx(0.5, abs=1e-2)


def test_an_ordinary_column_beside_a_massive_one_is_scaled_by_its_own_spread() -> None:
    rng = np.random.default_rng(0)
    states = np.column_stack([1e5 + 1e3 * rng.normal(size=400), 0.02 * rng.normal(size=400)]).astype(np.float32)
    z = fit_standardiser(states)(states)
    np.testing.assert_allclose(z.std(axis=0), 1.0, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------- chunks of rows


def test_streaming_in_chunks_equals_doing_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    z, r = planted_rows(103, 12)
    z, folds = z * np.float32(3) + np.float32(40), ragged_folds(103)
    whole, whole_scale = fit_ridge_folds(z, r, folds)[0], fit_standardiser(z)
    mlp = fit_mlp(LayerData(z, r, z, r), SMALL, seed=0)
    at_once = [mlp.predict(z), fit_ridge_path(z, r)[3].predict(z), whole_scale(z)]
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 8 * 12 * 10)
    scale = fit_standardiser(z)
    np.testing.assert_allclose(scale.mean, whole_scale.mean, rtol=1e-6)
    np.testing.assert_allclose(scale.scale, whole_scale.scale, rtol=1e-6)
    np.testing.assert_allclose(fit_ridge_folds(z, r, folds)[0], whole, rtol=1e-8, atol=1e-10)
    streamed = [mlp.predict(z), fit_ridge_path(z, r)[3].predict(z), whole_scale(z)]
    for one, other in zip(streamed, at_once, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_probes_learn_from_half_precision_states_in_a_file(tmp_path: Path) -> None:
    z, r = planted_rows(200)
    half = np.memmap(tmp_path / "z", dtype=np.float16, mode="w+", shape=z.shape)
    half[:] = z
    half.flush()
    mapped = np.memmap(tmp_path / "z", dtype=np.float16, mode="r", shape=z.shape)
    same = z.astype(np.float16).astype(np.float32)
    assert fit_ridge_path(mapped, r)[2].weight.tobytes() == fit_ridge_path(same, r)[2].weight.tobytes()
    ours, theirs = (fit_mlp(LayerData(a, r, a[:50], r[:50]), SMALL, seed=0) for a in (mapped, same))
    assert ours.predict(mapped).tobytes() == theirs.predict(same).tobytes()
    standardiser = fit_standardiser(mapped)
    np.testing.assert_array_equal(standardiser.scale, fit_standardiser(same).scale)
    assert standardiser(mapped, out=half) is half
    np.testing.assert_array_equal(half, standardiser(same).astype(np.float16))


# ----------------------------------------------------------------------------------------------------------- R squared


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=2, max_size=20))
def test_r_squared_is_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    r, r_hat = (np.array(side) for side in zip(*pairs, strict=True))
    if np.ptp(r) > 1e-6:
        assert r_squared(r, r_hat) == pytest.approx(r2_score(r, r_hat), rel=1e-9, abs=1e-9)


def test_r_squared_by_hand() -> None:
    # squared errors 0.25 + 0.25, total 0.5 + 0.5 around the mean 0
    r = np.array([np.sqrt(0.5), -np.sqrt(0.5)])
    assert r_squared(r, r - 0.5) == pytest.approx(0.5)
    assert r_squared(r, np.zeros(2)) == pytest.approx(0.0)
    assert r_squared(r, r) == 1.0
    assert r_squared(np.ones(3), np.zeros(3)) == 0.0
