"""Where a store is: a folder, or a URL that a folder of this machine mirrors. All other code works on the folder.

A process that writes has a mirror of its own, under TMPDIR while it works: each file that is whole is put at the URL, a shard
before the line of a journal that tells of it. A process that reads has a mirror in the cache, and fetches what it reads of it.
What is at the URL is the truth; a mirror holds nothing else that counts.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from coral_lens.errors import CoralError
from coral_lens.storage.files import digest, disk_errors, write_atomic, write_new
from coral_lens.storage.remote import Objects, is_url, local_folder
from coral_lens.storage.temporary import temporary_folder

MANIFEST = "manifest.json"
FETCHED = re.compile(r"manifest\.json|journal(-\d+-of-\d+-[0-9a-f]{8})?\.jsonl")
"""What every process reads of a store before anything else."""
HEADER = 2**14
"""Bytes of a shard that are fetched first: the header of most is shorter."""
MOST_HEADER = 2**25
"""Bytes of a header at most."""


class Place(ABC):
    """Where a store is, and the folder in which its files are written and read."""

    folder: Path
    name: str
    """What people call it: the folder, or the URL."""
    appends: bool
    """Whether a line can be added to a file that others see, and a folder be locked."""

    @abstractmethod
    def refresh(self) -> None:
        """Have the manifest and the journals in the folder, as they are now."""

    @abstractmethod
    def fetch(self, name: str) -> None:
        """Have one file in the folder, as it is now."""

    @abstractmethod
    def begin(self) -> bool:
        """Show the manifest of the folder to all, unless there is another: then have that, and return False."""

    @abstractmethod
    def publish(self, *names: str) -> None:
        """Show the manifest and other files of the folder to all; a manifest of other work is refused."""

    @abstractmethod
    def wrote(self, path: Path) -> None:
        """Show a file of the folder to all, once it is whole."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file for all."""

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Return whether all see a file."""

    @abstractmethod
    def whole(self, path: Path) -> AbstractContextManager[Path]:
        """Give a file that has all that others see under this name; there may be none."""

    @abstractmethod
    def fetch_tensor(self, path: Path, tensor: str, *, anew: bool) -> None:
        """Have a tensor of a shard in the folder, if that can be had; `anew`: nothing of the shard was right."""

    @abstractmethod
    def n_bytes(self) -> int:
        """Return the bytes of all its files."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have errors call the place by its name, and not by its folder."""
        try:
            yield
        except CoralError as error:
            said = str(error)
            if str(self.folder) == self.name or str(self.folder) not in said:
                raise
            raise type(error)(said.replace(str(self.folder), self.name)) from error


class Folder(Place):
    """A folder that all processes see, which is its own mirror."""

    appends = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def refresh(self) -> None: ...

    def fetch(self, name: str) -> None: ...

    def begin(self) -> bool:
        return True

    def publish(self, *names: str) -> None: ...

    def wrote(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        return path.exists()

    @contextmanager
    def whole(self, path: Path) -> Iterator[Path]:
        yield path

    def fetch_tensor(self, path: Path, tensor: str, *, anew: bool) -> None: ...

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


class Mirror(Place):
    """A URL, and the folder that mirrors it."""

    appends = False

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.name, self.objects = folder, url.rstrip("/"), Objects(url.rstrip("/"))
        self.sizes: Mapping[str, int] = {}
        """Of the objects, when they were last listed."""

    def refresh(self) -> None:
        self.sizes = self.objects.sizes()
        here = {path.name for path in self.folder.glob("*.json*")}
        # the main journal after those of parts: whoever merges these into it removes them afterwards
        for name in sorted(filter(FETCHED.fullmatch, here | self.sizes.keys())):
            self.fetch(name)

    def fetch(self, name: str) -> None:
        path, data = self.folder / name, self.objects.read(name)
        if data is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)

    def begin(self) -> bool:
        ours, there = (self.folder / MANIFEST).read_bytes(), self.objects.read(MANIFEST)
        if there is None:
            self._refuse_foreign()
        if there == ours or (there is None and self.objects.create(MANIFEST, ours)):
            return True
        self.fetch(MANIFEST)
        return False

    def _refuse_foreign(self) -> None:
        others = sorted(self.objects.sizes().keys() - {MANIFEST})
        if others and not self.objects.holds(MANIFEST):
            raise CoralError(
                f"{self.name} holds {others[0]} and no manifest, so it is not a store of ours, or what it depends on is lost; "
                "choose another place, or delete this one."
            )

    def publish(self, *names: str) -> None:
        if not self.begin():
            raise CoralError(
                f"{self.name} was begun by another process at the same moment, in another way; run the same command again and it "
                "takes part in that."
            )
        for name in names:
            if self.objects.read(name) != (self.folder / name).read_bytes():
                self.objects.put(name, self.folder / name)

    def wrote(self, path: Path) -> None:
        ours, there = self.folder / MANIFEST, self.objects.read(MANIFEST)
        if there is None or not ours.exists() or there != ours.read_bytes():
            raise CoralError(
                f"{self.name} was deleted, or begun anew in another way, while this process worked on it; run the same command "
                "again."
            )
        self.objects.put(path.name, path)
        if path.suffix == ".safetensors":  # a store may be larger than the disk of a worker
            path.unlink()

    def remove(self, path: Path) -> None:
        self.objects.remove(path.name)
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        return self.objects.holds(path.name)

    @contextmanager
    def whole(self, path: Path) -> Iterator[Path]:
        copy = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with disk_errors(copy):
                self.objects.copy(path.name, copy)
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    def fetch_tensor(self, path: Path, tensor: str, *, anew: bool) -> None:
        if anew:
            path.unlink(missing_ok=True)
        if not path.exists():
            self._outline(path)
        place = places_in(header_bytes(path)).get(tensor) if path.exists() else None
        if place is None or not place[0] < place[1] <= self.sizes.get(path.name, 0):
            return
        if data := self.objects.read(path.name, *place):
            with disk_errors(path), path.open("r+b") as file:
                file.seek(place[0])
                file.write(data)

    def _outline(self, path: Path) -> None:
        """Make a file as long as a shard that has its header and holes: tensors are filled in as they are asked for."""
        size = self.sizes.get(path.name, 0)
        start = self.objects.read(path.name, 0, min(size, HEADER)) or b"" if size else b""
        length = header_length(start)
        if len(start) < length <= size:
            start = self.objects.read(path.name, 0, length) or b""
        if length and max((stop for _, stop in places_in(start[:length]).values()), default=length) == size:
            write_new(path, start[:length], size=size)

    def n_bytes(self) -> int:
        return sum(self.objects.sizes().values())


# ------------------------------------------------------------------------------------------- the header of a shard


def header_length(start: bytes) -> int:
    """Return the bytes of a safetensors file before its tensors, by its beginning; 0 if that is damaged."""
    length = 8 + int.from_bytes(start[:8], "little") if len(start) > 8 else 0
    return length if length <= MOST_HEADER else 0


def header_bytes(path: Path) -> bytes:
    """Return the bytes of a safetensors file before its tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        return start + file.read(max(0, header_length(start + b"{") - 8))


def places_in(header: bytes) -> dict[str, tuple[int, int]]:
    """Return where each tensor begins and ends in a file with this header; none if that is damaged."""
    try:
        entries = {
            name: about["data_offsets"] for name, about in json.loads(header[8:]).items() if name != "__metadata__"
        }
        return {str(name): (len(header) + int(a), len(header) + int(b)) for name, (a, b) in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


# ---------------------------------------------------------------------------------------------------------- opened


def as_place(where: Path | Place) -> Place:
    """Return a folder as a place; a place is itself."""
    return where if isinstance(where, Place) else Folder(where)


@contextmanager
def working_place(where: str | Path) -> Iterator[Place]:
    """Yield a place that is written to. Of a URL, nothing is in its folder yet: `refresh` or `fetch` it."""
    if not is_url(where):
        yield Folder(local_folder(where))
        return
    with temporary_folder() as folder:
        mirror = Mirror(str(where), folder)
        with mirror.named():
            yield mirror


def reading_place(where: str | Path, cache: Path) -> Place:
    """Return a place that is read, refreshed; what is read of a URL stays in a folder inside `cache`."""
    if not is_url(where):
        return Folder(local_folder(where))
    url = str(where).rstrip("/")
    mirror = Mirror(url, cache / digest(url)[:16])
    mirror.refresh()
    return mirror
