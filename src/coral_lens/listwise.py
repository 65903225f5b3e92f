"""The listwise lens: softmax_j(a * log p_j + w . z_j) over the options of each question, fitted by cross-entropy.

Not in the paper. It optimises a proper score of the whole distribution instead of each option's residual, learns a
temperature of the base on the way (1 / a), and never clips a probability to 0. States are centred within the question first:
what all its options share cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from coral_lens.scratch import pieces
from coral_lens.steering import softmax

DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1)
"""Weight decays, strongest first: each fit starts from the one before."""
MAX_ITERATIONS = 60


def centre(states: Float[np.ndarray, "row width"], offsets: Int[np.ndarray, " edge"]) -> Float[np.ndarray, "row width"]:
    """Subtract from each option's state the mean over the options of its question."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    means = np.add.reduceat(states, starts, axis=0) / sizes[:, None].astype(states.dtype)
    return states - np.repeat(means, sizes, axis=0)


def tilt(
    p: Float[np.ndarray, " row"],
    scores: Float[np.ndarray, " row"],
    offsets: Int[np.ndarray, " edge"],
    *,
    base_weight: float,
    gamma: float,
) -> Float[np.ndarray, " row"]:
    """Return softmax(base_weight * log p + gamma * scores) per question; gamma 0 leaves plain temperature scaling."""
    return softmax(base_weight * np.log(np.maximum(p, 1e-300)) + gamma * scores, offsets)


@dataclass(frozen=True)
class ListwiseFit:
    """Weights of one fit."""

    weight: Float[np.ndarray, " width"]
    base_weight: float
    decay: float


def fit_listwise_path(
    z: Float[np.ndarray, "row width"],
    p: Float[np.ndarray, " row"],
    offsets: Int[np.ndarray, " edge"],
    answers: Int[np.ndarray, " question"],
    decays: Sequence[float] = DECAYS,
) -> list[ListwiseFit]:
    """Minimise mean cross-entropy + decay / 2 * |w|^2 over w and a >= 0, for every weight decay, by L-BFGS.

    The problem is convex, so the path of starts changes only how fast the minimum is found.
    """
    from scipy.optimize import minimize

    log_p = np.log(np.maximum(p, 1e-300))
    right = offsets[:-1] + answers
    n = len(answers)

    def loss(theta: np.ndarray, decay: float) -> tuple[float, np.ndarray]:
        weight, a = theta[:-1], theta[-1]
        scores = np.concatenate([z[rows] @ weight.astype(z.dtype) for rows in pieces(z)])
        q = softmax(a * log_p + scores.astype(np.float64), offsets)
        error = q.copy()
        error[right] -= 1.0
        value = -np.log(np.maximum(q[right], 1e-300)).mean() + 0.5 * decay * float(weight @ weight)
        slope = sum((error[rows].astype(z.dtype) @ z[rows]).astype(np.float64) for rows in pieces(z))
        return value, np.append(slope / n + decay * weight, error @ log_p / n)

    theta = np.append(np.zeros(z.shape[1]), 1.0)
    bounds = [(None, None)] * z.shape[1] + [(0.0, None)]
    fits = []
    for decay in decays:
        options = {"maxiter": MAX_ITERATIONS, "ftol": 1e-7, "gtol": 1e-5}
        theta = minimize(loss, theta, args=(decay,), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
        fits.append(ListwiseFit(theta[:-1].copy(), float(theta[-1]), decay))
    return fits
