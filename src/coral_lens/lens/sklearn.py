"""The probes as scikit-learn regressors, for pipelines, grid searches and states from elsewhere. They fit nothing new.

A row is one option of one question. The rows of a question share its text, so give `groups` (the question of each row,
or its article) wherever rows are divided: to `fit`, which holds some out to choose by, and to `cross_val_score` or
`GridSearchCV`. Without groups a probe is chosen for recognising questions that it has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.model_selection import GroupKFold, GroupShuffleSplit, KFold, ShuffleSplit
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import nn

from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, fit_ridge_path
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.lens.settings import HIDDEN

REACH = 0.9
"""Scaled targets end here: tanh comes near 1 only with weights that grow without end."""


class RidgeProbe(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Ridge regression on standardised states.

    Parameters
    ----------
    penalty : float or None, default=None
        Weight of the squared coefficients, in units of one row's squared error (scikit-learn's `alpha`, but of
        standardised states). None: the best of `penalties` in cross-validation, by squared error.
    penalties : sequence of float
        Penalties to choose from if `penalty` is None; all are solved at the cost of one.
    n_folds : int, default=5
        Number of folds of that cross-validation. Folds hold whole groups if `fit` is given groups; otherwise they are runs of
        successive rows, which mostly keeps together rows that are stored question by question.

    Attributes
    ----------
    penalty_ : float
        The penalty in use.
    cv_errors_ : ndarray of shape (n_penalties,)
        Mean squared error of each of `penalties` on held-out rows; only if one was chosen.
    probe_ : LinearProbe
    standardiser_ : Standardiser
    n_features_in_ : int

    """

    # a constructor takes anything and `fit` complains: scikit-learn's rule, which its checks test
    def __init__(self, penalty: Any = None, *, penalties: Any = PENALTIES, n_folds: Any = 5) -> None:
        self.penalty = penalty
        self.penalties = penalties
        self.n_folds = n_folds

    def fit(self, X: Any, y: Any, groups: Any = None) -> RidgeProbe:  # noqa: N803
        """Fit to states X of shape (n_rows, width) and targets y of shape (n_rows,)."""
        chosen = self.penalty is None
        states, r = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=1 + chosen)
        r = r.astype(np.float64)
        for penalty in self.penalties if chosen else [self.penalty]:
            _require(penalty > 0, f"A penalty must be greater than 0. Got {penalty} instead.")
        if chosen:
            folds = _folds(len(r), _checked_groups(groups, r), n_folds=self.n_folds)
            self.cv_errors_ = cv_errors(states, r, self.penalties, folds)
            self.penalty_ = float(self.penalties[int(np.argmin(self.cv_errors_))])
        else:
            self.penalty_ = float(self.penalty)
        self.standardiser_ = fit_standardiser(states)
        (self.probe_,) = fit_ridge_path(self.standardiser_(states), r, [self.penalty_])
        return self

    def predict(self, X: Any) -> Float[np.ndarray, " row"]:  # noqa: N803
        """Return the predicted target of each row."""
        z = _standardised(self, X)
        return self.probe_.predict(z)


class MlpProbe(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The paper's probe: ReLU layers with dropout and a tanh output, on standardised states, stopped early.

    Parameters
    ----------
    hidden : sequence of int, default=(1024, 512, 256, 128)
        Widths of the hidden layers.
    weight_decay : float, default=1.0
        Weight decay of AdamW.
    output_penalty : float, default=0.0
        Weight of the mean squared prediction in the loss (the paper's lambda_out).
    learning_rate : float, default=1e-3
    dropout : float, default=0.2
    max_epochs : int, default=100
    validation_fraction : float, default=0.2
        Share of the rows (of the groups, if `fit` is given groups) that is not trained on. The state of the epoch with
        the best loss on them is kept.
    scale_targets : "auto", True or False, default="auto"
        A tanh cannot leave [-1, 1]. Residuals y - p are never outside, and "auto" then leaves targets alone: the
        paper's probe. If any target is outside, "auto" maps their range to [-0.9, 0.9] and predictions back. Trap:
        "auto" looks at the targets of this fit, so parts of one set may be treated differently; True always maps,
        False never does and refuses targets out of reach.
    random_state : int, RandomState or None, default=None
        Seed of the draw of held-out rows, of the first weights, of dropout and of the order of rows.

    Attributes
    ----------
    probe_ : NetworkProbe
    standardiser_ : Standardiser
    target_map_ : TargetMap
    n_features_in_ : int

    """

    def __init__(
        self,
        hidden: Any = HIDDEN,
        *,
        weight_decay: Any = 1.0,
        output_penalty: Any = 0.0,
        learning_rate: Any = 1e-3,
        dropout: Any = 0.2,
        max_epochs: Any = 100,
        validation_fraction: Any = 0.2,
        scale_targets: Any = "auto",
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.weight_decay = weight_decay
        self.output_penalty = output_penalty
        self.learning_rate = learning_rate
        self.dropout = dropout
        self.max_epochs = max_epochs
        self.validation_fraction = validation_fraction
        self.scale_targets = scale_targets
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> MlpProbe:  # noqa: N803
        """Fit to states X of shape (n_rows, width) and targets y of shape (n_rows,)."""
        states, r = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        r = r.astype(np.float64)
        settings, rng = self._settings(), check_random_state(self.random_state)
        units = _checked_groups(groups, r)
        splitter = ShuffleSplit if units is None else GroupShuffleSplit
        split = splitter(n_splits=1, test_size=self.validation_fraction, random_state=rng)
        train, held_out = next(split.split(states, groups=units))
        self.target_map_ = target_map(r, scale_targets=self.scale_targets)
        self.standardiser_ = fit_standardiser(states[train])
        z, r = self.standardiser_(states), self.target_map_.forth(r)
        data = LayerData(z[train], r[train], z[held_out], r[held_out])
        self.probe_ = fit_mlp(data, settings, seed=int(rng.randint(2**31 - 1)))
        return self

    def predict(self, X: Any) -> Float[np.ndarray, " row"]:  # noqa: N803
        """Return the predicted target of each row."""
        z = _standardised(self, X)
        return self.target_map_.back(in_double(self.probe_.network, z))

    def _settings(self) -> MlpSettings:
        """Return the settings, or refuse what cannot be fitted."""
        hidden = tuple(self.hidden)
        _require(
            all(width >= 1 for width in hidden), f"Layers of `hidden` must be 1 wide or more. Got {hidden} instead."
        )
        for name in ("weight_decay", "output_penalty"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative. Got {getattr(self, name)} instead.")
        _require(self.learning_rate > 0, f"learning_rate must be greater than 0. Got {self.learning_rate} instead.")
        _require(0 <= self.dropout < 1, f"dropout must be at least 0 and below 1. Got {self.dropout} instead.")
        _require(self.max_epochs >= 1, f"max_epochs must be at least 1. Got {self.max_epochs} instead.")
        fraction = self.validation_fraction
        _require(0 < fraction < 1, f"validation_fraction must lie between 0 and 1. Got {fraction} instead.")
        return MlpSettings(
            weight_decay=self.weight_decay,
            output_penalty=self.output_penalty,
            learning_rate=self.learning_rate,
            dropout=self.dropout,
            hidden=hidden,
            max_epochs=self.max_epochs,
        )


@torch.inference_mode()
def in_double(network: nn.Sequential, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
    """Return the network's outputs in float64: in float32 the last digits of a row depend on how many rows go with it."""
    exact = copy.deepcopy(network).double().eval()
    parts = [exact(part)[:, 0] for part in torch.from_numpy(z.astype(np.float64)).split(8192)]
    return torch.cat(parts).numpy()


# --- targets within reach of tanh -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetMap:
    """r = (y - centre) / scale, and back."""

    centre: float
    scale: float

    def forth(self, y: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        return (y - self.centre) / self.scale

    def back(self, r: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        return r * self.scale + self.centre


def target_map(y: Float[np.ndarray, " row"], *, scale_targets: str | bool) -> TargetMap:
    """Return the identity, or the map of the targets' range to [-REACH, REACH]."""
    _require(
        scale_targets in ("auto", True, False),
        f'scale_targets must be "auto", True or False. Got {scale_targets!r} instead.',
    )
    low, high = float(y.min()), float(y.max())
    inside = max(-low, high) <= 1.0
    _require(
        bool(scale_targets) or inside,
        f'Targets must lie in [-1, 1] for a tanh to reach them. Got {low:.4g} to {high:.4g}; set scale_targets="auto".',
    )
    if scale_targets is False or (scale_targets == "auto" and inside):
        return TargetMap(0.0, 1.0)
    return TargetMap((low + high) / 2, (high - low) / 2 / REACH or 1.0)


# --- rows that are held out -------------------------------------------------------------------------------------------

Fold = tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]
"""Training rows and held-out rows; folds differ in size."""


def cv_errors(
    states: Float[np.ndarray, "row width"],
    r: Float[np.ndarray, " row"],
    penalties: Sequence[float],
    folds: Sequence[Fold],
) -> Float[np.ndarray, " penalty"]:
    """Return the mean squared error of each penalty on held-out rows, each fold standardised by its training rows."""
    total = np.zeros(len(penalties))
    for train, held_out in folds:
        standardiser = fit_standardiser(states[train])
        z = standardiser(states[held_out])
        probes = fit_ridge_path(standardiser(states[train]), r[train], penalties)
        total += [((probe.predict(z) - r[held_out]) ** 2).sum() for probe in probes]
    return total / sum(len(held_out) for _, held_out in folds)


def _folds(n_rows: int, groups: np.ndarray | None, *, n_folds: int) -> list[Fold]:
    n_units = n_rows if groups is None else len(np.unique(groups))
    _require(n_folds >= 2, f"n_folds must be at least 2. Got {n_folds} instead.")
    _require(n_units >= 2, f"Choosing a penalty takes at least 2 groups. Got {n_units}; give more, or set `penalty`.")
    splitter = (KFold if groups is None else GroupKFold)(min(n_folds, n_units))
    return list(splitter.split(np.zeros(n_rows), groups=groups))


def _checked_groups(groups: Any, r: Float[np.ndarray, " row"]) -> np.ndarray | None:
    if groups is None:
        return None
    check_consistent_length(groups, r)
    return np.asarray(column_or_1d(groups))


def _standardised(estimator: Any, X: Any) -> Float[np.ndarray, "row width"]:  # noqa: N803
    check_is_fitted(estimator)
    return estimator.standardiser_(validate_data(estimator, X, dtype=np.float64, reset=False))


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise CoralError(complaint)
