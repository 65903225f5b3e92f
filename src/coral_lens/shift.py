"""How far a question lies from those that a lens was fitted on, measured in the model's own hidden states.

A question's place is the mean of its options' states. Its distance to a training task is a Mahalanobis distance with the
covariance within tasks: the leading directions each with its own variance, the rest with their mean (probabilistic PCA).
The distance to the nearest task, over what held-out questions of that task show, is the shift: 1 is typical, 1.5 is far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.probes import Standardiser, fit_standardiser

RANK = 64
"""Leading directions that have a variance of their own, where there are questions enough for them."""
QUESTIONS_PER_DIRECTION = 4


@dataclass(frozen=True)
class ShiftModel:
    """The places of the training tasks and the covariance within them."""

    standardiser: Standardiser
    means: Float[np.ndarray, "domain width"]
    basis: Float[np.ndarray, "width rank"]
    variances: Float[np.ndarray, " rank"]
    rest: float
    """Mean variance in the directions outside the basis."""
    typical: Float[np.ndarray, " domain"]
    """Median distance of held-out questions of each domain to it."""

    def __call__(
        self, states: Float[np.ndarray, "row width"], offsets: Int[np.ndarray, " edge"]
    ) -> Float[np.ndarray, " question"]:
        """Return the shift of each question: the ratio of its distance to that of a typical training question."""
        return self.of(places(states, offsets))

    def of(self, at: Float[np.ndarray, "question width"]) -> Float[np.ndarray, " question"]:
        """Return the shift of questions at these places."""
        return (self.distances(at) / self.typical).min(axis=1)

    def distances(self, at: Float[np.ndarray, "question width"]) -> Float[np.ndarray, "question domain"]:
        """Return the distance of each question to each domain, per direction."""
        z = self.standardiser(at).astype(np.float64)
        found = []
        for mean in self.means:
            moved = z - mean
            inside = moved @ self.basis
            outside = np.maximum((moved**2).sum(axis=1) - (inside**2).sum(axis=1), 0.0)
            found.append(((inside**2 / self.variances).sum(axis=1) + outside / self.rest) / z.shape[1])
        return np.stack(found, axis=1)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is kept of it in a lens."""
        return {
            "shift.mean": torch.from_numpy(self.standardiser.mean),
            "shift.scale": torch.from_numpy(self.standardiser.scale),
            "shift.means": torch.from_numpy(self.means),
            "shift.basis": torch.from_numpy(self.basis),
            "shift.variances": torch.from_numpy(self.variances),
            "shift.rest": torch.tensor([self.rest], dtype=torch.float64),
            "shift.typical": torch.from_numpy(self.typical),
        }

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> ShiftModel:
        """Make it again from its tensors."""
        of = {name.removeprefix("shift."): t.numpy() for name, t in tensors.items() if name.startswith("shift.")}
        standardiser = Standardiser(of["mean"], of["scale"])
        return ShiftModel(standardiser, of["means"], of["basis"], of["variances"], float(of["rest"][0]), of["typical"])


def places(
    states: Float[np.ndarray, "row width"], offsets: Int[np.ndarray, " edge"]
) -> Float[np.ndarray, "question width"]:
    """Return the mean state over the options of each question."""
    return np.add.reduceat(states, offsets[:-1], axis=0) / np.diff(offsets)[:, None].astype(states.dtype)


def fit_shift(
    at: Float[np.ndarray, "question width"],
    domains: Sequence[str],
    held_out: tuple[Float[np.ndarray, "other width"], Sequence[str]],
) -> ShiftModel:
    """Fit on the places of training questions and their domains; held-out ones say what distance is typical."""
    standardiser = fit_standardiser(at)
    z = standardiser(at).astype(np.float64)
    names = sorted(set(domains))
    labels = np.asarray(domains)
    means = np.stack([z[labels == name].mean(axis=0) for name in names])
    within = z - means[np.searchsorted(names, labels)]
    values, vectors = np.linalg.eigh(within.T @ within / len(within))
    rank = max(1, min(RANK, len(z) // QUESTIONS_PER_DIRECTION, z.shape[1] - 1))
    variances = np.maximum(values[::-1][:rank], 1e-8)
    rest = max(float(values[::-1][rank:].mean()) if rank < z.shape[1] else 1.0, 1e-8)
    basis = np.ascontiguousarray(vectors[:, ::-1][:, :rank])
    fitted = ShiftModel(standardiser, means, basis, variances, rest, np.ones(len(names)))
    places_out, domains_out = held_out
    distances = fitted.distances(places_out)
    out = np.asarray(domains_out)
    typical = np.array(
        [
            np.median(distances[out == n, i]) if (out == n).any() else np.median(distances.min(axis=1))
            for i, n in enumerate(names)
        ]
    )
    return ShiftModel(standardiser, means, basis, variances, rest, np.maximum(typical, 1e-8))
