"""How a command ended, and how often each end was seen. Knows nothing of what was done to the command."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coral_lens.cli import main
from coral_lens.errors import CoralError

End = Literal["same bytes", "one sentence", "traceback", "silent"]
ENDS: tuple[End, ...] = ("same bytes", "one sentence", "traceback", "silent")
PATIENCE, SHORT = 60, 10
"""Seconds of processor time after which a command, or a call, counts as hanging."""
WAITING = 10
"""It counts as hanging after so many times these seconds on the clock too: beside busy neighbours, all commands take long."""
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
"""Codes of a command that a signal ended."""


@dataclass(frozen=True)
class Outcome:
    """How one command ended."""

    code: int | None
    """None if it ended in an exception that nobody had thought of."""
    out: str
    err: str

    @property
    def is_refusal(self) -> bool:
        """Whether it ended with a sentence of ours, or the usage of a wrong option, and the code of a refusal or of a signal."""
        said = any(line.startswith("coral: ") for line in self.err.splitlines()) or "─ Error ─" in self.err
        return self.code in (2, *STOPPED) and said and "Traceback" not in self.err

    @property
    def last(self) -> str:
        """Its last word."""
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")


class TookTooLong(BaseException):
    """A command that hangs."""


@contextlib.contextmanager
def at_most(seconds: int, end: type[BaseException] = TookTooLong) -> Iterator[None]:
    """Stop what takes longer: a hang is an end like the others. With KeyboardInterrupt it is stopped as by Ctrl-C."""

    def stop(*_: Any) -> None:
        raise end(f"still at work after {seconds} seconds")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, WAITING * seconds)}
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, after) in timers.items():
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def coral(folder: Path, *arguments: str, patience: contextlib.AbstractContextManager[None] | None = None) -> Outcome:
    """Run a command in this process and in a folder, as the installed script does."""
    out, err = io.StringIO(), io.StringIO()
    argv, place = sys.argv, Path.cwd()
    sys.argv = ["coral", *arguments]
    os.chdir(folder)
    code: int | None = None
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            patience or at_most(PATIENCE),
        ):
            warnings.simplefilter("default")  # as for a user; in tests they are errors
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except (Exception, TookTooLong):
                err.write(traceback.format_exc())
    finally:
        sys.argv = argv
        os.chdir(place)
    return Outcome(code, out.getvalue(), err.getvalue())


def call(function: Callable[[], Any]) -> Outcome:
    """Call a function of ours as a command does: a CoralError is a sentence, anything else a traceback."""
    try:
        with at_most(SHORT), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function()
    except CoralError as error:
        return Outcome(2, "", f"coral: {error}")
    except (Exception, TookTooLong):
        return Outcome(None, "", traceback.format_exc())
    return Outcome(0, "", "")


@dataclass
class Tally:
    """The ends of one kind of fault, and what was wrong with the wrong ones."""

    what: str
    may_refuse: bool = True
    """Whether a sentence is a good end: after a kill it is not."""
    counts: dict[End, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    wrong: list[str] = field(default_factory=list)
    """One line for each wrong end: the case and what happened."""

    @property
    def tried(self) -> int:
        return sum(self.counts.values())

    def add(self, case: str, end: End, said: str = "") -> None:
        """Count an end."""
        self.counts[end] += 1
        if end in ("traceback", "silent") or (end == "one sentence" and not self.may_refuse):
            self.wrong.append(f"{case}: {end}: {said}"[:600])

    def judge(self, case: str, outcome: Outcome, *, difference: str = "") -> None:
        """Count the end of a command that left this difference from what was expected."""
        if outcome.code == 0:
            self.add(case, "silent" if difference else "same bytes", difference)
        else:
            self.add(case, "one sentence" if outcome.is_refusal else "traceback", outcome.last)


def table(tallies: list[Tally]) -> str:
    """Return the table that `make torture` prints."""
    head = ("what", "tried", *ENDS)
    total = Tally("all", counts={end: sum(t.counts[end] for t in tallies) for end in ENDS})
    rows = [head, *((t.what, f"{t.tried:,}", *(f"{n:,}" for n in t.counts.values())) for t in [*tallies, total])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
