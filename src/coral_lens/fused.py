"""Compute a model's norms and gates with fewer passes over memory, while a `with` runs; the model itself is not changed.

Only modules of the classes named here are touched, whose definition in transformers is known, and only in float32 on the
CPU. Results differ from transformers' own by rounding alone. Everything else is computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")
"""Families whose RMSNorm is weight * x / rms(x), without Gemma's 1 + weight."""
GATED = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Families whose MLP is down(act(gate(x)) * up(x)), each a layer of its own."""


def rms_norm(module: Any, states: Tensor) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps); the squares are summed without being written out."""
    scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_().div_(states.shape[-1])
    return (states * scale.add_(module.variance_epsilon).rsqrt_()).mul_(module.weight)


def gated_mlp(module: Any, states: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)), in the memory of the gate."""
    gate = nn.functional.silu(module.gate_proj(states), inplace=True)
    return module.down_proj(gate.mul_(module.up_proj(states)))


def is_silu(module: nn.Module) -> bool:
    """Tell whether the activation of an MLP is SiLU, under either of its names."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def substitute(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the function that computes what a module does, or None where none is known to."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in {f"{family}RMSNorm" for family in FAMILIES}:
        return rms_norm
    if kind.__name__ in {f"{family}MLP" for family in GATED} and is_silu(module):
        return gated_mlp
    return None


@contextmanager
def fused(hf: PreTrainedModel) -> Iterator[None]:
    """Let the norms and MLPs of a model be computed by the functions above; their hooks run as ever."""
    with ExitStack() as stack:
        if hf.dtype == torch.float32 and hf.device.type == "cpu":
            for module in hf.modules():
                function = substitute(module)
                # a module with a forward of its own (weights kept elsewhere) has been changed by somebody else
                if function is not None and "forward" not in vars(module):
                    module.forward = partial(function, module)
                    stack.callback(delattr, module, "forward")
        yield
