"""What an analysis keeps is found again by what it depends on, is made again if it was damaged, and belongs to one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coral_lens.analysis.files import kept_arrays, kept_rows
from coral_lens.errors import CoralError
from coral_lens.storage.resumable import locked, locked_file


@dataclass(frozen=True)
class Row:
    """A row of nothing in particular."""

    name: str
    value: float


def rows_of(path: Path | None, *keys: str, made: list[str] | None = None) -> list[Any]:
    """The rows for some keys, each noted in `made` if it had to be made."""

    def make(key: str) -> list[Row]:
        if key == "killed":
            raise KeyboardInterrupt
        if made is not None:
            made.append(key)
        return [Row(key, float(len(key))), Row(f"{key} again", float("nan"))]

    with kept_rows(path) as done:
        return [done.rows(["key", key], lambda key=key: make(key)) for key in keys]  # type: ignore[misc]


def test_rows_are_kept_line_by_line_and_a_killed_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = rows_of(tmp_path / "whole.jsonl", "a", "bb", "ccc")
    assert whole[1] == [{"name": "bb", "value": 2.0}, {"name": "bb again", "value": None}]
    with pytest.raises(KeyboardInterrupt):
        rows_of(tmp_path / "killed.jsonl", "a", "bb", "killed")
    made: list[str] = []
    assert rows_of(tmp_path / "killed.jsonl", "a", "bb", "ccc", made=made) == whole
    assert made == ["ccc"]
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_line_that_was_cut_or_damaged_is_made_again_and_leaves_the_file(tmp_path: Path, line: int) -> None:
    path = tmp_path / "rows.jsonl"
    whole = rows_of(path, "a", "bb", "ccc")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line][:-9] if line == 2 else lines[line].replace(b"value", b"VALUE", 1)
    path.write_bytes(b"".join(lines))
    made: list[str] = []
    assert rows_of(path, "a", "bb", "ccc", made=made) == whole
    assert made == [["a", "bb", "ccc"][line]]
    assert path.read_bytes().count(b"\n") == 3
    assert b"VALUE" not in path.read_bytes()


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows_of(None, "a", "a")[0] == rows_of(None, "a")[0]
    with kept_arrays(None, "identity") as done:
        assert done.arrays(1, lambda: {"x": np.ones(2)})["x"].tolist() == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_kept_by_what_they_depend_on(tmp_path: Path) -> None:
    made: list[int] = []

    def arrays(identity: str, key: int) -> list[float]:
        with kept_arrays(tmp_path, identity) as done:
            return list(done.arrays(key, lambda: (made.append(key), {"x": np.arange(key) * 2.0})[1])["x"])

    assert arrays("one", 3) == arrays("one", 3) == [0.0, 2.0, 4.0]
    assert made == [3]
    assert arrays("other", 3) == [0.0, 2.0, 4.0]
    assert arrays("one", 2) == [0.0, 2.0]
    assert made == [3, 3, 2]


def test_a_second_process_may_not_add_to_the_same_file_or_folder(tmp_path: Path) -> None:
    with locked_file(tmp_path / "rows.jsonl"), pytest.raises(CoralError, match="another process") as error:
        rows_of(tmp_path / "rows.jsonl", "a")
    assert str(tmp_path / "rows.jsonl") in str(error.value)
    with locked_file(tmp_path / "rows.jsonl"):
        assert rows_of(tmp_path / "others.jsonl", "a"), "another analysis of the same folder may"
    with locked(tmp_path), pytest.raises(CoralError, match="another process"), kept_arrays(tmp_path, "identity"):
        pass
