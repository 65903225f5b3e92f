"""What is no table of questions is one sentence that says what it is, whether it is a file, a folder or an object of Python."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.data.sources import is_file
from coral_lens.errors import CoralError

ROW = {"question": "Which?", "options": ["x", "y"], "answer": 1}


def refused(source: Any) -> str:
    with pytest.raises(CoralError) as error:
        load_questions(source)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_names_that_are_taken_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain").write_text("")
    Path("folder").mkdir()
    Path("saved").mkdir()
    Path("saved/state.json").write_text("{}")
    assert [is_file(name) for name in ("q.parquet", "q.XLSX", "q.arrow", "plain", "saved")] == [True] * 5
    assert [is_file(name) for name in ("folder", "arc_easy", "q.txt")] == [False] * 3


@pytest.mark.parametrize("name", ["q.parquet", "q.arrow", "q.feather", "q.xlsx", "q.parquet.gz"])
@pytest.mark.parametrize(
    "data", [b"", b"question,A,B\n?,x,y\n", b"PAR1PAR1", b"ARROW1\0\0ARROW1", b"PK\x03\x04" + b"\0" * 40]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert str(path) in refused(path)


def test_lengths_that_lead_out_of_an_arrow_file_are_one_sentence_not_the_end_of_the_process(tmp_path: Path) -> None:
    import pyarrow as pa

    path, table = tmp_path / "q.arrow", pa.table({"question": ["Which?"] * 3, "A": ["xxx"] * 3, "B": ["y"] * 3})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    ends = struct.pack("<4i", 0, 3, 6, 9)  # of the texts of A
    whole = path.read_bytes()
    assert whole.count(ends) == 1
    path.write_bytes(whole.replace(ends, struct.pack("<4i", 0, 3, 2**31 - 1, -5)))
    assert f"{path} cannot be read as Arrow" in refused(path)


def test_a_zip_of_a_version_that_python_does_not_know_is_no_workbook(tmp_path: Path) -> None:
    from support.layouts import workbook

    path = tmp_path / "q.xlsx"
    workbook(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 168  # the version that is needed to read the first part
    path.write_bytes(data)
    assert f"{path} is no Excel workbook (zip file version 16.8)" in refused(path)


def test_a_file_that_is_called_otherwise_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\x1f\x8b\x08\xff" + b"\xff" * 20)
    assert "it is gzipped: call it so" in refused(path)
    path = tmp_path / "q.csv"
    path.write_bytes(b"PK\x03\x04\xff\xff\n")
    assert "it is an Excel workbook or a zip: call it so" in refused(path)


def test_a_workbook_that_would_fill_the_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.layouts import workbook

    monkeypatch.setattr("coral_lens.data._arrow_tables.UNHARMED", 10)
    monkeypatch.setattr("coral_lens.data._arrow_tables.EXPANSION", 1)
    workbook(tmp_path / "q.xlsx")
    assert "which is too much for a workbook" in refused(tmp_path / "q.xlsx")


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list([ROW, ROW])
    splits = DatasetDict({"train": data, "test": data})
    splits.save_to_disk(str(tmp_path / "saved"))
    assert refused(tmp_path / "saved").endswith(f"name one of them: {tmp_path / 'saved' / 'train'}.")
    assert refused(splits) == "The dataset has the splits train, test; give one of them: dataset['train']."
    assert len(load_questions(str(tmp_path / "saved" / "test"))) == 2


@pytest.mark.parametrize(
    ("state", "said"),
    [("{", "cannot be read"), ("[]", "is not of a saved dataset"), ("{}", "was not saved by `datasets`"),
     ('{"_data_files": [{"filename": "../x.arrow"}]}', "which is outside of it"),
     ('{"_data_files": [{"filename": "none.arrow"}]}', "No such file")],
)  # fmt: skip
def test_a_damaged_saved_dataset_is_refused(tmp_path: Path, state: str, said: str) -> None:
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    assert said in refused(tmp_path)


def test_objects_that_hold_no_rows_are_refused() -> None:
    import pandas as pd
    import polars as pl

    assert "Got a int instead" in refused(3)
    assert "Got a dict instead" in refused(ROW)
    assert refused([ROW, 7]) == "the list, row 2: each row must be a dict. Got a int instead."
    assert refused([]) == "the list holds no questions."
    assert refused(pl.DataFrame([ROW]).lazy()) == "The frame is lazy: give frame.collect()."
    twice = pd.DataFrame([["?", "x", "y"]], columns=["question", "A", "A"])
    assert refused(twice) == "the frame: the column 'A' appears twice; rename one of them."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("7", "Got a int instead"),
        ('["a"]', "Got a str instead"),
        ('[{"question": "?"}, 3]', "Got a int instead"),
        ('[{"question": "?",]', "line 1: malformed JSON"),
        ("[\n{},\n}", "line 3: malformed JSON"),
        ("{" * 100_000, "malformed JSON"),
        ('{"question": "?"}\n{"question": ', "line 2: malformed JSON"),
    ],
)
def test_a_document_that_is_no_table_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "q.json"
    path.write_text(content)
    assert said in refused(path)


def test_lines_that_are_one_document_are_told_its_name(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps([ROW], indent=1))
    assert "one document of many lines is called .json" in refused(path)


def test_a_limit_reads_only_as_far_of_every_kind_of_table(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "q.csv"
    path.write_text("question,A,B,answer\n?,x,y,A\n?,x,y,B\nthis line is never read\n")
    assert len(load_questions(path, TaskOptions(limit=2))) == 2
    frame = pd.DataFrame([{**ROW, "answer": 0}, ROW, {**ROW, "question": None}])
    assert len(load_questions(frame, TaskOptions(limit=2))) == 2


def test_parts_may_not_move_from_one_field_to_another_within_a_file() -> None:
    rows = [{**ROW, "label": 0, "answer": None}] * 3
    first = [{k: v for k, v in row.items() if k != "answer"} for row in rows]
    many = first * 2000 + [{**ROW, "label": 0}]
    assert "the answer stands in 'answer' from here on, and in 'label' before" in refused(many)
