"""Small random autoencoders."""

from __future__ import annotations

import torch

from coral_lens.sae.autoencoder import Autoencoder

DEAD = 5


def make_sae(layer: int, *, width: int = 32, n_features: int = 40, architecture: str = "standard") -> Autoencoder:
    """Random directions, about a quarter of them active in a state; feature 5 is dead, feature 7 always active."""
    rng = torch.Generator().manual_seed(layer)
    w_enc = torch.randn(width, n_features, generator=rng) / width**0.5
    b_enc = torch.full((n_features,), -0.5)
    b_enc[DEAD], b_enc[7] = -1e6, 50.0
    w_dec = 0.3 * torch.randn(n_features, width, generator=rng)
    return Autoencoder(w_enc, b_enc, w_dec, torch.randn(width, generator=rng), layer, architecture, 12)  # type: ignore[arg-type]
