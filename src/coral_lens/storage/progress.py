"""How far long work is, on standard error: a bar in a terminal, one line that changes in a notebook, lines in a log.

A log gets a line at the start, one that says what an earlier run has left, one every half minute, and one at the end; nothing
else. Knows nothing of the work.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from coral_lens.storage.escape import in_one_line

Progress = Callable[[int], None]
"""Told how many more questions are done."""

Bar = Callable[[str, int, str], AbstractContextManager[Progress]]
"""Opens a bar for a label, a total and a unit, and gives the function that advances it."""


@dataclass(frozen=True, slots=True)
class Advance:
    """A Progress that tells apart what is done now and what an earlier run has left, and shows a note beside the numbers."""

    now: Progress
    before: Progress
    note: Callable[[str], None]

    def __call__(self, n: int) -> None:
        self.now(n)


def done_before(progress: Progress, n: int) -> None:
    """Tell what an earlier run has left; a Progress that does not tell it apart counts it like the rest."""
    if isinstance(progress, Advance):
        progress.before(n)
    else:
        progress(n)


def note_beside(progress: Progress, text: str) -> None:
    """Show a few words beside the numbers, such as how many workers there are, until others come."""
    if isinstance(progress, Advance):
        progress.note(text)


LOG_SECONDS = 30.0
"""Between two lines of a log."""
NOTEBOOK_SECONDS = 0.5
"""Between two changes of the line in a notebook."""
WINDOW = 60.0
"""Seconds of the past that the rate is taken from."""


@contextmanager
def silent(_: str, __: int, ___: str) -> Iterator[Progress]:
    """Show nothing."""
    yield lambda _: None


def shown(label: str, total: int, unit: str) -> AbstractContextManager[Progress]:
    """Show how many are done, how many a second, and the time left, in the way of the place: what commands do."""
    if in_notebook():
        return rewritten(label, total, unit)
    return drawn(label, total, unit) if sys.stderr.isatty() else logged(label, total, unit)


def watched(label: str, total: int, unit: str) -> AbstractContextManager[Progress]:
    """Show the same where a person looks, in a terminal or a notebook, and elsewhere nothing: what functions do."""
    return shown(label, total, unit) if in_notebook() or sys.stderr.isatty() else silent(label, total, unit)


def bar_of(progress: Bar | bool) -> Bar:
    """Return the bar that an argument asks for: True where a person looks, False nowhere."""
    if isinstance(progress, bool):
        return watched if progress else silent
    return progress


def questions_bar(label: str, total: int) -> AbstractContextManager[Progress]:
    """Show how many questions are done."""
    return shown(label, total, "questions")


def in_notebook() -> bool:
    """Whether this is a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # a terminal's shell is another class; that of Colab has a name of its own module
    return shell is not None and (type(shell).__name__ == "ZMQInteractiveShell" or "colab" in type(shell).__module__)


# ------------------------------------------------------------------------------------------------------------- words


class Pace:
    """How many are done, how fast, and how long the rest takes."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done, self.start = total, unit, 0, time.monotonic()
        self.note = ""
        """A few words beside the numbers."""
        self._past: deque[tuple[float, int]] = deque()

    def say(self, note: str) -> None:
        """Show these words from now on."""
        self.note = note

    def advance(self, n: int) -> None:
        """Count n more as done."""
        self.done += n
        self._past.append((time.monotonic(), self.done))
        while len(self._past) > 2 and self._past[0][0] < time.monotonic() - WINDOW:
            self._past.popleft()

    def before(self, n: int) -> None:
        """Count n more that an earlier run has left: they took no time, so the clock of the rate starts here."""
        self._past.clear()
        self.advance(n)

    @property
    def rate(self) -> float | None:
        """How many a second of late; None where that is not known yet."""
        if len(self._past) < 2:
            return None
        (first, before), (last, done) = self._past[0], self._past[-1]
        return (done - before) / (last - first) if last > first else None

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.start

    @property
    def speed(self) -> str:
        """The rate and the time that is left, in words; empty where they are not known."""
        rate = self.rate
        return f"{rate:,.1f} {self.unit}/s, {duration(max(self.total - self.done, 0) / rate)} left" if rate else ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [f"{self.done:,} of {self.total:,} {self.unit}", self.speed, self.note]))


def duration(seconds: float) -> str:
    """Return a time for people: `40 s`, `6 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


# ------------------------------------------------------------------------------------------------------------- places


@contextmanager
def logged(label: str, total: int, unit: str) -> Iterator[Progress]:
    """Write lines: at the start, every half minute, and at the end, also if that is an error."""
    pace, said = Pace(total, unit), time.monotonic()

    def tell(text: str) -> None:
        print(f"{label}: {text}", file=sys.stderr, flush=True)

    def advance(n: int) -> None:
        nonlocal said
        pace.advance(n)
        if time.monotonic() - said >= LOG_SECONDS and pace.done < total:
            said = time.monotonic()
            tell(str(pace))

    def before(n: int) -> None:
        pace.before(n)
        if n:
            tell(f"{n:,} of {total:,} {unit} were done before")

    tell(f"{total:,} {unit}")
    try:
        yield Advance(advance, before, pace.say)
    finally:
        tell(f"{pace.done:,} of {total:,} {unit} in {duration(pace.seconds)}")


@contextmanager
def rewritten(label: str, total: int, unit: str) -> Iterator[Progress]:
    """Write one line again and again, which every notebook can show."""
    pace, said, width = Pace(total, unit), 0.0, 0

    def tell(text: str, end: str = "") -> None:
        nonlocal width
        print(f"\r{label}: {text}".ljust(width), end=end, file=sys.stderr, flush=True)
        width = len(label) + len(text) + 3

    def advance(n: int) -> None:
        nonlocal said
        pace.advance(n)
        if time.monotonic() - said >= NOTEBOOK_SECONDS:
            said = time.monotonic()
            tell(str(pace))

    def before(n: int) -> None:
        pace.before(n)
        tell(str(pace))

    try:
        yield Advance(advance, before, pace.say)
    finally:
        tell(f"{pace.done:,} of {total:,} {unit} in {duration(pace.seconds)}", end="\n")


@contextmanager
def drawn(label: str, total: int, unit: str) -> Iterator[Progress]:
    """Draw a bar in a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    pace = Pace(total, unit)

    class PaceColumn(ProgressColumn):
        """Units per second, the time left, and the note."""

        def render(self, task: Task) -> Text:
            return Text(", ".join(filter(None, [pace.speed, pace.note])), style="progress.data.speed")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        PaceColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(in_one_line(label), total=total)

        def advance(n: int) -> None:
            pace.advance(n)
            progress.advance(task, n)

        def before(n: int) -> None:
            # the bar starts there, and its clock too: what took no time is no speed
            pace.before(n)
            progress.reset(task, completed=int(progress.tasks[task].completed) + n)

        yield Advance(advance, before, pace.say)
