"""Vector scaling: a scale and a bias for each place in the list of options, softmax(scale * log p + bias).

It needs the same number of options everywhere, because its numbers belong to places. Where letters are scored, it can remove a
preference for a letter; where texts are scored, places mean nothing and it is temperature scaling with more to overfit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from coral_lens.errors import CoralError
from coral_lens.jobs import Job, Method, Predict, QuestionSet, options_of
from coral_lens.joined import predictions_of
from coral_lens.records import Predictions, Question, Style
from coral_lens.steering import base_probs

SMALLEST = 1e-12
"""Probabilities are raised to this before their logarithm is taken."""


@dataclass(frozen=True)
class VectorSettings:
    """How vector scaling is fitted."""

    weight: float = 0.01
    """Of the squared distance to the identity (scale 1, bias 0), which is added to the mean NLL."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise CoralError(f"weight must be at least 0. Got {self.weight} instead.")


@dataclass(frozen=True)
class VectorScaling:
    """A scale and a bias for each place."""

    scale: Float[np.ndarray, " place"]
    bias: Float[np.ndarray, " place"]

    def __call__(self, p: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
        """Return the scaled probabilities."""
        return np.exp(log_softmax(self.scale * np.log(np.maximum(p, SMALLEST)) + self.bias))


def log_softmax(scores: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
    """Return the logarithm of the softmax over places."""
    moved = scores - scores.max(axis=1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))


def fit_vector(
    p: Float[np.ndarray, "question place"], answers: Int[np.ndarray, " question"], *, weight: float
) -> VectorScaling:
    """Return the scales and biases with the lowest mean NLL plus weight times the squared distance to the identity.

    The sum is convex, and strictly so for a positive weight: L-BFGS finds its one minimum.
    """
    from scipy.optimize import minimize

    logs, n = np.log(np.maximum(p, SMALLEST)), p.shape[1]
    right = np.eye(n)[answers]

    def cost(x: Float[np.ndarray, " both"]) -> tuple[float, Float[np.ndarray, " both"]]:
        scale, bias = x[:n], x[n:]
        found = log_softmax(scale * logs + bias)
        surplus = (np.exp(found) - right) / len(p)
        away = np.concatenate([scale - 1.0, bias])
        gradient = np.concatenate([(surplus * logs).sum(axis=0), surplus.sum(axis=0)]) + 2 * weight * away
        return float(-(found * right).sum() / len(p) + weight * away @ away), gradient

    start = np.concatenate([np.ones(n), np.zeros(n)])
    tight = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    x = minimize(cost, start, jac=True, method="L-BFGS-B", options=tight).x
    return VectorScaling(x[:n], x[n:])


def refuse_ragged(questions: Sequence[Question], _: Style, __: VectorSettings) -> None:
    """Refuse questions of different numbers of options."""
    first = questions[0]
    other = next((q for q in questions if len(q.options) != len(first.options)), None)
    if other:
        raise CoralError(
            f"Vector scaling needs the same number of options everywhere, but question {first.id!r} has {len(first.options)} and "
            f"{other.id!r} has {len(other.options)}; leave the method out, or use temperature or isotonic."
        )


def fit_vector_scaling(job: Job, settings: VectorSettings) -> Predict:
    """Fit on the validation questions."""
    data, n = job.data, len(job.train.states.questions[0].options)
    validation = data.p.reshape(-1, n)[data.covered]
    fitted = fit_vector(validation, data.table.answers[data.covered], weight=settings.weight)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        p = base_probs(test.states.table, job.common.base)
        return {"": predictions_of("vector-scaling", test.states, fitted(p.reshape(-1, n)).reshape(-1))}

    return predict


VECTOR_SCALING = Method(options_of(VectorSettings), fit_vector_scaling, check=refuse_ragged)
