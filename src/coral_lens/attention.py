"""Attention over trees laid end to end in one row: each question is computed against its own keys, and nothing else is.

Under a dense mask a kernel multiplies every query with every key and then throws most products away. Here the queries of a
question go a few at a time, and only with the keys before them: parents come before children, so later keys are never seen.
What a query sees is the same, so results differ from the dense mask by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "coral_blocks"
"""What the function is called among the attention functions of transformers."""
STEP = 64
"""Queries at a time: their scores against all keys of a question stay in the core's own cache."""


class Piece(NamedTuple):
    """Queries start to stop of a row; they see the keys from the start of their block to their own last one."""

    start: int
    stop: int
    mask: Float[Tensor, "query key"]
    """Added to the scores of the last keys; all earlier keys are seen by every query of the piece."""


class Block(NamedTuple):
    """Tokens start to stop of a row that see each other, and nothing else of the row."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def cut_blocks(allowed: Bool[Tensor, "query key"], extents: Sequence[tuple[int, int]]) -> tuple[Block, ...]:
    """Cut the mask of a row, whose own keys come last, into the blocks that lie between the given borders."""
    own = allowed[:, allowed.shape[1] - allowed.shape[0] :]
    blocks = []
    for start, stop in extents:
        pieces = []
        for low in range(start, stop, STEP):
            high = min(low + STEP, stop)
            seen = own[low:high, start:high]
            hidden = (~seen.all(dim=0)).nonzero()
            seen = seen[:, int(hidden[0]) if len(hidden) else high - start :]
            mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
            pieces.append(Piece(low, high, mask))
        blocks.append(Block(start, stop, tuple(pieces)))
    return tuple(blocks)


def attend(
    module: Any,
    query: Float[Tensor, "1 head token size"],
    key: Float[Tensor, "1 kv_head key size"],
    value: Float[Tensor, "1 kv_head key size"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    blocks: tuple[Block, ...],
    **_: Any,
) -> tuple[Float[Tensor, "1 token head size"], None]:
    """Attend block by block; the keys of a prefix, if there is one, come first and are seen by every query.

    The signature is that of transformers' attention functions.
    """
    q, k, v = query[0], key[0], value[0]
    n_heads, width, size = q.shape
    past = k.shape[1] - width
    out = torch.empty(width, n_heads, size, dtype=q.dtype)
    for block in blocks:
        keys, values = (with_prefix(x, past, block) for x in (k, v))
        for start, stop, mask in block.pieces:
            n, seen = stop - start, past + stop - block.start
            # query heads that share keys are stacked, so that their products are one
            rows = q[:, start:stop].reshape(len(k), -1, size)
            scores = torch.baddbmm(rows.new_zeros(()), rows, keys[:, :seen].mT, beta=0, alpha=scaling)
            if mask.shape[1]:
                scores.view(n_heads, n, seen)[..., seen - mask.shape[1] :].add_(mask)
            mixed = torch.bmm(scores.softmax(dim=-1), values[:, :seen])
            out[start:stop] = mixed.view(n_heads, n, size).transpose(0, 1)
    return out[None], None


def with_prefix(
    states: Float[Tensor, "kv_head key size"], past: int, block: Block
) -> Float[Tensor, "kv_head seen size"]:
    """Return the keys or values of the prefix and those of a block, next to each other."""
    own = states[:, past + block.start : past + block.stop]
    return torch.cat([states[:, :past], own], dim=1) if past else own


@contextmanager
def block_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Let a model attend block by block while the `with` runs; it must be called with `blocks=`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    config = hf.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
