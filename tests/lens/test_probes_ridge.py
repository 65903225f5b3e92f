"""Ridge probes are scikit-learn's, for every penalty and fold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from support.planted import planted_rows, ragged_folds

from coral_lens.errors import CoralError
from coral_lens.lens.correction import PROBES
from coral_lens.lens.probes.ridge import PENALTIES, LinearProbe, fit_ridge_folds, fit_ridge_path
from coral_lens.lens.probes.standardise import Probe, fit_standardiser


@pytest.mark.parametrize(("n", "width"), [(200, 12), (20, 40)])
def test_every_penalty_of_the_path_is_scikit_learns_ridge(n: int, width: int) -> None:
    z, r = planted_rows(n, width)
    z = z + np.float32(0.5)  # so that the intercept matters
    for penalty, probe in zip(PENALTIES, fit_ridge_path(z, r), strict=True):
        reference = Ridge(alpha=penalty, solver="cholesky").fit(z.astype(np.float64), r)
        np.testing.assert_allclose(probe.weight, reference.coef_, rtol=1e-6, atol=1e-8 * np.abs(reference.coef_).max())
        assert probe.bias == pytest.approx(reference.intercept_, rel=1e-8)
        np.testing.assert_allclose(probe.predict(z), reference.predict(z.astype(np.float64)), rtol=1e-6, atol=1e-9)


def test_ridge_worked_by_hand() -> None:
    # centred z = (-1, 1), centred r = (-0.5, 0.5): w = 1 / (2 + penalty), b = mean r - mean z * w
    z, r = np.array([[1.0], [3.0]], np.float32), np.array([0.0, 1.0])
    light, heavy = fit_ridge_path(z, r, [2.0, 8.0])
    assert (light.weight[0], light.bias) == pytest.approx((1 / 4, 0.5 - 2 / 4))
    assert (heavy.weight[0], heavy.bias) == pytest.approx((1 / 10, 0.5 - 2 / 10))


def test_a_heavy_penalty_predicts_the_mean() -> None:
    z, r = planted_rows()
    (probe,) = fit_ridge_path(z, r, [1e14])
    np.testing.assert_allclose(probe.predict(z), r.mean(), atol=1e-9)


def test_a_ridge_probe_comes_back_from_its_tensors_to_the_bit() -> None:
    z, r = planted_rows()
    probe = fit_ridge_path(z, r)[4]
    again = PROBES[probe.kind](probe.tensors())
    assert isinstance(again, LinearProbe)
    assert isinstance(again, Probe)
    assert again.predict(z).tobytes() == probe.predict(z).tobytes()


def fold_by_fold(z: np.ndarray, r: np.ndarray, folds: np.ndarray, penalty: float) -> np.ndarray:
    """What scikit-learn predicts of each fold after standardising and fitting on the others."""
    predicted = np.empty(len(r))
    for k in np.unique(folds):
        pipeline = make_pipeline(StandardScaler(), Ridge(alpha=penalty, solver="cholesky"))
        pipeline.fit(z[folds != k].astype(np.float64), r[folds != k])
        predicted[folds == k] = pipeline.predict(z[folds == k].astype(np.float64))
    return predicted


@pytest.mark.parametrize(("n", "width", "offset"), [(200, 12, 0.0), (200, 12, 300.0), (30, 60, 0.5)])
def test_every_fold_and_penalty_is_scikit_learns_on_ragged_questions(n: int, width: int, offset: float) -> None:
    z, r = planted_rows(n, width)
    z, folds = z * np.float32(7) + np.float32(offset), ragged_folds(n)
    predicted, probes_of_all = fit_ridge_folds(z, r, folds)
    for penalty, ours, probe in zip(PENALTIES, predicted, probes_of_all, strict=True):
        theirs = fold_by_fold(z, r, folds, penalty)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
        whole = Ridge(alpha=penalty, solver="cholesky").fit(z.astype(np.float64), r)
        np.testing.assert_allclose(probe.weight, whole.coef_, rtol=0, atol=1e-6 * np.abs(whole.coef_).max())


def test_columns_that_are_constant_everywhere_or_outside_one_fold_are_not_blown_up() -> None:
    z, r = planted_rows(90, 6)
    folds = np.arange(90) % 3
    z[:, 0] = 3.3
    z[:, 1] = np.where(np.arange(90) == 6, 4.0, 0.1)  # varies in fold 0 alone
    predicted, probes_of_all = fit_ridge_folds(z, r, folds, [1.0])
    assert probes_of_all[0].weight[0] == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(predicted[0], fold_by_fold(z, r, folds, 1.0), atol=1e-6)


def test_states_that_are_all_constant_predict_the_mean_of_the_other_folds() -> None:
    _, r = planted_rows(60)
    folds = np.arange(60) % 2
    predicted, probes_of_all = fit_ridge_folds(np.full((60, 4), 2.5, np.float32), r, folds, [1.0, 10.0])
    for row in predicted:
        np.testing.assert_allclose(row, np.where(folds == 0, r[folds == 1].mean(), r[folds == 0].mean()))
    assert probes_of_all[0].predict(np.zeros((1, 4), np.float32))[0] == pytest.approx(r.mean())


def test_equal_residuals_give_a_probe_that_predicts_them() -> None:
    z, _ = planted_rows(60)
    predicted, probes_of_all = fit_ridge_folds(z, np.full(60, 0.25), np.arange(60) % 3)
    np.testing.assert_allclose(predicted, 0.25, atol=1e-12)
    np.testing.assert_allclose(probes_of_all[0].weight, 0.0, atol=1e-12)


@pytest.mark.parametrize("fit", [fit_ridge_path, lambda z, r: fit_ridge_folds(z, r, np.arange(len(r)) % 2)])
def test_a_state_that_is_no_number_is_named(fit: Callable[..., object]) -> None:
    z, r = planted_rows(50)
    z[31, 7] = np.nan
    with pytest.raises(CoralError, match=r"state of row 31 is nan in column 7.*Extract the activations again"):
        fit(z, r)
    with pytest.raises(CoralError, match=r"residual of row 3 is inf"):
        fit(planted_rows(50)[0], np.where(np.arange(50) == 3, np.inf, r))


def test_penalties_and_folds_that_make_no_sense_are_refused() -> None:
    z, r = planted_rows(50)
    with pytest.raises(CoralError, match=r"must be above 0. Got \[0.0\]"):
        fit_ridge_path(z, r, [0.0])
    with pytest.raises(CoralError, match=r"at least two folds. Got 1 for 50 rows"):
        fit_ridge_folds(z, r, np.zeros(50, np.int64))
    with pytest.raises(CoralError, match="0 rows"):
        fit_standardiser(np.zeros((0, 3), np.float32))
