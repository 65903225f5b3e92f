"""A folder of checked shards: the usual form of resumable work. Knows nothing of what the tensors hold.

    journal.jsonl             one line per finished shard, with a digest for each of its tensors
    shard-00000.safetensors   the tensors of a shard

A shard is written under a temporary name and renamed, and only then has its line. So a killed run goes on where it was, and
damage is noticed. Never pickle.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.storage.files import append_line, canonical, digest, digest_bytes, lines_of, write_atomic

FLOAT16_MAX = 65504.0


def compact(tensor: Tensor) -> Tensor:
    """Return float32 states in float16 where they fit its range, else as they are: never an inf. Other types stay."""
    if tensor.dtype != torch.float32 or bool((tensor.abs() > FLOAT16_MAX).any()):
        return tensor
    return tensor.half()


class Journal:
    """The finished shards of a folder. A line is added only after its shard is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "journal.jsonl"
        self.entries: dict[int, dict[str, str]] = {}
        """The digests of each shard's tensors, by their names."""
        self._clean = True
        for line in lines_of(self.path):
            entry = parse_entry(line)
            if entry is None:
                self._clean = False  # the line that was being written when the run was killed
            else:
                self.entries[entry[0]] = entry[1]

    def intact(self) -> set[int]:
        """Return the finished shards. One whose file is missing or does not match its digests is forgotten."""
        for shard, digests in list(self.entries.items()):
            if damaged_tensors(shard_path(self.folder, shard), digests):
                del self.entries[shard]
                self._clean = False
        return set(self.entries)

    def add(self, number: int, result: dict[str, Tensor]) -> None:
        """Write the tensors of a shard, then its line."""
        self.entries[number] = {name: digest_tensor(t) for name, t in result.items()}
        write_atomic(shard_path(self.folder, number), save_tensors(result))
        if not self._clean or number != max(self.entries):
            self._rewrite()
        else:
            append_line(self.path, self._line(number))

    def finish(self, n_pieces: int) -> None:
        """Check that every shard is there and leave the lines in order."""
        assert sorted(self.entries) == list(range(n_pieces)), "shards are missing"
        if not self._clean or list(self.entries) != sorted(self.entries):
            self._rewrite()

    def tensors(self, shard: int, *names: str) -> dict[str, Tensor]:
        """Return tensors of a shard, all of them if none is named; damage is refused."""
        digests, path = self.entries[shard], shard_path(self.folder, shard)
        tensors = {name: read_tensor(path, name, digests[name]) for name in names or digests}
        if any(tensor is None for tensor in tensors.values()):
            raise CoralError(f"{path} is damaged; run the same command again and only this shard is computed anew.")
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

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
    except (ValueError, KeyError, TypeError, RecursionError):
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
