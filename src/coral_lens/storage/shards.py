"""A folder of checked shards: what resumable work is written to. Knows nothing of what the tensors hold.

A manifest says what the folder is of, and a run of anything else is refused; a lock keeps a second process out; a journal has
one line per finished shard, with a digest for each of its tensors, so that a killed run goes on where it was and damage is
noticed. Files are written under a temporary name and renamed. Never pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.storage.files import canonical, digest, digest_bytes, disk_errors, read_json, write_atomic, write_json

MAY_DIFFER = {"threads", "versions", "model.name"}
"""A finished store is the same whatever computes the next one; an unfinished one keeps its own thread count. The same
model may be called by another name."""
FLOAT16_MAX = 65504.0


def open_manifest(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest of a new store, or check that the one that is there is of the same things."""
    path = folder / "manifest.json"
    if not path.exists():
        write_json(path, wanted)
        return wanted
    found = read_json(path)
    none = {"edited": "", "readings": ""}
    here = none | flat(found)
    for key, value in (none | flat(wanted)).items():
        if key not in here or (not {key, key.split(".")[0]} & MAY_DIFFER and here[key] != value):
            raise CoralError(
                f"{folder} holds activations of something else: {key} is {shorten(here.get(key))}, not "
                f"{shorten(value)}. Choose another folder or delete this one."
            )
    return found


def flat(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with `model.weights` instead of weights inside model, so that a difference can be named."""
    nested = {f"{k}.{inner}": v for k, some in manifest.items() if isinstance(some, dict) for inner, v in some.items()}
    return {k: v for k, v in manifest.items() if not isinstance(v, dict)} | nested


def shorten(value: Any) -> str:
    """Return a value as short text for an error."""
    text = canonical(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from writing to the same store, where the system can lock files."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CoralError(
                f"{folder} is being written by another process; wait for it or choose another folder."
            ) from None
        yield


@contextmanager
def thread_count(n: int) -> Iterator[None]:
    """Compute with n threads: the number of threads changes the rounding of a matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compact(tensor: Tensor) -> Tensor:
    """Return float32 states in float16 where they fit its range, else as they are: never an inf. Other types stay."""
    if tensor.dtype != torch.float32 or bool((tensor.abs() > FLOAT16_MAX).any()):
        return tensor
    return tensor.half()


class Journal:
    """The finished shards of a store. A line is added only after its shard is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "journal.jsonl"
        self.entries: dict[int, dict[str, str]] = {}
        self._clean = True
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else ():
            entry = parse_entry(line)
            if entry is None:
                self._clean = False  # the line that was being written when the run was killed
            else:
                self.entries[entry[0]] = entry[1]

    def drop_damaged(self) -> None:
        """Forget shards whose file is missing or does not match its digests, so that they are computed again."""
        for shard, digests in list(self.entries.items()):
            if damaged_tensors(shard_path(self.folder, shard), digests):
                del self.entries[shard]
                self._clean = False

    def add(self, shard: int, tensors: dict[str, Tensor]) -> None:
        """Write a shard, then its line."""
        self.entries[shard] = {name: digest_tensor(t) for name, t in tensors.items()}
        write_atomic(shard_path(self.folder, shard), save_tensors(tensors))
        if not self._clean or shard != max(self.entries):
            self._rewrite()
            return
        with disk_errors(self.path), self.path.open("ab") as file:
            file.write(self._line(shard))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, n_shards: int) -> None:
        """Check that every shard is there and leave the lines in order."""
        assert sorted(self.entries) == list(range(n_shards)), "shards are missing"
        if not self._clean or list(self.entries) != sorted(self.entries):
            self._rewrite()

    def _line(self, shard: int) -> bytes:
        return (canonical({"shard": shard, "sha256": self.entries[shard]}) + "\n").encode()

    def _rewrite(self) -> None:
        self.entries = dict(sorted(self.entries.items()))
        write_atomic(self.path, b"".join(self._line(i) for i in self.entries))
        self._clean = True


def parse_entry(line: bytes) -> tuple[int, dict[str, str]] | None:
    """Return a journal line's shard and digests, or None if the line is cut or damaged."""
    try:
        entry = json.loads(line)
        return (int(entry["shard"]), dict(entry["sha256"])) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def shard_path(folder: Path, shard: int) -> Path:
    """Return the file of a shard."""
    return folder / f"shard-{shard:05d}.safetensors"


def digest_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes: a damaged header is noticed as damaged values are."""
    raw = tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b""
    return digest([str(tensor.dtype), list(tensor.shape), digest_bytes(raw)])


def damaged_tensors(path: Path, digests: dict[str, str]) -> list[str]:
    """Return the names of tensors that are missing from a shard or differ from their digest."""
    return [name for name, wanted in digests.items() if read_tensor(path, name, wanted) is None]


def read_tensor(path: Path, name: str, wanted: str) -> Tensor | None:
    """Map one tensor of a shard and check it; the others are not read. None if it is missing or damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError):
        return None
    return tensor if digest_tensor(tensor) == wanted else None
