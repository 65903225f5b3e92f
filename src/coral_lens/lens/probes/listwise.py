"""Listwise probes: softmax_j(a * log p_j + c * f(z_j)) over the options of each question, fitted by cross-entropy.

Not in the paper. They optimise a proper score of the whole distribution instead of each option's residual, learn a
temperature of the base on the way (1 / a), and never clip a probability to 0. States are centred within the question first:
what all its options share cannot tell them apart. f is linear, with c = 1, or the paper's kind of network with a tanh output:
the correction of an option then never exceeds c, which is learned like a.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.lens.probes.mlp import NetworkProbe, build_mlp
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import FittedProbe
from coral_lens.lens.rules import log_of
from coral_lens.lens.training_data import Sample
from coral_lens.ragged import Options
from coral_lens.storage.arrays import chunks, question_chunks, release

# ---------------------------------------------------------------------------------------------------------- linear probes

DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1)
"""Weight decays, strongest first: each fit starts from the one before."""
STOPS = {"maxiter": 60, "ftol": 1e-7, "gtol": 1e-5}
"""When L-BFGS stops."""


def fit_listwise_path(
    z: Float[np.ndarray, "row width"],
    p: Float[np.ndarray, " row"],
    options: Options,
    answers: Int[np.ndarray, " question"],
    decays: Sequence[float] = DECAYS,
    *,
    targets: Float[np.ndarray, " row"] | None = None,
    n_free: int = 0,
) -> list[FittedProbe]:
    """Minimise mean cross-entropy + decay / 2 * |w|^2 over w and a >= 0, for every weight decay, by L-BFGS.

    The problem is convex, so the path of starts changes only how fast the minimum is found. `targets` are soft answers. The
    weights of the last `n_free` columns do not decay.
    """
    from scipy.optimize import minimize

    log_p = log_of(p)
    y = options.one_hot(answers) if targets is None else targets
    n, decays_too = len(answers), np.arange(z.shape[1]) < z.shape[1] - n_free

    def loss(theta: np.ndarray, decay: float) -> tuple[float, np.ndarray]:
        weight, a = theta[:-1], theta[-1]
        scores = np.concatenate([z[rows] @ weight.astype(z.dtype) for rows in chunks(z)])
        q = options.softmax(a * log_p + scores.astype(np.float64))
        error = q - y
        held = decay * weight * decays_too
        value = -options.sum(y * log_of(q)).mean() + 0.5 * float(held @ weight)
        slope = sum((error[rows].astype(z.dtype) @ z[rows]).astype(np.float64) for rows in chunks(z))
        return value, np.append(slope / n + held, error @ log_p / n)

    theta = np.append(np.zeros(z.shape[1]), 1.0)
    bounds = [(None, None)] * z.shape[1] + [(0.0, None)]
    path = []
    for decay in decays:
        theta = minimize(loss, theta, args=(decay,), jac=True, method="L-BFGS-B", bounds=bounds, options=STOPS).x
        path.append(FittedProbe(LinearProbe(theta[:-1].copy(), 0.0), base_weight=float(theta[-1])))
    return path


# --------------------------------------------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class ListwiseMlpSettings:
    """Hyper-parameters of one fit."""

    weight_decay: float = 1.0
    learning_rate: float = 3e-4
    dropout: float = 0.2
    hidden: tuple[int, ...] = (128,)
    batch_size: int = 64
    """Questions in a mini-batch."""
    max_epochs: int = 60
    patience: int = 6
    """Epochs without a better validation loss before the fit stops."""


LISTWISE_GRID: tuple[dict[str, Any], ...] = tuple({"weight_decay": decay} for decay in (0.1, 1.0, 10.0))


@dataclass(frozen=True)
class QuestionRows:
    """The rows of some questions as tensors."""

    z: Float[Tensor, "row feature"]
    log_p: Float[Tensor, " row"]
    question: Int[Tensor, " row"]
    y: Float[Tensor, " row"]
    """The share of each option: 1 for the right one, unless answers are soft."""
    n_questions: int


def fit_listwise_mlp(train: Sample, validation: Sample, settings: ListwiseMlpSettings, *, seed: int) -> FittedProbe:
    """Minimise cross-entropy with AdamW; what is kept is a copy of the state with the best validation loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_mlp(train.z.shape[1], settings.hidden, dropout=settings.dropout).to(train.device)
        # of the base's weight and of the scale
        logs = torch.nn.Parameter(torch.tensor([-1.0, 0.0], device=train.device))
        groups: list[dict[str, Any]] = [
            {"params": list(network.parameters()), "weight_decay": settings.weight_decay},
            {"params": [logs], "weight_decay": 0.0, "lr": 10 * settings.learning_rate},
        ]
        optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate)
        best_loss, best_state, stale = float("inf"), (copy.deepcopy(network.state_dict()), logs.detach().clone()), 0
        for _ in range(settings.max_epochs):
            network.train()
            for batch in torch.randperm(len(train.options)).split(settings.batch_size):
                optimiser.zero_grad(set_to_none=True)
                loss(network, logs, rows_of_sample(train, batch.numpy())).backward()
                optimiser.step()
                release(train.z)
            value = validation_loss(network, logs, validation)
            stale += 1
            if value < best_loss:
                best_loss, best_state, stale = value, (copy.deepcopy(network.state_dict()), logs.detach().clone()), 0
            if stale >= settings.patience:
                break
    network.load_state_dict(best_state[0])
    base_weight, scale = best_state[1].cpu().double().exp().tolist()
    return FittedProbe(NetworkProbe(network.cpu().eval(), tuple(settings.hidden)), base_weight, scale)


@torch.no_grad()
def validation_loss(network: torch.nn.Module, logs: Tensor, sample: Sample) -> float:
    """Return the mean cross-entropy of all questions of a sample, without dropout, some questions at a time."""
    network.eval()
    total = 0.0
    for questions, _ in question_chunks(sample.options, sample.z.shape[1]):
        rows = rows_of_sample(sample, np.arange(questions.start, questions.stop))
        total += float(loss(network, logs, rows)) * rows.n_questions
        release(sample.z)
    return total / len(sample.answers)


def rows_of_sample(sample: Sample, questions: Int[np.ndarray, " chosen"]) -> QuestionRows:
    """Return the rows of numbered questions of a sample, in that order."""
    options, rows = sample.options.take(questions), sample.options.rows_of(questions)
    logs = np.log(np.maximum(sample.p[rows], 1e-30)).astype(np.float32)
    shares = options.one_hot(sample.answers[questions]) if sample.targets is None else sample.targets[rows]
    arrays = np.asarray(sample.z[rows], np.float32), logs, options.question, shares.astype(np.float32)
    z, log_p, question, y = (torch.from_numpy(array).to(sample.device) for array in arrays)
    return QuestionRows(z, log_p, question, y, len(options))


def loss(network: torch.nn.Module, logs: Tensor, rows: QuestionRows) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the answers."""
    weights = logs.exp()
    logits = weights[0] * rows.log_p + weights[1] * network(rows.z)[:, 0]
    n = rows.n_questions
    highest = logits.new_full((n,), -torch.inf).scatter_reduce(0, rows.question, logits.detach(), "amax")
    total = logits.new_zeros(n).index_add(0, rows.question, (logits - highest[rows.question]).exp())
    right = logits.new_zeros(n).index_add(0, rows.question, rows.y * logits)
    return (total.log() + highest - right).mean()
