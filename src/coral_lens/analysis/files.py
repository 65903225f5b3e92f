"""An analysis on the disk: NAME.json holds all of it, NAME.csv its rows. Knows nothing of what it writes."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coral_lens.storage.files import canonical, digest, digest_bytes, versions, write_atomic, write_json


def write_analysis(name: str, record: Any, folder: Path) -> dict[str, Any]:
    """Write a record's JSON and the CSV of its `rows`, and return what was written."""
    plain = {"analysis": name, **jsonable(asdict(record)), "versions": versions()}
    write_json(folder / f"{name}.json", plain)
    write_atomic(folder / f"{name}.csv", csv_of(plain["rows"]).encode())
    return plain


class RowJournal:
    """Rows of an analysis that takes long, kept as they are made: a line for what each depends on, and its rows."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        for line in path.read_bytes().splitlines() if path and path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # a damaged line is one that is not there
                entry = json.loads(line)
                if digest(entry["rows"]) == entry["sha256"]:
                    self.entries[entry["key"]] = entry["rows"]

    def rows(self, key: Any, make: Callable[[], list[Any]]) -> list[Any]:
        """Return the plain rows for what `key` says, made if they are not there."""
        name = digest(key)
        if name not in self.entries:
            self.entries[name] = jsonable([asdict(row) for row in make()])
            if self.path:
                lines = [canonical({"key": k, "rows": r, "sha256": digest(r)}) for k, r in self.entries.items()]
                write_atomic(self.path, "".join(f"{line}\n" for line in lines).encode())
        return list(self.entries[name])


class ArrayJournal:
    """Arrays of an analysis that takes long, kept as they are made: a file for what they depend on, made again if damaged."""

    def __init__(self, folder: Path | None, identity: Any) -> None:
        """`identity` is what all arrays depend on; without a folder nothing is kept."""
        self.folder, self.identity = folder, identity

    def arrays(self, key: Any, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the arrays for what `key` says, made if they are not there."""
        found = self.load(key)
        if found is None:
            self.save(key, found := dict(make()))
        return found

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
    return digest([[name, list(arrays[name].shape), digest_bytes(arrays[name].tobytes())] for name in sorted(arrays)])


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
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def flattened(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested row with names such as `chosen.ece_low`."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and {"value", "low", "high"} <= set(value):
            found |= {f"{prefix}{name}": value["value"]}
            found |= {f"{prefix}{name}_{part}": value[part] for part in value if part != "value"}
        elif isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = " ".join(map(str, value)) if isinstance(value, list) else value
    return found
