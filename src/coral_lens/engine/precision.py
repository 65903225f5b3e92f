"""In which arithmetic a model computes, beyond the dtypes of torch: `mixed` and `int8`, and which of them pays on this machine.

    mixed   float32 states; products with weights in bfloat16, added up in float32
    int8    float32 states; products of whole numbers: each weight row, and each state as it comes, has a scale of its own,
            after columns in which states are large have given a part of their size to the weights (SmoothQuant, 2023)

Both replace the linear layers of a model that was loaded for it, so every way to run the model computes so. Norms, attention and
softmax stay in float32. Nothing here loads a model.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from coral_lens.engine._machine import SMALLEST, machine_facts, remembered
from coral_lens.engine._seals import n_weights
from coral_lens.engine.architectures import find_parts
from coral_lens.engine.fingerprints import is_quantised
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Precision = Literal["float32", "bfloat16", "float16", "mixed", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CONVERTED = ("mixed", "int8")
"""Those that a model is converted to when it is loaded."""
MARK = "coral_precision"
"""Attribute of a converted model that says to which."""
WORTH = 1.5
"""How much faster than float32 `mixed` must be here to be chosen by itself: its answers differ a little."""
LARGEST = 127
"""The largest whole number that weights and states are scaled to."""
TINY = 1e-5
"""The least size of a column: one that is never anything else gives nothing away."""
ORDINARY = (
    "Question: Which of these is a colour?\nAnswer: red",
    "The river rises in the mountains, flows north through three towns and reaches the sea after 240 kilometres.",
    "If a shirt costs 20 dollars after a discount of 20 %, it cost 25 dollars before: 0.8 * 25 = 20.",
    "Plants take in carbon dioxide and water, and with the energy of light they make sugar and give off oxygen.",
    "She closed the window because it had begun to rain, and the papers on her desk were getting wet.",
)
"""Text from which int8 learns which columns of a model's states are large."""
ROUNDS = 5
TIMED_TOKENS = 256
"""Tokens of the passes that are timed; a block of the model takes them in milliseconds."""


# --------------------------------------------------------------------------------------------------------------- layers


@cache
def has_bfloat16() -> bool:
    """Tell whether this processor multiplies bfloat16; of one that torch cannot ask that is taken for granted."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return any(is_supported is None or is_supported() for is_supported in asked)


class MixedLinear(nn.Linear):
    """Multiplies in bfloat16 and gives the dtype that it got; the bias is added in that.

    A processor that has no such product, for which torch takes twice the time of one in float32, multiplies the same factors in
    float32.
    """

    def forward(self, states: Tensor) -> Tensor:
        factors = states.to(torch.bfloat16).to(self.weight.dtype)
        product = nn.functional.linear(factors, self.weight).to(states.dtype)
        return product if self.bias is None else product.add_(self.bias)


class Int8Linear(nn.Linear):
    """Multiplies whole numbers; the scale of each state is found as it comes."""

    scale: Float[Tensor, " out"]
    """What one of a weight row's whole numbers is worth."""
    smooth: Float[Tensor, " in"]
    """What each column of the states is multiplied with; the weights were divided by it."""

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1]) * self.smooth
        unit = rows.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(rows.dtype).tiny)
        whole = rows.div_(unit).round_().to(torch.int8)
        product = torch._int_mm(whole, self.weight.t()).to(states.dtype).mul_(unit).mul_(self.scale)
        product = product if self.bias is None else product.add_(self.bias)
        return product.view(*states.shape[:-1], -1)


class WideEmbedding(nn.Embedding):
    """Keeps what its head keeps and gives float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


def narrow(layer: nn.Linear | nn.Embedding) -> None:
    """Round a layer's weight to bfloat16; one that layers share is rounded once and stays shared.

    Where the processor does not multiply bfloat16, the rounded weight is kept as float32.
    """
    rounded = layer.weight.data.to(torch.bfloat16)
    layer.weight.data = rounded if has_bfloat16() else rounded.float()


def make_mixed(layer: nn.Linear) -> None:
    """Let a linear layer multiply in bfloat16."""
    narrow(layer)
    layer.__class__ = MixedLinear


def make_int8(layer: nn.Linear, largest: Float[Tensor, " in"]) -> None:
    """Let a linear layer multiply whole numbers; `largest` is the size that each column of its states reaches."""
    weight, tiny = layer.weight.detach().float(), torch.finfo(torch.float32).tiny
    smooth = (weight.abs().amax(dim=0).clamp(min=TINY) / largest.float().clamp(min=TINY)).sqrt()
    weight = weight / smooth
    scale = weight.abs().amax(dim=1).div_(LARGEST).clamp_(min=tiny)
    layer.register_buffer("scale", scale)
    layer.register_buffer("smooth", smooth)
    layer.weight = nn.Parameter((weight / scale[:, None]).round_().to(torch.int8), requires_grad=False)
    layer.__class__ = Int8Linear


@torch.inference_mode()
def largest_states(hf: PreTrainedModel, texts: Sequence[Sequence[int]]) -> dict[nn.Module, Float[Tensor, " in"]]:
    """Return the size that each column of a linear layer's states reaches on texts, for every such layer."""
    largest: dict[nn.Module, Tensor] = {}

    def see(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen = given[0].detach().reshape(-1, given[0].shape[-1]).abs().amax(dim=0)
        largest[layer] = torch.maximum(seen, largest[layer]) if layer in largest else seen

    with ExitStack() as stack:
        for layer in linear_layers(hf):
            stack.callback(layer.register_forward_pre_hook(see).remove)
        for ids in texts:
            hf.base_model(input_ids=torch.tensor([list(ids)], device=hf.device), use_cache=False)
    return largest


# --------------------------------------------------------------------------------------------------------------- models


def set_precision(hf: PreTrainedModel, precision: Precision, texts: Sequence[Sequence[int]]) -> None:
    """Let a model on the CPU compute in `mixed`, `int8` or float32, whatever its checkpoint has.

    `texts` are token ids of some ordinary text, from which int8 learns which columns of states are large.
    """
    if is_quantised(hf):
        raise CoralError(
            f"The weights of this model are quantised already, and cannot compute in {precision}; leave --dtype out."
        )
    if precision == "float32":
        hf.float()
        return
    layers, head, embedding = linear_layers(hf), hf.get_output_embeddings(), hf.get_input_embeddings()
    if not layers or type(head) is not nn.Linear:
        raise CoralError(f"{type(hf).__name__} is not made of linear layers that compute in {precision}; use bfloat16.")
    if embedding.weight is head.weight and type(embedding) is not nn.Embedding:
        # one that scales what it gives keeps its own weights
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    largest = largest_states(hf, texts) if precision == "int8" else {}
    products = {id(layer.weight) for layer in (*layers, head)}
    for parameter in hf.parameters():
        if id(parameter) not in products:
            parameter.data = parameter.data.float()
    for layer in layers:
        if precision == "int8" and layer in largest:
            make_int8(layer, largest[layer])
        else:
            make_mixed(layer)
    make_mixed(head)
    if embedding.weight is head.weight:
        embedding.__class__ = WideEmbedding
    setattr(hf, MARK, precision)


def linear_layers(hf: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers of a model but for its head."""
    return [layer for layer in hf.base_model.modules() if type(layer) is nn.Linear]


def precision_of(hf: PreTrainedModel) -> Precision:
    """Return in what a model computes."""
    return getattr(hf, MARK, None) or cast("Precision", str(hf.dtype).removeprefix("torch."))


def recorded_precision(record: Mapping[str, Any], *, device: str | None = None) -> Precision | None:
    """Return the precision of a model that a record describes, or None where it has none or one that is not of that device."""
    precision = str(record.get("dtype", "")).removeprefix("torch.")
    elsewhere = precision in CONVERTED and not (device or default_device()).startswith("cpu")
    return precision if precision in PRECISIONS and not elsewhere else None


def default_device() -> str:
    """Return where a model runs unless something else is said."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def states_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the states."""
    return torch.float32 if precision in CONVERTED else getattr(torch, precision)


def rounding(precision: Precision) -> float:
    """Return by how much the factors of a product are rounded, relative to their size."""
    if precision == "int8":
        return 1 / LARGEST
    return float(torch.finfo(torch.bfloat16 if precision == "mixed" else states_dtype(precision)).eps)


# ---------------------------------------------------------------------------------------------------------- the choice


def choose_precision(hf: PreTrainedModel) -> Precision:
    """Return what `auto` means for a model on this CPU: `mixed` where it is much faster, else float32. It is timed once."""
    middle = hf.config.get_text_config().num_hidden_layers // 2
    block = find_parts(hf).blocks[middle]
    shapes = [(layer.out_features, layer.in_features) for layer in block.modules() if type(layer) is nn.Linear]
    if n_weights(hf) < SMALLEST or not shapes or type(hf.get_output_embeddings()) is not nn.Linear:
        return "float32"
    gain = remembered("precisions", [shapes, machine_facts()], lambda: {"gain": gain_of_mixed(shapes)})["gain"]
    return "mixed" if gain >= WORTH else "float32"


@torch.inference_mode()
def gain_of_mixed(shapes: Sequence[tuple[int, int]]) -> float:
    """Return how many times faster layers of these sizes are in `mixed` than in float32 on this machine.

    By the processor time of one thread, so that it says the same beside busy programs.
    """
    exact = [nn.Linear(columns, rows, bias=False) for rows, columns in shapes]
    quick = [deepcopy(layer) for layer in exact]
    for layer in quick:
        make_mixed(layer)
    states = [torch.randn(TIMED_TOKENS, columns) for _, columns in shapes]

    def seconds(layers: Sequence[nn.Linear]) -> float:
        start = time.thread_time()
        for layer, state in zip(layers, states, strict=True):
            layer(state)
        return max(time.thread_time() - start, 1e-9)

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = [seconds(exact) / seconds(quick) for _ in range(ROUNDS + 1)]
    finally:
        torch.set_num_threads(n_threads)
    return statistics.median(ratios[1:])  # the first pass of a process is slow
