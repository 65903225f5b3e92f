"""Whether the weights of a model in memory are still those that were looked at: a check that is cheap enough for every pass.

Modules and tensors are compared by identity, tensors also by their count of writes and by a few of their numbers: a write
through `.data` leaves no other trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = 16
"""Numbers of each weight that are looked at before every pass."""


@dataclass(frozen=True, eq=False)
class Seal:
    """How a model looked: its modules, its tensors, and some numbers of each."""

    modules: tuple[nn.Module, ...]
    """All of them, a module before those inside it."""
    parts: tuple[tuple[object, ...], ...]
    """For each module what it holds: the identities of its modules and of its tensors, and where the latter lie."""
    views: tuple[Tensor, ...]
    """Numbers of every tensor, in its own memory."""
    numbers: tuple[Tensor, ...]
    """What they were."""

    def holds(self) -> bool:
        """Return whether nothing was replaced, added, removed or written since."""
        return tuple(map(parts_of, self.modules)) == self.parts and self.same_numbers()

    def same_numbers(self) -> bool:
        """Return whether the numbers that are looked at are as they were."""
        return all(map(torch.equal, gathered(self.views), self.numbers))


def seal_of(hf: PreTrainedModel) -> Seal:
    """Look at a model as it is now."""
    modules = tuple(hf.modules())
    views = tuple(map(sample, tensors_of(modules)))
    return Seal(modules, tuple(map(parts_of, modules)), views, gathered(views))


def tensors_of(modules: tuple[nn.Module, ...]) -> Iterator[Tensor]:
    """Yield every weight once, but for those that were offloaded: they are elsewhere, and never the same tensor twice."""
    seen: set[int] = set()
    for module in modules:
        for tensor in module._parameters.values():
            if tensor is not None and not tensor.is_meta and tensor.numel() and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def parts_of(module: nn.Module) -> tuple[object, ...]:
    """Return what a module holds, in a form that changes when anything of it is replaced or written to."""
    weights = [
        (name, id(w), 0 if w.is_inference() else w._version, w.data_ptr())
        for name, w in module._parameters.items()
        if w is not None and not w.is_meta
    ]
    return (*map(id, module._modules.values()), *weights)


def sample(tensor: Tensor) -> Tensor:
    """Return a few numbers of a tensor from the beginning of its memory to the end, without a copy."""
    bare = tensor.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(bare.shape, bare.stride(), strict=True))
    n = min(SAMPLED, extent)
    return bare.as_strided((n,), (max(1, (extent - 1) // max(1, n - 1)),))


def gathered(views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the numbers of all views, put together by device and dtype: then they are compared in one go."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    # NaN is never equal to itself, so bits are compared
    return tuple(torch.cat(group).view(torch.uint8) for group in groups.values())


# -------------------------------------------------------------------------------------------------- what is remembered

_SEALS: WeakKeyDictionary[PreTrainedModel, Seal] = WeakKeyDictionary()
_TABLE = Lock()
"""Held while the table is looked into."""


def remember(hf: PreTrainedModel) -> None:
    """Keep how a model looks now."""
    seal = seal_of(hf)
    with _TABLE:
        _SEALS[hf] = seal


def last_seal(hf: PreTrainedModel) -> Seal | None:
    """Return how a model looked when that was last kept, if it was."""
    with _TABLE:
        return _SEALS.get(hf)


def modules_of(hf: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return all modules of a model, from the last look at it if there was one: walking over them takes milliseconds."""
    seal = last_seal(hf)
    return seal.modules if seal else tuple(hf.modules())


def devices_of(hf: PreTrainedModel) -> set[str]:
    """Return the kinds of devices that the weights of a model are on."""
    return {w.device.type for module in modules_of(hf) for w in module._parameters.values() if w is not None}


def n_weights(hf: PreTrainedModel) -> int:
    """Return how many weights a model has."""
    return sum(tensor.numel() for tensor in tensors_of(modules_of(hf)))
