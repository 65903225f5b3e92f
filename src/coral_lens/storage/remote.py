"""Objects under an fsspec URL such as s3://bucket/states: read, put whole, listed and removed.

Never appends, renames or locks, because object stores cannot. Whatever goes wrong there is one sentence, and a place that does
not answer is given up within seconds. Addresses of servers and keys are what fsspec finds in the environment: none are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from coral_lens.errors import CoralError, need

SECONDS = 20.0
"""How long a place may take to answer for the first time."""
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
FLATTENED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\](?![/\\])")
"""What a Path makes of a URL; a drive of Windows has one letter."""
FILE = "file://"
EXTRAS = {"s3": "remote", "s3a": "remote"}
"""Protocols that an extra of ours is for."""
Result = TypeVar("Result")


def is_url(where: str | Path) -> bool:
    """Return whether a place is at a URL, and no folder; `file://` is a folder by another name."""
    return isinstance(where, str) and URL.match(where) is not None and not where.startswith(FILE)


def local_folder(where: str | Path) -> Path:
    """Return the folder that is meant by a path or by `file://`."""
    folder = Path(str(where).removeprefix(FILE))
    if is_flattened(folder):
        raise CoralError(f"{folder} was an address before it became a Path, which has no // in it; give it as text.")
    return folder


def is_flattened(path: Path) -> bool:
    """Return whether a Path was an address before it lost one of its slashes."""
    return FLATTENED.match(str(path)) is not None


@dataclass(frozen=True)
class Objects:
    """The objects under a URL, by the last part of their names."""

    url: str

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Return the bytes of an object, or some of them; None if there is no such object."""
        with self._said(f"read {name} of"), suppress(FileNotFoundError):
            system, root = self._opened
            return system.cat_file(f"{root}/{name}", start=start, end=stop)
        return None

    def copy(self, name: str, path: Path) -> bool:
        """Copy an object to a file; False if there is no such object."""
        with self._said(f"read {name} of"), suppress(FileNotFoundError):
            system, root = self._opened
            system.get_file(f"{root}/{name}", str(path))
            return True
        return False

    def put(self, name: str, path: Path) -> None:
        """Put a file there, whole: nobody sees a part of it."""
        with self._said(f"write {name} to"):
            system, root = self._opened
            system.put_file(str(path), f"{root}/{name}")

    def create(self, name: str, data: bytes) -> bool:
        """Put an object there unless there is one, and return whether there is one with these bytes now."""
        system, root = self._opened
        try:
            system.pipe_file(f"{root}/{name}", data, mode="create")
        except Exception:
            # another process was faster, or nothing can be put there, or the server knows no such condition
            if self.read(name) is None:
                with self._said(f"write {name} to"):
                    system.pipe_file(f"{root}/{name}", data)
        return self.read(name) == data

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        with self._said(f"remove {name} from"), suppress(FileNotFoundError):
            system, root = self._opened
            system.rm_file(f"{root}/{name}")

    def holds(self, name: str) -> bool:
        """Return whether there is such an object."""
        with self._said(f"look for {name} in"):
            system, root = self._opened
            return bool(system.exists(f"{root}/{name}"))

    def sizes(self) -> dict[str, int]:
        """Return the names of all objects with their sizes."""
        found: list[dict[str, Any]] = []
        with self._said("list"), suppress(FileNotFoundError):
            system, root = self._opened
            found = system.ls(root, detail=True)
        return {str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]: int(entry.get("size") or 0) for entry in found}

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the root, after it has answered once."""
        with self._said("open"):
            return answered(self._open, self.url)

    def _open(self) -> tuple[Any, str]:
        protocol, _, path = self.url.partition("://")
        if not path.strip("/"):
            raise CoralError(f"{self.url} names no folder; write it as in s3://bucket/states.")
        if protocol.lower() in EXTRAS:
            need(EXTRAS[protocol.lower()], by=f"A store at {protocol}://")
        from fsspec.core import url_to_fs

        # what others put there is seen at once, and keys that have changed are read again
        system, root = url_to_fs(self.url.rstrip("/"), use_listings_cache=False, skip_instance_cache=True)
        try:
            if not system.exists(f"{root}/manifest.json"):
                system.ls(root)
        except FileNotFoundError as error:
            if type(error.__cause__).__name__ == "NoSuchBucket":
                raise CoralError(f"{self.url} cannot be used: there is no such bucket; make it first.") from error
        return system, root

    @contextmanager
    def _said(self, doing: str) -> Iterator[None]:
        """Say in one sentence what a file system of any kind has raised; that an object is missing is for the caller."""
        try:
            yield
        except CoralError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CoralError(
                f"Cannot {doing} {self.url}: {reason.rstrip('.')}. Check the address, the keys and the network; finished work is "
                "kept, and the same command goes on."
            ) from error


def answered(call: Callable[[], Result], url: str) -> Result:
    """Return what a call returns or raises, and give it up after some seconds."""
    answer = Future[Result]()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # not a pool, whose threads a command would wait for when it ends
    Thread(target=ask, name=f"first look at {url}", daemon=True).start()
    try:
        return answer.result(timeout=SECONDS)
    except TimeoutError:
        raise CoralError(f"{url} does not answer within {SECONDS:.0f} s; check the address and the network.") from None
