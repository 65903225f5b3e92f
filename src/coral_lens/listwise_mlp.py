"""The listwise lens with a network: softmax_j(a * log p_j + c * f(z_j)), f the paper's kind of network with a tanh output.

The output is bounded, so the correction of an option never exceeds c, which is learned like the weight a of the base.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.mlp import NetworkProbe, build_mlp
from coral_lens.samples import Sample
from coral_lens.scratch import let_go, question_chunks


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
class ListwiseNetwork:
    """A fitted network with the two numbers that stand beside it."""

    probe: NetworkProbe
    base_weight: float
    scale: float


@dataclass(frozen=True)
class _Rows:
    """The rows of some questions as tensors."""

    z: Float[Tensor, "row feature"]
    log_p: Float[Tensor, " row"]
    question: Int[Tensor, " row"]
    right: Int[Tensor, " question"]


def fit_listwise_mlp(train: Sample, validation: Sample, settings: ListwiseMlpSettings, *, seed: int) -> ListwiseNetwork:
    """Minimise cross-entropy with AdamW; what is kept is a copy of the state with the best validation loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_mlp(train.z.shape[1], settings.hidden, dropout=settings.dropout)
        logs = torch.nn.Parameter(torch.tensor([-1.0, 0.0]))  # of the base's weight and of the scale
        groups: list[dict[str, Any]] = [
            {"params": list(network.parameters()), "weight_decay": settings.weight_decay},
            {"params": [logs], "weight_decay": 0.0, "lr": 10 * settings.learning_rate},
        ]
        optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate)
        best, kept, stale = float("inf"), (copy.deepcopy(network.state_dict()), logs.detach().clone()), 0
        for _ in range(settings.max_epochs):
            network.train()
            for some in torch.randperm(len(train.answers)).split(settings.batch_size):
                optimiser.zero_grad(set_to_none=True)
                loss(network, logs, rows_of_sample(train, some.numpy())).backward()
                optimiser.step()
                let_go(train.z)
            value = mean_loss(network, logs, validation)
            stale += 1
            if value < best:
                best, kept, stale = value, (copy.deepcopy(network.state_dict()), logs.detach().clone()), 0
            if stale >= settings.patience:
                break
    network.load_state_dict(kept[0])
    base_weight, scale = kept[1].double().exp().tolist()
    return ListwiseNetwork(NetworkProbe(network.eval(), tuple(settings.hidden)), base_weight, scale)


@torch.no_grad()
def mean_loss(network: torch.nn.Module, logs: Tensor, sample: Sample) -> float:
    """Return the mean cross-entropy of all questions of a sample, without dropout, some questions at a time."""
    network.eval()
    total = 0.0
    for questions, _ in question_chunks(sample.offsets, sample.z.shape[1]):
        rows = rows_of_sample(sample, np.arange(questions.start, questions.stop))
        total += float(loss(network, logs, rows)) * len(rows.right)
        let_go(sample.z)
    return total / len(sample.answers)


def rows_of_sample(sample: Sample, questions: Int[np.ndarray, " some"]) -> _Rows:
    """Return the rows of some questions of a sample, in that order."""
    starts, sizes = sample.offsets[:-1][questions], np.diff(sample.offsets)[questions]
    first = np.cumsum(sizes) - sizes
    rows = np.repeat(starts - first, sizes) + np.arange(sizes.sum())
    log_p = np.log(np.maximum(sample.p[rows], 1e-30)).astype(np.float32)
    return _Rows(
        torch.from_numpy(np.asarray(sample.z[rows], np.float32)),
        torch.from_numpy(log_p),
        torch.from_numpy(np.repeat(np.arange(len(questions)), sizes)),
        torch.from_numpy(first + sample.answers[questions]),
    )


def loss(network: torch.nn.Module, logs: Tensor, rows: _Rows) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the right options."""
    weights = logs.exp()
    logits = weights[0] * rows.log_p + weights[1] * network(rows.z)[:, 0]
    n = len(rows.right)
    highest = torch.full((n,), -torch.inf).scatter_reduce(0, rows.question, logits.detach(), "amax")
    total = torch.zeros(n).index_add(0, rows.question, (logits - highest[rows.question]).exp())
    return (total.log() + highest - logits[rows.right]).mean()
