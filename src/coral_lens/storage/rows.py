"""Rows of a table written for others: JSON lines, CSV or parquet by the ending of the file, and frames. Knows no meaning.

A cell of CSV never starts a formula, and what is no single value stands there as JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coral_lens.errors import CoralError, need
from coral_lens.storage.escape import for_csv

Row = Mapping[str, Any]


def names_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of rows, in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def as_lines(rows: Sequence[Row]) -> bytes:
    """Return rows as JSON, one a line."""
    return "".join(as_json(row) + "\n" for row in rows).encode()


def as_json(value: Any) -> str:
    """Return a value as JSON; what JSON does not know is written as text, and what is no number as nothing."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(value), ensure_ascii=False, default=str)


def without_nan(value: Any) -> Any:
    """Return a value with None in place of numbers that are none."""
    if isinstance(value, Mapping):
        return {str(name): without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


def as_csv(rows: Sequence[Row]) -> bytes:
    """Return rows as CSV with a header."""
    text, names = io.StringIO(newline=""), names_of(rows)
    table = csv.writer(text, lineterminator="\n")
    table.writerow([for_csv(name) for name in names])
    table.writerows([csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue().encode()


def csv_cell(value: Any) -> Any:
    """Return a value for a cell of CSV."""
    if value is None:
        return ""
    if isinstance(value, bool | Mapping | list | tuple):
        return for_csv(as_json(value))
    return for_csv(value) if isinstance(value, str | int | float) else for_csv(str(value))


def as_parquet(rows: Sequence[Row]) -> bytes:
    """Return rows as parquet; a column of values of different types is written as JSON."""
    need("tables", by="Writing parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in names_of(rows):
        values = [list(v) if isinstance(v, tuple) else v for v in (row.get(name) for row in rows)]
        try:
            columns[name] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            columns[name] = pa.array([None if v is None else v if isinstance(v, str) else as_json(v) for v in values])
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


WRITERS: dict[str, Callable[[Sequence[Row]], bytes]] = {
    ".jsonl": as_lines,
    ".ndjson": as_lines,
    ".json": lambda rows: (as_json(list(map(dict, rows))) + "\n").encode(),
    ".csv": as_csv,
    ".parquet": as_parquet,
}
"""By the ending of a file, how rows are written; a file of another ending has JSON lines."""


def writer_of(path: Path) -> Callable[[Sequence[Row]], bytes]:
    """Return how rows are written into a file of this name; refuse a table that is not written before anything is computed."""
    ending = path.suffix.lower()
    if ending in (".tsv", ".xlsx", ".xls", ".arrow", ".feather", ".gz", ".ods"):
        raise CoralError(f"--out {path}: {ending} is not written; choose {', '.join(WRITERS)}.")
    if ending == ".parquet":
        need("tables", by=f"--out {path}: writing parquet")
    return WRITERS.get(ending, as_lines)


def first_columns(path: Path) -> set[str]:
    """Return the columns of a table that was written here, as far as its beginning tells; none of what is no table."""
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            return set(pq.read_schema(path).names)
        with path.open("rb") as file:
            first = file.readline(2**20).decode("utf-8")
        if path.suffix.lower() == ".csv":
            return set(next(csv.reader([first]), []))
        record = json.loads(first)
        record = record[0] if isinstance(record, list) and record else record
        return set(record) if isinstance(record, dict) else set()
    except Exception:  # whatever it is, it was not written here
        return set()
