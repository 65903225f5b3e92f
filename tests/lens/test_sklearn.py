"""The regressors pass scikit-learn's own checks, are the probes of this package, and hold whole groups out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from coral_lens.errors import CoralError
from coral_lens.lens import sklearn as estimators
from coral_lens.lens.probes.mlp import HIDDEN, LayerData, MlpSettings, NetworkProbe, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, LinearProbe
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.lens.sklearn import REACH, MlpProbe, RidgeProbe, TargetMap, cv_errors, target_map


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny networks lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data(n: int = 200, width: int = 6, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """States and residuals in [-1, 1] that depend on them, by a fixed rule, and on noise."""
    rng = np.random.default_rng(seed)
    states = 3 + 2 * rng.normal(size=(n, width))
    return states, np.tanh((states - 3) @ np.linspace(-0.3, 0.3, width) + 0.1 * rng.normal(size=n))


def small(**changed: Any) -> MlpProbe:
    given = {"learning_rate": 0.03, "weight_decay": 0.0, "dropout": 0.0, "max_epochs": 40, "random_state": 0}
    return MlpProbe((16,), **(given | changed))


BOTH = [RidgeProbe(), small()]


# ------------------------------------------------------------------------------------------------- as scikit-learn's


@pytest.mark.parametrize("estimator", [RidgeProbe(), RidgeProbe(1.0), small()], ids=repr)
def test_scikit_learns_checks_pass_without_exception(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_skip=None, on_fail="raise")
    passed = [r["check_name"] for r in results if r["status"] == "passed"]
    assert len(passed) > 45
    assert "check_regressors_train" in passed  # on targets outside [-1, 1], and R2 must be above 0.5
    # arrays that are not numpy's are checked only where scipy was imported with SCIPY_ARRAY_API set
    assert {r["check_name"] for r in results} - set(passed) <= {"check_array_api_input"}


@pytest.mark.parametrize("estimator", BOTH, ids=repr)
def test_they_work_in_a_pipeline_and_a_clone_is_the_same_and_unfitted(estimator: Any) -> None:
    states, r = data()
    pipeline = make_pipeline(MinMaxScaler(), estimator).fit(states, r)
    assert pipeline.score(states, r) > 0.8
    again = clone(pipeline)
    with pytest.raises(NotFittedError):
        again[-1].predict(states)
    assert again.fit(states, r).predict(states).tobytes() == pipeline.predict(states).tobytes()
    assert pipeline.predict(states).dtype == np.float64


def test_a_grid_search_finds_the_better_setting() -> None:
    states, r = data()
    ridge = GridSearchCV(RidgeProbe(), {"penalty": [1.0, 1e6]}, cv=3).fit(states, r)
    assert ridge.best_params_ == {"penalty": 1.0}
    mlp = GridSearchCV(small(), {"hidden": [(16,), ()], "output_penalty": [0.0, 20.0]}, cv=2).fit(states, r)
    assert mlp.best_params_["output_penalty"] == 0.0
    assert mlp.best_score_ > 0.7


def test_groups_go_through_a_pipeline_and_through_cross_validation() -> None:
    states, r = data()
    question = np.repeat(np.arange(50), 4)
    pipeline = make_pipeline(StandardScaler(), RidgeProbe())
    pipeline.fit(states, r, ridgeprobe__groups=question)
    assert pipeline[-1].cv_errors_.shape == (len(PENALTIES),)
    scores = cross_val_score(RidgeProbe(), states, r, cv=GroupKFold(3), groups=question)
    assert scores.min() > 0.8


# ------------------------------------------------------------------------------------------------------------- ridge


def test_ridge_is_scikit_learns_after_its_scaler() -> None:
    states, r = data()
    for penalty in (1.0, 100.0):
        reference = make_pipeline(StandardScaler(), Ridge(alpha=penalty)).fit(states, r)
        probe = RidgeProbe(penalty).fit(states, r)
        np.testing.assert_allclose(probe.predict(states), reference.predict(states), atol=1e-6)
        assert isinstance(probe.probe_, LinearProbe)
        assert probe.penalty_ == penalty
        assert not hasattr(probe, "cv_errors_")


def test_the_penalty_is_chosen_by_the_held_out_error_that_scikit_learn_finds() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(60, 30))
    r = 0.2 * states[:, 0] + 0.4 * rng.normal(size=60)
    question = np.repeat(np.arange(20), 3)
    fitted = RidgeProbe(n_folds=4).fit(states, r, groups=question)
    errors = [
        -cross_val_score(
            make_pipeline(StandardScaler(), Ridge(alpha=penalty)),
            states,
            r,
            cv=GroupKFold(4),
            groups=question,
            scoring="neg_mean_squared_error",
        ).mean()
        for penalty in PENALTIES
    ]
    np.testing.assert_allclose(fitted.cv_errors_, errors, rtol=1e-5)  # folds of 15 rows each: the mean of means
    assert fitted.penalty_ == PENALTIES[int(np.argmin(errors))]
    assert PENALTIES[0] < fitted.penalty_ < PENALTIES[-1]


def test_held_out_errors_worked_by_hand() -> None:
    # z is (-1, 1) and r is (0, 2) in training: w = 2 / (2 + penalty), b = 1, and at h = 3 the state is z = 2
    states, r = np.array([[0.0], [2.0], [3.0]]), np.array([0.0, 2.0, 4.0])
    fold = (np.array([0, 1]), np.array([2]))
    assert cv_errors(states, r, [2.0, 6.0], [fold]) == pytest.approx([(1 + 1.0 - 4) ** 2, (1 + 0.5 - 4) ** 2])


def test_groups_matter_where_rows_of_a_question_are_alike() -> None:
    """Every question has a state and a target of its own, repeated: a probe can know them by heart."""
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(160)
    question = np.repeat(np.arange(40), 4)[shuffled]
    states = np.repeat(rng.normal(size=(40, 60)), 4, axis=0)[shuffled] + 0.01 * rng.normal(size=(160, 60))
    r = np.repeat(rng.uniform(-1, 1, size=40), 4)[shuffled]
    fooled, careful = RidgeProbe().fit(states, r), RidgeProbe().fit(states, r, groups=question)
    assert fooled.penalty_ < careful.penalty_
    assert fooled.cv_errors_.min() < 0.2 * careful.cv_errors_.min()


def test_fewer_groups_than_folds_are_one_fold_each() -> None:
    states, r = data(9)
    fitted = RidgeProbe().fit(states, r, groups=["a"] * 3 + ["b"] * 3 + ["c"] * 3)
    folds = list(GroupKFold(3).split(states, groups=np.repeat([0, 1, 2], 3)))
    np.testing.assert_allclose(fitted.cv_errors_, cv_errors(states, r, PENALTIES, folds))


# --------------------------------------------------------------------------------------------------------------- MLP


def test_the_defaults_are_the_papers_settings() -> None:
    default = {name: p.default for name, p in inspect.signature(MlpProbe).parameters.items()}
    paper = MlpSettings()
    assert default["hidden"] == HIDDEN
    for name in ("weight_decay", "output_penalty", "learning_rate", "dropout", "max_epochs"):
        assert default[name] == getattr(paper, name)
    assert inspect.signature(RidgeProbe).parameters["penalties"].default == PENALTIES


def test_an_mlp_on_residuals_is_the_papers_probe_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    states, r = data()
    calls: list[Any] = []

    def noting(*args: Any, **named: Any) -> NetworkProbe:
        calls.append((args, named))
        return fit_mlp(*args, **named)

    monkeypatch.setattr(estimators, "fit_mlp", noting)
    fitted = small(validation_fraction=0.25).fit(states, r)
    ((fitted_on, settings), named) = calls[0]
    z, r_train, z_val, r_val = fitted_on.z, fitted_on.r, fitted_on.z_val, fitted_on.r_val
    assert (len(r_train), len(r_val)) == (150, 50)
    assert sorted([*r_train, *r_val]) == sorted(r)  # not scaled: they lie in [-1, 1]
    assert settings == MlpSettings(hidden=(16,), learning_rate=0.03, weight_decay=0.0, dropout=0.0, max_epochs=40)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-5)  # standardised by training rows alone
    assert np.abs(z_val.mean(axis=0)).max() > 0.01
    direct = fit_mlp(fitted_on, settings, seed=named["seed"])
    assert all(torch.equal(t, fitted.probe_.tensors()[name]) for name, t in direct.tensors().items())
    np.testing.assert_allclose(fitted.predict(states), direct.predict(fitted.standardiser_(states)), atol=1e-6)


@pytest.mark.parametrize("estimator", BOTH, ids=repr)
def test_a_row_is_predicted_alike_alone_and_among_others(estimator: Any) -> None:
    states, r = data()
    fitted = clone(estimator).fit(states, r)
    alone = np.concatenate([fitted.predict(row[None]) for row in states])
    np.testing.assert_allclose(fitted.predict(states), alone, atol=1e-13)


def test_whole_groups_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    states, _ = data(200)
    question = np.random.default_rng(0).permutation(np.repeat(np.arange(50), 4))
    r = question / 50.0  # so that a target tells its question
    seen: list[np.ndarray] = []

    def noting(fitted_on: LayerData, *args: Any, **named: Any) -> NetworkProbe:
        seen.extend([fitted_on.r, fitted_on.r_val])
        return fit_mlp(fitted_on, *args, **named)

    monkeypatch.setattr(estimators, "fit_mlp", noting)
    small(max_epochs=1).fit(states, r, groups=question)
    assert not set(seen[0]) & set(seen[1])
    assert len(seen[1]) == 40


def test_the_seed_decides_everything_and_a_refit_repeats_it() -> None:
    states, r = data()
    probe = small(max_epochs=3, dropout=0.2)
    first = probe.fit(states, r).predict(states)
    torch.manual_seed(5)
    assert probe.fit(states, r).predict(states).tobytes() == first.tobytes()
    assert not np.allclose(clone(probe).set_params(random_state=1).fit(states, r).predict(states), first)


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_targets_out_of_reach_are_scaled_and_predictions_come_back(shift: float) -> None:
    states, r = data(400)
    fitted = small().fit(states, shift + 50 * r)
    assert fitted.score(states, shift + 50 * r) > 0.9
    predicted = fitted.predict(states)
    assert predicted.min() < shift - 25 < shift + 25 < predicted.max()


def test_the_range_of_targets_is_mapped_within_reach_by_hand() -> None:
    y = np.array([-2.0, 4.0, 10.0])
    mapped = target_map(y, scale_targets="auto")
    assert (mapped.centre, mapped.scale) == pytest.approx((4.0, 6 / REACH))
    assert mapped.forth(y) == pytest.approx([-REACH, 0.0, REACH])
    assert mapped.back(mapped.forth(y)) == pytest.approx(y)
    residuals = np.array([-1.0, 0.25, 1.0])
    for choice in ("auto", False):
        assert target_map(residuals, scale_targets=choice) == TargetMap(0.0, 1.0)
    always = target_map(np.array([0.0, 0.9]), scale_targets=True)
    assert (always.centre, always.scale) == pytest.approx((0.45, 0.5))
    assert target_map(np.full(3, 7.0), scale_targets="auto") == TargetMap(7.0, 1.0)


def test_a_constant_target_is_predicted() -> None:
    states, _ = data(50)
    for estimator in BOTH:
        assert clone(estimator).fit(states, np.full(50, 7.0)).predict(states) == pytest.approx(
            np.full(50, 7.0), abs=0.3
        )


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": (16, 0)}, "Layers of `hidden` must be 1 wide or more"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"output_penalty": -1.0}, "output_penalty must not be negative"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"max_epochs": 0}, "max_epochs must be at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1"),
        ({"scale_targets": "yes"}, "scale_targets must be"),
    ],
)
def test_settings_that_cannot_be_fitted_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CoralError, match=message):
        small().set_params(**changed).fit(*data(20))


def test_targets_out_of_reach_are_refused_where_scaling_is_switched_off() -> None:
    states, r = data(20)
    with pytest.raises(CoralError, match=r"must lie in \[-1, 1\].*set scale_targets"):
        small(scale_targets=False).fit(states, 3 * r)


def test_penalties_and_folds_that_cannot_be_used_are_refused() -> None:
    states, r = data(20)
    for probe in (RidgeProbe(0.0), RidgeProbe(penalties=(1.0, -1.0))):
        with pytest.raises(CoralError, match="A penalty must be greater than 0"):
            probe.fit(states, r)
    with pytest.raises(CoralError, match="n_folds must be at least 2"):
        RidgeProbe(n_folds=1).fit(states, r)
    with pytest.raises(CoralError, match=r"takes at least 2 groups\. Got 1"):
        RidgeProbe().fit(states, r, groups=["one"] * 20)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        RidgeProbe().fit(states, r, groups=["one", "two"])


def test_rows_are_standardised_as_the_package_does() -> None:
    states, r = data()
    expected = fit_standardiser(states)
    fitted = RidgeProbe(1.0).fit(states, r).standardiser_
    assert fitted.mean.tobytes() == expected.mean.tobytes()
    assert fitted.scale.tobytes() == expected.scale.tobytes()
