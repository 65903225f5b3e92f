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

from coral_lens.lens.probes.standardise import Standardiser, fit_standardiser, iter_rows
from coral_lens.ragged import Options
from coral_lens.storage.arrays import allocate, question_chunks, release

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

    def __call__(self, states: Float[np.ndarray, "row width"], options: Options) -> Float[np.ndarray, " question"]:
        """Return the shift of each question: the ratio of its distance to that of a typical training question."""
        return self.of(question_places(states, options))

    def of(
        self, places: Float[np.ndarray, "question width"], questions: Int[np.ndarray, " some"] | None = None
    ) -> Float[np.ndarray, " some"]:
        """Return the shift of some questions at these places, or of all."""
        return (self.distances(places, questions) / self.typical).min(axis=1)

    def nearest(
        self, states: Float[np.ndarray, "row width"], options: Options, among: Sequence[int]
    ) -> Int[np.ndarray, " question"]:
        """Return which of some domains each question lies nearest to."""
        distances = self.distances(question_places(states, options))
        return np.asarray(among)[distances[:, among].argmin(axis=1)]

    def distances(
        self, places: Float[np.ndarray, "question width"], questions: Int[np.ndarray, " some"] | None = None
    ) -> Float[np.ndarray, "some domain"]:
        """Return the distance of some questions, or of all, to each domain, per direction."""
        distances = np.empty((len(places) if questions is None else len(questions), len(self.means)))
        for rows, chunk in iter_rows(places, questions):
            z = self.standardiser(chunk).astype(np.float64)
            for i, mean in enumerate(self.means):
                away = z - mean
                inside = away @ self.basis
                outside = np.maximum((away**2).sum(axis=1) - (inside**2).sum(axis=1), 0.0)
                distances[rows, i] = ((inside**2 / self.variances).sum(axis=1) + outside / self.rest) / z.shape[1]
        return distances

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
        a = {name.removeprefix("shift."): t.numpy() for name, t in tensors.items() if name.startswith("shift.")}
        standardiser = Standardiser(a["mean"], a["scale"])
        return ShiftModel(standardiser, a["means"], a["basis"], a["variances"], float(a["rest"][0]), a["typical"])


def question_places(states: Float[np.ndarray, "row width"], options: Options) -> Float[np.ndarray, "question width"]:
    """Return the mean state over the options of each question."""
    places = allocate(len(options), states.shape[1])
    for questions, rows in question_chunks(options, states.shape[1]):
        places[questions] = options.take(questions).mean(states[rows])
        release(states, places)
    return places


def fit_shift(
    places: Float[np.ndarray, "question width"],
    domains: Sequence[str],
    *,
    train: Int[np.ndarray, " some"],
    held_out: Int[np.ndarray, " other"],
) -> ShiftModel:
    """Fit on the places of the questions that train and their domains; held-out ones say what distance is typical."""
    standardiser = fit_standardiser(places, train)
    labels = np.asarray(domains)
    names = sorted(set(labels[train].tolist()))
    number = np.searchsorted(names, labels[train])
    means, covariance = moments_within(places, train, number, standardiser)
    values, vectors = np.linalg.eigh(covariance)
    width = places.shape[1]
    rank = max(1, min(RANK, len(train) // QUESTIONS_PER_DIRECTION, width - 1))
    variances = np.maximum(values[::-1][:rank], 1e-8)
    rest = max(float(values[::-1][rank:].mean()) if rank < width else 1.0, 1e-8)
    basis = np.ascontiguousarray(vectors[:, ::-1][:, :rank])
    fitted = ShiftModel(standardiser, means, basis, variances, rest, np.ones(len(names)))
    distances = fitted.distances(places, held_out)
    held_out_labels = labels[held_out]
    typical = np.array(
        [
            np.median(distances[held_out_labels == n, i])
            if (held_out_labels == n).any()
            else np.median(distances.min(axis=1))
            for i, n in enumerate(names)
        ]
    )
    return ShiftModel(standardiser, means, basis, variances, rest, np.maximum(typical, 1e-8))


def moments_within(
    places: Float[np.ndarray, "question width"],
    train: Int[np.ndarray, " some"],
    number: Int[np.ndarray, " some"],
    standardiser: Standardiser,
) -> tuple[Float[np.ndarray, "domain width"], Float[np.ndarray, "width width"]]:
    """Return the standardised mean of each domain, by number, and the covariance of questions around their domain's mean."""
    width = places.shape[1]
    means, covariance = np.zeros((number.max() + 1, width)), np.zeros((width, width))
    for rows, chunk in iter_rows(places, train):
        z = standardiser(chunk).astype(np.float64)
        for i in range(len(means)):
            means[i] += z[number[rows] == i].sum(axis=0)
    means /= np.bincount(number)[:, None]
    for rows, chunk in iter_rows(places, train):
        within = standardiser(chunk).astype(np.float64) - means[number[rows]]
        covariance += within.T @ within
    return means, covariance / len(train)
