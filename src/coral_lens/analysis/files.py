"""An analysis on the disk: NAME.json holds all of it, NAME.csv its rows. Knows nothing of what it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coral_lens.report.tables.exports import csv_text
from coral_lens.storage.files import (
    append_line,
    digest,
    digest_bytes,
    lines_of,
    versions,
    write_atomic,
    write_json,
)
from coral_lens.storage.outputs import has_word, refuse_replacing
from coral_lens.storage.resumable import locked, locked_file


def write_analysis(name: str, record: Any, folder: Path) -> dict[str, Any]:
    """Write a record's JSON and the CSV of its `rows`, and return what was written."""
    plain = {"analysis": name, **jsonable(asdict(record)), "versions": versions()}
    write_json(folder / f"{name}.json", plain)
    write_atomic(folder / f"{name}.csv", csv_of(plain["rows"]).encode())
    return plain


# A later step of an analysis may depend on the results of an earlier one, so what is kept is found by a key that says what it
# depends on, and not by the number of a piece that was planned beforehand.


@contextmanager
def kept_rows(path: Path | None) -> Iterator[RowJournal]:
    """Open the rows in a file, which no other process may add to; without a file nothing is kept."""
    if path:
        refuse_replacing(path.parent, [path.name], is_ours=lambda path: has_word(path, '{"key": "'))
    with locked_file(path) if path else nullcontext():
        yield RowJournal(path)


class RowJournal:
    """Rows of an analysis that takes long, kept as they are made: a line for what each depends on, and its rows."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._clean = path, True
        self.entries: dict[str, Any] = {}
        for line in lines_of(path) if path else ():
            entry = parse_rows(line)
            if entry is None:
                self._clean = False
            else:
                self.entries[entry[0]] = entry[1]

    def rows(self, key: Any, make: Callable[[], list[Any]]) -> list[Any]:
        """Return the plain rows for what `key` says, made if they are not there."""
        name = digest(key)
        if name not in self.entries:
            self.entries[name] = jsonable([asdict(row) for row in make()])
            if self.path and self._clean:
                append_line(self.path, self._line(name))
            elif self.path:
                write_atomic(self.path, b"".join(map(self._line, self.entries)))
                self._clean = True
        return list(self.entries[name])

    def _line(self, name: str) -> bytes:
        rows = self.entries[name]
        # not canonical: keys stay in their order, which is that of the columns of a table that is made of kept rows
        line = json.dumps({"key": name, "rows": rows, "sha256": digest(rows)}, ensure_ascii=False, allow_nan=False)
        return f"{line}\n".encode()


def parse_rows(line: bytes) -> tuple[str, Any] | None:
    """Return the key and the rows of a line, or None if it is cut or damaged."""
    try:
        entry = json.loads(line if line.endswith(b"\n") else b"")
        return (entry["key"], entry["rows"]) if digest(entry["rows"]) == entry["sha256"] else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@contextmanager
def kept_arrays(folder: Path | None, identity: Any) -> Iterator[ArrayJournal]:
    """Open the arrays in a folder, which no other process may add to; without a folder nothing is kept."""
    with locked(folder) if folder else nullcontext():
        yield ArrayJournal(folder, identity)


class ArrayJournal:
    """Arrays of an analysis that takes long, kept as they are made: a file for what they depend on, made again if damaged."""

    def __init__(self, folder: Path | None, identity: Any) -> None:
        """`identity` is what all arrays depend on."""
        self.folder, self.identity = folder, identity

    def arrays(self, key: Any, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the arrays for what `key` says, made if they are not there."""
        arrays = self.load(key)
        if arrays is None:
            self.save(key, arrays := dict(make()))
        return arrays

    def path(self, key: Any) -> Path | None:
        """Return the file for a key."""
        return self.folder / f"{digest([self.identity, key])[:16]}.safetensors" if self.folder else None

    def load(self, key: Any) -> dict[str, np.ndarray] | None:
        """Return the arrays, or None if they are not there or damaged."""
        path = self.path(key)
        try:
            arrays = load(path.read_bytes()) if path else {}
            intact = arrays.pop("sha256").tobytes().decode() == arrays_digest(arrays)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        return arrays if intact else None

    def save(self, key: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays with their digest."""
        path = self.path(key)
        if path:
            name = np.frombuffer(arrays_digest(arrays).encode(), np.uint8)
            write_atomic(path, save({**{k: np.ascontiguousarray(v) for k, v in arrays.items()}, "sha256": name}))


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a digest of all arrays."""
    return digest(
        [[name, str(a.dtype), list(a.shape), digest_bytes(a.tobytes())] for name, a in sorted(arrays.items())]
    )


def jsonable(value: Any) -> Any:
    """Return plain JSON values; nan becomes None, because JSON has no nan."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV; a score becomes three columns: its value under its own name, and `_low` and `_high`."""
    flat = [flattened(row) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    return csv_text((columns, *([row.get(column) for column in columns] for row in flat)))


def flattened(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested row with names such as `chosen.ece_low`."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and {"value", "low", "high"} <= set(value):
            columns |= {f"{prefix}{name}": value["value"]}
            columns |= {f"{prefix}{name}_{part}": value[part] for part in value if part != "value"}
        elif isinstance(value, Mapping):
            columns |= flattened(value, f"{prefix}{name}.")
        else:
            columns[f"{prefix}{name}"] = " ".join(map(str, value)) if isinstance(value, list) else value
    return columns
