"""What each layer would say: the probes that a fit tried layer by layer, kept beside the lens for people to look at.

    layers.safetensors    in the lens's folder; a lens without it works just the same

They were fitted on the training questions while the layer was being chosen, so they cost nothing more. Never steers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save as save_tensors

from coral_lens.errors import CoralError
from coral_lens.lens.checks import load_tensors
from coral_lens.lens.correction import Correction
from coral_lens.lens.features import INPUTS
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import Standardiser
from coral_lens.lens.rules import RULES
from coral_lens.records import Scored
from coral_lens.storage.bundles import bundled
from coral_lens.storage.files import canonical

VIEW_FILE = "layers.safetensors"


@dataclass(frozen=True)
class LayerView:
    """A linear correction for each layer alone, with the standardiser folded into its probe."""

    corrections: tuple[Correction, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in order, one for each correction."""
        return tuple(c.layers[0] for c in self.corrections)

    @property
    def n_weights(self) -> int:
        """The inputs of all layers together."""
        return sum(len(c.standardiser.mean) for c in self.corrections)

    def changes(self, store: Scored, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, "layer row"]:
        """Return for each layer the residual that its own probe predicts for each option.

        Under the paper's rule that is the probe's output; under the listwise rule, the change of probability at full strength.
        """
        changes = np.empty((len(self.corrections), len(p)))
        for i, correction in enumerate(self.corrections):
            scores = correction.scores(p, correction.states(store), store.table.options)
            changes[i] = RULES[correction.rule].change(scores)
        return changes

    def content(self) -> bytes:
        """Return what the file holds."""
        probes = [c.probe for c in self.corrections if isinstance(c.probe, LinearProbe)]
        tensors = {
            "weight": torch.from_numpy(np.stack([p.weight.astype(np.float32) for p in probes])),
            "bias": torch.tensor([p.bias for p in probes], dtype=torch.float64),
            "base_weight": torch.tensor([c.base_weight for c in self.corrections], dtype=torch.float64),
            "layers": torch.tensor(self.layers),
        }
        first = self.corrections[0]
        # one entry, because safetensors writes several in any order, and the same lens must be the same bytes
        about = {"view": canonical({"rule": first.rule, "inputs": first.inputs})}
        return save_tensors(tensors, metadata=about)


def view_of(corrections: Sequence[Correction]) -> LayerView | None:
    """Return the view that corrections of single layers make; None where there are none, or their probes are not linear."""
    if not corrections or not all(isinstance(c.probe, LinearProbe) for c in corrections):
        return None
    return LayerView(tuple(c.folded() for c in corrections))


def load_view(folder: Path, digests: Mapping[str, str] | None) -> LayerView | None:
    """Read the file of a lens's folder; None where there is none. Older lenses have no digest of it, but always all shapes."""
    path = folder / VIEW_FILE
    wanted = (digests or {}).get(VIEW_FILE)
    if digests is not None and not wanted:
        return None
    if wanted and (found := bundled(folder, VIEW_FILE, wanted)):
        path = found
    elif not path.exists():
        return None
    elif digests is not None:
        raise CoralError(f"{path} is damaged: it does not match its digest; remove it: the lens works without it.")
    tensors, metadata = load_tensors(path)
    try:
        about = json.loads(metadata["view"])
        rule, inputs, layers = about["rule"], tuple(about["inputs"]), tensors["layers"].tolist()
        n, width = tensors["weight"].shape
        shapes = {"weight": (n, width), "bias": (n,), "base_weight": (n,), "layers": (n,)}
        wrong = [name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape]
        if wrong or not n or rule not in RULES or not set(inputs) <= set(INPUTS):
            raise ValueError(f"{wrong[0]} has another shape" if wrong else "it is of another kind of lens")
        if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
            raise ValueError("layers are no numbers of layers")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CoralError(f"{path} cannot be read ({error}); remove it: the lens works without it.") from None
    weights, biases, base = (tensors[name].double().numpy() for name in ("weight", "bias", "base_weight"))
    return LayerView(
        tuple(
            Correction(
                rule=rule,
                layers=(layer,),
                inputs=inputs,
                standardiser=Standardiser.identity(width),
                probe=LinearProbe(weights[i], float(biases[i])),
                base_weight=float(base[i]),
            )
            for i, layer in enumerate(layers)
        )
    )
