"""The driver computes every piece whatever dies, blames a piece that kills its workers, and never tries for ever.

A stand-in for Ray, without processes, lets workers die by dice; `test_extract.py` has the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.scale.driver import Driver, Job

Behaviour = Callable[["Dice", int], Any]


@dataclass(eq=False)
class Reference:
    """What a worker will return, or the error that it will end with."""

    find: Callable[[], Any]


@dataclass(eq=False)
class Worker:
    number: int
    dead: bool = False


@dataclass
class Dice:
    """A cluster in which a piece ends as a function of the attempt says."""

    behaviour: Behaviour
    random: random.Random = field(default_factory=lambda: random.Random(0))
    attempts: dict[int, int] = field(default_factory=dict)
    started: list[Worker] = field(default_factory=list)
    killed: list[Worker] = field(default_factory=list)
    can_start: bool = True

    def start(self) -> Worker:
        self.started.append(Worker(len(self.started)))
        return self.started[-1]

    def ready(self, worker: Worker) -> Reference:
        def find() -> None:
            if not self.can_start:
                raise ray.exceptions.RaySystemError("no such module")

        return Reference(find)

    def submit(self, worker: Worker, number: int) -> Reference:
        assert not worker.dead, "a dead worker is given no work"
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1

        def find() -> Any:
            try:
                return self.behaviour(self, attempt)
            except ray.exceptions.ActorDiedError:
                worker.dead = True
                raise

        return Reference(find)

    # what the driver asks of Ray

    def wait(self, references: Sequence[Reference], *, num_returns: int, timeout: float | None) -> tuple[Any, Any]:
        n = 1 if timeout != 0 else self.random.randint(0, len(references))
        return self.random.sample(list(references), n), []

    def get(self, reference: Reference) -> Any:
        return reference.find()

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)


def run(
    dice: Dice, n_pieces: int, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[str], Driver]:
    """Have pieces computed; return which were told to be done, and what was said."""
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray, name, getattr(dice, name))
    done: list[int] = []
    said: list[str] = []
    job = Job(dice.start, dice.ready, dice.submit, lambda number, _: done.append(number), lambda n: f"Shard {n} (ids)")
    driver = Driver(job, n_workers, said.append)
    driver.run(range(n_pieces))
    return done, said, driver


def dies(dice: Dice, attempt: int) -> None:
    raise ray.exceptions.ActorDiedError


@given(st.integers(0, 60), st.integers(1, 8), st.integers(0, 10**6))
def test_every_piece_is_done_once_although_workers_die_twice_at_each(n_pieces: int, n_workers: int, seed: int) -> None:
    def often(dice: Dice, attempt: int) -> str:
        if attempt < 3 and dice.random.random() < 0.4:
            raise ray.exceptions.ActorDiedError
        return "digests"

    dice = Dice(often, random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        done, said, driver = run(dice, n_pieces, n_workers, patch)
    assert sorted(done) == list(range(n_pieces))
    deaths = sum(worker.dead for worker in dice.started)
    assert len(said) == deaths
    assert len(dice.started) <= n_workers + deaths
    assert {id(w) for w in dice.started if not w.dead} == {id(w) for w in dice.killed}, "all are dismissed"
    assert not driver.running


def test_a_piece_at_which_three_workers_die_ends_the_work_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(lambda dice, attempt: dies(dice, attempt))
    with pytest.raises(CoralError, match=r"Shard \d \(ids\) failed 3 times, and everything else is kept"):
        run(dice, 5, 2, monkeypatch)
    assert max(dice.attempts.values()) == 3


def test_an_error_of_ours_is_tried_three_times_by_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(dice: Dice, attempt: int) -> None:
        raise ray.exceptions.RayTaskError("compute", "Traceback ...", ZeroDivisionError("division by zero"))

    dice = Dice(fails)
    with pytest.raises(CoralError, match=r"failed 3 times.*ZeroDivisionError: division by zero"):
        run(dice, 1, 1, monkeypatch)
    assert len(dice.started) == 1


def test_a_sentence_of_a_worker_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dice: Dice, attempt: int) -> None:
        raise CoralError("Cannot write store: no space left on the disk.")

    dice = Dice(full)
    with pytest.raises(CoralError, match="no space left on the disk"):
        run(dice, 9, 3, monkeypatch)
    assert max(dice.attempts.values()) == 1


def test_workers_that_cannot_begin_are_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(dies, can_start=False)
    with pytest.raises(CoralError, match=r"Workers cannot begin: .*no such module"):
        run(dice, 2, 2, monkeypatch)


def test_a_cluster_without_room_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(dies)
    dice.wait = lambda *_, **__: ([], [])  # type: ignore[method-assign]
    with pytest.raises(CoralError, match="No worker has begun within 300 s"):
        run(dice, 1, 1, monkeypatch)
    assert len(dice.killed) == 1


def test_no_more_workers_are_started_than_there_are_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(lambda *_: "digests")
    run(dice, 2, 50, monkeypatch)
    assert len(dice.started) == 2
