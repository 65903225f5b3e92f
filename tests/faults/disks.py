"""Small disks and signals: a file operation that fails with no space left, files that may not grow, and a process that is asked
to end. Each ends in one sentence, and the same command then ends as an undisturbed run does."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.kills import WRITING
from faults.outcomes import Outcome, Tally, coral
from faults.workshop import Step, Workshop


class FullDisk:
    """Lets the n-th file that is opened for writing in a folder, and all later ones, fail."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.folder = Path()
        sys.addaudithook(self._see)  # it stays for the rest of the process, and does nothing without a count

    @contextlib.contextmanager
    def after(self, n: int, folder: Path) -> Iterator[None]:
        """Have room for n files."""
        self.left, self.folder = n, folder.resolve()
        try:
            yield
        finally:
            self.left = None

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left is None or event != "open" or not isinstance(arguments[2], int) or not arguments[2] & WRITING:
            return
        if isinstance(arguments[0], str | os.PathLike) and Path(os.path.abspath(arguments[0])).is_relative_to(
            self.folder
        ):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disks(shop: Workshop, steps: list[Step], *, rooms: list[int], sizes: list[int]) -> Tally:
    """Run commands with room for so many files, and with files of at most so many bytes; then again without a limit."""
    tally, disk = Tally("full disks"), FullDisk()
    for step in steps:
        limits = [*((f"room for {n} files", disk.after(n, shop.place)) for n in rooms)]
        limits += [(f"files of {n} bytes", largest_file(n)) for n in sizes]
        for name, limit in limits:
            folder = shop.bench(step.before)
            with limit:
                outcome = coral(folder, *step.arguments)
            case = f"`{step.line}`, {name}"
            tally.judge(case, outcome)
            again, changed = shop.again(step, folder)
            tally.judge(f"{case}, then with room", again, difference=changed)
    return tally


ASKED = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
CHILD = """
import os, signal, sys, coral_lens.engine.shard_work as shard_work, time
# a suite that runs in the background ignores some of them, and so would this process
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
usual = shard_work.gather_shard
def slow(*arguments):
    print("computing", flush=True)
    time.sleep(60)
    return usual(*arguments)
shard_work.gather_shard = slow
from coral_lens.cli import main
sys.argv = ["coral", *sys.argv[1:]]
main()
"""


def signals(shop: Workshop, step: Step, *, names: list[str]) -> Tally:
    """Ask a process to end while it computes: it says one sentence, leaves nothing in TMPDIR, and can be resumed."""
    tally = Tally("signals")
    for name in names:
        folder = shop.bench(step.before)
        temporary = shop.home / "tmp"
        temporary.mkdir(exist_ok=True)
        outcome = ended_by(ASKED[name], step, folder, temporary)
        left = sorted(p.name for p in temporary.iterdir())
        tally.judge(f"{name} to `{step.line}`", outcome, difference="it went on")
        again, changed = shop.again(step, folder)
        changed = ", ".join(filter(None, [changed, *(f"{n} is left in TMPDIR" for n in left)]))
        tally.judge(f"`{step.line}` after {name}", again, difference=changed)
    return tally


def ended_by(number: int, step: Step, folder: Path, temporary: Path) -> Outcome:
    """Start a command, wait until it computes, and send it a signal."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary), "CORAL_CACHE": "cache"}
    command = [sys.executable, "-c", CHILD, *step.arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        while "computing" not in (line := child.stdout.readline()):
            assert line or child.poll() is None, "it ended before it computed"
        time.sleep(0.3)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    return Outcome(child.returncode, out, err)
