"""Digests, atomic writes and provenance: how every artefact is named, written and traced. Knows nothing of what it writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coral_lens.errors import CoralError

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
    installed = {}
    for name in TRACED_PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


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
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise CoralError(
            f"Cannot write {path}: {reason}. Finished work is kept; make room or choose another place, then run it again."
        ) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it: a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file and flush it to the disk: a killed run has all of the lines before it, and perhaps a part of it."""
    with disk_errors(path), path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends, none if there is no file. One that was cut by a kill has no end."""
    # bytes, because str.splitlines would also cut at U+2028 and its like
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def write_json(path: Path, value: Any) -> None:
    """Write a readable JSON file atomically; keys stay in their order, so a record reads back as it was."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON record of ours; a damaged or missing one is named."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CoralError(f"{path} does not exist; check the folder's name.") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise CoralError(f"{path} is not readable as JSON ({error}); it is damaged, make it again.") from None
    except OSError as error:
        raise CoralError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(record, dict):
        raise CoralError(f"{path} holds a JSON {type(record).__name__}, not a record; it is not a file of ours.")
    return record


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `target` when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    with disk_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        yield temporary
        with disk_errors(target):
            if target.exists():
                target.replace(old)  # deleted only when the new one is in its place
            temporary.replace(target)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not target.exists():
            old.replace(target)
        shutil.rmtree(temporary, ignore_errors=True)


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
