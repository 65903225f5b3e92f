"""Where questions of one's own come from: files by their endings, saved datasets, frames. Opens tables and reads no meaning."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coral_lens.data._arrow_tables import SPLITS, STATE, arrow_table, dataset_table, excel_table, parquet_table
from coral_lens.data._csv_tables import csv_table
from coral_lens.data._frames import frame_table
from coral_lens.data._json_tables import document_table, lines_table
from coral_lens.data.tables import BATCH, Refusals, Table
from coral_lens.errors import CoralError

Reader = Callable[[Path, str, Refusals, int], Table]
"""Makes a table of a path, what ids begin with, what happens to bad rows, and the rows of a batch."""

READERS: dict[str, Reader] = {
    ".jsonl": lines_table,
    ".ndjson": lines_table,
    ".json": document_table,
    ".csv": csv_table,
    ".tsv": csv_table,
    ".tab": csv_table,
    ".parquet": parquet_table,
    ".arrow": arrow_table,
    ".feather": arrow_table,
    ".xlsx": excel_table,
    "": lines_table,  # a name without an ending may be a pipe
}
"""By the ending of a file's name, how its rows are read."""
NAMED = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".xlsx", ".gz")
"""Endings by which a name is taken for that of a file even if there is no such file."""
ENDINGS = ", ".join(ending for ending in READERS if ending)


def is_file(source: str | Path) -> bool:
    """Whether a source is taken for a file of questions, or for a saved dataset, rather than for a task."""
    # os.path, because a long or odd task name is then simply not a file
    if str(source).lower().endswith(NAMED):
        return True
    return is_saved_dataset(source) if os.path.isdir(source) else os.path.exists(source)


def is_saved_dataset(folder: str | Path) -> bool:
    """Whether a folder was saved by `datasets`."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (STATE, SPLITS))


def ending_of(path: Path) -> str:
    """Return the ending of a file without its .gz, in lower case; a spreadsheet may write it in capitals."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def open_table(source: Any, refuse: Refusals, limit: int | None = None) -> Table:
    """Return the rows of a file, of a saved dataset, or of what Python holds in memory."""
    size = min(BATCH, limit or BATCH)
    if not isinstance(source, str | Path):
        return frame_table(source, size)
    path = Path(source)
    if is_saved_dataset(path):
        return replace(dataset_table(path, path.name, refuse, size), file=str(source))
    ending = ending_of(path)
    if ending not in READERS and not path.is_dir():
        raise CoralError(f"{path}: files that end in {ENDINGS} are read (also with .gz).")
    stem = path.name[: -len(".gz")] if path.name.lower().endswith(".gz") else path.name
    read = READERS[ending if ending in READERS else ""]
    return replace(read(path, stem.rpartition(".")[0] or stem, refuse, size), file=str(source))
