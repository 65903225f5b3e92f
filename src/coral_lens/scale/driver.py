"""Hand out pieces of work to workers on a cluster until all are done, whatever dies on the way. Knows nothing of the work.

A piece is computed at least once; who wrote it first does not matter, because writing it twice leaves the same bytes. A worker
that dies is replaced, and its piece given to another one; a piece at which three workers failed ends the work, and so does at
once what a worker says in a sentence (a full disk, another model): trying again would not help.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coral_lens.errors import CoralError

MOST_FAILURES = 3
"""Of a piece, and of workers that are being started, one after another."""
PATIENCE = 300.0
"""Seconds without any worker at all after which the cluster is given up; where workers load for so long, that is said."""
TICK = 1.0
"""Seconds between two looks at the cluster while nothing happens."""
Tell = Callable[[str], None]
"""Told in a sentence what happens."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker on the cluster."""

    name: str
    """As Ray's dashboard shows it."""
    actor: Any

    def end(self) -> None:
        """End it, whether it is alive, on the way or dead: one that only seems dead would keep its cores."""
        import ray

        with suppress(ray.exceptions.RayError, ValueError):  # ValueError: of an earlier connection
            ray.kill(self.actor)


@dataclass(frozen=True)
class Job:
    """How the pieces of some work are computed elsewhere."""

    start: Callable[[], Worker]
    """Starts a worker and returns it."""
    ready: Callable[[Any], Any]
    """Asks a worker's actor to say when it can begin, as a reference; an error says why it cannot."""
    submit: Callable[[Any, int], Any]
    """Gives a worker's actor the piece of a number, and returns a reference to its result."""
    done: Callable[[int, Any], None]
    """Told the result of each piece, once."""
    named: Callable[[int], str]
    """Says what a piece is, for people."""
    begun: Callable[[Any], None] = lambda _: None
    """Told what a worker says when it can begin; it may refuse the worker by an error."""
    release: Callable[[Worker], None] = Worker.end
    """What becomes of a worker that is not needed any more."""
    note: Tell = lambda _: None
    """Told how many workers there are, whenever that changes."""


@dataclass
class Driver:
    """Keeps workers busy with pieces until none is left."""

    job: Job
    n_workers: int
    tell: Tell = lambda _: None
    arriving: dict[Any, Worker] = field(default_factory=dict)
    """Workers that have no room yet, by the reference that says when they have."""
    starting: dict[Any, Worker] = field(default_factory=dict)
    """Workers on the way, with room or without, by the reference that says when they can begin."""
    free: list[Worker] = field(default_factory=list)
    running: dict[Any, tuple[Worker, int]] = field(default_factory=dict)
    """Which worker has which piece, by the reference to its result."""
    failures: Counter[int] = field(default_factory=Counter)
    """How often a piece failed."""
    false_starts: int = 0
    """Workers that could not begin, since the last one that could."""
    waiting: float | None = None
    """Since when there has been nothing but waiting for a worker."""
    said: str = ""
    """What was last told of how many workers there are."""

    @property
    def alive(self) -> int:
        """Workers that can compute."""
        return len(self.free) + len(self.running)

    def run(self, pieces: Sequence[int]) -> None:
        """Have all pieces computed."""
        todo = deque(pieces)
        try:
            while todo or self.running:
                self._keep_workers(len(todo) + len(self.running))
                while todo and self.free:
                    number, worker = todo.popleft(), self.free.pop()
                    self.running[self.job.submit(worker.actor, number)] = (worker, number)
                self._count()
                todo.extendleft(self._look())
        finally:
            self._dismiss()

    def _keep_workers(self, n_left: int) -> None:
        """Start workers where some are missing and there is something for them to do."""
        for _ in range(min(self.n_workers, n_left) - self.alive - len(self.starting)):
            worker = self.job.start()
            self.arriving[worker.actor.there.options(name="arrive").remote()] = worker
            self.starting[self.job.ready(worker.actor)] = worker

    def _count(self) -> None:
        """Tell how many workers there are, if that has changed."""
        text = f"{self.alive} of {self.n_workers} workers"
        if text != self.said:
            self.said = text
            self.job.note(text)

    def _look(self) -> list[int]:
        """Wait until something happens, or for a second, and return the pieces that have to be computed again."""
        import ray

        watched = [*self.running, *self.arriving, *self.starting]
        ready, _ = ray.wait(watched, num_returns=1, timeout=TICK)
        if not ready:
            self._wait_on()
            return []
        more, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
        again = []
        for reference in more or ready:
            if reference in self.running:
                again += self._take(reference)
            elif reference in self.starting:
                self._begin(reference)
            else:  # it has room now, or died: what it says when it should begin tells which
                self.arriving.pop(reference, None)
        return again

    def _wait_on(self) -> None:
        """Refuse to wait for ever for a worker that finds no room; of one that is there, say that it takes long."""
        now = time.monotonic()
        if self.alive or self.waiting is None:
            self.waiting = now
        if now - self.waiting <= PATIENCE:
            return
        without_room = list(self.arriving.values())
        loading = [worker.name for worker in self.starting.values() if worker not in without_room]
        if not loading:
            raise CoralError(
                f"No worker has begun within {PATIENCE:.0f} s: the cluster has no room for one now; ask for less with "
                "--cpus-per-worker and --gpus-per-worker, or come back later."
            )
        self.waiting = now
        self.tell(f"{loading[0]} is there, and has been loading the model for more than {PATIENCE:.0f} s")

    def _begin(self, reference: Any) -> None:
        """Take a worker among those that are free, or find out why it cannot begin."""
        import ray

        worker = self.starting.pop(reference)
        self.arriving = {there: one for there, one in self.arriving.items() if one is not worker}
        try:
            self.job.begun(ray.get(reference))
        except CoralError as error:
            worker.end()
            raise plain(error) from None
        except ray.exceptions.RayError as error:
            worker.end()
            self._could_not_begin(worker, error)
        else:
            self.false_starts, self.waiting = 0, None
            self.free.append(worker)

    def _could_not_begin(self, worker: Worker, error: Exception) -> None:
        """Have another one started; after three such workers go on with those that are there, if there are any."""
        self.false_starts += 1
        reason = reason_of(getattr(error, "cause", None) or error)
        if self.false_starts < MOST_FAILURES:
            self.tell(f"{worker.name} could not begin ({reason}); another one is started")
        elif self.alive:
            self.n_workers, self.false_starts = self.alive + len(self.starting), 0
            self.tell(f"{worker.name} could not begin either ({reason}); the others go on without it")
        else:
            raise CoralError(
                f"Workers cannot begin: {reason}; they need coral-lens and the model, as this machine has them."
            ) from error

    def _take(self, reference: Any) -> list[int]:
        """Take the result of a piece; return the piece if it has to be computed again."""
        import ray

        worker, number = self.running.pop(reference)
        self.waiting = None  # up to now there was a worker, also where no look at the cluster was ever in vain
        try:
            result = ray.get(reference)
        except CoralError as error:
            worker.end()
            raise plain(error) from None
        except ray.exceptions.RayTaskError as error:
            self.free.append(worker)
            return self._failed(number, worker, reason_of(error.cause))
        except ray.exceptions.RayError as error:
            worker.end()
            return self._failed(number, worker, reason_of(error))
        self.free.append(worker)
        self.job.done(number, result)
        return []

    def _failed(self, number: int, worker: Worker, reason: str) -> list[int]:
        self.failures[number] += 1
        what = self.job.named(number)
        if self.failures[number] >= MOST_FAILURES:
            raise CoralError(
                f"{what} failed {MOST_FAILURES} times, and everything else is kept; the last time: {reason}"
            )
        self.tell(
            f"{what} is computed again, {self.alive} of {self.n_workers} workers are there; {worker.name}: {reason}"
        )
        return [number]

    def _dismiss(self) -> None:
        for worker in self.free:
            self.job.release(worker)
        for worker in [*self.starting.values(), *(worker for worker, _ in self.running.values())]:
            worker.end()


def plain(error: CoralError) -> CoralError:
    """Return what a worker has said, without what Ray says of it."""
    cause = getattr(error, "cause", error)
    return CoralError(str(cause))


def reason_of(error: BaseException) -> str:
    """Return in a line what an error says: of a traceback its last error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    if errors:
        return errors[-1]
    return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"
