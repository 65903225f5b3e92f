"""Probes: from an option's pooled state to its predicted residual. They see standardised states and never probabilities.

States may be float16, float32 or mapped from a file: they are read in chunks of rows, and no copy of them all is made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coral_lens.errors import CoralError

PENALTIES = tuple(float(x) for x in np.logspace(0, 7, 15))
"""Ridge penalties, in units of one row's weight."""

HIDDEN = (1024, 512, 256, 128)
"""The paper's four hidden layers."""

CHUNK_BYTES = 64 * 2**20
"""Of float64 copies of states; so many rows are read at a time."""


def chunks(n: int, width: int) -> Iterator[slice]:
    """Yield slices of n rows, each of which may be copied in float64."""
    step = max(1, CHUNK_BYTES // (8 * max(1, width)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def column_means(states: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " width"]:
    """Return the mean of each column in float64, and refuse states that are not numbers."""
    if not len(states):
        raise CoralError("There are no states to fit a probe on: 0 rows. Give more questions.")
    total = np.zeros(states.shape[1])
    for rows in chunks(*states.shape):
        part = states[rows].sum(axis=0, dtype=np.float64)
        if not np.isfinite(part).all():
            refuse_numbers(states[rows], first=rows.start)
        total += part
    return total / len(states)


def refuse_numbers(states: Float[np.ndarray, "row width"], *, first: int) -> None:
    """Name the first value that is NaN or infinite."""
    row, column = np.argwhere(~np.isfinite(states))[0]
    raise CoralError(
        f"The state of row {first + row} is {states[row, column]} in column {column}; a probe cannot learn from it. "
        "Extract the activations again, with float32 weights if the model overflows in half precision."
    )


def refuse_residuals(r: Float[np.ndarray, " row"]) -> None:
    """Name the first residual that is not a number."""
    if not np.isfinite(r).all():
        row = int(np.flatnonzero(~np.isfinite(r))[0])
        raise CoralError(f"The residual of row {row} is {r[row]}; check the probabilities that it comes from.")


@dataclass(frozen=True)
class Standardiser:
    """z = (h - mean) / scale with training statistics; a constant column has scale 1."""

    mean: Float[np.ndarray, " width"]
    scale: Float[np.ndarray, " width"]

    def __call__(
        self, states: Float[np.ndarray, "row width"], out: Float[np.ndarray, "row width"] | None = None
    ) -> Float[np.ndarray, "row width"]:
        """Return standardised states in float32, or write them to `out`, which may be mapped from a file."""
        z = np.empty(states.shape, np.float32) if out is None else out
        for rows in chunks(*states.shape):
            z[rows] = (states[rows] - self.mean) / self.scale
        return z


def fit_standardiser(states: Float[np.ndarray, "row width"]) -> Standardiser:
    """Return the standardiser of training states, from two passes in float64."""
    mean = column_means(states)
    squares = np.zeros_like(mean)
    for rows in chunks(*states.shape):
        squares += ((states[rows] - mean) ** 2).sum(axis=0)
    scale = np.sqrt(squares / len(states))
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
        parts = [z[rows].astype(np.float64) @ self.weight for rows in chunks(*z.shape)]
        return np.concatenate([np.zeros(0), *parts]) + self.bias

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
        for rows in chunks(len(index), width):
            part = self.z[index[rows]] - self.z_mean
            residual = self.r[index[rows]] - self.r_mean
            total += part.sum(axis=0)
            gram += part.T @ part
            cross += part.T @ residual
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
    packed, diagonal, beside, tau, _ = lapack.dsytrd(gram.T, lower=1, lwork=64 * width)
    q = np.asfortranarray(packed[1:, :-1])  # Q leaves the first coordinate alone
    work = 64 * (len(penalties) + 65)
    turned = cross[:, None].copy()
    turned[1:] = lapack.dormqr("L", "T", q, tau, turned[1:], work)[0]
    solved = np.hstack([lapack.dgtsv(beside, diagonal + penalty, beside, turned)[3] for penalty in penalties])
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
        for rows in chunks(len(index), z.shape[1]):
            predicted[:, index[rows]] = (z[index[rows]].astype(np.float64) @ weights + biases).T
    return predicted, linear_probes(*ridge.solve(everything, penalties, np.ones(z.shape[1])))


def sum_moments(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all rows from those of each fold."""
    gram = parts[0].gram.copy()
    for part in parts[1:]:
        gram += part.gram
    total, cross = np.sum([p.total for p in parts], axis=0), np.sum([p.cross for p in parts], axis=0)
    return Moments(sum(p.n for p in parts), total, gram, cross, math.fsum(p.target for p in parts))


def column_scale(m: Moments, everything: Moments, shift: Float[np.ndarray, " width"]) -> Float[np.ndarray, " width"]:
    """Return the standard deviation of each column over some rows; 1 if it is constant there, up to rounding."""
    mean = m.total / m.n
    variance = m.gram.diagonal() / m.n - mean**2
    rounding = 1e-12 * np.maximum(everything.gram.diagonal() / everything.n, (mean + shift) ** 2)
    return np.sqrt(np.where(variance > rounding, variance, 1.0))


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
        return outputs(self.network, z).double().numpy()

    def tensors(self) -> dict[str, Tensor]:
        return {f"probe.{name}": t.contiguous() for name, t in self.network.state_dict().items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> NetworkProbe:
        state = {name.removeprefix("probe."): t for name, t in tensors.items() if name.startswith("probe.")}
        weights = [state[name] for name in sorted(state, key=lambda n: int(n.split(".")[0])) if name.endswith("weight")]
        hidden = tuple(w.shape[0] for w in weights[:-1])
        return NetworkProbe(mlp_from(state, hidden), hidden)


def hidden_of_depth(depth: int) -> tuple[int, ...]:
    """Return the first `depth` of the paper's hidden layers; 0 is a linear probe with a tanh, trained by the same loss."""
    if not 0 <= depth <= len(HIDDEN):
        raise CoralError(f"The depth of a probe must be 0 to {len(HIDDEN)} hidden layers. Got {depth} instead.")
    return HIDDEN[:depth]


class Dropout(nn.Dropout):
    """nn.Dropout with a generator of its own: five times faster on a CPU, and fits side by side do not share randomness."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.rng = np.random.default_rng(0)

    def forward(self, h: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return h
        draws = self.rng.integers(0, 2**16, size=tuple(h.shape), dtype=np.uint16)
        return h * torch.from_numpy(draws >= round(self.p * 2**16)) * (1.0 / (1.0 - self.p))


def build_mlp(width: int, hidden: Sequence[int], *, dropout: float) -> nn.Sequential:
    """Return the network; dropout modules are always there, so that weights have the same names whatever its rate."""
    layers: list[nn.Module] = []
    for before, after in pairwise([width, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU(), Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else width, 1), nn.Tanh())


def initial_mlp(width: int, settings: MlpSettings, *, seed: int) -> nn.Sequential:
    """Return the network with torch's usual initial weights, drawn from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):  # without weights, because drawing them would move the global generator
        network = build_mlp(width, settings.hidden, dropout=settings.dropout)
    network.to_empty(device="cpu")
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.Linear):
                bound = 1.0 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.uniform_(-bound, bound, generator=generator)
    return network


def mlp_from(state: dict[str, Tensor], hidden: Sequence[int]) -> nn.Sequential:
    """Return a network for prediction with copies of given weights."""
    with torch.device("meta"):
        network = build_mlp(state["0.weight"].shape[1], hidden, dropout=0.0)
    network.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    return network.eval()


def mlp_loss(r: Float[Tensor, " row"], r_hat: Float[Tensor, " row"], *, output_penalty: float) -> Float[Tensor, ""]:
    """Return MSE + lambda_out * mean(r_hat^2) (the paper's Eq. 3)."""
    return ((r - r_hat) ** 2).mean() + output_penalty * (r_hat**2).mean()


@torch.inference_mode()
def outputs(network: nn.Sequential, z: Float[np.ndarray, "row width"]) -> Float[Tensor, " row"]:
    """Return what a network makes of states, without dropout."""
    network.eval()
    parts = [network(torch.from_numpy(z[rows].astype(np.float32)))[:, 0] for rows in chunks(*z.shape)]
    return torch.cat([torch.zeros(0), *parts])


@dataclass(frozen=True)
class LayerData:
    """Standardised states and residuals of one layer, or of several concatenated: what a probe is fitted and judged on."""

    z: Float[np.ndarray, "train width"]
    r: Float[np.ndarray, " train"]
    z_val: Float[np.ndarray, "validation width"]
    r_val: Float[np.ndarray, " validation"]

    def __post_init__(self) -> None:
        for z, r in ((self.z, self.r), (self.z_val, self.r_val)):
            refuse_residuals(r)
            column_means(z)  # refuses what is not a number


class MlpTraining:
    """A fit of the paper's probe that can pause after any epoch and go on later, as if it had never paused.

    What it keeps is a copy of the state with the best validation loss, not the last one. The randomness of an epoch
    depends on the seed and the epoch's number alone: on no global generator and on no other fit.
    """

    def __init__(self, width: int, settings: MlpSettings, *, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.network = initial_mlp(width, settings, seed=seed)
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.epochs, self.stale = 0, 0
        self.best_loss, self.r2 = math.inf, -math.inf
        self.best_state = copy.deepcopy(self.network.state_dict())

    @property
    def finished(self) -> bool:
        return self.stale >= self.settings.patience or self.epochs >= self.settings.max_epochs

    def advance(self, data: LayerData, epochs: int, on_epoch: Callable[[], None] | None = None) -> None:
        """Train until so many epochs are done in all, or until the validation loss has stopped falling."""
        while not self.finished and self.epochs < epochs:
            rng = np.random.default_rng([self.seed, self.epochs])
            train_epoch(self.network, self.optimiser, (data.z, data.r), self.settings, rng)
            self.epochs += 1
            self.judge(data)
            if on_epoch:
                on_epoch()
        self.optimiser.zero_grad(set_to_none=True)  # a paused fit needs no gradients

    @property
    def n_bytes(self) -> int:
        """Memory of a paused fit: its weights, their two moments and the best weights."""
        return 4 * sum(t.nbytes for t in self.best_state.values())

    def judge(self, data: LayerData) -> None:
        """Keep a copy of the state if no earlier one had a lower validation loss."""
        r_hat = outputs(self.network, data.z_val).double().numpy()
        loss = float(((data.r_val - r_hat) ** 2).mean() + self.settings.output_penalty * (r_hat**2).mean())
        self.stale += 1
        if loss < self.best_loss:
            self.best_loss, self.r2, self.stale = loss, r_squared(data.r_val, r_hat), 0
            for kept, now in zip(self.best_state.values(), self.network.state_dict().values(), strict=True):
                kept.copy_(now)
        elif not math.isfinite(loss) and math.isfinite(self.best_loss):
            self.stale = self.settings.patience  # it diverged, and what came before stands
        elif not math.isfinite(loss):
            raise CoralError(
                f"The MLP diverged in its first epoch at learning rate {self.settings.learning_rate:g} and weight decay "
                f"{self.settings.weight_decay:g}; make either smaller."
            )

    def probe(self) -> NetworkProbe:
        """Return the probe with the best validation loss so far."""
        network = mlp_from(self.best_state, self.settings.hidden)
        return NetworkProbe(network, tuple(self.settings.hidden))


def train_epoch(
    network: nn.Sequential,
    optimiser: torch.optim.Optimizer,
    data: tuple[Float[np.ndarray, "row width"], Float[np.ndarray, " row"]],
    settings: MlpSettings,
    rng: np.random.Generator,
) -> None:
    """Go once through the rows in random order; a batch is made float32 only when it is used."""
    z, r = data
    network.train()
    for module in network:
        if isinstance(module, Dropout):
            module.rng = rng
    order = rng.permutation(len(r))
    for start in range(0, len(r), settings.batch_size):
        rows = order[start : start + settings.batch_size]
        states, target = (torch.from_numpy(a[rows].astype(np.float32, copy=False)) for a in (z, r))
        optimiser.zero_grad(set_to_none=False)  # the same memory again: 10 % faster on a CPU than new gradients
        mlp_loss(target, network(states)[:, 0], output_penalty=settings.output_penalty).backward()
        optimiser.step()


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
    """Train the paper's probe until its validation loss has stopped falling, and return its best state."""
    data = LayerData(*train, *validation)
    training = MlpTraining(data.z.shape[1], settings, seed=seed)
    training.advance(data, settings.max_epochs, on_epoch)
    return training.probe()


PROBES: dict[str, Callable[[dict[str, Tensor]], Probe]] = {
    "ridge": LinearProbe.from_tensors,
    "mlp": NetworkProbe.from_tensors,
}
"""How each kind of probe is made again from its saved tensors."""
