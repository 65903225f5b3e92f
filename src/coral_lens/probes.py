"""Probes: from an option's pooled state to its predicted residual. They see standardised states and never probabilities."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

PENALTIES = tuple(float(x) for x in np.logspace(0, 7, 15))
"""Ridge penalties, in units of one row's weight."""

HIDDEN = (1024, 512, 256, 128)
"""The paper's four hidden layers."""


@dataclass(frozen=True)
class Standardiser:
    """z = (h - mean) / scale with training statistics; a constant column has scale 1."""

    mean: Float[np.ndarray, " width"]
    scale: Float[np.ndarray, " width"]

    def __call__(self, states: Float[np.ndarray, "row width"]) -> Float[np.ndarray, "row width"]:
        return ((states - self.mean) / self.scale).astype(np.float32)


def fit_standardiser(states: Float[np.ndarray, "row width"]) -> Standardiser:
    """Return the standardiser of training states."""
    mean = states.mean(axis=0, dtype=np.float64)
    scale = states.std(axis=0, dtype=np.float64)
    # each column against its own mean: beside a massive activation, an ordinary column is not constant
    scale[scale <= 1e-6 * np.abs(mean)] = 1.0
    return Standardiser(mean.astype(np.float32), scale.astype(np.float32))


@runtime_checkable
class Probe(Protocol):
    """A fitted probe. Its tensors and its kind are all that a lens keeps of it."""

    kind: str

    def predict(self, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
        """Return the predicted residual of each standardised state."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights to save."""


def r_squared(r: Float[np.ndarray, " row"], r_hat: Float[np.ndarray, " row"]) -> float:
    """Return the share of the residuals' variance that is predicted; negative if worse than their mean."""
    total = float(((r - r.mean()) ** 2).sum())
    return 1.0 - float(((r - r_hat) ** 2).sum()) / total if total > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------- ridge


@dataclass(frozen=True)
class LinearProbe:
    """A linear probe with a quadratic penalty."""

    weight: Float[np.ndarray, " width"]
    bias: float
    kind = "ridge"

    def predict(self, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
        return z.astype(np.float64) @ self.weight + self.bias

    def tensors(self) -> dict[str, Tensor]:
        return {
            "probe.weight": torch.from_numpy(self.weight),
            "probe.bias": torch.tensor([self.bias], dtype=torch.float64),
        }

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> LinearProbe:
        return LinearProbe(tensors["probe.weight"].numpy(), float(tensors["probe.bias"][0]))


def fit_ridge_path(
    z: Float[np.ndarray, "row width"], r: Float[np.ndarray, " row"], penalties: Sequence[float] = PENALTIES
) -> list[LinearProbe]:
    """Return the ridge solution for every penalty, all from one eigendecomposition of z'z.

    Minimises sum (r - z w - b)^2 + penalty * |w|^2 with b unpenalised.
    """
    wide = z.astype(np.float64)
    mean, target = wide.mean(axis=0), r.mean()
    wide -= mean
    values, vectors = np.linalg.eigh(wide.T @ wide)
    projected = vectors.T @ (wide.T @ (r - target))
    weights = vectors @ (projected[:, None] / (np.maximum(values, 0.0)[:, None] + np.asarray(penalties)[None, :]))
    return [LinearProbe(np.ascontiguousarray(w), float(target - mean @ w)) for w in weights.T]


# ------------------------------------------------------------------------------------------------------------ MLP


@dataclass(frozen=True)
class MlpSettings:
    """Hyper-parameters of one MLP fit; the defaults are the paper's and, where it is silent, its authors' code."""

    weight_decay: float = 1.0
    output_penalty: float = 0.0
    """The paper's lambda_out: weight of mean(r_hat^2) in the loss."""
    learning_rate: float = 1e-3
    dropout: float = 0.2
    hidden: tuple[int, ...] = HIDDEN
    batch_size: int = 256
    max_epochs: int = 100
    patience: int = 10
    """Epochs without a better validation loss before the fit stops."""


@dataclass(frozen=True)
class NetworkProbe:
    """The paper's probe: ReLU layers with dropout and a tanh output."""

    network: nn.Sequential
    hidden: tuple[int, ...]
    kind = "mlp"

    @torch.inference_mode()
    def predict(self, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
        self.network.eval()
        parts = [self.network(part)[:, 0] for part in torch.from_numpy(z).split(8192)]
        return torch.cat(parts).double().numpy()

    def tensors(self) -> dict[str, Tensor]:
        return {f"probe.{name}": t.contiguous() for name, t in self.network.state_dict().items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> NetworkProbe:
        state = {name.removeprefix("probe."): t for name, t in tensors.items() if name.startswith("probe.")}
        weights = [state[name] for name in sorted(state, key=lambda n: int(n.split(".")[0])) if name.endswith("weight")]
        hidden = tuple(w.shape[0] for w in weights[:-1])
        network = build_mlp(weights[0].shape[1], hidden, dropout=0.0)
        network.load_state_dict(state)
        return NetworkProbe(network, hidden)


def build_mlp(width: int, hidden: Sequence[int], *, dropout: float) -> nn.Sequential:
    """Return the network; dropout modules are always there, so that weights have the same names whatever its rate."""
    layers: list[nn.Module] = []
    for before, after in pairwise([width, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else width, 1), nn.Tanh())


def mlp_loss(r: Float[Tensor, " row"], r_hat: Float[Tensor, " row"], *, output_penalty: float) -> Float[Tensor, ""]:
    """Return MSE + lambda_out * mean(r_hat^2) (the paper's Eq. 3)."""
    return ((r - r_hat) ** 2).mean() + output_penalty * (r_hat**2).mean()


Training = tuple[Float[np.ndarray, "train width"], Float[np.ndarray, " train"]]
Validation = tuple[Float[np.ndarray, "validation width"], Float[np.ndarray, " validation"]]


def fit_mlp(
    train: Training,
    validation: Validation,
    settings: MlpSettings,
    *,
    seed: int,
    on_epoch: Callable[[], None] | None = None,
) -> NetworkProbe:
    """Train the paper's probe; what is kept is a copy of the state with the best validation loss, not the last one."""
    (z, r), (z_val, r_val) = (
        tuple(torch.from_numpy(np.asarray(a, np.float32)) for a in d) for d in (train, validation)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_mlp(z.shape[1], settings.hidden, dropout=settings.dropout)
        optimiser = torch.optim.AdamW(
            network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        best, best_state, stale = float("inf"), copy.deepcopy(network.state_dict()), 0
        for _ in range(settings.max_epochs):
            train_epoch(network, optimiser, (z, r), settings)
            network.eval()
            with torch.no_grad():
                loss = float(mlp_loss(r_val, network(z_val)[:, 0], output_penalty=settings.output_penalty))
            stale += 1
            if loss < best:
                best, best_state, stale = loss, copy.deepcopy(network.state_dict()), 0
            if on_epoch:
                on_epoch()
            if stale >= settings.patience:
                break
    network.load_state_dict(best_state)
    return NetworkProbe(network.eval(), tuple(settings.hidden))


def train_epoch(
    network: nn.Sequential, optimiser: torch.optim.Optimizer, data: tuple[Tensor, Tensor], settings: MlpSettings
) -> None:
    """Go once through the rows in random order."""
    z, r = data
    network.train()
    for rows in torch.randperm(len(r)).split(settings.batch_size):
        optimiser.zero_grad(set_to_none=True)
        mlp_loss(r[rows], network(z[rows])[:, 0], output_penalty=settings.output_penalty).backward()
        optimiser.step()


PROBES: dict[str, Callable[[dict[str, Tensor]], Probe]] = {
    "ridge": LinearProbe.from_tensors,
    "mlp": NetworkProbe.from_tensors,
}
"""How each kind of probe is made again from its saved tensors."""
