"""A finding: a table with its figure, as files that any program reads and that the page of a run gathers.

    NAME.csv  NAME.json     the numbers, as fractions and unrounded; JSON has title and caption too
    NAME.svg  NAME.png      the figure

Whatever lies under `analysis/` in a run's folder is gathered, whoever wrote it: only the files' names are agreed on.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coral_lens.errors import CoralError
from coral_lens.report.figures.style import Picture
from coral_lens.report.tables.exports import csv_text
from coral_lens.storage.files import write_atomic
from coral_lens.storage.outputs import refuse_replacing
from coral_lens.storage.temporary import remove_abandoned

FOLDER = "analysis"
"""Where in a run's folder its findings are."""
MOST_ROWS = 400
"""Rows of a gathered table that are shown; the file holds all."""
KINDS = (".csv", ".json", ".png", ".svg")
Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one analysis: a table and its figure."""

    name: str
    """The name of its files."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    picture: Picture


def write_findings(findings: Iterable[Finding], folder: Path) -> list[str]:
    """Write findings into a folder that holds nothing else, and return their names; those of an earlier run are replaced.

    A figure that somebody else has put there stays.
    """
    remove_abandoned(folder)
    if folder.exists() and any(path.suffix not in KINDS for path in folder.iterdir() if path.name[0] != "."):
        raise CoralError(f"{folder} holds other files than findings; choose another folder for --out.")
    earlier = written_before(folder)
    names = []
    for finding in findings:
        refuse_others(folder, [finding.name])
        write_finding(finding, folder)
        names.append(finding.name)
    for name in earlier - set(names):
        for kind in KINDS:
            (folder / f"{name}{kind}").unlink(missing_ok=True)
    return names


def written_before(folder: Path) -> set[str]:
    """Return the names of the findings of ours in a folder: those with all four files and our words in the JSON."""
    names = {path.name.removesuffix(".json") for path in folder.glob("*.json")} if folder.is_dir() else set()
    whole = {name for name in names if all((folder / f"{name}{kind}").is_file() for kind in KINDS)}
    return {
        name
        for name in whole
        if {"title", "caption", "alt", "columns", "rows"} <= set(loose_record(folder / f"{name}.json"))
    }


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which files of these names are not ours; the JSON, which is written first, tells."""

    def is_ours(path: Path) -> bool:
        record = loose_record(path.parent / f"{path.name.removesuffix(path.suffix)}.json")
        return "analysis" in record or {"title", "caption", "alt"} <= record.keys()

    refuse_replacing(folder, [f"{name}{kind}" for name in names for kind in KINDS], is_ours=is_ours)


def loose_record(path: Path) -> dict[str, Any]:
    """Return a JSON record, or an empty one where a file is none."""
    try:
        return read_record(path)
    except CoralError:
        return {}


def write_finding(finding: Finding, folder: Path) -> None:
    """Write the four files of a finding."""
    rows = [tuple(None if isinstance(x, float) and math.isnan(x) else x for x in row) for row in finding.rows]
    picture = finding.picture
    record: dict[str, Any] = {
        "title": finding.title,
        "caption": picture.caption,
        "alt": picture.alt,
        "columns": finding.columns,
    }
    record |= {"rows": [dict(zip(finding.columns, row, strict=True)) for row in rows]}
    write_atomic(folder / f"{finding.name}.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(folder / f"{finding.name}.csv", csv_text((finding.columns, *rows)).encode())
    for ending, data in picture.files().items():
        write_atomic(folder / f"{finding.name}{ending}", data)


# --- gathering --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathered:
    """A finding as its files tell it."""

    name: str
    section: str
    """The folder below `analysis/` that it lies in; empty for `analysis/` itself."""
    title: str
    caption: str
    alt: str
    svg: bytes
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_rows: int
    """Rows of the whole table."""


def gather_findings(run_folder: Path) -> list[Gathered]:
    """Return the findings under a run's `analysis/`, in the order of their names: every figure, and tables without one."""
    top = run_folder / FOLDER
    found = [path for kind in ("svg", "csv") for path in top.rglob(f"*.{kind}")]
    # a name that begins with a dot is what a killed command left behind
    hidden = [path for path in found if any(part.startswith(".") for part in path.relative_to(top).parts)]
    stems = sorted({path.with_suffix("") for path in found if path not in hidden})
    return [read_finding(stem, top) for stem in stems]


def read_finding(stem: Path, top: Path) -> Gathered:
    """Read the files of one finding; words that its JSON lacks are made of its name."""
    record = read_record(file_of(stem, "json"))
    section = stem.parent.relative_to(top).as_posix().removeprefix(".")
    plain = stem.name.replace("-", " ").replace("_", " ")
    title = str(record.get("title") or plain[:1].upper() + plain[1:])
    table = file_of(stem, "csv")
    svg = file_of(stem, "svg").read_bytes() if file_of(stem, "svg").exists() else b""
    columns, rows = read_table(table) if table.exists() else ((), ())
    return Gathered(
        name=f"{section}-{stem.name}".lstrip("-"),
        section=section,
        title=title,
        caption=str(record.get("caption") or ""),
        alt=str(record.get("alt") or label_in(svg) or title),
        svg=svg,
        columns=columns,
        rows=rows[:MOST_ROWS],
        n_rows=len(rows),
    )


def label_in(svg: bytes) -> str:
    """Return what a figure says of itself to those who cannot see it."""
    match = re.search(rb'<svg[^>]* aria-label="([^"]*)"', svg)
    return html.unescape(match[1].decode()) if match else ""


def file_of(stem: Path, kind: str) -> Path:
    """Return the file of a finding; its name may hold dots."""
    return stem.parent / f"{stem.name}.{kind}"


def read_record(path: Path) -> dict[str, Any]:
    """Return what a finding's JSON says of itself: nothing where there is none, or where it is a bare list of rows."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CoralError(f"{path} is not valid JSON ({error}); make the analysis again, or remove the file.") from None
    return record if isinstance(record, dict) else {}


def read_table(path: Path) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the head and the lines of a CSV file."""
    try:
        lines: Sequence[Sequence[str]] = list(csv.reader(io.StringIO(path.read_bytes().decode())))
    except (csv.Error, UnicodeDecodeError) as error:
        raise CoralError(f"{path} cannot be read as CSV ({error}); make the analysis again, or remove it.") from None
    return (tuple(lines[0]), tuple(map(tuple, lines[1:]))) if lines else ((), ())
