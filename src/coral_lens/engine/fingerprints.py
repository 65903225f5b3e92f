"""What tells whether a model and a tokenizer are the ones that something was made with. Never loads either.

Weights and tokenizer have digests. Of the configuration all values that may change a forward pass are kept as they are: a
later version of transformers may know more of them, and those that both know must agree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coral_lens.storage.files import canonical, digest, digest_bytes, dotted_keys

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


NO_MATTER = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id",
    "prefix", "problem_type", "return_dict", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Values of configurations that change no forward pass in evaluation mode; nor does any dropout."""


def weights_digest(hf: PreTrainedModel) -> str:
    """Return a digest of the weights that does not depend on the dtype or device they were loaded in.

    Every weight is rounded to bfloat16 first: a checkpoint has the same digest in float32 and in bfloat16. Whole numbers, of
    quantised weights, are taken as they are.
    """

    def one(item: tuple[str, Tensor]) -> str:
        name, weight = item
        if weight.is_meta:
            return f"{name}:{tuple(weight.shape)}:offloaded"
        rounded = weight.detach().to(torch.bfloat16) if weight.is_floating_point() else weight.detach()
        raw = rounded.contiguous().cpu().view(torch.uint8).numpy()
        return f"{name}:{tuple(weight.shape)}:{digest_bytes(raw.data)}"

    # some libraries keep quantised weights as buffers
    buffers = hf.named_buffers() if is_quantised(hf) else ()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return digest(sorted(pool.map(one, (*hf.named_parameters(), *buffers))))


def is_quantised(hf: PreTrainedModel) -> bool:
    """Tell whether the weights of a model were quantised by another library, which then computes with them."""
    return getattr(hf.config, "quantization_config", None) is not None


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokenizer's vocabulary, rules and special tokens.

    Padding and truncation do not count: they change with every use of a tokenizer, and never reach a score.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        rules = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return digest({"rules": rules, "special": special})


def config_facts(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values of a configuration that may change a forward pass, as JSON has them."""
    values = config.get_text_config().to_dict()
    facts = {
        key: value
        for key, value in values.items()
        if key not in NO_MATTER and not key.startswith("_") and not key.endswith(("dropout", "pdrop"))
    }
    return json.loads(canonical(facts))


def config_difference(known: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return the first difference of two configurations in words; a value that only one of them has is none."""
    ours, theirs = dotted_keys(known), dotted_keys(given)
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            return f"{key} {canonical(ours[key])} against {canonical(theirs[key])}"
    return None


def identity_difference(known: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return in words how two records of models differ (`Model.identity`); what only one of them has is not compared."""
    for key in ("weights", "tokenizer", "dtype"):
        if key in known and key in given and known[key] != given[key]:
            return f"{key} {known[key][:14]} against {given[key][:14]}"
    # of whole records: one without this key is of logits as the head gives them; states do not depend on it
    if {"weights", "config"} <= known.keys() & given.keys() and known.get("logits") != given.get("logits"):
        return f"logits {known.get('logits', 'not scaled')} against {given.get('logits', 'not scaled')}"
    return config_difference(known.get("config", {}), given.get("config", {}))
