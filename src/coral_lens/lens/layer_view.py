"""What each layer would say: the probes that a fit tried layer by layer, kept beside the lens for people to look at.

    layers.safetensors    in the lens's folder; a lens without it works just the same

They were fitted on the training questions while the layer was being chosen, so that they cost nothing more. Never steers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from coral_lens.errors import CoralError
from coral_lens.lens.features import build_inputs
from coral_lens.lens.probes.listwise import tilt
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import Probe, Standardiser
from coral_lens.lens.rules import Rule
from coral_lens.records import Scored
from coral_lens.storage.files import canonical, write_atomic

FILE = "layers.safetensors"


@dataclass(frozen=True)
class LayerView:
    """A linear probe for each layer, with the standardiser folded into it."""

    rule: Rule
    inputs: tuple[str, ...]
    layers: tuple[int, ...]
    weight: Float[np.ndarray, "layer feature"]
    bias: Float[np.ndarray, " layer"]
    base_weight: Float[np.ndarray, " layer"]
    """Of log p under the listwise rule."""

    def changes(self, store: Scored, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, "layer row"]:
        """Return for each layer the residual that its own probe predicts for each option.

        Under the paper's rule that is the probe's output; under the listwise rule, the change of probability at full strength.
        """
        options = store.table.options
        found = np.empty((len(self.layers), len(p)))
        for i, layer in enumerate(self.layers):
            x = build_inputs(store.layer(layer), p, options, self.inputs)
            scores = x.astype(np.float64) @ self.weight[i].astype(np.float64) + self.bias[i]
            if self.rule == "residual":
                found[i] = scores
            else:
                found[i] = tilt(p, scores, options, base_weight=float(self.base_weight[i]), gamma=1.0) - p
        return found

    def save(self, folder: Path) -> None:
        """Write the file."""
        tensors = {
            "weight": torch.from_numpy(self.weight),
            "bias": torch.from_numpy(self.bias),
            "base_weight": torch.from_numpy(self.base_weight),
            "layers": torch.tensor(self.layers),
        }
        # one entry, because safetensors writes several in any order, and the same lens must be the same bytes
        about = {"view": canonical({"rule": self.rule, "inputs": self.inputs})}
        write_atomic(folder / FILE, save_tensors(tensors, metadata=about))


@dataclass(frozen=True)
class LayerFit:
    """What was fitted on one layer alone."""

    layer: int
    standardiser: Standardiser
    probe: Probe
    base_weight: float
    scale: float


def view_of(fits: Sequence[LayerFit], rule: Rule, inputs: tuple[str, ...]) -> LayerView | None:
    """Fold each layer's standardiser into its probe; None where probes are not linear."""
    weights, biases = [], []
    for one in fits:
        if not isinstance(one.probe, LinearProbe):
            return None
        weight = one.scale * one.probe.weight / one.standardiser.scale
        weights.append(weight.astype(np.float32))
        biases.append(one.scale * one.probe.bias - float(one.standardiser.mean @ weight))
    if not fits:
        return None
    return LayerView(
        rule,
        inputs,
        tuple(one.layer for one in fits),
        np.stack(weights),
        np.array(biases),
        np.array([one.base_weight for one in fits]),
    )


def load_view(folder: Path) -> LayerView | None:
    """Read the file of a lens's folder; None where there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["view"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError, ValueError, KeyError) as error:
        raise CoralError(f"{path} cannot be read ({error}); remove it: the lens works without it.") from None
    return LayerView(
        about["rule"],
        tuple(about["inputs"]),
        tuple(int(layer) for layer in tensors["layers"]),
        tensors["weight"],
        tensors["bias"],
        tensors["base_weight"],
    )
