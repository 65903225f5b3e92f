"""Progress is a bar in a terminal, a line in a notebook, a line every half minute in a log, and nothing where nobody looks."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

import coral_lens.storage.progress as progress
from coral_lens.storage.progress import (
    Pace,
    bar_of,
    done_before,
    duration,
    in_notebook,
    note_beside,
    shown,
    silent,
    watched,
)


class Clock:
    """A clock that stands still between two calls of `wait`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def test_a_log_gets_a_line_at_the_start_every_half_minute_and_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown("extracting", 1000, "questions") as advance:
        for _ in range(100):
            advance(10)
            clock.wait(1)
    assert capsys.readouterr().err.splitlines() == [
        "extracting: 1,000 questions",
        "extracting: 310 of 1,000 questions, 10.0 questions/s, 69 s left",
        "extracting: 610 of 1,000 questions, 10.0 questions/s, 39 s left",
        "extracting: 910 of 1,000 questions, 10.0 questions/s, 9 s left",
        "extracting: 1,000 of 1,000 questions in 2 min",
    ]


def test_what_an_earlier_run_left_does_not_count_as_speed(clock: Clock) -> None:
    pace = Pace(1000, "questions")
    pace.advance(100)
    clock.wait(1)
    pace.before(700)
    assert pace.rate is None
    clock.wait(10)
    pace.advance(20)
    assert str(pace) == "820 of 1,000 questions, 2.0 questions/s, 2 min left"


def test_a_log_says_what_an_earlier_run_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with shown("extracting", 300, "questions") as advance:
        done_before(advance, 28)
        clock.wait(31)
        advance(31)
    assert capsys.readouterr().err.splitlines() == [
        "extracting: 300 questions",
        "extracting: 28 of 300 questions were done before",
        "extracting: 59 of 300 questions, 1.0 questions/s, 4 min left",
        "extracting: 59 of 300 questions in 31 s",
    ]


def test_a_log_and_a_bar_have_a_note_beside_the_numbers(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note_beside(print, "is not for a progress that only counts")
    with shown("extracting", 100, "questions") as advance:
        done_before(advance, 0)
        note_beside(advance, "2 of 2 workers")
        clock.wait(31)
        advance(62)
    assert capsys.readouterr().err.splitlines()[1:-1] == [
        "extracting: 62 of 100 questions, 2.0 questions/s, 19 s left, 2 of 2 workers"
    ]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    with shown("extracting", 100, "questions") as advance:
        done_before(advance, 0)
        note_beside(advance, "1 of 2 workers")
        clock.wait(10)
        advance(50)
    assert "5.0 questions/s, 10 s left, 1 of 2 workers" in terminal.getvalue()


def test_a_bar_starts_where_an_earlier_run_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown("extracting", 300, "questions") as advance:
        done_before(advance, 28)
    assert " 28/300" in terminal.getvalue()


def test_a_progress_that_only_counts_counts_what_an_earlier_run_left() -> None:
    told: list[int] = []
    done_before(told.append, 28)
    assert told == [28]


def test_the_rate_is_that_of_the_last_minute(clock: Clock) -> None:
    pace = Pace(1000, "steps")
    for speed in (1, 5):
        for _ in range(120):
            clock.wait(1)
            pace.advance(speed)
    assert pace.rate == pytest.approx(5)


def test_a_log_says_how_far_failed_work_came(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(ZeroDivisionError), shown("extracting", 9, "questions") as advance:
        advance(3)
        raise ZeroDivisionError
    assert capsys.readouterr().err.splitlines()[-1] == "extracting: 3 of 9 questions in 0 s"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for bar in (shown, watched, bar_of(True)):
        with bar("extracting", 10, "questions") as advance:
            advance(10)
    assert terminal.getvalue().count("10/10") >= 3


@pytest.mark.usefixtures("notebook")
def test_a_notebook_gets_one_line_that_changes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_notebook()
    with watched("extracting", 100, "questions") as advance:
        for _ in range(10):
            advance(10)
            clock.wait(1)
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert written.count("\r") == 11
    last, before = written.split("\r")[-1], written.split("\r")[-2]
    assert last.rstrip() == "extracting: 100 of 100 questions in 10 s"
    assert len(last) > len(before), "what stood there is written over"


def test_functions_show_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for bar in (watched, bar_of(True), bar_of(False), silent):
        with bar("extracting", 10, "questions") as advance:
            advance(10)
    assert capsys.readouterr() == ("", "")
    assert bar_of(shown) is shown
    assert bar_of(False) is silent


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (89.0, "89 s"), (150.0, "2 min"), (5400.0, "1 h 30 min"), (7500.0, "2 h 5 min")]
)
def test_a_time_is_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
