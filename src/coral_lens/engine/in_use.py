"""A model while the engine computes with it: one thread at a time, in the modes that results are measured in.

Hooks, attention by blocks and fused modules are on a model while a pass runs, and a second thread would meet them. So every
pass holds the model's lock. It also leaves training mode, autocast and another default dtype, and refuses weights that are no
longer those of the fingerprint. Afterwards the model is as it was found. Computes nothing by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock, get_ident
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from coral_lens.engine._seals import Bits, Seal, all_bits, last_seal, modules_of, remember
from coral_lens.engine.fingerprints import is_quantised, weights_digest
from coral_lens.engine.precision import CONVERTED
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coral_lens.engine.model import Model


class Hold:
    """Who computes with a model: its lock, the thread that has it, and how many passes of that lie inside each other."""

    def __init__(self) -> None:
        self.lock, self.thread, self.depth = RLock(), 0, 0
        self.is_torn = False
        """Whether this process is a fork, made in the midst of a pass that no thread of it will end."""


_HOLDS: WeakKeyDictionary[PreTrainedModel, Hold] = WeakKeyDictionary()
_TABLE = Lock()
"""Held while the table above is looked into."""


@contextmanager
def in_use(model: Model) -> Iterator[None]:
    """Have a model for this thread alone while the block runs, in evaluation mode and its own precision."""
    refuse_fork()
    with _TABLE:
        hold = _HOLDS.setdefault(model.hf, Hold())
    if hold.is_torn:
        raise CoralError(
            f"This process was forked while another thread computed with {model.name!r}, which is left in the midst of that: "
            'load it again here, or start workers with multiprocessing.get_context("spawn").'
        )
    with hold.lock:
        hold.thread, hold.depth = get_ident(), hold.depth + 1
        try:
            if hold.depth > 1:  # a pass inside a pass
                yield
                return
            refuse_changed(model)
            with evaluating(model.hf), default_dtype(), without_autocast(model.device.type):
                yield
        finally:
            hold.depth -= 1


# -------------------------------------------------------------------------------------------------------------- modes


@contextmanager
def evaluating(hf: PreTrainedModel) -> Iterator[None]:
    """Take the modules that are in training mode out of it: dropout would change every score."""
    training = [module for module in modules_of(hf) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Compute in the model's own precision inside somebody's autocast too."""
    with ExitStack() as stack:
        for kind in {"cpu", device} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Default:
    """The default dtype of the process, as it was before the first of all passes that run now."""

    lock = Lock()
    n_passes = 0
    before = torch.float32


@contextmanager
def default_dtype() -> Iterator[None]:
    """Make float32 the default dtype; the last pass to end sets it back, because all threads share it."""
    with _Default.lock:
        if _Default.n_passes == 0:
            _Default.before = torch.get_default_dtype()
            if _Default.before != torch.float32:
                torch.set_default_dtype(torch.float32)
        _Default.n_passes += 1
    try:
        yield
    finally:
        with _Default.lock:
            _Default.n_passes -= 1
            if _Default.n_passes == 0 and _Default.before != torch.float32:
                torch.set_default_dtype(_Default.before)


# ------------------------------------------------------------------------------------------------------------ weights


def refuse_changed(model: Model, *, full: bool = False) -> None:
    """Refuse a model whose weights are no longer those of its fingerprint.

    Some numbers of every weight and buffer are looked at, and whether a tensor was replaced or written to; all of them if that
    tells of a change, or if `full`.
    """
    seal = last_seal(model.hf)
    holds = seal is not None and seal.holds()
    if holds and not full:
        return
    bits = all_bits(model.hf)
    if (seal is not None and is_changed(model, seal, bits)) or not is_of_fingerprint(model):
        raise CoralError(
            f"The weights of {model.name!r} have changed since it was loaded (edited in place, cast, or an adapter was added), "
            "so its fingerprint is no longer true; give the changed model to `coral_lens.wrap` and use what that returns."
        )
    if not holds:
        remember(model.hf, bits)


def is_changed(model: Model, seal: Seal, bits: Mapping[str, Bits]) -> bool:
    """Tell whether any number is another one than when the model was looked at last.

    A weight that was cast to another dtype since has other bits: there the fingerprint must do, where it can.
    """
    if seal.bits.keys() != bits.keys() or not seal.same_numbers():
        return True
    weights = {name for name, _ in model.hf.named_parameters()} if has_digest(model) else set()
    cast = {name for name in weights & bits.keys() if bits[name][0] != seal.bits[name][0]}
    return any(bits[name] != seal.bits[name] for name in bits.keys() - cast)


def is_of_fingerprint(model: Model) -> bool:
    """Tell whether the weights have the digest of the fingerprint, where that can be told."""
    return not has_digest(model) or weights_digest(model.hf) == model.fingerprint["weights"]


def has_digest(model: Model) -> bool:
    """Tell whether weights are as they were when their digest was taken: not converted, nor laid out anew by a library."""
    return model.precision not in CONVERTED and not is_quantised(model.hf)


# --------------------------------------------------------------------------------------------------------------- forks


class _Process:
    """Which process has computed with several threads."""

    computed: int | None = None


def refuse_fork() -> None:
    """Refuse to compute in a process that was forked from one that had started OpenMP's threads: it would hang for ever."""
    threads = torch.get_num_threads()
    if threads > 1 and _Process.computed not in (None, os.getpid()):
        raise CoralError(
            f"This process was forked from one that has computed with {threads} threads, and would hang: start workers with "
            'multiprocessing.get_context("spawn"), or call torch.set_num_threads(1) first.'
        )
    if threads > 1:
        _Process.computed = os.getpid()


def begin_fork() -> None:
    """Make the locks anew in a fork: of the threads that may have held them, only the one that forked is there."""
    global _TABLE
    _TABLE, _Default.lock = Lock(), Lock()
    for hold in _HOLDS.values():
        if hold.depth and hold.thread != get_ident():
            hold.is_torn, hold.depth = True, 0
            _Default.n_passes -= 1
        hold.lock = hold.lock if hold.depth else RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=begin_fork)
