"""Work in pieces that a killed run goes on with, and that ends with the same bytes as an undisturbed one.

A manifest says what the results in a folder depend on, and a run of anything else is refused; a lock keeps a second process
out; every piece is kept as soon as it is finished (`shards` has the journal of finished ones), and a damaged one is computed
again. Knows nothing of the work itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from coral_lens.errors import CoralError
from coral_lens.storage.files import (
    canonical,
    disk_errors,
    dotted_keys,
    json_bytes,
    read_record,
    sealed,
    write_atomic,
    write_new,
)
from coral_lens.storage.parts import Part
from coral_lens.storage.progress import Progress, done_before, note_beside
from coral_lens.storage.temporary import lock_file, remove_abandoned

Piece = TypeVar("Piece")
Result = TypeVar("Result")
PieceResult = TypeVar("PieceResult", contravariant=True)
Compute = Callable[[Sequence[Piece], Progress], Generator[Result, None, None]]


@runtime_checkable
class FinishedPieces(Protocol[PieceResult]):
    """The finished pieces in a folder, by their numbers: a form on the disk. `shards.Journal` is the usual one."""

    def intact(self, among: Collection[int] | None = None) -> set[int]:
        """Return the pieces that are there and not damaged, of these or of all."""

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
    compute: Compute[Piece, Result]
    """Yields the results of pieces in their order, and may be busy with the next ones while one is kept; it may tell the second
    argument how far it is. `each` makes one of what computes a single piece."""
    size: Callable[[Piece], int]
    """How much progress a piece is. What `compute` has not told of it is told when the piece is kept."""
    form: Callable[[Path], FinishedPieces[Result]]
    """Opens the finished pieces of the folder."""
    manifest: str = "manifest.json"
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of other files of the folder, by name; written where a file is missing or differs."""
    differing: Mapping[str, str] = field(default_factory=dict)
    """What a folder holds whose identity differs in this key, for people: `states of other questions`."""
    name: str = ""
    """What people call the folder, where it mirrors another place."""
    part: Part | None = None
    """Which of them are computed here, while other processes compute the others; None: all."""
    mixed: bool = False
    """Whether pieces that are left may be computed on another kind of device than those that are there."""

    def run(self, progress: Progress | None = None, *, elsewhere: Elsewhere | None = None) -> None:
        """Compute every piece that is not finished, with the number of threads that the first run had.

        `elsewhere` has them computed by others, and says which are finished.
        """
        with hold_lock(*self._lock()):
            path = self.folder / self.manifest
            manifest = open_manifest(path, self.identity, self.differing, name=self.name)
            for name, content in self.other_files.items():
                write_unless_same(self.folder / name, content)
            with thread_count(manifest.get("threads")):
                self._complete(self.form(self.folder), Counted(progress), manifest, elsewhere or self._here)

    def _lock(self) -> tuple[Path, str]:
        if self.part is None:
            return self.folder / ".lock", str(self.folder)
        return self.folder / f".part-{self.part.name}.lock", f"Part {self.part} of {self.folder}"

    def _complete(
        self, finished: FinishedPieces[Result], counted: Counted, manifest: dict[str, Any], compute: Elsewhere
    ) -> None:
        numbers = range(len(self.pieces)) if self.part is None else self.part.share(len(self.pieces))
        done = finished.intact(numbers)
        counted.before(sum(self.size(self.pieces[number]) for number in numbers if number in done))
        if todo := [number for number in numbers if number not in done]:
            if not self.mixed:
                refuse_other_device(self.folder, manifest, self.identity)
            compute(todo, finished, counted)
        finished.finish(len(self.pieces))

    def _here(self, todo: Sequence[int], finished: FinishedPieces[Result], counted: Counted) -> None:
        with closing(self.compute([self.pieces[number] for number in todo], counted)) as results:
            for number in todo:
                due = counted.total + self.size(self.pieces[number])
                finished.add(number, next(results))
                if counted.total < due:
                    counted(due - counted.total)


def each(compute: Callable[[Piece, Progress], Result]) -> Compute[Piece, Result]:
    """Return the computation of pieces one by one, each when the one before is kept."""

    def computed(pieces: Sequence[Piece], progress: Progress) -> Generator[Result, None, None]:
        for piece in pieces:
            yield compute(piece, progress)

    return computed


Elsewhere = Callable[[Sequence[int], Any, "Counted"], None]
"""Has the pieces of these numbers computed, tells the finished ones of each, and the progress."""


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

    def note(self, text: str) -> None:
        """Say something beside the numbers."""
        if self._progress:
            note_beside(self._progress, text)


def write_unless_same(path: Path, content: bytes) -> None:
    """Write a file that is missing or was damaged; another is not touched."""
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content)


# ------------------------------------------------------------------------------------------------------- identity

MAY_DIFFER = {"threads", "versions", "model.name", "device"}
"""A finished store is the same whatever computes the next one; an unfinished one keeps its own thread count, and is not gone on
with on another kind of device. The same model may be called by another name."""
MAY_LACK = "model.config."
"""Begins the names of values that are compared where both manifests have them: versions of transformers know more or fewer."""


def open_manifest(
    path: Path, wanted: dict[str, Any], differing: Mapping[str, str] | None = None, *, name: str = ""
) -> dict[str, Any]:
    """Write the manifest of new work, or check that the one that is there is of the same things, and return it.

    `differing` says for people what the folder holds where a key differs, the first that applies.
    """
    if begin_manifest(path, wanted):
        return wanted
    recorded, words, name = read_manifest(path), differing or {}, name or str(path.parent)
    defaults = {"edited": "", "readings": ""}
    here, asked = defaults | dotted_keys(recorded), defaults | dotted_keys(wanted)
    if any(key.startswith(MAY_LACK) for key in asked) and not any(key.startswith(MAY_LACK) for key in here):
        warnings.warn(
            f"{name} was made by an earlier version, which did not record the model's configuration: whether that is "
            "the same cannot be checked.",
            stacklevel=3,
        )
    others = [key for key in asked if differs(key, here, asked)]
    if key := next((key for key in words if key in others), None):
        difference = f"{key}: {shorten(here.get(key), 16)} there, {shorten(asked[key], 16)} now"
        raise CoralError(
            f"{name} holds {words[key]}: delete that folder to compute them anew, or choose another ({difference})."
        )
    if others:
        key = others[0]
        raise CoralError(
            f"{name} holds results of something else: {key} is {shorten(here.get(key))}, not "
            f"{shorten(asked[key])}. Choose another folder or delete this one."
        )
    return recorded


def begin_manifest(path: Path, wanted: dict[str, Any]) -> bool:
    """Write the manifest of new work and return True; False if there is one, or if another process was faster."""
    if path.exists():
        remove_abandoned(path)  # of a process that was killed just when it had given the file its name
        return False
    try:
        refuse_foreign(path.parent)
    except CoralError:
        if path.exists():  # another process has just begun
            return False
        raise
    return write_new(path, json_bytes(sealed(wanted)))


def refuse_other_device(folder: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with results on another kind of device: the last bits of some would be other than those of the rest."""
    there, here = recorded.get("device"), wanted.get("device")
    if there and here and there != here:
        raise CoralError(
            f"{folder} was begun on another kind of device ({there}, not {here}), and each rounds in its own way; go on there, "
            "or give `coral extract`, `run` or `reproduce` --mixed if that does not matter."
        )


def differs(key: str, here: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether a key says that results are of something else."""
    if key not in here:
        return not key.startswith(MAY_LACK) and key not in MAY_DIFFER
    return not {key, key.split(".")[0]} & MAY_DIFFER and here[key] != asked[key]


def read_manifest(path: Path, *, needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return the manifest of a folder, whole; without it nobody knows what the results depend on."""
    return read_record(path, remedy=f"restore it from a copy, or delete {path.parent} and make it again", needs=needs)


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds anything but has no manifest: it is somebody else's, or nobody knows what of."""
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        raise CoralError(
            f"{folder} holds {others[0]} and no manifest: something else made it, or its manifest is lost; choose a new folder, "
            "or delete this one if nothing in it is needed."
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
def hold_lock(lock: Path, place: Path | str) -> Iterator[None]:
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
