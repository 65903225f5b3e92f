"""Rows that are written for others are read back as they were, and no cell of CSV starts a formula."""

from __future__ import annotations

import csv
import datetime
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.storage.rows import as_csv, as_lines, as_parquet, first_columns, writer_of

values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(
    st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8
)  # fmt: skip
tables = st.lists(
    st.dictionaries(st.sampled_from(["a", "b", "c d"]), values | st.lists(values, max_size=2)), max_size=4
)


@given(tables)
def test_json_lines_hold_what_was_written(rows: list[dict[str, Any]]) -> None:
    lines = as_lines(rows).decode().split("\n")
    assert [json.loads(line) for line in lines if line] == rows


@given(tables)
def test_no_cell_of_csv_starts_a_formula(rows: list[dict[str, Any]]) -> None:
    cells = [cell for row in csv.reader(io.StringIO(as_csv(rows).decode(), newline="")) for cell in row]
    for cell in cells:
        assert not cell.startswith(("=", "@", "\t", "\r")), cell
        assert not cell.startswith(("+", "-")) or float(cell) is not None


@given(tables)
def test_parquet_takes_whatever_columns_hold(rows: list[dict[str, Any]]) -> None:
    read = pq.read_table(io.BytesIO(as_parquet(rows))).to_pylist() if any(rows) else []
    assert len(read) == (len(rows) if any(rows) else 0)


def test_csv_has_a_header_and_lists_as_json() -> None:
    rows = [{"q": "=1+1", "probs": (0.25, 0.75), "sure": True, "n": None}, {"q": "a, b", "more": {"x": 1}, "n": -3}]
    assert as_csv(rows).decode() == (
        "q,probs,sure,n,more\n'=1+1,\"[0.25, 0.75]\",true,,\n\"a, b\",,,-3,\"{\"\"x\"\": 1}\"\n"
    )  # fmt: skip


def test_what_json_does_not_know_is_written_as_text_or_nothing() -> None:
    row = {"when": datetime.date(2026, 11, 18), "share": float("nan"), "all": [float("inf"), 1]}
    assert json.loads(as_lines([row])) == {"when": "2026-11-18", "share": None, "all": [None, 1]}


def test_parquet_keeps_types_and_writes_mixed_columns_as_json() -> None:
    rows = [{"probs": (0.25, 0.75), "mixed": 1, "id": "a"}, {"probs": (1.0,), "mixed": "x", "id": "b"}]
    table = pq.read_table(io.BytesIO(as_parquet(rows)))
    assert table.to_pylist() == [
        {"probs": [0.25, 0.75], "mixed": "1", "id": "a"},
        {"probs": [1.0], "mixed": "x", "id": "b"},
    ]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.parquet", "t.json", "t"])
def test_the_columns_of_what_was_written_are_known_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(writer_of(path)([{"id": "1", "answer": 2}, {"id": "2", "answer": 0}]))
    assert first_columns(path) == {"id", "answer"}
    path.write_bytes(b"\xff\x00 something else")
    assert not {"id", "answer"} <= first_columns(path)


@pytest.mark.parametrize("name", ["t.xlsx", "t.tsv", "t.jsonl.gz", "t.arrow"])
def test_a_table_that_is_not_written_is_refused_at_once(name: str) -> None:
    with pytest.raises(CoralError, match=f"--out {name}: .* is not written; choose .jsonl"):
        writer_of(Path(name))
