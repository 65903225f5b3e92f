"""Whether the weights of a model in memory are still those that were looked at: a check that is cheap enough for every pass.

Modules and tensors are compared by identity, tensors also by their count of writes and by a few of their numbers: a write
through `.data` leaves no other trace. For those who want to know it of every number there are sums over all bits, taken once:
they cost little more than reading the memory, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from coral_lens.storage.files import digest_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = 16
"""Numbers of each weight that are looked at before every pass."""
ACROSS = 1024
"""Words of 8 bytes in a row of the table that the bits of a tensor are summed up in, by rows and by columns."""
Bits = tuple[torch.dtype, str]
"""The dtype of a tensor, and a digest of all its numbers."""


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
    bits: Mapping[str, Bits]
    """The dtype and a digest of all numbers of each tensor, by its name."""

    def holds(self) -> bool:
        """Return whether nothing was replaced, added, removed or written since."""
        return tuple(map(parts_of, self.modules)) == self.parts and self.same_numbers()

    def same_numbers(self) -> bool:
        """Return whether the numbers that are looked at are as they were."""
        return all(map(torch.equal, gathered(self.views), self.numbers))


def seal_of(hf: PreTrainedModel, bits: Mapping[str, Bits]) -> Seal:
    """Look at a model as it is now."""
    modules = tuple(hf.modules())
    tensors = {id(t): t for module in modules for _, t in tensors_of(module) if t.numel()}
    views = tuple(map(sample, tensors.values()))
    return Seal(modules, tuple(map(parts_of, modules)), views, gathered(views), bits)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a module itself computes with, but for what was offloaded: it is elsewhere, and never the same tensor twice."""
    for name, weight in module._parameters.items():
        if weight is not None and not weight.is_meta:
            yield name, weight
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta and not is_set_anew(module, name):
            yield name, buffer


def is_set_anew(module: nn.Module, name: str) -> bool:
    """Tell whether a module sets a buffer by itself as rows come: dynamic and LongRoPE their frequencies, by the length."""
    kind = str(vars(module).get("rope_type", ""))
    return ("dynamic" in kind or "longrope" in kind) and "inv_freq" in name and "original" not in name


def parts_of(module: nn.Module) -> tuple[object, ...]:
    """Return what a module holds, in a form that changes when anything of it is replaced or written to."""
    tensors = [(name, id(t), 0 if t.is_inference() else t._version, t.data_ptr()) for name, t in tensors_of(module)]
    return (*map(id, module._modules.values()), *tensors)


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


# ----------------------------------------------------------------------------------------------------------- all numbers


def all_bits(hf: PreTrainedModel) -> dict[str, Bits]:
    """Return the dtype and a digest of all numbers of each tensor that a model computes with, by its first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for place, module in hf.named_modules():
        for name, tensor in tensors_of(module):
            named.setdefault(id(tensor), (f"{place}.{name}" if place else name, tensor))
    return {name: (tensor.dtype, bits_of(tensor)) for name, tensor in named.values()}


@torch.inference_mode()
def bits_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape and of the sums of its bits, laid into a table of words, over rows and over columns.

    Sums of whole numbers are the same in any order, and no change of one word, nor a swap of two, leaves all as they were.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    n = raw.numel() // (8 * ACROSS) * 8 * ACROSS
    table = raw[:n].view(torch.int64).view(-1, ACROSS)
    sums = torch.cat([table.sum(dim=0), table.sum(dim=1)]).view(torch.uint8)
    summed = torch.cat([sums, raw[n:]]).cpu().numpy()
    return f"{tuple(tensor.shape)} {digest_bytes(summed.data)}"


# -------------------------------------------------------------------------------------------------- what is remembered

_SEALS: WeakKeyDictionary[PreTrainedModel, Seal] = WeakKeyDictionary()
_TABLE = Lock()
"""Held while the table is looked into."""


def remember(hf: PreTrainedModel, bits: Mapping[str, Bits] | None = None) -> None:
    """Keep how a model looks now; `bits` where they are known already."""
    seal = seal_of(hf, all_bits(hf) if bits is None else bits)
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
    weights = {id(w): w for module in modules_of(hf) for w in module._parameters.values() if w is not None}
    return sum(weight.numel() for weight in weights.values() if not weight.is_meta)
