"""Ridge: probes for every penalty, and for every fold, from one reading of the rows. It knows nothing of questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.lens.probes.standardise import column_means, iter_rows, refuse_residuals

PENALTIES = tuple(float(x) for x in np.logspace(0, 7, 15))
"""Ridge penalties, in units of one row's weight."""


@dataclass(frozen=True)
class LinearProbe:
    """A linear probe with a quadratic penalty."""

    weight: Float[np.ndarray, " width"]
    bias: float
    kind = "ridge"

    def predict(self, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
        predicted = [chunk.astype(np.float64) @ self.weight for _, chunk in iter_rows(z)]
        return np.concatenate([np.zeros(0), *predicted]) + self.bias

    def tensors(self) -> dict[str, Tensor]:
        return {
            "probe.weight": torch.from_numpy(self.weight),
            "probe.bias": torch.tensor([self.bias], dtype=torch.float64),
        }

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> LinearProbe:
        return LinearProbe(tensors["probe.weight"].numpy(), float(tensors["probe.bias"][0]))


@dataclass(frozen=True)
class Moments:
    """Sums over rows, all that ridge needs of them; those of some rows can be taken from those of all."""

    n: int
    total: Float[np.ndarray, " width"]
    """Sum of the states, less a shift that all moments share."""
    gram: Float[np.ndarray, "width width"]
    cross: Float[np.ndarray, " width"]
    """Sum of state times residual, both shifted."""
    target: float
    """Sum of the shifted residuals."""

    def __sub__(self, other: Moments) -> Moments:
        return Moments(
            self.n - other.n,
            self.total - other.total,
            self.gram - other.gram,
            self.cross - other.cross,
            self.target - other.target,
        )


@dataclass(frozen=True)
class RidgeRows:
    """States and residuals, shifted by their means: differences of moments then lose no digits to a large mean."""

    z: Float[np.ndarray, "row width"]
    r: Float[np.ndarray, " row"]
    z_mean: Float[np.ndarray, " width"]
    r_mean: float

    def moments(self, index: Int[np.ndarray, " some"]) -> Moments:
        """Return the moments of some rows, in float64 and chunk by chunk."""
        width = self.z.shape[1]
        total, gram, cross, target = np.zeros(width), np.zeros((width, width)), np.zeros(width), 0.0
        for place, states in iter_rows(self.z, index):
            shifted = states - self.z_mean
            residual = self.r[index[place]] - self.r_mean
            total += shifted.sum(axis=0)
            gram += shifted.T @ shifted
            cross += shifted.T @ residual
            target += float(residual.sum())
        return Moments(len(index), total, gram, cross, target)

    def solve(
        self, m: Moments, penalties: Sequence[float], scale: Float[np.ndarray, " width"]
    ) -> tuple[Float[np.ndarray, "width penalty"], Float[np.ndarray, " penalty"]]:
        """Return weights and biases for every penalty on the columns divided by `scale`."""
        mean = m.total / m.n
        gram = m.gram - np.outer(mean, m.total)
        gram /= scale
        gram /= scale[:, None]
        weights = solve_shifted(gram, (m.cross - m.target * mean) / scale, penalties) / scale[:, None]
        return weights, m.target / m.n + self.r_mean - (mean + self.z_mean) @ weights


def solve_shifted(
    gram: Float[np.ndarray, "width width"], cross: Float[np.ndarray, " width"], penalties: Sequence[float]
) -> Float[np.ndarray, "width penalty"]:
    """Return (gram + penalty I)^-1 cross for every penalty, from one reduction gram = Q T Q' with T tridiagonal.

    A tridiagonal system is solved in no time, so the eigenvectors, which would cost as much again, are not needed.
    """
    from scipy.linalg import lapack

    width = len(gram)
    if width == 1:
        return cross[:, None] / (gram + np.asarray(penalties))
    packed, diagonal, off_diagonal, tau, _ = lapack.dsytrd(gram.T, lower=1, lwork=64 * width)
    q = np.asfortranarray(packed[1:, :-1])  # Q leaves the first coordinate alone
    work = 64 * (len(penalties) + 65)
    turned = cross[:, None].copy()
    turned[1:] = lapack.dormqr("L", "T", q, tau, turned[1:], work)[0]
    solved = np.hstack(
        [lapack.dgtsv(off_diagonal, diagonal + penalty, off_diagonal, turned)[3] for penalty in penalties]
    )
    solved[1:] = lapack.dormqr("L", "N", q, tau, solved[1:], work)[0]
    return solved


def ridge_of(z: Float[np.ndarray, "row width"], r: Float[np.ndarray, " row"], penalties: Sequence[float]) -> RidgeRows:
    """Check and centre what ridge is fitted on."""
    refuse_residuals(r)
    if not penalties or min(penalties) <= 0.0:
        raise CoralError(f"Ridge penalties must be above 0. Got {list(penalties)} instead.")
    return RidgeRows(z, r.astype(np.float64), column_means(z), float(r.mean(dtype=np.float64)))


def linear_probes(
    weights: Float[np.ndarray, "width penalty"], biases: Float[np.ndarray, " penalty"]
) -> list[LinearProbe]:
    """Return a probe per penalty."""
    return [LinearProbe(np.ascontiguousarray(w), float(b)) for w, b in zip(weights.T, biases, strict=True)]


def fit_ridge_path(
    z: Float[np.ndarray, "row width"], r: Float[np.ndarray, " row"], penalties: Sequence[float] = PENALTIES
) -> list[LinearProbe]:
    """Return the ridge solution for every penalty, all from one decomposition of z'z.

    Minimises sum (r - z w - b)^2 + penalty * |w|^2 with b unpenalised.
    """
    ridge = ridge_of(z, r, penalties)
    everything = ridge.moments(np.arange(len(z)))
    return linear_probes(*ridge.solve(everything, penalties, np.ones(z.shape[1])))


def fit_ridge_folds(
    z: Float[np.ndarray, "row width"],
    r: Float[np.ndarray, " row"],
    folds: Int[np.ndarray, " row"],
    penalties: Sequence[float] = PENALTIES,
) -> tuple[Float[np.ndarray, "penalty row"], list[LinearProbe]]:
    """Return for every penalty what each row is predicted by a probe that has not seen its fold, and the probe of all rows.

    `folds` numbers the fold of each row; a question's rows must share one. The probes of a fold are fitted on the other
    folds standardised anew with their own statistics, so it does not matter that `z` was standardised with all rows.
    The moments of the others are those of all rows less those of the fold: the rows are read once.
    """
    ridge = ridge_of(z, r, penalties)
    names = np.unique(folds)
    if len(names) < 2:
        raise CoralError(f"Ridge needs at least two folds. Got {len(names)} for {len(z)} rows; give more questions.")
    members = {int(name): np.flatnonzero(folds == name) for name in names}
    held_out = {name: ridge.moments(index) for name, index in members.items()}
    everything = sum_moments(list(held_out.values()))
    predicted = np.empty((len(penalties), len(z)))
    for name, index in members.items():
        others = everything - held_out.pop(name)
        weights, biases = ridge.solve(others, penalties, column_scale(others, everything, ridge.z_mean))
        for place, states in iter_rows(z, index):
            predicted[:, index[place]] = (states.astype(np.float64) @ weights + biases).T
    return predicted, linear_probes(*ridge.solve(everything, penalties, np.ones(z.shape[1])))


def sum_moments(folds: Sequence[Moments]) -> Moments:
    """Return the moments of all rows from those of each fold."""
    gram = folds[0].gram.copy()
    for fold in folds[1:]:
        gram += fold.gram
    total, cross = np.sum([m.total for m in folds], axis=0), np.sum([m.cross for m in folds], axis=0)
    return Moments(sum(m.n for m in folds), total, gram, cross, math.fsum(m.target for m in folds))


def column_scale(m: Moments, everything: Moments, shift: Float[np.ndarray, " width"]) -> Float[np.ndarray, " width"]:
    """Return the standard deviation of each column over some rows; 1 if it is constant there, up to rounding."""
    mean = m.total / m.n
    variance = m.gram.diagonal() / m.n - mean**2
    rounding = 1e-12 * np.maximum(everything.gram.diagonal() / everything.n, (mean + shift) ** 2)
    return np.sqrt(np.where(variance > rounding, variance, 1.0))
