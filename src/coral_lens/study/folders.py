"""The folders of a study: its data, its work and its results; one that cannot be used is refused. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coral_lens.engine.loading import JOINS
from coral_lens.errors import CoralError
from coral_lens.storage.files import file_name, read_record, write_record
from coral_lens.storage.outputs import has_word, refuse_folder


@dataclass(frozen=True)
class Folders:
    """Where a study finds its data and leaves its results."""

    out: Path
    work: Path
    """States, lenses and predictions; studies that share it share them."""
    data: Path | None = None
    dtype: str | None = None
    """The dtype of models, if one was asked for: what they make of questions in it is kept apart."""
    adapter: str | None = None
    """A LoRA adapter that is added to models: what they make of questions with it is kept apart, too."""
    mixed: bool = False
    """Whether states that were begun on another kind of device are gone on with, and workers may have several kinds."""

    def of_model(self, name: str) -> Path:
        """Return the folder for what a model makes of questions."""
        called = name if self.adapter is None else f"{name}{JOINS}{self.adapter}"
        return self.work / file_name(called if self.dtype is None else f"{called} in {self.dtype}")

    def runs_of(self, name: str) -> Path:
        """Return the folder for the runs of a model."""
        return self.out / "runs" / file_name(name)


def check_folders(folders: Folders, *, holds: str, kind: str) -> None:
    """Refuse places that cannot be folders, and one for results that holds other things than a `kind`, known by a file."""
    for folder in (folders.out, folders.work):
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        if not nearest.is_dir():
            raise CoralError(f"{folder} cannot be a folder for results: {nearest} is a file; choose another place.")
    refuse_folder(folders.out, kind, is_ours=has_word(folders.out / holds, '"format"'))


def claim(folder: Path, record: dict[str, Any]) -> None:
    """Write the study's record, unless the folder belongs to another study."""
    path = folder / "study.json"
    if (
        path.exists()
        and (other := read_record(path, remedy="delete it and run the study again").get("name")) != record["name"]
    ):
        raise CoralError(f"{folder} holds the study {other!r}, not {record['name']!r}; choose another --out.")
    write_record(path, record)
