"""Attention over token trees on a GPU: torch's flex attention skips the parts of a mask in which nothing is seen.

Under a dense mask a kernel multiplies every query with every key and then throws most products away. Here the mask is cut into
squares of 128 tokens, and squares without a visible pair are never computed. transformers takes such a mask where it takes a
dense one. Where flex attention cannot be compiled, the model attends under dense masks as ever, and that is said once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from jaxtyping import Bool
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

NAME = "flex_attention"
"""Its name among the attention functions of transformers."""
DEVICES = ("cuda",)
"""Where it is compiled, and skips: elsewhere it computes all scores and is slower than a dense mask."""

_REFUSED: WeakSet[PreTrainedModel] = WeakSet()
"""Models with which it failed in this process."""


def works_with(hf: PreTrainedModel, device: torch.device) -> bool:
    """Tell whether a model attends through flex attention: on a device that compiles it, and unless that has failed."""
    return device.type in DEVICES and hf not in _REFUSED


def refuse(hf: PreTrainedModel) -> None:
    """Let a model attend under dense masks from now on."""
    _REFUSED.add(hf)


def is_refused(hf: PreTrainedModel) -> bool:
    """Tell whether it failed with a model."""
    return hf in _REFUSED


def block_mask(allowed: Bool[Tensor, "batch query key"]) -> BlockMask:
    """Return a mask as flex attention takes it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Any:
        return allowed[row, query, key]

    n_rows, n_queries, n_keys = allowed.shape
    return create_block_mask(sees, n_rows, None, n_queries, n_keys, device=str(allowed.device))


@contextmanager
def flex_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Let a model attend through flex attention while the `with` runs; its masks must be of `block_mask`."""
    config = hf.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
