"""A folder of checked shards: the usual form of resumable work. Knows nothing of what the tensors hold.

    journal.jsonl             one line per finished shard, with a digest for each of its tensors
    shard-00000.safetensors   the tensors of a shard
    journal-3-of-16-*.jsonl   the same lines, of a process that works on a part; gone when all are finished

A shard is written under a temporary name and renamed, and only then has its line. So a killed run goes on where it was, and
damage is noticed. Never pickle.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.storage.files import append_line, canonical, digest, digest_bytes, lines_of, write_atomic
from coral_lens.storage.parts import Part
from coral_lens.storage.places import Place, as_place
from coral_lens.storage.temporary import remove_abandoned_like

FLOAT16_MAX = 65504.0
MAIN = "journal.jsonl"
PART_NAME = re.compile(r"journal-\d+-of-\d+-[0-9a-f]{8}\.jsonl")
SHARD_NAMES = r"shard-\d{5,}\.safetensors"
LINES = 64
"""Of a journal where nothing can be added to a file: it is put there whole for every line, so that a long one is a new one."""
AT_ONCE = 16
"""So many shards are fetched side by side."""


def compact(tensor: Tensor) -> Tensor:
    """Return float32 states in float16 where they fit its range, else as they are: never an inf. Other types stay."""
    if tensor.dtype != torch.float32 or bool((tensor.abs() > FLOAT16_MAX).any()):
        return tensor
    return tensor.half()


class Journal:
    """The finished shards of a folder. A line is added only after its shard is on the disk.

    Processes that work on parts of one folder have a journal each (`part_journals`), which are read as one.
    """

    alone = True
    """Whether nobody else is expected to write shards."""

    flush_seconds = 0.0
    """Between two waits for the disk, where lines come faster: a power cut may lose these, and their shards are made again."""

    def __init__(self, where: Path | Place) -> None:
        self.place = as_place(where)
        self.folder = folder = self.place.folder
        self.path = folder / MAIN
        self.entries: dict[int, dict[str, str]] = {}
        """The digests of each shard's tensors, by their names."""
        self.announced = 0
        """How many shards there are in all, where a part has said so."""
        self._clean = True
        self._size = 0
        """Bytes of its own file as this process knows it."""
        self._flushed, self._is_flushed = float("-inf"), True
        # the main one last: whoever merges the others into it removes them afterwards
        for path in (*part_journals(folder), self.path):
            lines = lines_of(path)
            for line in lines:
                self._read(line, path)
            self._size = sum(map(len, lines))

    def _read(self, line: bytes, path: Path) -> None:
        entry = parse_entry(line)
        if entry is None:
            self.announced = max(self.announced, parse_announcement(line))
            self._clean = self._clean and path != self.path  # the line that was being written when the run was killed
            return
        shard, digests = entry
        known = self.entries.get(shard)
        # two processes may have computed a shard: what counts is the file that is there
        if known is None or known == digests or self._is_damaged(shard):
            self.entries[shard] = digests

    def intact(self, among: Collection[int] | None = None) -> set[int]:
        """Return the finished shards among these numbers, or all. One that is missing or does not match its digests is forgotten.

        What killed runs left on the way to shards is removed, unless other processes are expected to be writing.
        """
        if self.alone:
            remove_abandoned_like(self.folder, SHARD_NAMES)
        shards = [shard for shard in self.entries if among is None or shard in among]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # bytes are hashed side by side
            damaged = list(pool.map(self._is_damaged, shards))
        for shard in compress(shards, damaged):
            del self.entries[shard]
            self._clean = False
        return set(shards) & self.entries.keys()

    def _is_damaged(self, shard: int) -> bool:
        with self.place.whole(shard_path(self.folder, shard)) as path:
            return bool(damaged_tensors(path, self.entries[shard]))

    def add(self, number: int, result: dict[str, Tensor]) -> None:
        """Write the tensors of a shard, then its line."""
        self.note(number, write_shard(self.place, number, result))

    def note(self, number: int, digests: dict[str, str]) -> None:
        """Add the line of a shard that is on the disk."""
        self.entries[number] = digests
        if self._clean:
            self._append(self._line(number))
        else:
            self._rewrite()

    def _append(self, line: bytes) -> None:
        """Add a line to a file that nobody else may have written to: where files cannot be locked, that shows here."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            raise CoralError(
                f"{self.folder} is being written by another process, which has changed {self.path.name}; wait for it, then run "
                "the same command again."
            )
        due = time.monotonic() - self._flushed >= self.flush_seconds
        append_line(self.path, line, flush=due)
        self._flushed, self._is_flushed = (time.monotonic() if due else self._flushed), due
        self._size += len(line)

    def finish(self, n_pieces: int) -> None:
        """Check that every shard is there, leave the lines in order, and of other journals nothing."""
        assert sorted(self.entries) == list(range(n_pieces)), "shards are missing"
        parts = part_journals(self.folder)
        if parts or not self._clean or not self._is_flushed or list(self.entries) != sorted(self.entries):
            self._rewrite()
        for path in parts:  # a process that still writes one repeats what is known
            self.place.remove(path)
        remove_abandoned_like(self.folder, SHARD_NAMES)

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
        data = b"".join(self._line(i) for i in self.entries)
        write_atomic(self.path, data)
        self.place.wrote(self.path)
        self._clean, self._is_flushed, self._size = True, True, len(data)


class PartJournal(Journal):
    """The finished shards of a folder, for one of several processes that work on it: its own lines are in a file of its own.

    Nobody else ever writes to that file, so that nothing is lost where files cannot be locked.
    """

    alone = False

    def __init__(self, where: Path | Place, part: Part, n_pieces: int) -> None:
        super().__init__(where)
        self.part, self.n_pieces = part, n_pieces
        self._begin()

    def _begin(self) -> None:
        """Begin a file of its own."""
        self.path, self._n_lines = self.folder / f"journal-{self.part.name}-{secrets.token_hex(4)}.jsonl", 0

    def note(self, number: int, digests: dict[str, str]) -> None:
        """Add the line of a shard that is on the disk; the first line of all says how many shards there are."""
        if self._n_lines == LINES and not self.place.appends:
            self._show()
            self._begin()
        if not self.path.exists():
            append_line(self.path, (canonical({"shards": self.n_pieces}) + "\n").encode())
        self.entries[number] = digests
        append_line(self.path, self._line(number))
        self._n_lines, self._is_flushed = self._n_lines + 1, False
        if time.monotonic() - self._flushed >= self.flush_seconds:
            self._show()

    def _show(self) -> None:
        """Show its lines to all."""
        if not self._is_flushed:
            self.place.wrote(self.path)
            self._flushed, self._is_flushed = time.monotonic(), True

    def finish(self, n_pieces: int) -> None:
        """Leave the files as a run of all pieces does if no other process has anything left to do."""
        self._show()
        self.place.refresh()
        everyones = Journal(self.place)
        if len(everyones.entries) == n_pieces:
            everyones.finish(n_pieces)


def open_journal(where: Path | Place, part: Part | None, n_pieces: int) -> Journal:
    """Open the finished shards of a place, for a process that computes a part of them or all.

    Where nothing can be added to a file, a process that computes all has a journal of its own too.
    """
    place = as_place(where)
    if part is None and place.appends:
        return Journal(place)
    return PartJournal(place, part or Part(1, 1), n_pieces)


def part_journals(folder: Path) -> list[Path]:
    """Return the journals of processes that work, or worked, on parts of a folder."""
    return sorted(path for path in folder.glob("journal-*-of-*.jsonl") if PART_NAME.fullmatch(path.name))


def write_shard(where: Path | Place, number: int, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write the tensors of a shard and return their digests. Two processes may write the same one at once."""
    place = as_place(where)
    path = shard_path(place.folder, number)
    write_atomic(path, save_tensors(tensors), sweep=False)
    place.wrote(path)
    return {name: digest_tensor(tensor) for name, tensor in tensors.items()}


def parse_entry(line: bytes) -> tuple[int, dict[str, str]] | None:
    """Return a journal line's shard and digests, or None if the line is cut or damaged."""
    try:
        entry = json.loads(line)
        return (int(entry["shard"]), dict(entry["sha256"])) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_announcement(line: bytes) -> int:
    """Return how many shards there are in all if a line says that, else 0."""
    try:
        return int(json.loads(line)["shards"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0


def shard_path(folder: Path, shard: int) -> Path:
    """Return the file of a shard."""
    return folder / f"shard-{shard:05d}.safetensors"


def digest_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes: a damaged header is noticed as damaged values are."""
    raw = tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b""
    return digest([str(tensor.dtype), list(tensor.shape), digest_bytes(raw)])


def damaged_tensors(path: Path, digests: dict[str, str]) -> list[str]:
    """Return the names of tensors that are missing from a shard or differ from their digest; the file is opened once."""
    try:
        with safe_open(str(path), framework="pt") as file:
            held = set(file.keys())
            return [n for n, wanted in digests.items() if n not in held or digest_tensor(file.get_tensor(n)) != wanted]
    except (OSError, SafetensorError, ValueError):
        return list(digests)


def read_tensor(path: Path, name: str, wanted: str) -> Tensor | None:
    """Map one tensor of a shard and check it; the others are not read. None if it is missing or damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError):
        return None
    return tensor if digest_tensor(tensor) == wanted else None


def bring_column(place: Place, name: str, shards: Mapping[int, Mapping[str, str]]) -> None:
    """Have a tensor of all shards in the folder of a place, as far as it can be had; `shards` has their digests."""

    def bring(shard: int) -> None:
        path, wanted = shard_path(place.folder, shard), shards[shard][name]
        for anew in (False, True):
            if read_tensor(path, name, wanted) is None:
                place.fetch_tensor(path, name, anew=anew)

    if not place.appends:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(bring, [shard for shard in shards if name in shards[shard]]))
