"""Steer by features (appendix A.1): weights from ablations, and an edit that amplifies what a weighted feature adds.

h' = h + gamma * sum_j f_j w_j d_j * sigma, with f_j the feature's own activation in that very state. Number of features and
gamma are chosen on validation questions; gamma = 0 is the unsteered model, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.edits import EditPlace, edited_positions, replaced
from coral_lens.engine import Site
from coral_lens.errors import CoralError
from coral_lens.layout import Batch
from coral_lens.sae.autoencoder import CHUNK, Autoencoder

TOP = (50, 100, 128, 200, 300)
"""Numbers of features that are tried."""
GAMMAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Strengths that are tried. Weights sum to 1: at gamma = n, a feature of n with equal weights is doubled."""


@dataclass(frozen=True)
class Weighing:
    """What an ablation's changes are worth."""

    accuracy: float = 1.0
    """The paper's alpha_acc."""
    calibration: float = 1.0
    """The paper's alpha_cal."""


@dataclass(frozen=True)
class Steering:
    """Features with weights that sum to 1, the heaviest first."""

    features: Int[Tensor, " feature"]
    weights: Float[Tensor, " feature"]

    def top(self, n: int) -> Steering:
        """Return the n heaviest, normalised anew."""
        some = self.weights[:n]
        return Steering(self.features[:n], some / some.sum())


def steering_of(
    d_accuracy: Mapping[int, float], d_ece: Mapping[int, float], weighing: Weighing | None = None
) -> Steering:
    """Return the beneficial features: those whose ablation lowers accuracy or raises ECE, weighted by how much."""
    how = weighing or Weighing()
    weights = {
        j: how.accuracy * max(-d_accuracy[j], 0.0) + how.calibration * max(d_ece[j], 0.0) for j in sorted(d_accuracy)
    }
    kept = sorted((j for j, w in weights.items() if w > 0), key=lambda j: (-weights[j], j))
    if not kept:
        raise CoralError(
            f"None of the {len(weights)} ablated features is beneficial: taking out none of them lowers accuracy or raises "
            "ECE, so that there is nothing to steer by. Ablate others, or on more questions."
        )
    values = torch.tensor([weights[j] for j in kept], dtype=torch.float64)
    return Steering(torch.tensor(kept), (values / values.sum()).float())


@dataclass(frozen=True)
class SteerFeatures:
    """An Edit that adds gamma * sum_j f_j w_j d_j, in the units of the states."""

    sae: Autoencoder
    steering: Steering
    gamma: float
    where: EditPlace = "all"

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        if self.gamma == 0:
            return states
        return replaced(states, edited_positions(batch, self.where), self._steer)

    def _steer(self, states: Float[Tensor, "position width"]) -> Float[Tensor, "position width"]:
        features, sae = self.steering.features.to(states.device), self.sae.on(states.device)
        directions = self.gamma * self.steering.weights.to(states.device)[:, None] * sae.w_dec[features]
        parts = [some + sae.encode_some(some, features) @ directions for some in states.split(CHUNK)]
        return torch.cat(parts)

    @property
    def about(self) -> dict[str, Any]:
        """What the edit depends on beside the autoencoder."""
        return {
            "features": self.steering.features.tolist(),
            "weights": [float(w) for w in np.round(self.steering.weights.double().numpy(), 9)],
            "gamma": self.gamma,
            "where": self.where,
        }


def settings_of(
    n_beneficial: int, top: Sequence[int] = TOP, gammas: Sequence[float] = GAMMAS
) -> list[tuple[int, float]]:
    """Return the settings to try: gamma 0 once, and each number of features that there are with each other gamma."""
    sizes = list(dict.fromkeys(min(n, n_beneficial) for n in top))
    return [(0, 0.0), *((n, g) for n in sizes for g in gammas if g != 0.0)]
