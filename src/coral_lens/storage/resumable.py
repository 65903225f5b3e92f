"""Work in pieces that a killed run goes on with, and that ends with the same bytes as an undisturbed one.

A manifest says what the results in a folder depend on, and a run of anything else is refused; a lock keeps a second process
out; every piece is kept as soon as it is finished (`shards` has the journal of finished ones), and a damaged one is computed
again. Knows nothing of the work itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from coral_lens.errors import CoralError
from coral_lens.storage.files import canonical, disk_errors, dotted_keys, read_record, write_atomic, write_record
from coral_lens.storage.progress import Progress, done_before
from coral_lens.storage.temporary import lock_file

Piece = TypeVar("Piece")
Result = TypeVar("Result")
PieceResult = TypeVar("PieceResult", contravariant=True)


@runtime_checkable
class FinishedPieces(Protocol[PieceResult]):
    """The finished pieces in a folder, by their numbers: a form on the disk. `shards.Journal` is the usual one."""

    def intact(self) -> set[int]:
        """Return the pieces that are there and not damaged."""

    def add(self, number: int, result: PieceResult) -> None:
        """Write the result of a piece; once this returns, a kill does not lose it."""

    def finish(self, n_pieces: int) -> None:
        """Leave the files as an undisturbed run of all pieces does."""


@dataclass(frozen=True)
class Resumable(Generic[Piece, Result]):
    """Work that is kept piece by piece in a folder."""

    folder: Path
    identity: dict[str, Any]
    """What the results depend on, as JSON: it becomes the manifest. Under `threads` is how many compute, if that matters."""
    pieces: Sequence[Piece]
    """All of them, in the same order at every run of the same identity."""
    compute: Callable[[Piece, Progress], Result]
    """Computes a piece; it may tell the second argument how far it is."""
    size: Callable[[Piece], int]
    """How much progress a piece is. What `compute` has not told of it is told when the piece is kept."""
    form: Callable[[Path], FinishedPieces[Result]]
    """Opens the finished pieces of the folder."""
    manifest: str = "manifest.json"
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of other files of the folder, by name; written where a file is missing or differs."""
    differing: Mapping[str, str] = field(default_factory=dict)
    """What a folder holds whose identity differs in this key, for people: `states of other questions`."""

    def run(self, progress: Progress | None = None) -> None:
        """Compute every piece that is not finished, with the number of threads that the first run had."""
        with locked(self.folder):
            manifest = open_manifest(self.folder / self.manifest, self.identity, self.differing)
            for name, content in self.other_files.items():
                write_unless_same(self.folder / name, content)
            with thread_count(manifest.get("threads")):
                self._complete(self.form(self.folder), Counted(progress))

    def _complete(self, finished: FinishedPieces[Result], counted: Counted) -> None:
        done = finished.intact()
        counted.before(sum(self.size(piece) for number, piece in enumerate(self.pieces) if number in done))
        for number, piece in enumerate(self.pieces):
            if number not in done:
                due = counted.total + self.size(piece)
                finished.add(number, self.compute(piece, counted))
                if counted.total < due:
                    counted(due - counted.total)
        finished.finish(len(self.pieces))


class Counted:
    """A Progress that also counts its total."""

    def __init__(self, progress: Progress | None) -> None:
        self.total, self._progress = 0, progress

    def __call__(self, n: int) -> None:
        self.total += n
        if self._progress:
            self._progress(n)

    def before(self, n: int) -> None:
        """Count what an earlier run has left."""
        self.total += n
        if self._progress:
            done_before(self._progress, n)


def write_unless_same(path: Path, content: bytes) -> None:
    """Write a file that is missing or was damaged; another is not touched."""
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content)


# ------------------------------------------------------------------------------------------------------- identity

MAY_DIFFER = {"threads", "versions", "model.name"}
"""A finished store is the same whatever computes the next one; an unfinished one keeps its own thread count. The same
model may be called by another name."""
MAY_LACK = "model.config."
"""Begins the names of values that are compared where both manifests have them: versions of transformers know more or fewer."""


def open_manifest(path: Path, wanted: dict[str, Any], differing: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write the manifest of new work, or check that the one that is there is of the same things, and return it.

    `differing` says for people what the folder holds where a key differs, the first that applies.
    """
    if not path.exists():
        refuse_foreign(path.parent)
        write_record(path, wanted)
        return wanted
    recorded, words = read_manifest(path), differing or {}
    defaults = {"edited": "", "readings": ""}
    here, asked = defaults | dotted_keys(recorded), defaults | dotted_keys(wanted)
    if any(key.startswith(MAY_LACK) for key in asked) and not any(key.startswith(MAY_LACK) for key in here):
        warnings.warn(
            f"{path.parent} was made by an earlier version, which did not record the model's configuration: whether that is "
            "the same cannot be checked.",
            stacklevel=3,
        )
    others = [key for key in asked if differs(key, here, asked)]
    if key := next((key for key in words if key in others), None):
        difference = f"{key}: {shorten(here.get(key), 16)} there, {shorten(asked[key], 16)} now"
        raise CoralError(
            f"{path.parent} holds {words[key]}: delete that folder to compute them anew, or choose another ({difference})."
        )
    if others:
        key = others[0]
        raise CoralError(
            f"{path.parent} holds results of something else: {key} is {shorten(here.get(key))}, not "
            f"{shorten(asked[key])}. Choose another folder or delete this one."
        )
    return recorded


def differs(key: str, here: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether a key says that results are of something else."""
    if key not in here:
        return not key.startswith(MAY_LACK)
    return not {key, key.split(".")[0]} & MAY_DIFFER and here[key] != asked[key]


def read_manifest(path: Path, *, needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return the manifest of a folder, whole; without it nobody knows what the results depend on."""
    return read_record(path, remedy=f"restore it from a copy, or delete {path.parent} and make it again", needs=needs)


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds anything but has no manifest: it is somebody else's, or nobody knows what of."""
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        raise CoralError(
            f"{folder} holds {others[0]} and no manifest, so it is not a folder of ours, or what it depends on is lost; choose "
            "another folder, or delete this one."
        )


def shorten(value: Any, most: int = 80) -> str:
    """Return a value as short text for an error."""
    text = canonical(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---------------------------------------------------------------------------------------------- one process at a time


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from writing to the same folder."""
    with hold_lock(folder / ".lock", folder):
        yield


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Keep a second process from writing to the same file; others of its folder may be written."""
    with hold_lock(path.with_name(f".{path.name}.lock"), path):
        yield


@contextmanager
def hold_lock(lock: Path, place: Path) -> Iterator[None]:
    """Hold a lock, where the system can lock files; an error says that `place` is being written."""
    with ExitStack() as stack:
        with disk_errors(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            is_free = stack.enter_context(lock_file(lock))
        if not is_free:
            raise CoralError(f"{place} is being written by another process; wait for it or choose another folder.")
        yield


@contextmanager
def thread_count(n: int | None) -> Iterator[None]:
    """Compute with n threads, where results depend on their number: it changes the rounding of a product that they divide."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
