"""What methods cost: time to fit, and time to answer a question relative to scoring it once. Measured beside the results.

Costs are never part of a result: two runs that end in the same bytes may have taken different times. Time that is lost when a
run is killed cannot be known, so a step that was interrupted has no cost rather than a wrong one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from coral_lens.errors import CoralError
from coral_lens.storage.escape import for_markdown
from coral_lens.storage.files import read_record, write_atomic, write_json, write_record
from coral_lens.storage.temporary import remove_abandoned

FILE = "cost.json"
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Cost:
    """Time spent on some questions."""

    questions: int
    seconds: float
    cpu_seconds: float
    """Of all threads. Unlike seconds it does not count waiting for other programs."""
    device: str = "cpu"
    """Where the model was, if that is known."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.questions + other.questions,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            other.device,
        )

    def work(self, device: str) -> float:
        """Return what is compared: processor time, or where a GPU does the work the time on the clock."""
        return self.cpu_seconds if device == "cpu" else self.seconds


class Stopwatch:
    """Runs while a block runs."""

    def __init__(self) -> None:
        self._start = now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still while a block runs."""
        before = now()
        yield
        after = now()
        self._start = self._start[0] + after[0] - before[0], self._start[1] + after[1] - before[1]

    def read(self, questions: int, device: str = "cpu") -> Cost:
        """Return the time since it was made, without pauses."""
        seconds, cpu = now()
        return Cost(questions, seconds - self._start[0], cpu - self._start[1], device)


def now() -> tuple[float, float]:
    """Return the time on the clock and that of the processor."""
    return time.perf_counter(), time.process_time()


STEPS = "steps"
"""The key of the costs in their file."""


class CostRecord:
    """The costs of a method, step by step (`training`, and each test set by its name), in a file beside its results."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.steps = read_steps(self._path)
        self._watch = Stopwatch()

    @contextmanager
    def measuring(self, step: str, questions: int) -> Iterator[None]:
        """Measure a step; one that was measured before keeps its cost, one that was interrupted before has none."""
        fresh = step not in self.steps
        if fresh:
            self._write(step, None)
        self._watch = Stopwatch()
        yield
        if fresh:
            self._write(step, self._watch.read(questions))

    def uncounted(self, load: Callable[[], Loaded]) -> Callable[[], Loaded]:
        """Return a function that loads what a step needs, at nobody's cost: a model is loaded once for all methods."""

        def loading() -> Loaded:
            with self._watch.paused():
                return load()

        return loading

    def _write(self, step: str, cost: Cost | None) -> None:
        self.steps[step] = cost
        write_steps(self._path, self.steps)


def write_steps(path: Path, steps: Mapping[str, Cost | None]) -> None:
    """Write the cost of each step."""
    write_record(path, {STEPS: {name: asdict(cost) if cost else None for name, cost in steps.items()}})


def read_steps(path: Path) -> dict[str, Cost | None]:
    """Return the costs that a file holds, None for steps that were interrupted; none at all where it is missing or damaged."""
    remove_abandoned(path)  # where a run was killed while it wrote them, the next one may have nothing to write
    if not path.exists():
        return {}
    try:
        record = read_record(path)
        steps = record[STEPS] if set(record) == {STEPS} else record  # earlier versions had the steps themselves
        return {name: Cost(**cost) if cost else None for name, cost in steps.items()}
    except (CoralError, TypeError, AttributeError):
        warnings.warn(f"{path} is damaged: what was measured there is shown as a dash.", stacklevel=2)
        return {}


def add_scoring(folder: Path, cost: Cost) -> None:
    """Add the cost of scoring some more questions of a store to what its other questions took."""
    known = scoring_cost(folder)  # also removes what a killed run left on the way to it
    if cost.questions:
        write_steps(folder / FILE, {"scoring": known + cost if known else cost})


def scoring_cost(folder: Path) -> Cost | None:
    """Return what scoring the questions of a store took, if that was measured."""
    return read_steps(folder / FILE).get("scoring")


# ---------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class MethodCost:
    """One row of the table of costs."""

    method: str
    training_seconds: float | None
    questions_per_second: float | None
    relative: float | None
    """Time per answered question, divided by that of scoring it once with the model."""


def method_cost(
    method: str, steps: Mapping[str, Cost | None], scoring: Mapping[str, Cost | None], *, from_scores: bool
) -> MethodCost:
    """Put the costs of a method together; `scoring` says for each test set what scoring its questions took.

    A method that starts from the shared scores pays for them too.
    """
    training = steps.get("training")
    fitted = training.seconds if training else None
    pairs = [(steps.get(test), plain) for test, plain in scoring.items()]
    known = [(own, plain) for own, plain in pairs if own and plain and own.questions and plain.questions]
    n = sum(own.questions for own, _ in known)
    if not n:
        return MethodCost(method, fitted, None, None)
    plain_work = sum(plain.work(plain.device) / plain.questions * own.questions for own, plain in known)
    plain_seconds = sum(plain.seconds / plain.questions * own.questions for own, plain in known)
    work = sum(own.work(plain.device) for own, plain in known) + from_scores * plain_work
    seconds = sum(own.seconds for own, _ in known) + from_scores * plain_seconds
    return MethodCost(method, fitted, n / seconds, work / plain_work)


HEADING = "| method | seconds to fit | questions/s | cost per question, scoring it once = 1 |\n|---|---:|---:|---:|\n"
NOTE = (
    "\nScoring once is one pass of the engine with states pooled at every layer kept; methods that start from its scores pay for "
    "it too. Seconds and questions/s are by the clock, the ratio by processor time (by the clock on a GPU). A dash: "
    "interrupted, or not measured.\n"
)


def write_costs(rows: Sequence[MethodCost], folder: Path) -> Path:
    """Write the table of costs as Markdown and JSON; return the Markdown."""
    write_json(folder / "costs.json", {"methods": [asdict(row) for row in rows]})
    numbers = ((cell(r.training_seconds, 1), cell(r.questions_per_second, 2), cell(r.relative, 2)) for r in rows)
    lines = (f"| {' | '.join((for_markdown(r.method), *n))} |\n" for r, n in zip(rows, numbers, strict=True))
    path = folder / "costs.md"
    write_atomic(path, (HEADING + "".join(lines) + NOTE).encode())
    return path


def cell(value: float | None, digits: int) -> str:
    """Return a number for the table, or a dash."""
    return "—" if value is None else f"{value:.{digits}f}"
