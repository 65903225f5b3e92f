"""A command that is told to end says one sentence, and leaves nothing in the folder for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAITING = """
import signal, sys, tempfile, time
from coral_lens.cli import check, main
hangup_is_ignored = sys.argv[1:] == ["nohup"]
# whoever runs the tests may have it ignored
signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup_is_ignored else signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to Ctrl-C

def work(*_):
    with tempfile.TemporaryDirectory() as folder:
        print("waiting", flush=True)
        if hangup_is_ignored:
            sys.stdin.read()  # until the signal has been sent
        else:
            time.sleep(60)

check.folder_of_data = work
sys.argv = ["coral", "tasks"]
main()
"""


def end(number: int, folder: Path, *arguments: str) -> tuple[int, str]:
    """Start a command, send it a signal while it works, and return its code and what it said."""
    environment = {**os.environ, "TMPDIR": str(folder), "CORAL_CACHE": str(folder.parent / "cache")}
    command = [sys.executable, "-c", WAITING, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        assert list(folder.iterdir())
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_command_in_one_sentence_and_its_temporary_folders(
    tmp_path: Path, name: str, code: int
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    assert end(getattr(signal, name), folder) == (
        code,
        "coral: Interrupted. Finished work is kept; the same command goes on where it was.\n",
    )
    assert not list(folder.iterdir())


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    _, said = end(signal.SIGHUP, folder, "nohup")
    assert "Interrupted" not in said
