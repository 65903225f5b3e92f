"""The paper's probe: a network with a tanh output, trained by AdamW and stopped early. One fit; the search is elsewhere.

A network is trained where its data says (`LayerData.device`), by the same code on every device: randomness is drawn on the
CPU, so a GPU sees the same order, the same masks and the same first weights. A probe that is returned lies on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from coral_lens.errors import CoralError
from coral_lens.lens.probes.standardise import column_means, iter_rows, r_squared, refuse_residuals
from coral_lens.lens.settings import HIDDEN
from coral_lens.storage.arrays import release


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
        kept = torch.from_numpy(draws >= round(self.p * 2**16)).to(h.device)
        return h * kept * (1.0 / (1.0 - self.p))


def build_mlp(width: int, hidden: Sequence[int], *, dropout: float) -> nn.Sequential:
    """Return the network; dropout modules are always there, so weights have the same names whatever the rate."""
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
    """Return what a network makes of states, without dropout, on the CPU wherever the network is."""
    network.eval()
    place = device_of(network)
    predicted = [network(torch.from_numpy(chunk.astype(np.float32)).to(place))[:, 0].cpu() for _, chunk in iter_rows(z)]
    return torch.cat([torch.zeros(0), *predicted])


def device_of(network: nn.Module) -> torch.device:
    """Return where a network's weights are."""
    return next(network.parameters()).device


def adamw(parameters: Iterable[Tensor], settings: MlpSettings, device: torch.device) -> torch.optim.AdamW:
    """Return the optimiser of a network, in one kernel where there is one."""
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=device.type != "meta"
    )


@dataclass(frozen=True)
class LayerData:
    """Standardised states and residuals of one layer, or of several concatenated: what a probe is fitted and judged on."""

    z: Float[np.ndarray, "train width"]
    r: Float[np.ndarray, " train"]
    z_val: Float[np.ndarray, "validation width"]
    r_val: Float[np.ndarray, " validation"]
    device: str = "cpu"
    """Where a network is trained on it."""

    def __post_init__(self) -> None:
        for z, r in ((self.z, self.r), (self.z_val, self.r_val)):
            refuse_residuals(r)
            column_means(z)  # refuses what is not a number


class MlpTraining:
    """A fit of the paper's probe that can pause after any epoch and go on later, as if it had never paused.

    What it keeps is a copy of the state with the best validation loss, not the last one. The randomness of an epoch
    depends on the seed and the epoch's number alone: on no global generator and on no other fit. One that diverges in its
    first epoch is finished with an R2 of -inf, and has no state worth keeping.
    """

    def __init__(self, width: int, settings: MlpSettings, *, seed: int, device: str = "cpu") -> None:
        self.settings, self.seed = settings, seed
        self.network = initial_mlp(width, settings, seed=seed).to(device)
        self.optimiser = adamw(self.network.parameters(), settings, torch.device(device))
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
            for best, now in zip(self.best_state.values(), self.network.state_dict().values(), strict=True):
                best.copy_(now)
        elif not math.isfinite(loss):
            self.stale = self.settings.patience  # it diverged, and what came before stands, if anything did

    def probe(self) -> NetworkProbe:
        """Return the probe with the best validation loss so far."""
        network = mlp_from({name: t.cpu() for name, t in self.best_state.items()}, self.settings.hidden)
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
    place = device_of(network)
    network.train()
    for module in network:
        if isinstance(module, Dropout):
            module.rng = rng
    order = rng.permutation(len(r))
    for start in range(0, len(r), settings.batch_size):
        rows = order[start : start + settings.batch_size]
        states, target = (torch.from_numpy(a[rows].astype(np.float32, copy=False)).to(place) for a in (z, r))
        release(z)
        optimiser.zero_grad(set_to_none=False)  # the same memory again: 10 % faster on a CPU than new gradients
        mlp_loss(target, network(states)[:, 0], output_penalty=settings.output_penalty).backward()
        optimiser.step()


def fit_mlp(
    data: LayerData, settings: MlpSettings, *, seed: int, on_epoch: Callable[[], None] | None = None
) -> NetworkProbe:
    """Train the paper's probe until its validation loss has stopped falling, and return its best state."""
    training = MlpTraining(data.z.shape[1], settings, seed=seed, device=data.device)
    training.advance(data, settings.max_epochs, on_epoch)
    if training.r2 == -math.inf:
        raise CoralError(
            f"The MLP diverged in its first epoch at learning rate {settings.learning_rate:g} and weight decay "
            f"{settings.weight_decay:g}; make either smaller."
        )
    return training.probe()
