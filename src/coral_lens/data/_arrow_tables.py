"""Tables that know their types: parquet, Arrow, folders that `datasets` saved, and Excel workbooks."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from coral_lens.data._csv_tables import header_of
from coral_lens.data.tables import Batch, Refusals, Table, batches_of_rows, exploded
from coral_lens.errors import CoralError, need
from coral_lens.storage.lines import EXPANSION, UNHARMED, opened

STATE, SPLITS, ABOUT = "state.json", "dataset_dict.json", "dataset_info.json"
"""Files of a folder that `datasets` saved: of one split, of several, and what its columns are."""


def parquet_table(path: Path, stem: str, _: Refusals, size: int) -> Table:
    """Return the rows of a parquet file."""
    need("tables", by=f"{path}: reading parquet")
    return Table(str(path), stem, parquet_batches(path, size), unit="row")


def parquet_batches(path: Path, size: int) -> Iterator[Batch]:
    """Yield the rows of a parquet file in batches, without holding all of it."""
    import pyarrow.parquet as pq

    with damaged(path, "parquet"), random_access(path) as source:
        yield from arrow_batches(pq.ParquetFile(source).iter_batches(batch_size=size), size)


def arrow_table(path: Path, stem: str, _: Refusals, size: int) -> Table:
    """Return the rows of an Arrow file or stream, or of a feather file."""
    need("tables", by=f"{path}: reading Arrow")
    return Table(str(path), stem, ipc_batches([path], size), unit="row")


def dataset_table(folder: Path, stem: str, _: Refusals, size: int) -> Table:
    """Return the rows of a folder that `datasets` saved; names of classes come along."""
    need("tables", by=f"{folder}: reading a saved dataset")
    if (folder / SPLITS).is_file():
        splits = saved_record(folder / SPLITS).get("splits", [])
        raise CoralError(f"{folder} holds the splits {', '.join(splits)}; name one of them: {folder / str(splits[0])}.")
    try:
        files = [folder / one["filename"] for one in saved_record(folder / STATE)["_data_files"]]
        features = saved_record(folder / ABOUT).get("features") or {}
        classes = {name: tuple(about["names"]) for name, about in features.items() if is_class(about)}
    except (KeyError, TypeError, AttributeError) as error:
        raise CoralError(f"{folder} was not saved by `datasets`, or is damaged ({error!r}); save it again.") from error
    if outside := next((file for file in files if file.parent != folder), None):
        raise CoralError(f"{folder} names {outside}, which is outside of it; save the dataset again.")
    return Table(str(folder), stem, ipc_batches(files, size), unit="row", classes=classes)


def is_class(about: Any) -> bool:
    """Whether a column of a dataset holds the numbers of classes."""
    return isinstance(about, dict) and about.get("_type") == "ClassLabel" and isinstance(about.get("names"), list)


def saved_record(path: Path) -> dict[str, Any]:
    """Return a record of a saved dataset."""
    try:
        record = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CoralError(f"{path} cannot be read ({error}); save the dataset again.") from error
    if not isinstance(record, dict):
        raise CoralError(f"{path} is not of a saved dataset; save it again.")
    return record


def ipc_batches(paths: list[Path], size: int) -> Iterator[Batch]:
    """Yield the rows of files of Arrow's own format, one after the other."""
    import pyarrow as pa

    start = 1
    for path in paths:
        with damaged(path, "Arrow"), random_access(path) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            parts = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for batch in arrow_batches(parts, size, start):
                start = batch.numbers[-1] + 1
                yield batch


def arrow_batches(parts: Any, size: int, start: int = 1) -> Iterator[Batch]:
    """Yield the rows of Arrow's batches in ours, numbered from 1."""
    for part in parts:
        part.validate(
            full=True
        )  # lengths in a damaged file would have Arrow read beyond its end, which ends the process
        for low in range(0, part.num_rows, size):
            piece = part.slice(low, size)
            columns = piece.to_pydict()
            if len(columns) != piece.num_columns:
                raise CoralError("two columns have the same name; rename one of them.")
            yield Batch(columns, range(start, start + piece.num_rows))
            start += piece.num_rows


@contextmanager
def random_access(path: Path) -> Iterator[Any]:
    """Open a file that is read from both ends; a gzipped one is expanded in memory."""
    import pyarrow as pa

    if path.suffix.lower() == ".gz":
        with opened(path) as file:
            yield io.BytesIO(file.read())
    else:
        with opened(path):
            pass  # whatever cannot be opened is said in our words
        with pa.memory_map(str(path)) as source:
            yield source


@contextmanager
def damaged(path: Path, kind: str) -> Iterator[None]:
    """Say in one sentence what Arrow says of a file that is not what it is called."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CoralError(f"{path} cannot be read as {kind}: {reason}. Is it damaged, or of another kind?") from error
    except CoralError as error:
        raise CoralError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


# --------------------------------------------------------------------------------------------------------------- workbooks


def excel_table(path: Path, stem: str, _: Refusals, size: int) -> Table:
    """Return the rows of the first sheet of an Excel workbook."""
    need("excel", by=f"{path}: reading an Excel workbook")
    return Table(str(path), stem, batches_of_rows(exploded(sheet_rows(path)), size), unit="row")


def sheet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of the first sheet, numbered as Excel numbers them; formulas count as what they were when it was saved."""
    from openpyxl import load_workbook

    refuse_bomb(path)
    try:
        with opened(path) as file:
            book = load_workbook(file, read_only=True, data_only=True)
            names: tuple[str, ...] = ()
            for number, cells in enumerate(book.worksheets[0].iter_rows(values_only=True), start=1):
                if all(cell is None for cell in cells):
                    continue
                if not names:
                    names = header_of(["" if cell is None else str(cell) for cell in cells], f"{path}, row {number}")
                else:
                    yield number, dict(zip(names, cells, strict=False))
    except CoralError:
        raise
    except Exception as error:  # a damaged workbook fails in its XML, its zip or deep inside the library
        raise CoralError(f"{path} cannot be read as an Excel workbook ({error}); save it again, or as CSV.") from error


def refuse_bomb(path: Path) -> None:
    """Refuse a workbook that would fill the memory: it is a zip, which says how large its parts are."""
    try:
        with opened(path) as file, ZipFile(file) as archive:
            size = sum(part.file_size for part in archive.infolist())
    except (BadZipFile, RuntimeError) as error:  # RuntimeError: a kind of zip that Python does not read
        raise CoralError(f"{path} is no Excel workbook ({error}); save it again, or as CSV.") from error
    if size > max(UNHARMED * 8, EXPANSION * path.stat().st_size):
        raise CoralError(f"{path} would expand to {size:,} bytes, which is too much for a workbook; save it as CSV.")
