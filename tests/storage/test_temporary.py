"""What a command has on the disk while it runs is nobody else's, and what a killed one left is gone at the next start."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coral_lens.errors import CoralError
from coral_lens.storage.files import append_line, fresh_folder, write_atomic
from coral_lens.storage.resumable import locked
from coral_lens.storage.temporary import MARK, file_beside, temporary_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from coral_lens.storage.temporary import file_beside, folder_beside, lock_file, temporary_folder
target = Path(sys.argv[1])
with file_beside(target), folder_beside(target), lock_file(target.parent / ".lock"), temporary_folder():
    print("there", flush=True)
    sys.stdin.read()
"""


def kill_in_the_middle(target: Path, *, meanwhile: bool = False) -> None:
    """Let another process make temporary things on the way to `target`, and kill it."""
    environment = {**os.environ, "TMPDIR": str(target.parent)}
    command = [sys.executable, "-c", KILLED, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        if meanwhile:
            before = set(target.parent.iterdir())
            write_atomic(target, b"x")
            with temporary_folder():
                pass
            assert set(target.parent.iterdir()) == before | {target}
        process.send_signal(signal.SIGKILL)


@pytest.fixture(autouse=True)
def tmpdir_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_what_a_killed_command_left_is_gone_after_the_next_and_nothing_else(tmp_path: Path) -> None:
    target, others = tmp_path / "answers", {".answers.notes.tmp", ".other.0123abcd.tmp", "coral-reef"}
    (tmp_path / ".answers.notes.tmp").write_text("mine")
    (tmp_path / ".other.0123abcd.tmp").write_text("mine")
    (tmp_path / "coral-reef").mkdir()  # it has no mark of ours
    kill_in_the_middle(target)
    assert len(list(tmp_path.iterdir())) == len(others) + 4
    write_atomic(target, b"x")
    with temporary_folder(), locked(tmp_path):
        pass
    assert {p.name for p in tmp_path.iterdir()} == others | {"answers"}


def test_what_a_running_command_has_is_not_touched(tmp_path: Path) -> None:
    kill_in_the_middle(tmp_path / "answers", meanwhile=True)


def test_the_folders_of_earlier_versions_are_cleaned_up_and_a_lens_put_aside_is_put_back(tmp_path: Path) -> None:
    gone, here = 4_194_303, os.getpid()  # the highest number of a process
    for name in (f".lens.{gone}.tmp", f".lens.{gone}.old", f".lens.{here}.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lens.json").write_text(name)
    with pytest.raises(CoralError, match="not empty"), fresh_folder(tmp_path / "lens"):
        pass
    assert (tmp_path / "lens" / "lens.json").read_text() == f".lens.{gone}.old"
    assert {p.name for p in tmp_path.iterdir()} == {"lens", f".lens.{here}.tmp"}


def test_planted_links_are_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "diary"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in (".lock", ".x.tmp", ".x.0123abcd.tmp", "x", "journal"):
        (out / name).symlink_to(victim)
    with pytest.raises(CoralError, match=r"\.lock: it is a link, which is not followed"), locked(out):
        pass
    with pytest.raises(CoralError, match="it is a link"):
        append_line(out / "journal", b"line\n")
    write_atomic(out / "x", b"new")
    assert not (out / "x").is_symlink()
    assert victim.read_text() == "mine"


def test_a_lock_that_somebody_else_has_written_to_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with locked(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


def test_a_lock_is_gone_afterwards_and_a_second_one_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(CoralError, match="another process"), locked(tmp_path):
            pass
        assert (tmp_path / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_nearly_too_long_for_the_file_system_can_be_written(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("n" * 255), b"x")
    assert [len(p.name) for p in tmp_path.iterdir()] == [255]


def test_a_temporary_file_is_held_and_can_be_guessed_by_nobody(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with file_beside(tmp_path / "x") as (_file, path), path.open("rb") as other:
            names.add(path.name)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(names) == 3
    with temporary_folder() as folder:
        assert [p.name for p in folder.iterdir()] == [MARK]
