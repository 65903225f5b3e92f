"""Rows of JSON: one object a line, or one document in any of the shapes in which tables are written."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coral_lens.data.tables import Refusals, Table, batches_of_rows, exploded
from coral_lens.errors import CoralError
from coral_lens.storage.lines import iter_lines, opened, parse_json

Row = tuple[int, Mapping[str, Any]]
"""A line or row number and the fields found there."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MARKS = {b"PK\x03\x04": "an Excel workbook or a zip", b"PAR1": "parquet", b"ARROW1": "Arrow", b"\x1f\x8b": "gzipped"}
"""How files of other kinds begin, whatever they are called."""


def lines_table(path: Path, stem: str, refuse: Refusals, size: int) -> Table:
    """Return the rows of a file with one JSON object a line."""
    rows = rows_of_lines(path, iter_lines(path), refuse)
    return Table(str(path), stem, batches_of_rows(exploded(rows), size), column="field")


def document_table(path: Path, stem: str, refuse: Refusals, size: int) -> Table:
    """Return the rows of a file that holds one JSON document, or lines all the same."""
    with opened(path) as file:
        data = file.read()
    encoding = "utf-16" if data.startswith(UTF16) else "utf-8-sig"
    try:
        document = parse_json(data.decode(encoding))
    except ValueError as error:
        lines = data.splitlines(keepends=True)
        first = next((line for line in lines if line.strip()), b"")
        if not lines or first.lstrip().startswith(b"{"):
            rows = rows_of_lines(path, enumerate(lines, start=1), refuse)
            return Table(str(path), stem, batches_of_rows(exploded(rows), size), column="field")
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CoralError(f"{path}{line}: malformed JSON ({error}).") from error
    rows = enumerate(document_rows(document, path), start=1)
    return Table(str(path), stem, batches_of_rows(exploded(rows), size), unit="row", column="field")


def rows_of_lines(path: Path, lines: Iterable[tuple[int, bytes]], refuse: Refusals) -> Iterator[Row]:
    """Yield the objects of lines; one that holds none is refused."""
    offset = 0
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            fields = parse_json(text)
        except UnicodeDecodeError as error:
            refuse(not_utf8(where, line, error.start, offset, whole=data_before(number, line)), error)
        except ValueError as error:
            document = "; one document of many lines is called .json" if line.strip() in (b"[", b"{") else ""
            refuse(f"{where}: malformed JSON ({error}){document}.", error)
        else:
            if isinstance(fields, dict):
                yield number, fields
            else:
                refuse(f"{where}: each line must be one JSON object. Got a {type(fields).__name__} instead.")
        finally:
            offset += len(line)


def data_before(number: int, line: bytes) -> bytes:
    """Return the beginning of a file if this is its first line."""
    return line if number == 1 else b""


def not_utf8(where: str, line: bytes, at: int, offset: int, *, whole: bytes = b"") -> str:
    """Say which byte is not UTF-8, and what the file is if its first bytes tell."""
    kind = next((name for mark, name in MARKS.items() if whole.startswith(mark)), "")
    remedy = f"it is {kind}: call it so" if kind else "save the file as UTF-8"
    return f"{where}: not UTF-8 (byte 0x{line[at]:02x} at offset {offset + at}); {remedy}."


def document_rows(document: Any, path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a document: a list of objects, one object, or a table as pandas writes it in its five shapes."""
    rows = document if isinstance(document, list) else rows_of_object(document) if isinstance(document, dict) else None
    if rows is None or not all(isinstance(row, dict) for row in rows):
        found = next((row for row in rows or [document] if not isinstance(row, dict)), document)
        raise CoralError(
            f"{path}: a list of JSON objects is expected, one for each question. Got a {type(found).__name__} instead."
        )
    return rows


def rows_of_object(document: dict[str, Any]) -> list[Any]:
    """Return the rows that an object holds, or the object itself as the only row."""
    values = list(document.values())
    names, data = document.get("columns"), document.get("data")
    if isinstance(names, list) and isinstance(data, list) and all(isinstance(row, list) for row in data):
        return [dict(zip(map(str, names), row, strict=False)) for row in data]  # orient="split"
    if isinstance(data, list) and all(isinstance(row, dict) for row in data):
        return data  # orient="table", and many others
    inner = document.get("questions")
    if isinstance(inner, list) and all(isinstance(row, dict) for row in inner):
        shared = {name: value for name, value in document.items() if name not in ("questions", "id")}
        return [{**shared, **row} for row in inner]
    if values and all(isinstance(value, dict) for value in values):
        return rows_of_objects(document)
    if values and all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]  # lists of columns
    return [document]


def rows_of_objects(document: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the rows of an object of objects: columns with their rows by number, or rows by their id."""
    inner = list(document.values())
    numbers = list(inner[0])
    if all(list(column) == numbers for column in inner) and all(number.isdigit() for number in numbers):
        return [{name: column[number] for name, column in document.items()} for number in numbers]  # orient="columns"
    return [{"id": name, **row} for name, row in document.items()]  # orient="index"
