"""One autoencoder in training: its weights, the paper's loss, a step of Adam, and a new start for silent features.

Everything here sees z-scored states. Knows nothing of files or of the order of states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.sae.autoencoder import top_k


@dataclass(frozen=True)
class TrainingSettings:
    """How autoencoders are trained."""

    expansions: tuple[int, ...] = (4, 8, 16)
    """Features per dimension of the states; the paper's three."""
    penalty: float = 4.0
    """The paper's lambda, for z-scored states and a squared error summed over dimensions."""
    k: int = 0
    """Above 0: TopK, which keeps the k largest codes and needs no penalty."""
    learning_rate: float = 3e-3
    warm_up: float = 0.05
    """Share of the steps over which the learning rate grows from 0."""
    penalty_warm_up: float = 0.1
    """Share of the steps over which lambda grows from 0."""
    decay: float = 0.2
    """Share of the steps, at the end, over which the learning rate falls to 0."""
    batch_size: int = 512
    epochs: int = 1
    massive: float = 10.0
    """States so many times as long as the median (attention sinks) are kept from training; 0 keeps them in."""
    resample: int = 250
    """After so many steps, features that none of them has activated start anew; never in the last third."""
    checkpoint: int = 200
    """Steps between checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.expansions or min(self.expansions) < 1 or len(set(self.expansions)) < len(self.expansions):
            raise CoralError(
                f"Expansions must be different whole numbers from 1 on. Got {list(self.expansions)} instead."
            )
        for name in ("batch_size", "epochs", "resample", "checkpoint"):
            if getattr(self, name) < 1:
                raise CoralError(f"{name} must be at least 1. Got {getattr(self, name)} instead.")
        if self.massive and not 1 < self.massive < math.inf:
            raise CoralError(f"massive must be 0, which keeps all states, or above 1. Got {self.massive} instead.")
        if self.penalty < 0 or self.learning_rate <= 0:
            raise CoralError(
                f"lambda must be at least 0 and the learning rate above 0. Got {self.penalty} and {self.learning_rate}."
            )

    def rate_at(self, step: int, n_steps: int) -> float:
        """Return the learning rate of a step."""
        up = min(1.0, (step + 1) / max(1.0, self.warm_up * n_steps))
        down = min(1.0, (n_steps - step) / max(1.0, self.decay * n_steps))
        return self.learning_rate * min(up, down)

    def penalty_at(self, step: int, n_steps: int) -> float:
        """Return lambda of a step."""
        if self.k:
            return 0.0
        return self.penalty * min(1.0, (step + 1) / max(1.0, self.penalty_warm_up * n_steps))


# ---------------------------------------------------------------------------------------------------------- weights


@dataclass
class Weights:
    """The weights of one autoencoder of z-scored states, and what Adam and resampling remember of each."""

    w_enc: Float[Tensor, "width feature"]
    b_enc: Float[Tensor, " feature"]
    w_dec: Float[Tensor, "feature width"]
    """Row j is the paper's d_j."""
    b_dec: Float[Tensor, " width"]
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Adam's means `m.NAME` and squares `v.NAME`."""
    silent: Int[Tensor, " feature"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Steps since each feature was active."""

    NAMES = ("w_enc", "b_enc", "w_dec", "b_dec")

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return {name: getattr(self, name) for name in self.NAMES}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint keeps."""
        return {**self.parameters(), **self.moments, "silent": self.silent}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Weights:
        moments = {n: t for n, t in tensors.items() if n[:2] in ("m.", "v.")}
        return Weights(**{n: tensors[n] for n in Weights.NAMES}, moments=moments, silent=tensors["silent"])


def first_weights(width: int, n_features: int, *, seed: int) -> Weights:
    """Return random short directions, the encoder the decoder's transpose, and no biases."""
    rng = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_features, width, generator=rng)
    w_dec = 0.1 * directions / directions.norm(dim=1, keepdim=True)
    weights = Weights(w_dec.T.contiguous(), torch.zeros(n_features), w_dec, torch.zeros(width))
    weights.moments = {f"{m}.{n}": torch.zeros_like(t) for m in "mv" for n, t in weights.parameters().items()}
    weights.silent = torch.zeros(n_features, dtype=torch.int64)
    return weights


def codes_of(weights: Weights, z: Float[Tensor, "row width"], *, k: int = 0) -> Float[Tensor, "row feature"]:
    """Return f = ReLU(W_enc z + b_enc), or its k largest."""
    codes = torch.addmm(weights.b_enc, z, weights.w_enc).relu()
    return top_k(codes, k) if k else codes


def loss_of(
    weights: Weights, z: Float[Tensor, "row width"], *, penalty: float, k: int = 0
) -> tuple[Float[Tensor, ""], Float[Tensor, "row feature"], Float[Tensor, " row"]]:
    """Return the mean loss over states (the paper's L_SAE), their codes, and each state's squared error."""
    codes = codes_of(weights, z, k=k)
    errors = (torch.addmm(weights.b_dec, codes, weights.w_dec) - z).square().sum(dim=1)
    # codes are never negative, so that |f_j| is f_j
    sparsity = (codes @ weights.w_dec.norm(dim=1)).mean() if penalty else torch.zeros(())
    return errors.mean() + penalty * sparsity, codes, errors


BETAS, EPSILON = (0.9, 0.999), 1e-8


def train_step(
    weights: Weights, z: Float[Tensor, "row width"], settings: TrainingSettings, *, at: tuple[int, int]
) -> None:
    """Take one step of Adam on a minibatch, `at` step i of n."""
    step, n_steps = at
    parameters = weights.parameters()
    for p in parameters.values():
        p.requires_grad_(True)
    loss, codes, errors = loss_of(weights, z, penalty=settings.penalty_at(step, n_steps), k=settings.k)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    rate = settings.rate_at(step, n_steps)
    with torch.no_grad():
        for (name, p), g in zip(parameters.items(), gradients, strict=True):
            p.requires_grad_(False)
            mean, square = weights.moments[f"m.{name}"], weights.moments[f"v.{name}"]
            mean.lerp_(g, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            size = rate / (1 - BETAS[0] ** (step + 1))
            p.addcdiv_(mean, square.div(1 - BETAS[1] ** (step + 1)).sqrt_().add_(EPSILON), value=-size)
        active = (codes > 0).any(dim=0)
        weights.silent = torch.where(active, 0, weights.silent + 1)
        if (step + 1) % settings.resample == 0 and step < 2 * n_steps // 3:
            resample(weights, z, errors, settings, step=step)


def resample(
    weights: Weights,
    z: Float[Tensor, "row width"],
    errors: Float[Tensor, " row"],
    settings: TrainingSettings,
    *,
    step: int,
) -> int:
    """Give silent features the directions of states that are reconstructed badly; return how many.

    As in Bricken et al. (2023): states are drawn in proportion to the square of their error, the encoder's new column has a
    fifth of the mean length of the living ones, and Adam forgets what it knew of both.
    """
    dead = (weights.silent >= settings.resample).nonzero()[:, 0]
    alive = weights.silent < settings.resample
    if not len(dead) or not bool(alive.any()):
        return 0
    rng = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    drawn = torch.multinomial(errors.double().square() + 1e-12, len(dead), replacement=True, generator=rng)
    directions = z[drawn] - weights.b_dec
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-6)
    weights.w_dec[dead] = directions * weights.w_dec[alive].norm(dim=1).mean()
    weights.w_enc[:, dead] = (directions * 0.2 * weights.w_enc[:, alive].norm(dim=0).mean()).T
    weights.b_enc[dead] = 0.0
    for m in "mv":
        weights.moments[f"{m}.w_dec"][dead] = 0.0
        weights.moments[f"{m}.w_enc"][:, dead] = 0.0
        weights.moments[f"{m}.b_enc"][dead] = 0.0
    weights.silent[dead] = 0
    return len(dead)
