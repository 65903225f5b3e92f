"""A progress bar for long work, on standard error. Knows nothing of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Progress = Callable[[int], None]
"""A function that is told how many more units of work, mostly questions, are done."""
Bar = Callable[[str, int, str], AbstractContextManager[Progress]]
"""Opens a bar for a label, a total and a unit, and gives the function that advances it."""


@contextmanager
def silent(_: str, __: int, ___: str) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    yield lambda _: None


def questions_bar(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show how many questions are done."""
    return shown(label, total, "questions")


@contextmanager
def shown(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how many are done, how many a second, and the time left; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        """Units per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f} {unit}/s" if speed else "", style="progress.data.speed")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)
