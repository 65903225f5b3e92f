"""What was found out on this machine, kept in the user's cache: whether trees are exact, what is fast, digests of large files.

A record is of one model, machine, thread count and set of versions, or of files of one size, time and place. One that is
missing, damaged or cannot be written is found out again: nothing depends on it but time.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coral_lens.data.assets import cache_dir
from coral_lens.engine._seals import n_weights
from coral_lens.errors import CoralError
from coral_lens.storage.files import digest, digest_file, kept_record, versions, write_record

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


BUSY = 0.6
"""Of the cores, how many may be at work before anything of ours runs."""
SMALLEST = 20_000_000
"""Weights below which a model is scored so fast that nothing is worth keeping."""


def is_tiny(model: Model) -> bool:
    """Tell whether a model is so small that looking at it again costs nothing."""
    return n_weights(model.hf) < SMALLEST


def is_busy() -> bool:
    """Tell whether others have used much of this machine in the last minute, so that times would say little."""
    if not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)


def record_path(model: Model, kind: str) -> Path:
    """Return where a record of some kind is kept for this model, machine, thread count and these versions."""
    identity = {
        "model": model.identity,
        "family": repr(model.family),
        "dtype": model.precision,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        **machine_facts(),
    }
    return cache_dir() / kind / f"{digest(identity)[:32]}.json"


def machine_facts() -> dict[str, Any]:
    """Return what the time of a computation depends on beside the computation."""
    return {
        "machine": [platform.node(), platform.machine()],
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a record, unless the cache cannot be written: the next run then finds it out again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record)
    except (OSError, CoralError):
        return


# ---------------------------------------------------------------------------------------------------------------- files


def remembered(kind: str, identity: Any, find_out: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of some kind that is kept under this identity; the first time, find it out and keep it."""
    path = cache_dir() / kind / f"{digest(identity)[:32]}.json"
    record = kept_record(path)
    if record is None:
        record = find_out()
        keep(path, record)
    return record


def file_facts(paths: Iterable[Path]) -> list[list[Any]]:
    """Return what changes when a file is written or replaced: its place, size, time and number on the disk."""
    stats = [(path.resolve(), path.stat()) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]


def known_digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it was written since."""
    record = remembered("digests", file_facts([path]), lambda: {"sha256": digest_file(path)})
    return str(record["sha256"])
