"""Logistic probes on the outputs of attention heads, all heads of a block in one fit, and the directions that ITI adds.

Rows are options; y says which of them are right. Nothing here runs a model or knows of questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.storage.arrays import row_chunks

PENALTY = 1.0
"""1 / C of scikit-learn's LogisticRegression, at its default; the intercept is not penalised."""
MAX_STEPS = 100
TOLERANCE = 1e-9
"""A head is done when a Newton step could lower its loss by no more than this share of it."""

Heads = Float[np.ndarray, "row head head_dim"]
"""What each head of a block puts out, by option."""


@dataclass(frozen=True)
class LogisticProbes:
    """p(right) = sigmoid(w . h + b), for each head of a block."""

    weights: Float[np.ndarray, "head head_dim"]
    biases: Float[np.ndarray, " head"]

    def logits(self, states: Heads) -> Float[np.ndarray, "row head"]:
        """Return w . h + b of every option and head."""
        return np.einsum("nhd,hd->nh", states.astype(np.float64), self.weights) + self.biases


def class_weights(y: Float[np.ndarray, " row"], *, balanced: bool) -> Float[np.ndarray, " row"]:
    """Return the weight of each row: 1, or such that right and wrong options weigh the same in all."""
    if not balanced:
        return np.ones(len(y))
    return np.where(y > 0, len(y) / (2.0 * y.sum()), len(y) / (2.0 * (1.0 - y).sum()))


# ------------------------------------------------------------------------------------------------------------ fitting


@dataclass(frozen=True)
class LossSums:
    """Penalised loss of every head at some weights, with its first and second derivatives; the bias comes last."""

    loss: Float[Tensor, " head"]
    gradient: Float[Tensor, "head k"]
    hessian: Float[Tensor, "head k k"]


def fit_probes(states: Heads, y: Float[np.ndarray, " row"], row_weights: Float[np.ndarray, " row"]) -> LogisticProbes:
    """Minimise |w|^2 / 2 + sum of weighted cross-entropies for every head at once, by Newton's method in float64.

    A step that would raise a head's loss is halved for that head until it does not.
    """
    n_heads, dim = states.shape[1:]
    weights = torch.zeros(n_heads, dim + 1, dtype=torch.float64)
    sums = sums_at(weights, states, y, row_weights)
    for _ in range(MAX_STEPS):
        step = torch.linalg.solve(sums.hessian, sums.gradient)
        gain = (step * sums.gradient).sum(dim=1)
        if bool((gain <= TOLERANCE * sums.loss).all()):
            break
        length = torch.ones(n_heads, dtype=torch.float64)
        for _ in range(MAX_STEPS):
            trial = weights - length[:, None] * step
            trial_sums = sums_at(trial, states, y, row_weights)
            worse = trial_sums.loss > sums.loss * (1 + 1e-12)
            if not bool(worse.any()):
                break
            length[worse] /= 2
        weights, sums = trial, trial_sums
    return LogisticProbes(weights[:, :-1].numpy(), weights[:, -1].numpy())


def sums_at(
    weights: Float[Tensor, "head k"],
    states: Heads,
    y: Float[np.ndarray, " row"],
    row_weights: Float[np.ndarray, " row"],
) -> LossSums:
    """Return loss and derivatives, summed over rows chunk by chunk."""
    width = weights.shape[1]
    penalty = torch.full((width,), PENALTY, dtype=torch.float64)
    penalty[-1] = 0.0
    loss = 0.5 * (penalty * weights**2).sum(dim=1)
    gradient = penalty * weights
    hessian = torch.diag(penalty).expand(len(weights), -1, -1).clone()
    for x, target, weight in head_chunks(states, y, row_weights):
        logits = torch.bmm(x, weights[:, :, None])[:, :, 0]
        p = logits.sigmoid()
        cross_entropy = torch.nn.functional.softplus(logits) - target * logits
        loss += (weight * cross_entropy).sum(dim=1)
        gradient += torch.bmm((weight * (p - target))[:, None, :], x)[:, 0]
        curve = (weight * p * (1 - p))[:, :, None] * x
        hessian += torch.bmm(curve.transpose(1, 2), x)
    # where every probability has saturated the bias has no curvature left
    hessian[:, -1, -1] += 1e-12
    return LossSums(loss, gradient, hessian)


def head_chunks(
    states: Heads, y: Float[np.ndarray, " row"], row_weights: Float[np.ndarray, " row"]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield states [head, row, k] in float64 with a column of ones for the bias, and the rows' labels and weights."""
    n, n_heads, dim = states.shape
    for rows in row_chunks(n, n_heads * (dim + 1)):
        x = np.ones((n_heads, len(y[rows]), dim + 1))
        x[:, :, :-1] = states[rows].transpose(1, 0, 2)
        yield torch.from_numpy(x), torch.from_numpy(y[rows]), torch.from_numpy(row_weights[rows])


# ------------------------------------------------------------------------------------------------ judging, directions


def accuracies(
    probes: LogisticProbes, states: Heads, y: Float[np.ndarray, " row"], row_weights: Float[np.ndarray, " row"]
) -> Float[np.ndarray, " head"]:
    """Return the weighted share of options that the probe of each head classifies correctly."""
    agrees = (probes.logits(states) > 0) == (y > 0)[:, None]
    return (row_weights[:, None] * agrees).sum(axis=0) / row_weights.sum()


def mean_difference(states: Heads, y: Float[np.ndarray, " row"]) -> Float[np.ndarray, "head head_dim"]:
    """Return the mean over right options less the mean over wrong ones (the paper's theta), for each head."""
    right = y > 0
    return states[right].mean(axis=0, dtype=np.float64) - states[~right].mean(axis=0, dtype=np.float64)


def unit(directions: Float[np.ndarray, "head head_dim"]) -> Float[np.ndarray, "head head_dim"]:
    """Return directions of length 1; one of length 0, of a head that puts out nothing, stays as it is."""
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    return directions / np.where(lengths > 0, lengths, 1.0)


def spreads(states: Heads, directions: Float[np.ndarray, "head head_dim"]) -> Float[np.ndarray, " head"]:
    """Return the standard deviation of the states along each head's direction (the original's sigma)."""
    return np.einsum("nhd,hd->nh", states.astype(np.float64), directions).std(axis=0)
