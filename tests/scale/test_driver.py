"""The driver computes every piece whatever dies, blames a piece that kills its workers, and never tries for ever.

A stand-in for Ray, without processes, lets workers die by dice; `test_extract.py` has the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import coral_lens.scale.driver as driver_module
from coral_lens.errors import CoralError
from coral_lens.scale.driver import Driver, Job, Worker

Behaviour = Callable[["Dice", int], Any]


@dataclass(eq=False)
class Reference:
    """What a worker will return, or the error that it will end with."""

    find: Callable[[], Any]


@dataclass(eq=False)
class Actor:
    dead: bool = False
    arrival: Reference = field(default_factory=lambda: Reference(lambda: None))

    @property
    def there(self) -> Any:
        return SimpleNamespace(options=lambda name: SimpleNamespace(remote=lambda: self.arrival))


@dataclass
class Dice:
    """A cluster in which a piece ends as a function of the attempt says."""

    behaviour: Behaviour
    random: random.Random = field(default_factory=lambda: random.Random(0))
    attempts: dict[int, int] = field(default_factory=dict)
    started: list[Actor] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)
    can_start: bool = True
    notes: list[str] = field(default_factory=list)
    begun: Callable[[Any], None] = lambda _: None

    def start(self) -> Worker:
        self.started.append(Actor())
        return Worker(f"worker {len(self.started)}", self.started[-1])

    def ready(self, actor: Actor) -> Reference:
        def find() -> None:
            if not self.can_start:
                raise ray.exceptions.RaySystemError("no such module")

        return Reference(find)

    def submit(self, actor: Actor, number: int) -> Reference:
        assert not actor.dead, "a dead worker is given no work"
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1

        def find() -> Any:
            try:
                return self.behaviour(self, attempt)
            except ray.exceptions.ActorDiedError:
                actor.dead = True
                raise

        return Reference(find)

    # what the driver asks of Ray

    def wait(self, references: Sequence[Reference], *, num_returns: int, timeout: float | None) -> tuple[Any, Any]:
        n = 1 if timeout != 0 else self.random.randint(0, len(references))
        return self.random.sample(list(references), n), []

    def get(self, reference: Reference) -> Any:
        return reference.find()

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


def run(
    dice: Dice, n_pieces: int, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[str], Driver]:
    """Have pieces computed; return which were told to be done, and what was said."""
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray, name, getattr(dice, name))
    done: list[int] = []
    said: list[str] = []
    job = Job(
        dice.start,
        dice.ready,
        dice.submit,
        lambda number, _: done.append(number),
        lambda n: f"Shard {n} (ids)",
        begun=dice.begun,
        note=dice.notes.append,
    )
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
    assert {id(w) for w in dice.started} == {id(w) for w in dice.killed}, "all are ended, also those that seem dead"
    assert len(dice.killed) == len(dice.started)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on by a hundred seconds at every look."""
    times = [0.0]

    def monotonic() -> float:
        times.append(times[-1] + 100)
        return times[-1]

    monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=monotonic))
    return times


def test_a_cluster_without_room_is_given_up(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    dice = Dice(dies)
    dice.wait = lambda *_, **__: ([], [])  # type: ignore[method-assign]
    with pytest.raises(CoralError, match="No worker has begun within 300 s: the cluster has no room"):
        run(dice, 1, 1, monkeypatch)
    assert len(dice.killed) == 1
    assert len(clock) < 9


def test_a_cluster_is_not_given_up_for_the_time_in_which_its_workers_computed(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """The only worker dies long after the last look at which nothing had happened: its successor has all the time."""
    dice = Dice(lambda dice, _: dies(dice, 0) if clock[-1] > 1000 and len(dice.started) == 1 else "digests")
    in_vain = {3, 9}
    looks = iter(range(100))

    def wait(references: Sequence[Reference], *, num_returns: int, timeout: float | None) -> tuple[Any, Any]:
        if timeout == 0:
            return list(references), []
        look = next(looks)
        clock.append(max(clock[-1], 2000.0 if look == 8 else 0.0))
        return ([] if look in in_vain else list(references)), []

    dice.wait = wait  # type: ignore[method-assign]
    done, said, _ = run(dice, 20, 1, monkeypatch)
    assert done == list(range(20))
    assert len(dice.started) == 2
    assert len(said) == 1


def test_a_worker_that_loads_for_long_is_waited_for_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    dice = Dice(lambda *_: "digests")
    looks = iter(range(100))

    def wait(references: Sequence[Reference], *, num_returns: int, timeout: float | None) -> tuple[Any, Any]:
        look = next(looks)
        arrived = [r for r in references if r in [actor.arrival for actor in dice.started]]
        if look < 2:
            return arrived, []
        return ([], []) if look < 12 else (list(references), [])

    dice.wait = wait  # type: ignore[method-assign]
    done, said, _ = run(dice, 1, 1, monkeypatch)
    assert done == [0]
    assert set(said) == {"worker 1 is there, and has been loading the model for more than 300 s"}
    assert 1 <= len(said) <= 4


def test_after_three_workers_that_cannot_begin_those_that_compute_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(lambda *_: "digests")

    def ready(actor: Actor) -> Reference:
        return Reference(lambda: None if actor is dice.started[0] else dies(dice, 0))

    dice.ready = ready  # type: ignore[method-assign]
    dice.wait = lambda references, **_: (list(references), [])  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        done, said, driver = run(dice, 40, 3, patch)
    assert sorted(done) == list(range(40))
    assert len(dice.started) <= 8
    assert driver.n_workers == 1
    assert "the others go on without it" in "".join(said)


def test_a_worker_that_is_refused_by_what_it_says_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(said: Any) -> None:
        raise CoralError("Workers have several kinds of devices.")

    dice = Dice(lambda *_: "digests")
    dice.begun = refuse
    with pytest.raises(CoralError, match="several kinds"):
        run(dice, 1, 1, monkeypatch)
    assert dice.killed == dice.started


def test_how_many_workers_there_are_is_said_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(dice: Dice, attempt: int) -> str:
        if sum(worker.dead for worker in dice.started) == 0:
            raise ray.exceptions.ActorDiedError
        return "digests"

    dice = Dice(once)
    _, said, _ = run(dice, 9, 2, monkeypatch)
    assert dice.notes[0] == "0 of 2 workers"
    assert "2 of 2 workers" in dice.notes
    assert all(a != b for a, b in pairwise(dice.notes))
    assert len(said) == 1
    assert "worker " in said[0], "as the dashboard calls it"


def test_no_more_workers_are_started_than_there_are_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(lambda *_: "digests")
    run(dice, 2, 50, monkeypatch)
    assert len(dice.started) == 2
