"""Requests that wait for the model: a bounded queue, which counts questions, and what became of each request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import NamedTuple

from coral_lens.lens.answers import Answer
from coral_lens.records import Question
from coral_lens.serve.lenses import ServedLens


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a single question has no answer."""

    reason: str
    """In one sentence."""


Outcome = Answer | Refusal


class LayerChange(NamedTuple):
    """What one layer would do by itself."""

    layer: int
    changes: tuple[float, ...]
    """By how much its own probe would change the probability of each option."""


class Scored(NamedTuple):
    """What became of a question, and what that took."""

    outcome: Outcome
    n_tokens: int = 0
    """Its tokens, with its input and its options."""
    n_cached: int = 0
    """How many of them had been computed for an earlier request."""
    layers: tuple[LayerChange, ...] | None = None
    """What each layer would do, where that was asked for and the lens knows."""


class FullError(Exception):
    """There is no room in the queue, or no more work is taken."""


class Job:
    """The questions of one request. Made by the thread that serves; all else is done to it by the one that owns the model."""

    def __init__(
        self, lens: ServedLens, questions: Sequence[Question], *, seconds: float, layers: bool = False
    ) -> None:
        """`seconds` are left for it; `layers`: what each layer would do is to be said too."""
        assert questions, "a request without questions would never be done"
        assert len({q.id for q in questions}) == len(questions), "the ids of a request differ"
        self.lens, self.questions, self.layers = lens, tuple(questions), layers
        self.arrived = time.monotonic()
        self.expires = self.arrived + seconds
        self.done: Future[tuple[Scored, ...]] = Future()
        self._scored: dict[int, Scored] = {}

    @property
    def is_dropped(self) -> bool:
        """Whether nobody waits for it any more: the client has gone, it failed, or it is too late."""
        return self.done.done() or time.monotonic() > self.expires

    def settle(self, number: int, scored: Scored) -> None:
        """Note what became of a question; with the last one, the request is done."""
        self._scored[number] = scored
        if len(self._scored) == len(self.questions):
            with suppress(InvalidStateError):  # the client may have gone this very moment
                self.done.set_result(tuple(self._scored[i] for i in range(len(self.questions))))

    def fail(self, error: Exception) -> None:
        """End the request without an answer."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


class JobQueue:
    """Requests in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._is_closed = False
        self._changed = Condition()

    @property
    def waiting(self) -> int:
        """Questions that are neither answered nor dropped."""
        return self._waiting

    def has_company(self, job: Job) -> bool:
        """Whether questions of other requests wait beside those of this one."""
        return self._waiting > len(job.questions)

    def put(self, job: Job) -> None:
        """Add a request, all of it or nothing."""
        with self._changed:
            if self._is_closed or self._waiting + len(job.questions) > self._most:
                raise FullError
            self._jobs.append(job)
            self._waiting += len(job.questions)
            self._changed.notify()

    def take(self, timeout: float | None = None) -> Job | None:
        """Return the next request; None if none comes in time, or, once the queue is closed, none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed, timeout)
            return self._jobs.popleft() if self._jobs else None

    def finished(self, n: int) -> None:
        """Note that so many questions wait no longer."""
        with self._changed:
            self._waiting -= n

    def close(self) -> None:
        """Take no further request; those that wait are still given out."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
