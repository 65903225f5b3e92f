"""Nothing that somebody else has written is replaced, and no output is its own input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coral_lens.errors import CoralError
from coral_lens.storage.outputs import output_file, refuse_inputs, refuse_replacing


def is_ours(path: Path) -> bool:
    return path.read_bytes().startswith(b"ours")


def test_an_output_that_is_an_input_by_any_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("ours")
    (tmp_path / "link").symlink_to(tmp_path / "q.jsonl")
    os.link(tmp_path / "q.jsonl", tmp_path / "hard")
    for name in ("q.jsonl", "link", "hard", "./q.jsonl"):
        with pytest.raises(CoralError, match="which is read: it would be replaced"):
            refuse_inputs(tmp_path / name, ["arc_easy", tmp_path / "q.jsonl"])
    refuse_inputs(tmp_path / "new", ["arc_easy", tmp_path / "q.jsonl"])


def test_pipes_devices_and_folders_are_no_output_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null"), tmp_path / "link"):
        with pytest.raises(CoralError, match="not a plain file"):
            output_file(path, is_ours=is_ours)


def test_a_file_is_written_where_it_is_new_or_ours_and_a_link_is_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("ours")
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "empty").touch()
    for name, target in {"a": "ours", "b": "new", "c": "thesis"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    for name, target in {"ours": "ours", "new": "new", "empty": "empty", "a": "ours", "b": "new"}.items():
        assert output_file(tmp_path / name, is_ours=is_ours) == tmp_path / target
    for name in ("thesis", "c"):
        with pytest.raises(CoralError, match="was not written by this command"):
            output_file(tmp_path / name, is_ours=is_ours)


def test_a_folder_in_which_something_would_be_replaced_is_refused(tmp_path: Path) -> None:
    refuse_replacing(tmp_path / "new", ["report.html"], is_ours=is_ours)
    (tmp_path / "report.html").write_text("ours")
    refuse_replacing(tmp_path, ["report.html"], is_ours=is_ours)
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(CoralError, match=r"report\.html exists and is not ours"):
        refuse_replacing(tmp_path, ["report.html"], is_ours=is_ours)
