"""What is kept between runs in the user's cache folder: all of it can be made again, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coral_lens.data.assets import DATA, MODEL, cache_dir, installed
from coral_lens.errors import CoralError, nearest
from coral_lens.storage.files import disk_errors, size_of

KINDS = {
    "models": ("models", "GGUF files made dense, such as the embedded model; made again at the next use"),
    "assets": ("assets", "the embedded model and data, as `coral assets` fetched them"),
    "task-index": ("task-index.json", "names of lm-eval's tasks; made again in a second"),
    "budgets": ("budgets", "tokens in a batch, as timed on this machine; timed again in seconds"),
    "precisions": ("precisions", "how much faster mixed arithmetic is on this machine; timed again in a second"),
    "fingerprints": ("fingerprints", "digests of models whose files were not written since; computed again in seconds"),
    "digests": ("digests", "digests of GGUF files, likewise"),
    "intact": ("intact", "which converted models were checked whole, likewise"),
    "stores": ("stores", "what was read of stores at addresses such as s3://; fetched again when it is read"),
    "packings": ("packings", "self-checks of models on this machine; made again in seconds"),
}
"""What each part of the cache is called, the file or folder that holds it, and what it is."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A part of the cache that is there."""

    name: str
    what: str
    path: Path
    n_bytes: int


def kept() -> list[Kept]:
    """Return the parts of the cache that are there."""
    places = [(name, what, cache_dir() / place) for name, (place, what) in KINDS.items()]
    return [Kept(name, what, path, size_of(path)) for name, what, path in places if path.exists()]


def named(names: Sequence[str]) -> list[Kept]:
    """Return the parts of these names that are there, all of them if none is named; an unknown name is refused."""
    for name in names:
        if name not in KINDS:
            raise CoralError(
                f"The cache has no part called {name!r}.{nearest(name, KINDS)} Its parts are {', '.join(KINDS)}."
            )
    return [part for part in kept() if not names or part.name in names]


def remove(parts: Sequence[Kept]) -> None:
    """Delete parts of the cache, and its folder if nothing else is in it."""
    for part in parts:
        with disk_errors(part.path):
            shutil.rmtree(part.path) if part.path.is_dir() else part.path.unlink()
    folder = cache_dir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def elsewhere() -> dict[str, Path]:
    """Return where else models and data lie, which is not ours to remove: installed packages, and what the hub gave."""
    packages = {f"the package {asset.package}": installed(asset) for asset in (MODEL, DATA)}
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    places = packages | {"downloads from the hub (`hf cache` manages them)": home}
    return {what: path for what, path in places.items() if path is not None and path.exists()}
