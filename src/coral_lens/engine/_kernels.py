"""The same numbers with less work, while a `with` runs: attention question by question or token by token, fused norms and gates.

Attention over trees laid end to end in one row: under a dense mask a kernel multiplies every query with every key and then
throws most products away. Here the queries of a question go a few at a time, and only with the keys before them: parents
come before children, so later keys are never seen.

Attention of one new token: query heads that share keys are the queries of one head, so keys are not copied for each of them.

Norms and gates go with fewer passes over memory, on the CPU, and only in classes that `architectures` names.

In bfloat16 the residual stream, the norms and the attention are computed in float32 in those classes, and only the products
with weights and the gates in bfloat16: the stream is then rounded nowhere on its way, for hardly any time.

Results differ from transformers' own by rounding alone. The model itself is never changed: all is as before after the `with`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from coral_lens.engine._seals import modules_of
from coral_lens.engine.architectures import FAMILIES, family_of
from coral_lens.engine.precision import precision_of, states_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAME = "coral_blocks"
"""Name of `attend` among the attention functions of transformers."""
GROUPED = "coral_grouped"
"""Name of `attend_grouped` there."""
STEP = 64
"""Queries at a time: their scores against all keys of a question stay in the core's own cache."""
RMS_NORMS = frozenset(family.rms_norm for family in FAMILIES.values()) - {None}
"""Names of the classes for which `rms_norm` stands in."""
GATED_MLPS = frozenset(family.gated_mlp for family in FAMILIES.values()) - {None}
"""Names of the classes for which `gated_mlp` stands in."""


# -------------------------------------------------------------------------------------------------- attention in blocks


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


@contextmanager
def block_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Let a model attend block by block while the `with` runs; it must be called with `blocks=`."""
    with attention(hf, NAME, attend):
        yield


@contextmanager
def attention(hf: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a model attend by a function, which takes the masks of transformers' own sdpa, while the `with` runs."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    # the name stays in the table (docs/decisions/10): a pass of somebody else may just have read it from the configuration
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config = hf.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: Any,
    query: Float[Tensor, "batch head token size"],
    key: Float[Tensor, "batch kv_head key size"],
    value: Float[Tensor, "batch kv_head key size"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    blocks: tuple[Block, ...] | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "batch token head size"], None]:
    """Attend block by block; the keys of a prefix, if there is one, come first and are seen by every query.

    The signature is that of transformers' attention functions. Without blocks it is a pass of somebody else, in another
    thread, through a model that attends in blocks just now: it gets the attention that it would have had.
    """
    if blocks is None:
        return attend_as_usual(module, query, key, value, attention_mask, scaling=scaling, **others)
    # small products gain nothing from bfloat16 on the CPU, and the softmax is better in float32
    q, k, v = query[0].float(), key[0].float(), value[0].float()
    n_heads, width, size = q.shape
    past = k.shape[1] - width
    out = torch.empty(width, n_heads, size, dtype=query.dtype)
    for block in blocks:
        keys, values = (beside_prefix(x, past, block) for x in (k, v))
        for start, stop, mask in block.pieces:
            n, seen = stop - start, past + stop - block.start
            # query heads that share keys are stacked: their products are then one
            rows = q[:, start:stop].reshape(len(k), -1, size)
            scores = torch.baddbmm(rows.new_zeros(()), rows, keys[:, :seen].mT, beta=0, alpha=scaling)
            if mask.shape[1]:
                scores.view(n_heads, n, seen)[..., seen - mask.shape[1] :].add_(mask)
            mixed = torch.bmm(scores.softmax(dim=-1), values[:, :seen])
            out[start:stop] = mixed.view(n_heads, n, size).transpose(0, 1)
    return out[None], None


def attend_as_usual(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attend as transformers does by itself."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)


def beside_prefix(
    states: Float[Tensor, "kv_head key size"], past: int, block: Block
) -> Float[Tensor, "kv_head seen size"]:
    """Return the keys or values of the prefix and those of a block, next to each other."""
    own = states[:, past + block.start : past + block.stop]
    return torch.cat([states[:, :past], own], dim=1) if past else own


# ------------------------------------------------------------------------------------------------- one token at a time


@contextmanager
def grouped_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Let a model attend to keys that query heads share without copying them, while the `with` runs."""
    with attention(hf, GROUPED, attend_grouped):
        yield


def attend_grouped(
    module: Any,
    query: Float[Tensor, "batch head token size"],
    key: Float[Tensor, "batch kv_head key size"],
    value: Float[Tensor, "batch kv_head key size"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **others: Any,
) -> tuple[Float[Tensor, "batch token head size"], None]:
    """Attend with one new token a row: the query heads of a group are as many queries of one head, with the same mask.

    Longer rows go transformers' own way.
    """
    batch, n_heads, n_tokens, size = query.shape
    if n_tokens != 1:
        return attend_as_usual(module, query, key, value, attention_mask, scaling=scaling, **others)
    groups = query.reshape(batch, key.shape[1], -1, size)
    mixed = nn.functional.scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(batch, 1, n_heads, size), None


# ------------------------------------------------------------------------------------------------------ norms and gates


@contextmanager
def fused(hf: PreTrainedModel) -> Iterator[None]:
    """Let the norms and MLPs of a model be computed by the functions below; their hooks run as ever."""
    with ExitStack() as stack:
        dtype = states_dtype(precision_of(hf))
        if hf.device.type == "cpu" and dtype in PRECISE:
            widens = dtype != torch.float32 and has_known_norms(hf)
            for module in modules_of(hf):
                function = substitute(module, widens=widens)
                # a module with a forward of its own (weights kept elsewhere) has been changed by somebody else
                if function is not None and "forward" not in vars(module):
                    module.forward = partial(function, module)
                    stack.callback(delattr, module, "forward")
        yield


PRECISE = (torch.float32, torch.bfloat16)
"""Dtypes of states that the functions below are for."""


def has_known_norms(hf: PreTrainedModel) -> bool:
    """Tell whether all norms of a model are computed here: its stream may then have another dtype than its weights."""
    return family_of(hf.config.get_text_config().model_type).rms_norm is not None


Substitute = Callable[..., Any]
"""Takes a module, then what its `forward` takes."""


def substitute(module: nn.Module, *, widens: bool = False) -> Substitute | None:
    """Return the function that computes what a module does, or None where none is known to.

    With `widens` the stream is float32 where the weights are not: embeddings begin it, and norms lead from it to the weights.
    """
    kind = type(module)
    if widens and isinstance(module, nn.Embedding):
        return wide_embedding
    if not kind.__module__.startswith("transformers.models."):
        return None
    if widens and kind.__name__.endswith("RotaryEmbedding"):
        return narrow_rotation
    if kind.__name__ in RMS_NORMS:
        return rms_norm
    if kind.__name__ in GATED_MLPS and is_silu(module):
        return gated_mlp
    return None


def rms_norm(module: Any, states: Tensor) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) in the dtype of the weight; the squares are summed without being written out."""
    states, weight = states.float(), module.weight
    scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_().div_(states.shape[-1])
    return (states * scale.add_(module.variance_epsilon).rsqrt_()).mul_(weight.float()).to(weight.dtype)


def gated_mlp(module: Any, states: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)), in the memory of the gate."""
    gate = nn.functional.silu(module.gate_proj(states), inplace=True)
    return module.down_proj(gate.mul_(module.up_proj(states)))


def wide_embedding(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the embeddings in float32: what blocks add to them is then float32 too."""
    return type(module).forward(module, *args, **kwargs).float()


def narrow_rotation(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the cosines and sines in bfloat16, as a model whose stream is bfloat16 gets them."""
    return tuple(part.to(torch.bfloat16) for part in type(module).forward(module, *args, **kwargs))


def is_silu(module: nn.Module) -> bool:
    """Tell whether the activation of an MLP is SiLU, under either of its names."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
