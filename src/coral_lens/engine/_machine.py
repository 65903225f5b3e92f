"""What was found out about a model on this machine, kept in the user's cache: whether trees are exact, which batches are fast.

A record is of one model, machine, thread count and set of versions. One that is missing, damaged or cannot be written is
found out again: nothing depends on it but time.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coral_lens.data.assets import cache_dir
from coral_lens.errors import CoralError
from coral_lens.storage.files import digest, versions, write_record

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


SMALLEST = 20_000_000
"""Weights below which a model is scored so fast that nothing is worth keeping."""


def is_tiny(model: Model) -> bool:
    """Tell whether a model is so small that looking at it again costs nothing."""
    return sum(p.numel() for p in model.hf.parameters()) < SMALLEST


def record_path(model: Model, kind: str) -> Path:
    """Return where a record of some kind is kept for this model, machine, thread count and these versions."""
    identity = {
        "model": model.identity,
        "family": repr(model.family),
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "machine": [platform.node(), platform.machine()],
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    return cache_dir() / kind / f"{digest(identity)[:32]}.json"


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a record, unless the cache cannot be written: the next run then finds it out again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record)
    except (OSError, CoralError):
        return
