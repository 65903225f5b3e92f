"""All that is known of model families, and how the parts of a model are found. No other file names a family.

To add a family, write one entry of `FAMILIES`, and one line of FAMILIES in tests/support/models.py, from which every test
of the engine takes its tiny models. An entry states what neither a configuration nor the modules tell. A family that is not
listed runs with safe defaults: its parts are found by their usual names, and the self-check decides how it is scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NORM_NAMES = ("norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm")
"""Names of the final norm that are tried in a family whose entry does not say."""
PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "c_proj")
"""Likewise, names of the linear layer that mixes the heads of a block's attention."""

MaskForm = Literal["full", "sliding", "by_layer"]
"""One causal mask; one mask cut to a window of *positions*; a dict of both kinds, from which each layer takes its own.

A full mask on a sliding family is silently wrong, and a family that takes one mask refuses a dict.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a family of models beyond their configuration. Every default is safe for an unknown family."""

    mask: MaskForm | None = None
    """The attention mask that it takes. None: it is tried with a full one, and scored by plain rows if that is wrong."""
    in_blocks: bool = False
    """Attention is softmax(q k / scale) v through transformers' attention functions and nothing more; the questions of a
    row may then be computed one by one."""
    takes_gaps: bool = False
    """Masked columns in the midst of a row change nothing: positions are given to the model, or it counts the mask. (MPT
    and families with a recurrent state count columns.)"""
    rms_norm: str | None = None
    """Class of the norm, if it is weight * x / rms(x), without Gemma's 1 + weight: computed with fewer passes over memory."""
    gated_mlp: str | None = None
    """Class of the MLP, if it is down(act(gate(x)) * up(x)), each a layer of its own: likewise."""
    flex: bool = True
    """Where its mask is known: on a GPU it takes it in the form of flex attention too."""
    learned_positions: bool = False
    """Positions are a learned table, which ends at the model's longest input."""
    needs_bos: bool = False
    """The model is lost without BOS in front; its tokenizer is made to add it."""
    norm: str | None = None
    """Name of the final norm in the base model. None: the first of NORM_NAMES that is there."""
    projection: str | None = None
    """Name of the output projection in a block's attention. None: the first of PROJECTION_NAMES that is there."""
    logits_times: str | None = None
    """Name of the value of the configuration that logits are multiplied by. None: they are what the head gives."""
    logits_over: str | None = None
    """Likewise, the name of what they are divided by."""


FAMILIES: dict[str, Family] = {
    "llama": Family("full", in_blocks=True, takes_gaps=True, rms_norm="LlamaRMSNorm", gated_mlp="LlamaMLP"),
    "mistral": Family("sliding", in_blocks=True, takes_gaps=True, rms_norm="MistralRMSNorm", gated_mlp="MistralMLP"),
    "qwen2": Family("by_layer", in_blocks=True, takes_gaps=True, rms_norm="Qwen2RMSNorm", gated_mlp="Qwen2MLP"),
    "qwen3": Family("by_layer", in_blocks=True, takes_gaps=True, rms_norm="Qwen3RMSNorm", gated_mlp="Qwen3MLP"),
    "phi3": Family("sliding", in_blocks=True, takes_gaps=True, rms_norm="Phi3RMSNorm"),
    "gemma2": Family("by_layer", takes_gaps=True, needs_bos=True),
    "gemma3_text": Family("by_layer", takes_gaps=True, needs_bos=True),
    "gpt_neox": Family("full", takes_gaps=True, norm="final_layer_norm", projection="dense"),
    "gpt2": Family("full", takes_gaps=True, flex=False, learned_positions=True, norm="ln_f", projection="c_proj"),
    # no position ids: ALiBi counts the mask, and distance along the row, which a tree bends
    "bloom": Family(takes_gaps=True, norm="ln_f", projection="dense"),
    "falcon": Family(takes_gaps=True, norm="ln_f", projection="dense"),
    # the head is not the end of these: an option would be nats too likely or too unlikely
    "granite": Family("full", takes_gaps=True, logits_over="logits_scaling"),
    "granitemoe": Family(logits_over="logits_scaling"),
    "granitemoeshared": Family(logits_over="logits_scaling"),
    "granitemoehybrid": Family(logits_over="logits_scaling"),
    "hyperclovax": Family(logits_times="logits_scaling"),
    "cohere": Family(logits_times="logit_scale"),
    "cohere2": Family(logits_times="logit_scale"),
    "falcon_h1": Family(logits_times="lm_head_multiplier"),
}
"""Every family that is known, by the `model_type` of its configuration."""


def family_of(model_type: str) -> Family:
    """Return what is known of the family of that name."""
    # every generation of Gemma has needed BOS, so one that is not listed yet gets it too
    return FAMILIES.get(model_type, Family(needs_bos=model_type.startswith("gemma")))


@dataclass(frozen=True)
class Parts:
    """The modules of a model that the engine reads and edits."""

    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    """The final norm."""
    head: nn.Module
    """The vocabulary head."""
    projections: tuple[nn.Module, ...]
    """The attention output projection of each block, whose input holds the outputs of the heads side by side; empty where
    blocks have none (recurrent models)."""


def find_parts(hf: PreTrainedModel) -> Parts:
    """Find blocks, final norm, head and attention output projections by structure and by the names of the family."""
    base, config = hf.base_model, hf.config.get_text_config()
    family = family_of(config.model_type)
    norm_names = (family.norm,) if family.norm else NORM_NAMES
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers]
    norm, head = first_child(base, norm_names), hf.get_output_embeddings()
    wanted = {
        f"one list of {config.num_hidden_layers} blocks": len(lists) == 1,
        f"a final norm named {', '.join(norm_names)}": norm is not None,
        "an output embedding": head is not None,
    }
    if missing := [name for name, present in wanted.items() if not present]:
        raise CoralError(
            f"The architecture {type(hf).__name__} (model type {config.model_type!r}) is not supported: "
            f"looked for {'; '.join(missing)}."
        )
    assert norm is not None
    assert head is not None
    blocks = tuple(lists[0])
    return Parts(blocks, norm, head, output_projections(blocks, family))


def output_projections(blocks: tuple[nn.Module, ...], family: Family) -> tuple[nn.Module, ...]:
    """Return the linear layer of every block that mixes the heads of its attention, or none where some block has none."""
    names = (family.projection,) if family.projection else PROJECTION_NAMES
    attentions = [attention_of(block) for block in blocks]
    projections = [p for a in attentions if a is not None and (p := first_child(a, names)) is not None]
    return tuple(projections) if len(projections) == len(blocks) else ()


def first_child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first direct child that bears one of the names."""
    children = dict(module.named_children())
    return next((children[n] for n in names if n in children), None)


def attention_of(block: nn.Module) -> nn.Module | None:
    """Return the attention of a block, or None where it has none."""
    return next((child for child in block.children() if "Attention" in type(child).__name__), None)


def mlp_of(block: nn.Module) -> nn.Module | None:
    """Return the part of a block that works on each position by itself, or None where it has no known name."""
    return next((child for child in block.children() if type(child).__name__.endswith("MLP")), None)
