"""CCPS's two networks: an embedding in which right and wrong options lie apart, and a classifier on it (appendix B.2).

Rows are the standardised features of options; y says which are right. Seeded, and free of the global random generator.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coral_lens.lens.probes.mlp import Dropout

Activation = Literal["elu", "relu"]
ACTIVATIONS: dict[Activation, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU}


@dataclass(frozen=True)
class Examples:
    """Options with standardised features, and which of them are right."""

    z: Float[np.ndarray, "row feature"]
    y: Float[np.ndarray, " row"]

    @property
    def rows(self) -> Float[Tensor, "row feature"]:
        return torch.from_numpy(self.z.astype(np.float32))


@dataclass(frozen=True)
class NetworkSettings:
    """How the two networks are built and trained; the defaults are those of the paper's list of hyper-parameters."""

    activation: Activation = "elu"
    """`elu` with dropout 0.05 is in the paper's list; its description of the method says `relu` with 0.1."""
    dropout: float = 0.05
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the embedding network."""
    embedding: int = 8
    classifier: tuple[int, ...] = (48, 24, 12)
    margin: float = 1.0
    steps: int = 5000
    """Training steps of each of the two networks."""
    batch_size: int = 64
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    tune_embedding: bool = False
    """Whether the classifier's training moves the embedding network too; the paper allows both."""


OnStep = Callable[[int], None]
"""Told of each step of a training."""


# ----------------------------------------------------------------------------------------------------------- networks


def build_network(sizes: Sequence[int], settings: NetworkSettings, rng: np.random.Generator) -> nn.Sequential:
    """Return linear layers with activation and dropout between them, and torch's usual initial weights drawn from `rng`."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        with torch.device("meta"):  # without weights, because drawing them would move the global generator
            linear = nn.Linear(before, after)
        linear.to_empty(device="cpu")
        bound = 1.0 / math.sqrt(before)
        with torch.no_grad():
            for parameter in (linear.weight, linear.bias):
                draws = rng.uniform(-bound, bound, size=tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(draws))
        layers += [linear, ACTIVATIONS[settings.activation](), Dropout(settings.dropout)]
    return seeded(nn.Sequential(*layers[:-2]), rng)


def seeded(network: nn.Sequential, rng: np.random.Generator) -> nn.Sequential:
    """Return the network with its dropout drawn from `rng`."""
    for module in network:
        if isinstance(module, Dropout):
            module.rng = rng
    return network


def contrastive_loss(
    first: Float[Tensor, "pair feature"],
    second: Float[Tensor, "pair feature"],
    differ: Float[Tensor, " pair"],
    *,
    margin: float,
) -> Float[Tensor, ""]:
    """Return the mean of (1 - y_ij) d^2 + y_ij max(0, m - d)^2, where y_ij says that the labels differ."""
    square = ((first - second) ** 2).sum(dim=1)
    # the root has no gradient at 0
    distance = (square + 1e-12).sqrt()
    return ((1 - differ) * square + differ * (margin - distance).clamp(min=0.0) ** 2).mean()


def draw_pairs(
    y: Float[np.ndarray, " row"], n: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
    """Draw n pairs of rows, each row's class first: half of the pairs then differ, however rare right options are."""
    members = [np.flatnonzero(y == 0), np.flatnonzero(y > 0)]
    classes = rng.integers(0, 2, size=(2, n))
    places = rng.random(size=(2, n))
    picked = [
        np.where(c == 1, members[1][(u * len(members[1])).astype(int)], members[0][(u * len(members[0])).astype(int)])
        for c, u in zip(classes, places, strict=True)
    ]
    return picked[0], picked[1]


# ----------------------------------------------------------------------------------------------------------- training


def descend(
    modules: Sequence[nn.Module], settings: NetworkSettings, losses: Iterator[Tensor], on_step: OnStep | None
) -> None:
    """Take a step of AdamW for each loss; only the modules that are given are moved."""
    parameters = [p for module in modules for p in module.parameters()]
    rate, decay = settings.learning_rate, settings.weight_decay
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
    for loss in losses:
        optimiser.zero_grad(set_to_none=False)
        loss.backward()
        optimiser.step()
        if on_step:
            on_step(1)


def fit_embedding(
    examples: Examples, settings: NetworkSettings, *, seed: int, on_step: OnStep | None = None
) -> nn.Sequential:
    """Train the embedding network on pairs of options."""
    rng = np.random.default_rng([seed, 0])
    sizes = [examples.z.shape[1], *settings.hidden, settings.embedding]
    network, rows, y = build_network(sizes, settings, rng).train(), examples.rows, examples.y

    def losses() -> Iterator[Tensor]:
        for _ in range(settings.steps):
            i, j = draw_pairs(y, settings.batch_size, rng)
            first, second = network(rows[np.concatenate([i, j])]).chunk(2)
            differ = torch.from_numpy((y[i] != y[j]).astype(np.float32))
            yield contrastive_loss(first, second, differ, margin=settings.margin)

    descend([network], settings, losses(), on_step)
    return network.eval()


@dataclass(frozen=True)
class Confidence:
    """Both networks: from an option's standardised features to the probability that it is right."""

    embedding: nn.Sequential
    classifier: nn.Sequential

    @torch.inference_mode()
    def __call__(self, z: Float[np.ndarray, "row feature"]) -> Float[np.ndarray, " row"]:
        """Return p(right) of each row."""
        logits = self.classifier.eval()(self.embedding.eval()(torch.from_numpy(z.astype(np.float32))))
        return logits.double().softmax(dim=-1)[:, 1].numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights to save."""
        parts = {"embedding": self.embedding, "classifier": self.classifier}
        return {f"{name}.{key}": t.contiguous() for name, part in parts.items() for key, t in part.state_dict().items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor], settings: NetworkSettings) -> Confidence:
        """Return what `tensors` gave of networks with these settings."""
        rng = np.random.default_rng(0)
        width = tensors["embedding.0.weight"].shape[1]
        embedding = build_network([width, *settings.hidden, settings.embedding], settings, rng)
        classifier = build_network([settings.embedding, *settings.classifier, 2], settings, rng)
        for name, part in (("embedding", embedding), ("classifier", classifier)):
            part.load_state_dict(
                {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
            )
        return Confidence(embedding.eval(), classifier.eval())


def fit_classifier(
    embedding: nn.Sequential,
    examples: Examples,
    settings: NetworkSettings,
    *,
    seed: int,
    on_step: OnStep | None = None,
) -> Confidence:
    """Train a classifier on an embedding network, which is left as it is; tuning moves a copy of it."""
    rng = np.random.default_rng([seed, 1])
    fresh = Confidence(
        seeded(copy.deepcopy(embedding), rng),
        build_network([settings.embedding, *settings.classifier, 2], settings, rng),
    )
    return train_classifier(fresh, examples, settings, rng, on_step)


def adapt_classifier(
    confidence: Confidence, examples: Examples, settings: NetworkSettings, *, seed: int, on_step: OnStep | None = None
) -> Confidence:
    """Go on training a copy of the classifier on options of another task; the embedding stays frozen, as the paper says."""
    rng = np.random.default_rng([seed, 2])
    start = Confidence(confidence.embedding, seeded(copy.deepcopy(confidence.classifier), rng))
    return train_classifier(start, examples, replace(settings, tune_embedding=False), rng, on_step)


def train_classifier(
    start: Confidence,
    examples: Examples,
    settings: NetworkSettings,
    rng: np.random.Generator,
    on_step: OnStep | None,
) -> Confidence:
    """Minimise cross-entropy over rows drawn as they come, not balanced by class: only then are the outputs probabilities."""
    embedding, classifier, tuned = start.embedding, start.classifier.train(), settings.tune_embedding
    rows, labels = examples.rows, torch.from_numpy((examples.y > 0).astype(np.int64))
    if tuned:
        embedding.train()
    else:
        with torch.no_grad():
            rows = embedding.eval()(rows)

    def losses() -> Iterator[Tensor]:
        for _ in range(settings.steps):
            drawn = rng.integers(0, len(rows), size=settings.batch_size)
            inputs = embedding(rows[drawn]) if tuned else rows[drawn]
            yield nn.functional.cross_entropy(classifier(inputs), labels[drawn])

    descend([classifier, embedding] if tuned else [classifier], settings, losses(), on_step)
    return Confidence(embedding.eval(), classifier.eval())
