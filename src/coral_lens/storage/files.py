"""Digests, atomic writes and provenance: how every artefact is named, written and traced. Knows nothing of what it writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from coral_lens.errors import CoralError
from coral_lens.storage.temporary import file_beside, folder_beside

TRACED_PACKAGES = ("coral-lens", "torch", "transformers", "lm_eval", "numpy", "scikit-learn")
"""Packages whose version can change a result."""
MOST_NAME = 100
"""Bytes of a file name that is made of a user's text: file systems take 255, and suffixes follow."""


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal text, and so equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def dotted_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `model.weights` instead of weights inside model: a difference can then be named."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        inner = dotted_keys(value) if isinstance(value, Mapping) else None
        values |= {key: value} if inner is None else {f"{key}.{name}": v for name, v in inner.items()}
    return values


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON-ready value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a result."""
    return {name: installed_version(name) for name in TRACED_PACKAGES}


@cache
def installed_version(name: str) -> str:
    """Return the version of a package; reading it takes milliseconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence; what was already written stays."""
    try:
        yield
    except OSError as error:
        reasons = {errno.ENOSPC: "no space left on the disk", errno.EDQUOT: "the disk quota is used up"}
        reasons |= {
            errno.EACCES: "permission denied",
            errno.EROFS: "the disk is read-only",
            errno.ENOTDIR: "not a folder",
            errno.ELOOP: "it is a link, which is not followed",
            errno.ENXIO: "it is not a plain file",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise CoralError(
            f"Cannot write {path}: {reason}. Finished work is kept; make room or choose another place, then run it again."
        ) from error


def write_atomic(path: Path, data: bytes, *, sweep: bool = True) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it: a reader sees all of it or nothing.

    A link under its name is replaced; what it points to is not touched. `sweep` is as in `file_beside`.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_and(path, data, lambda temporary: temporary.replace(path), sweep=sweep)
        except FileNotFoundError:
            # where locks do not reach from machine to machine, another one may have taken the file for abandoned
            write_and(path, data, lambda temporary: temporary.replace(path), sweep=sweep)


def write_new(path: Path, data: bytes, *, size: int = 0) -> bool:
    """Write a file unless there is one, and return whether it was written: of several processes at once, one succeeds.

    With `size` it is made so long, by a hole at its end.
    """

    def put(temporary: Path) -> bool:
        os.truncate(temporary, max(size, len(data)))
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if path.exists():
                return False
            temporary.replace(path)
        return True

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_and(path, data, put)


Put = TypeVar("Put")


def write_and(path: Path, data: bytes, put: Callable[[Path], Put], *, sweep: bool = True) -> Put:
    """Write and flush a temporary file beside `path`, and return what `put` makes of it."""
    with file_beside(path, sweep=sweep) as (file, temporary):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        if os.name == "nt":  # an open file has no other name there
            file.close()
        return put(temporary)


def append_line(path: Path, line: bytes, *, flush: bool = True) -> None:
    """Add a line to a file and flush it to the disk: a killed run has all of the lines before it, and perhaps a part of it.

    Without `flush` a power cut may lose it, and a kill does not.
    """
    with disk_errors(path):
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with disk_errors(path), os.fdopen(number, "ab") as file:
        file.write(line)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends, none if there is no file. One that was cut by a kill has no end."""
    try:  # without a look before: whoever ends a store may remove the journal of a part in between
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    # bytes, because str.splitlines would also cut at U+2028 and its like
    return data.splitlines(keepends=True)


def write_json(path: Path, value: Any) -> None:
    """Write a readable JSON file atomically; keys stay in their order, so a record reads back as it was."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return a value as readable JSON."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def where_it_stops(path: Path) -> str:
    """Say of a missing record whether its folder is missing too, or is a folder of another kind."""
    if path.parent.name in ("", ".."):
        return ""
    return f": {path.parent} is a folder of another kind" if path.parent.exists() else f": there is no {path.parent}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON record of ours; a damaged or missing one is named."""
    try:
        if path.exists() and not path.is_file():
            raise CoralError(f"{path} is not a plain file; remove it, or choose another folder.")
        record = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise CoralError(f"{path} does not exist{where_it_stops(path)}; check the path.") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise CoralError(f"{path} is not readable as JSON ({error}); it is damaged, or another kind of file.") from None
    except NotADirectoryError:
        raise CoralError(f"{path.parent} is a file, and a folder is wanted here; check the path.") from None
    except OSError as error:
        raise CoralError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(record, dict):
        raise CoralError(f"{path} holds a JSON {type(record).__name__}, not a record; it is not a file of ours.")
    return record


# ------------------------------------------------------------------------------------------------------ sealed records

SEAL = "digest"
"""The last key of a record: the digest of all others. What earlier versions wrote without it is read as it is."""


def seal_of(record: Mapping[str, Any]) -> str:
    """Return the digest of a record as it reads back from JSON; equal to `digest`, but a score may be nan."""
    plain = json.loads(json.dumps(record))
    return digest_bytes(json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its digest."""
    assert SEAL not in record, "this key is for the digest"
    return {**record, SEAL: seal_of(record)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record that will be read back, with its digest."""
    write_json(path, sealed(record))


def read_record(path: Path, *, remedy: str = "make it again", needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return a record without its digest; one that does not match it, or lacks a key that it needs, is refused."""
    record = read_json(path)
    if missing := [key for key in needs if key not in record]:
        raise CoralError(f"{path} is damaged: it says nothing of {missing[0]}; {remedy}.")
    claimed = record.pop(SEAL, None)
    if claimed is not None and claimed != seal_of(record):
        raise CoralError(f"{path} is damaged: its content does not match its digest; {remedy}.")
    return record


def kept_record(path: Path) -> dict[str, Any] | None:
    """Return a record of work that can be done again: None where it is missing or damaged."""
    try:
        return read_record(path) if path.exists() else None
    except CoralError:
        return None


# ------------------------------------------------------------------------------------------------------------- folders


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `target`, which must not exist or be empty, when the block ends well."""
    with ExitStack() as stack:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(folder_beside(target))
        yield temporary
        with disk_errors(target):
            temporary.replace(target)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; links are not followed."""
    if path.is_symlink() or not path.exists():
        return 0
    inside = [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()] if path.is_dir() else [path]
    return sum(p.stat().st_size for p in inside)


def size_text(n_bytes: int) -> str:
    """Return a size for people: `538 MB`, `12 kB`."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= one:
            return f"{n_bytes / one:.1f} {unit}" if n_bytes < 10 * one else f"{n_bytes / one:,.0f} {unit}"
    return f"{n_bytes} bytes"


def file_name(name: str) -> str:
    """Return a name as a file name of at most 100 bytes; names that a file system would confuse stay apart."""
    cleaned = re.sub(r"[^\w.-]+", "_", name.replace(":", "."))
    as_it_is = cleaned == name.replace(":", ".") and not cleaned.startswith(".")
    if as_it_is and len(cleaned.encode()) <= MOST_NAME:
        return cleaned
    short = cleaned.lstrip(".").encode()[: MOST_NAME - 9].decode(errors="ignore")  # a leading dot hides, or leads up
    return f"{short}-{digest(name)[:8]}"
