"""Digests that tell whether a model and a tokenizer are the ones that something was made with. Never loads either."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coral_lens.storage.files import digest, digest_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def weights_digest(hf: PreTrainedModel) -> str:
    """Return a digest of the weights that does not depend on the dtype or device they were loaded in.

    Every weight is rounded to bfloat16 first: a checkpoint has the same digest in float32 and in bfloat16.
    """

    def one(item: tuple[str, Tensor]) -> str:
        name, weight = item
        if weight.is_meta:
            return f"{name}:{tuple(weight.shape)}:offloaded"
        raw = weight.detach().to(torch.bfloat16).contiguous().cpu().view(torch.uint8).numpy()
        return f"{name}:{tuple(weight.shape)}:{digest_bytes(raw.data)}"

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return digest(sorted(pool.map(one, hf.named_parameters())))


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
