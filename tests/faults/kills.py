"""Kills: the folder as it is at each file operation of a command, and the same command again from there.

Whatever a process has done to files when SIGKILL ends it is what another process then finds. So a command runs once, and at
each of its file operations the folder is copied: that is what a kill at this moment leaves. A file that is being flushed is
also copied with its end cut off, as a crash of the machine leaves it. `real` and `random_moments` kill processes, to show
that the copies are true.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.outcomes import Outcome, Tally, coral
from faults.workshop import Step, Workshop, copied

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}
TORN = 7
"""Bytes that are cut off the end of a file that was not flushed."""
GONE = "99999999"
"""Stands in copies for the number of the process that made them: it has ended."""


class Recorder:
    """Copies a folder at every change that this process makes inside it, or at a sample of so many of them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.kept: list[Path] = []
        self.n_operations = 0
        self._at_work = False
        sys.addaudithook(self._see)  # it stays for the rest of the process, and does nothing without a folder

    @contextlib.contextmanager
    def watching(self, folder: Path, home: Path, *, most: int | None, seed: int = 0) -> Iterator[None]:
        """Keep copies in `home` while the block runs; they are in `kept` afterwards."""
        self.folder, self.home, self.most, self.random = folder.resolve(), home, most, random.Random(seed)
        self.kept, self.n_operations = [], 0
        self._last: set[tuple[str, int, int]] | None = None
        home.mkdir(parents=True)
        flush = os.fsync

        def flushing(number: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if self.folder and path.is_relative_to(self.folder):
                self._keep()
                self._keep(torn=path)
            flush(number)

        os.fsync = flushing
        try:
            yield
        finally:
            os.fsync, self.folder = flush, None

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or self._at_work or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
        if (writes or event in CHANGES) and Path(os.path.abspath(arguments[0])).is_relative_to(self.folder):
            self._keep()

    def _keep(self, torn: Path | None = None) -> None:
        assert self.folder
        self._at_work = True
        try:
            if self.most is None and self._is_as_before() and torn is None:
                return  # of a sample, two that are the same are no waste of time
            self.n_operations += 1
            place = self._place()
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
                copied(self.folder, place)
                if torn is not None:
                    cut(place / torn.relative_to(self.folder))
                self._end(place)
        finally:
            self._at_work = False

    def _is_as_before(self) -> bool:
        assert self.folder
        before = self._last
        self._last = {(str(p), (s := p.lstat()).st_size, s.st_mtime_ns) for p in self.folder.rglob("*")}
        return before == self._last

    def _place(self) -> Path | None:
        """Where the next copy goes, so that in the end each operation was as likely to be kept: a reservoir."""
        number = len(self.kept)
        if self.most is not None and number >= self.most:
            number = self.random.randrange(self.n_operations)
            return self.kept[number] if number < self.most else None
        self.kept.append(self.home / f"kill-{number}")
        return self.kept[-1]

    def _end(self, place: Path) -> None:
        """Have the names of temporary files say that their process has ended."""
        for path in sorted(place.rglob(f".*{os.getpid()}*"), reverse=True):
            path.rename(path.with_name(path.name.replace(str(os.getpid()), GONE)))


def cut(path: Path) -> None:
    """Take the last bytes off a file."""
    size = path.stat().st_size
    os.truncate(path, max(size - TORN, 0))


def record_all(home: Path, recorder: Recorder, *, large: bool, most: int | None) -> Workshop:
    """Run every command, and keep the folder as it was at (a sample of at most so many of) its file operations."""

    @contextlib.contextmanager
    def around(step: Step, folder: Path) -> Iterator[None]:
        with recorder.watching(folder, kills_of(home, step), most=most, seed=step.number):
            yield

    return Workshop.make(home, large=large, around=around)


def kills_of(home: Path, step: Step) -> Path:
    """Return the folder for what kills of a command leave."""
    return home / f"kills-{step.number}"


def kill_all(shop: Workshop) -> Iterator[Tally]:
    """Run every command again from each moment of it that was kept."""
    for step in shop.steps:
        tally = Tally(f"kill: {' '.join(step.line.split()[:2])}", may_refuse=False)
        for folder in sorted(kills_of(shop.home, step).iterdir()):
            outcome, changed = shop.again(step, shop.bench(folder))
            tally.judge(f"{step.line} ({folder.name})", outcome, difference=changed)
            shutil.rmtree(folder)
        yield tally


CHILD = """
import os, signal, sys
from support.commands import quiet
from faults.outcomes import coral
left = int(sys.argv[1])
def see(event, arguments):
    global left
    if event == "os.rename":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(see)
with quiet():
    ended = coral(os.getcwd(), *sys.argv[2:])
sys.stderr.write(ended.err)
sys.exit(1 if ended.code is None else ended.code)
"""


def started(step: Step, folder: Path, *before: str) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    command = [sys.executable, "-c", CHILD, *before, *step.arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def real(shop: Workshop, step: Step, *, renames: list[int]) -> Tally:
    """End processes by SIGKILL before their n-th rename, and run the command again here."""
    tally = Tally(f"SIGKILL: {step.line.split()[0]}", may_refuse=False)
    for n in renames:
        folder = shop.bench(step.before)
        with started(step, folder, str(n)) as child:
            _, err = child.communicate(timeout=300)
        assert child.returncode in (0, -9), err.decode()
        outcome, changed = shop.again(step, folder)
        tally.judge(f"{step.line} (SIGKILL before rename {n})", outcome, difference=changed)
    return tally


def random_moments(shop: Workshop, step: Step, *, n: int, seed: int = 0) -> Tally:
    """End processes by SIGKILL at moments drawn from the whole time that the command takes, and run it again here."""
    tally = Tally(f"SIGKILL at random: {' '.join(step.line.split()[:2])}", may_refuse=False)
    moments = random.Random(f"{seed} {step.number}")
    whole = seconds_until_end(step, shop.bench(step.before), None)
    for _ in range(n):
        moment, folder = moments.uniform(0, whole), shop.bench(step.before)
        seconds_until_end(step, folder, moment)
        outcome, changed = shop.again(step, folder)
        tally.judge(f"{step.line} (SIGKILL after {moment:.4f} of {whole:.4f} s)", outcome, difference=changed)
    return tally


def seconds_until_end(step: Step, folder: Path, moment: float | None) -> float:
    """Run a command in a fork of this process, which is killed after so many seconds; return when it ended."""
    begun = time.monotonic()
    if (child := os.fork()) == 0:  # a process that begins anew would be killed while it imports, most of the time
        code = None
        try:
            code = coral(folder, *step.arguments).code
        finally:
            os._exit(1 if code is None else code)
    if moment is not None:
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), step.line
    return time.monotonic() - begun


def pairs(shop: Workshop, steps: list[Step]) -> Tally:
    """Run a command in two processes at once, in one folder: one of them may say that the other is at work."""
    tally = Tally("two processes in one folder")
    for step in steps:
        folder = shop.bench(step.before)
        with started(step, folder, str(10**9)) as one, started(step, folder, str(10**9)) as other:
            ends = [(child, *child.communicate(timeout=600)) for child in (one, other)]
        for child, out, err in ends:
            tally.judge(f"{step.line} beside itself", Outcome(child.returncode, out.decode(), err.decode()))
        outcome, changed = shop.again(step, folder)
        tally.judge(f"{step.line} after two at once", outcome, difference=changed)
    return tally
