"""What each layer would say: the probes that a fit tried layer by layer, kept beside the lens for people to look at.

    layers.safetensors    in the lens's folder; a lens without it works just the same

They were fitted on the training questions while the layer was being chosen, so they cost nothing more. They are of the same
kind as the lens's own probe: linear ones have the standardiser folded in, networks keep it and have weights in half precision.
Never steers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.lens.checks import load_tensors, probe_shapes, refuse_tensor
from coral_lens.lens.correction import Correction
from coral_lens.lens.features import INPUTS
from coral_lens.lens.probes.mlp import NetworkProbe
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import Standardiser
from coral_lens.lens.rules import RULES
from coral_lens.records import Scored
from coral_lens.storage.bundles import bundled
from coral_lens.storage.files import canonical

VIEW_FILE = "layers.safetensors"


LARGEST_VIEW = 512 * 2**20
"""Bytes of networks above which none are kept: at 4,096 columns and 33 layers they are 323 MB."""


@dataclass(frozen=True)
class LayerView:
    """A correction for each layer alone."""

    corrections: tuple[Correction, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in order, one for each correction."""
        return tuple(c.layers[0] for c in self.corrections)

    @property
    def n_weights(self) -> int:
        """The inputs of all layers together."""
        return sum(len(c.standardiser.mean) for c in self.corrections)

    def is_of(self, correction: Correction) -> bool:
        """Whether its probes are of a lens's own kind; earlier versions kept ridge's beside a network."""
        return self.corrections[0].probe.kind == correction.probe.kind

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
        first = self.corrections[0]
        about: dict[str, Any] = {"rule": first.rule, "inputs": first.inputs}
        if isinstance(first.probe, NetworkProbe):
            tensors, about = network_tensors(self.corrections), about | {"probe": first.probe.kind}
        else:
            tensors = linear_tensors(self.corrections)
        tensors["base_weight"] = torch.tensor([c.base_weight for c in self.corrections], dtype=torch.float64)
        tensors["layers"] = torch.tensor(self.layers)
        # one entry, because safetensors writes several in any order, and the same lens must be the same bytes
        return save_tensors(tensors, metadata={"view": canonical(about)})


def view_of(corrections: Sequence[Correction]) -> LayerView | None:
    """Return the view that corrections of single layers make; None where there are none, or their networks are too large."""
    if corrections and all(isinstance(c.probe, LinearProbe) for c in corrections):
        return LayerView(tuple(c.folded() for c in corrections))
    size = sum(t.numel() for c in corrections for t in c.probe.tensors().values()) * 2
    if not corrections or size > LARGEST_VIEW:
        return None
    return LayerView(tuple(halved(c) for c in corrections))


def halved(correction: Correction) -> Correction:
    """Return a network's correction with weights that half precision can hold, and single precision for its standardiser."""
    tensors = {name: in_half(t).float() for name, t in correction.probe.tensors().items()}
    mean, scale = (part.astype(np.float32).astype(np.float64) for part in vars(correction.standardiser).values())
    return replace(correction, standardiser=Standardiser(mean, scale), probe=NetworkProbe.from_tensors(tensors))


def in_half(tensor: Tensor) -> Tensor:
    """Return a tensor in half precision, without infinities."""
    most = torch.finfo(torch.float16).max
    return tensor.clamp(-most, most).half()


# ------------------------------------------------------------------------------------------------------------- tensors


def linear_tensors(corrections: Sequence[Correction]) -> dict[str, Tensor]:
    """Return linear probes side by side."""
    probes = [c.probe for c in corrections if isinstance(c.probe, LinearProbe)]
    return {
        "weight": torch.from_numpy(np.stack([p.weight.astype(np.float32) for p in probes])),
        "bias": torch.tensor([p.bias for p in probes], dtype=torch.float64),
    }


def network_tensors(corrections: Sequence[Correction]) -> dict[str, Tensor]:
    """Return networks and standardisers, each name with the place of its layer before it."""
    tensors = {"scale": torch.tensor([c.scale for c in corrections], dtype=torch.float64)}
    for i, correction in enumerate(corrections):
        for name, tensor in correction.tensors().items():
            part = in_half(tensor) if name.startswith("probe.") else tensor.float()
            tensors[f"{i}.{name}"] = part.contiguous()
    return tensors


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
        if rule not in RULES or not set(inputs) <= set(INPUTS) or about.get("probe", "mlp") != "mlp":
            raise ValueError("it is of another kind of lens")
        if not layers or not all(isinstance(layer, int) and layer >= 0 for layer in layers):
            raise ValueError("layers are no numbers of layers")
        parts = network_parts(tensors, len(layers), path) if "probe" in about else linear_parts(tensors, len(layers))
    except (KeyError, TypeError, ValueError, RecursionError, CoralError) as error:
        raise CoralError(f"{path} cannot be read ({error}); remove it: the lens works without it.") from None
    return LayerView(
        tuple(Correction(rule, (layer,), inputs, **part) for layer, part in zip(layers, parts, strict=True))
    )


def linear_parts(tensors: Mapping[str, Tensor], n: int) -> list[dict[str, Any]]:
    """Return what each linear correction is made of."""
    width = tensors["weight"].shape[1] if tensors["weight"].ndim == 2 else 0
    shapes = {"weight": (n, width), "bias": (n,), "base_weight": (n,), "layers": (n,)}
    wrong = [name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape]
    if wrong or not width:
        raise ValueError(f"{(wrong or ['weight'])[0]} has another shape")
    weights, biases, base = (tensors[name].double().numpy() for name in ("weight", "bias", "base_weight"))
    return [
        {
            "standardiser": Standardiser.identity(width),
            "probe": LinearProbe(weights[i], float(biases[i])),
            "base_weight": float(base[i]),
        }
        for i in range(n)
    ]


def network_parts(tensors: Mapping[str, Tensor], n: int, path: Path) -> list[dict[str, Any]]:
    """Return what each network's correction is made of."""
    parts = []
    for name in ("base_weight", "scale", "layers"):
        if tuple(tensors[name].shape) != (n,):
            raise ValueError(f"{name} has another shape")
    for i in range(n):
        own = {name.partition(".")[2]: t.float() for name, t in tensors.items() if name.partition(".")[0] == str(i)}
        width = len(own["standardiser.mean"])
        shapes = {"standardiser.mean": (width,), "standardiser.scale": (width,), **probe_shapes(own, "mlp", width)}
        for name, shape in shapes.items():
            refuse_tensor(own.get(name), name, shape, path)
        mean, scale = (own[f"standardiser.{part}"].double().numpy() for part in ("mean", "scale"))
        if not (scale > 0).all():
            raise ValueError("a scale is not positive")
        parts.append(
            {
                "standardiser": Standardiser(mean, scale),
                "probe": NetworkProbe.from_tensors(own),
                "base_weight": float(tensors["base_weight"][i]),
                "scale": float(tensors["scale"][i]),
            }
        )
    return parts
