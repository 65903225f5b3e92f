"""A sparse autoencoder of residual states: what it computes, and its folder. Never trains, never runs a model.

    cfg.json                   SAELens' configuration; under `metadata.coral` where it comes from
    sae_weights.safetensors    W_enc [width, feature], b_enc, W_dec [feature, width], b_dec
    statistics.safetensors     mean and scale of the training states; SAELens does not look at it

The paper's autoencoder sees z-scored states. Here the z-scoring is folded into the weights, as SAELens wants it: with
z = (h - mean) / scale, the rows of W_dec are the paper's d_j * sigma, and b_dec holds the mean. So everything below is in
the model's own units, and an autoencoder that SAELens trained is used in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.engine.fingerprints import identity_difference
from coral_lens.errors import CoralError
from coral_lens.storage.bundles import bundled, write_bundle
from coral_lens.storage.files import SEAL, digest_bytes, json_bytes, read_json, seal_of
from coral_lens.storage.outputs import has_word

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


DIGESTS = "sha256"
"""Under `metadata.coral`: the digests of the other files. Beside it, the digest of the whole configuration without itself."""
CONFIG, WEIGHTS, STATISTICS = "cfg.json", "sae_weights.safetensors", "statistics.safetensors"
SAELENS = "6.0.0"
"""The version whose layout this is; without it SAELens would look for the metadata where older ones had it."""
Architecture = Literal["standard", "topk", "jumprelu"]
ARCHITECTURES: tuple[Architecture, ...] = ("standard", "topk", "jumprelu")
CHUNK = 512
"""States encoded at a time: the codes of many features are wide."""


def top_k(codes: Float[Tensor, "row feature"], k: int) -> Float[Tensor, "row feature"]:
    """Return the k largest codes of each row and zeros elsewhere."""
    values, at = codes.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(codes).scatter(-1, at, values)


@dataclass(frozen=True)
class Autoencoder:
    """f = activation(h W_enc + b_enc) and h_hat = f W_dec + b_dec, in the units of the states themselves.

    A state beyond `norm_limit` has no active feature, and its h_hat is the state itself.
    """

    w_enc: Float[Tensor, "width feature"]
    b_enc: Float[Tensor, " feature"]
    w_dec: Float[Tensor, "feature width"]
    """Row j is what one unit of feature j adds to a state: the paper's d_j * sigma."""
    b_dec: Float[Tensor, " width"]
    layer: int
    """The residual stream that it was trained on, as `engine.model` numbers them."""
    architecture: Architecture = "standard"
    k: int = 0
    """Features that `topk` keeps."""
    threshold: Float[Tensor, " feature"] | None = None
    """What a code of `jumprelu` must exceed."""
    norm_limit: float | None = None
    """Longer states (attention sinks) were kept from training: they have no active feature and are left as they are."""
    about: dict[str, Any] = field(default_factory=dict, repr=False)
    """Model, training data and settings; empty for an autoencoder that was not trained here."""
    statistics: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """`mean` and `scale` of the states that it was trained on; empty likewise."""
    _elsewhere: dict[torch.device, Autoencoder] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Copies on other devices, each made once."""

    @property
    def width(self) -> int:
        return self.w_dec.shape[1]

    @property
    def n_features(self) -> int:
        return self.w_dec.shape[0]

    def on(self, device: torch.device) -> Autoencoder:
        """Return the autoencoder with its weights on a device: where a model keeps its states, they are worked on."""
        if device == self.w_dec.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self,
                w_enc=self.w_enc.to(device),
                b_enc=self.b_enc.to(device),
                w_dec=self.w_dec.to(device),
                b_dec=self.b_dec.to(device),
                threshold=None if self.threshold is None else self.threshold.to(device),
            )
        return self._elsewhere[device]

    def encode(self, states: Float[Tensor, "row width"]) -> Float[Tensor, "row feature"]:
        """Return the activation of every feature, on the device of the states."""
        own = self.on(states.device)
        codes = torch.addmm(own.b_enc, states.float(), own.w_enc)
        if own.architecture == "jumprelu":
            assert own.threshold is not None
            codes = codes.relu() * (codes > own.threshold)
        else:
            codes = codes.relu_()
        if own.architecture == "topk":
            codes = top_k(codes, self.k)
        return codes if self.norm_limit is None else codes.masked_fill_(self.massive(states)[:, None], 0.0)

    def massive(self, states: Float[Tensor, "row width"]) -> Bool[Tensor, " row"]:
        """Tell which states are longer than those that the autoencoder was trained on."""
        limit = float("inf") if self.norm_limit is None else self.norm_limit
        return states.float().norm(dim=-1) > limit

    def encode_some(
        self, states: Float[Tensor, "row width"], features: Int[Tensor, " chosen"]
    ) -> Float[Tensor, "row chosen"]:
        """Return the activations of some features; where others do not matter to them, only theirs are computed."""
        if self.architecture == "topk":
            return self.encode(states)[:, features]
        return self.on(states.device)._part(features).encode(states)

    def _part(self, features: Int[Tensor, " chosen"]) -> Autoencoder:
        return replace(
            self,
            w_enc=self.w_enc[:, features],
            b_enc=self.b_enc[features],
            w_dec=self.w_dec[features],
            threshold=None if self.threshold is None else self.threshold[features],
        )

    def decode(self, codes: Float[Tensor, "row feature"]) -> Float[Tensor, "row width"]:
        """Return the states that codes stand for, on the device of the codes."""
        own = self.on(codes.device)
        return torch.addmm(own.b_dec, codes, own.w_dec)

    def reconstruct(self, states: Float[Tensor, "row width"]) -> Float[Tensor, "row width"]:
        """Return h_hat of every state, a few at a time."""
        parts = [self.rebuilt(chunk, self.encode(chunk)) for chunk in states.split(CHUNK)]
        return torch.cat(parts) if parts else states.float()

    def rebuilt(
        self, states: Float[Tensor, "row width"], codes: Float[Tensor, "row feature"]
    ) -> Float[Tensor, "row width"]:
        """Return h_hat of states from their codes; states beyond `norm_limit` stay as they are."""
        decoded = self.decode(codes)
        return (
            decoded if self.norm_limit is None else torch.where(self.massive(states)[:, None], states.float(), decoded)
        )

    @cached_property
    def norms(self) -> Float[Tensor, " feature"]:
        """The length of each feature's direction."""
        return self.w_dec.norm(dim=1)

    def check(self, model: Model) -> None:
        """Refuse a model that the autoencoder cannot be of."""
        if model.width != self.width or not 0 <= self.layer <= model.n_layers:
            raise CoralError(
                f"The autoencoder is of states of width {self.width} at layer {self.layer}, but {model.name!r} has width "
                f"{model.width} and layers 0 to {model.n_layers}; use the model that it was trained on."
            )
        known = self.about.get("model", {})
        if difference := identity_difference(known, model.identity):
            raise CoralError(
                f"The autoencoder was trained on states of {known.get('name')!r}, and {model.name!r} is another model: "
                f"{difference}; use that model or train another."
            )

    # ------------------------------------------------------------------------------------------------------ folder

    def save(self, folder: Path) -> None:
        """Write the folder; an older autoencoder in it is replaced in one moment, and all else there stays."""
        tensors = {"W_enc": self.w_enc, "b_enc": self.b_enc, "W_dec": self.w_dec, "b_dec": self.b_dec}
        if self.threshold is not None:
            tensors["threshold"] = self.threshold
        files = {WEIGHTS: save_tensors({n: t.contiguous() for n, t in tensors.items()})}
        if self.statistics:
            files[STATISTICS] = save_tensors(self.statistics)
        config = self.config()
        config["metadata"]["coral"][DIGESTS] = {name: digest_bytes(data) for name, data in files.items()}
        config["metadata"]["coral"][SEAL] = seal_of(config)
        gone = () if self.statistics else (STATISTICS,)
        write_bundle(folder, (CONFIG, json_bytes(config)), files, gone=gone)

    def config(self) -> dict[str, Any]:
        """Return SAELens' configuration; what is ours is in its metadata, which takes any key."""
        config = {
            "architecture": self.architecture,
            "d_in": self.width,
            "d_sae": self.n_features,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": False,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": {
                "sae_lens_version": SAELENS,
                "model_name": self.about.get("model", {}).get("name"),
                "hook_name": hook_name(self.layer),
                "coral": {**self.about, **({} if self.norm_limit is None else {"norm_limit": self.norm_limit})},
            },
        }
        if self.architecture == "topk":
            config |= {"k": self.k, "rescale_acts_by_decoder_norm": False}
        return config


def hook_name(layer: int) -> str:
    """Return TransformerLens' name of a layer of the residual stream."""
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "blocks.0.hook_resid_pre"


def layer_of(name: str) -> int | None:
    """Return the layer that a TransformerLens hook reads, or None if it is not the residual stream."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", name)
    return int(match[1]) + (match[2] == "post") if match else None


def is_own(folder: Path) -> bool:
    """Return whether the autoencoder in a folder was made here, even if it is damaged now."""
    return has_word(folder / CONFIG, '"coral"')


def load_autoencoder(folder: Path, *, layer: int | None = None) -> Autoencoder:
    """Read a folder in SAELens' layout; `layer` says where it belongs if its configuration does not."""
    config = read_json(folder / CONFIG)
    metadata = {**config, **(config.get("metadata") or {})}  # before SAELens 6 all keys were at the top
    digests = take_digests(config, folder)
    tensors = read_weights(checked(folder, WEIGHTS, digests))
    architecture = config.get("architecture", "standard")
    k = config.get("k") or (config.get("activation_fn_kwargs") or {}).get("k", 0)
    if architecture == "standard" and k:
        architecture = "topk"
    refuse_unreadable(folder, architecture, config)
    own_layer = layer_of(str(metadata.get("hook_name", "")))
    if None not in (own_layer, layer) and own_layer != layer:
        raise CoralError(f"{folder} is of layer {own_layer}, not of layer {layer}; leave --layer out.")
    layer = own_layer if layer is None else layer
    if layer is None:
        raise CoralError(
            f"{folder} is of {metadata.get('hook_name')!r}, which is not a layer of the residual stream; choose another, "
            "or say --layer if it is."
        )
    about = dict((config.get("metadata") or {}).get("coral") or {})
    statistics = checked(folder, STATISTICS, digests)
    sae = Autoencoder(
        w_enc=tensors["W_enc"],
        b_enc=tensors["b_enc"],
        w_dec=tensors["W_dec"],
        b_dec=tensors["b_dec"],
        layer=layer,
        architecture=architecture,
        k=int(k),
        threshold=tensors.get("threshold"),
        norm_limit=about.pop("norm_limit", None),
        about=about,
        statistics=read_tensors(statistics) if statistics.exists() else {},
    )
    if config.get("rescale_acts_by_decoder_norm", False):
        sae = with_unit_rows(sae)
    if config.get("apply_b_dec_to_input", True):
        sae = replace(sae, b_enc=sae.b_enc - sae.b_dec @ sae.w_enc)
    return sae


def with_unit_rows(sae: Autoencoder) -> Autoencoder:
    """Move the lengths of the decoder's rows into the encoder: codes are then compared as SAELens' TopK compares them."""
    norms = sae.norms
    return replace(sae, w_enc=sae.w_enc * norms, b_enc=sae.b_enc * norms, w_dec=sae.w_dec / norms[:, None])


def take_digests(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Take our digests out of a configuration and return those of the files; others, and older ones of ours, have none."""
    coral = (config.get("metadata") or {}).get("coral") or {}
    claimed = coral.pop(SEAL, None)
    if claimed is not None and claimed != seal_of(config):
        raise CoralError(f"{folder / CONFIG} is damaged: its content does not match its digest; make it again.")
    return dict(coral.pop(DIGESTS, None) or {})


def checked(folder: Path, name: str, digests: dict[str, str]) -> Path:
    """Return a file of the folder; one that does not match its digest is refused."""
    if name not in digests:
        return folder / name
    path = bundled(folder, name, digests[name])
    if path is None:
        raise CoralError(f"{folder / name} is missing or damaged: it does not match its digest; make it again.")
    return path


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file."""
    try:
        return load_tensors(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise CoralError(f"{path} cannot be read ({error}); it is missing or damaged, make it again.") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in float32, or refuse a file that is not an autoencoder's."""
    tensors = {name: t.float() for name, t in read_tensors(path).items()}
    if missing := {"W_enc", "b_enc", "W_dec", "b_dec"} - set(tensors):
        raise CoralError(f"{path} has no {sorted(missing)[0]}; it is not an autoencoder in SAELens' layout.")
    if tensors["W_enc"].ndim != 2:
        raise CoralError(f"{path}: W_enc is not a matrix; the file is damaged, make it again.")
    width, n_features = tensors["W_enc"].shape
    if tensors["W_dec"].shape != (n_features, width):
        raise CoralError(
            f"{path}: W_enc is {width} by {n_features}, but W_dec {' by '.join(map(str, tensors['W_dec'].shape))}; "
            "the file is damaged, make it again."
        )
    return tensors


def refuse_unreadable(folder: Path, architecture: str, config: dict[str, Any]) -> None:
    """Refuse what SAELens can do and we cannot."""
    if architecture not in ARCHITECTURES:
        raise CoralError(f"{folder} has the architecture {architecture!r}; known are {', '.join(ARCHITECTURES)}.")
    normalised = config.get("normalize_activations") or "none"
    if normalised != "none":
        raise CoralError(
            f"{folder} normalises its inputs by {normalised!r} at run time; fold that into its weights with SAELens first."
        )


def expansions_in(folder: Path) -> Sequence[Path]:
    """Return the autoencoders that lie in a folder of `coral sae train`, the smallest first."""
    folders = [p.parent for p in folder.glob(f"*x/{CONFIG}")]
    return sorted(folders, key=lambda p: int(re.sub(r"\D", "", p.name) or 0))
