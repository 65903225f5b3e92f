"""The lines of other people's files, gzipped or not, and the JSON in them. A file that grows beyond reason is refused.

A few bytes of gzip can hold gigabytes of nothing. They are read in pieces, so that such a file is refused before it has
taken the memory; a plain file is as large as its owner sees.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from coral_lens.errors import CoralError, nearest

UNHARMED = 64 * 2**20
"""Bytes that every gzipped file may have when it is expanded."""
EXPANSION = 100
"""Beyond that, so many times its own size: text shrinks to a third or a tenth, and seldom to a fiftieth."""
PIECE = 2**18
"""Bytes that are read or expanded at a time."""
VARIABLE = "CORAL_EXPANSION"
"""Environment variable that allows another expansion."""


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file to read its bytes, which are expanded as they are read if its name ends in .gz; every failure is a sentence."""
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(path.open("rb", buffering=PIECE))
            if path.suffix.lower() == ".gz":
                file = BufferedReader(Expanded(stack.enter_context(gzip.open(file)), path), PIECE)
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CoralError(f"{path} is truncated or damaged: {error}. Copy it again.") from error
    except UnicodeError:  # what the bytes mean is for the reader to say
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise CoralError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.{remedy_of(path, error)}"
        ) from error


def remedy_of(path: Path, error: Exception) -> str:
    """Return what to do about a file that is not there, or that is a folder."""
    if isinstance(error, IsADirectoryError):
        return " Give a file in it."
    if not isinstance(error, FileNotFoundError):
        return ""
    try:
        return nearest(path.name, os.listdir(path.parent), n=1) or " Check the path."
    except OSError:
        return f" There is no folder {path.parent}; check the path."


def iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line with its end) of a file, which is expanded as it is read if its name ends in .gz."""
    with opened(path) as file:
        yield from enumerate(file, start=1)


class Expanded(RawIOBase):
    """The bytes of an opened gzip file, until they are more than it may hold."""

    def __init__(self, file: BufferedIOBase, path: Path) -> None:
        super().__init__()
        self.file, self.path = file, path
        self.left = max(UNHARMED, expansion() * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self.file.readinto(buffer)
        self.left -= n
        if self.left < 0:
            raise CoralError(
                f"{self.path} expands to more than {expansion()} times its size; if that is right, set {VARIABLE} to a larger "
                "number or expand it yourself."
            )
        return n


def expansion() -> int:
    """Return how many times its size a gzipped file may become."""
    text = os.environ.get(VARIABLE) or str(EXPANSION)
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise CoralError(f"{VARIABLE} must be a whole number, such as {EXPANSION}. Got {text!r} instead.")
    return int(text)


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says; one that is nested too deep is a ValueError like any other that is malformed."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
