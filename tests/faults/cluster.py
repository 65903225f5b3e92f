"""A real cluster of two nodes on this machine, on which workers, a node and the driver die, and disks and shards fail.

Whatever happens, the store ends with the bytes of one process: at once, or when the same command is run again. A shard at which
three workers fail ends the run in a sentence that names its questions. `python -m faults cluster` does all of it.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import GOLDEN, furnish, usual_shards

from coral_lens.data.questions import read_questions
from coral_lens.engine import extract as extract_module
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.parts import planned_together
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.scale.cluster import Cluster, connected
from coral_lens.scale.driver import Worker
from coral_lens.scale.extract import Spread, extract_on_ray
from coral_lens.scale.settings import RaySettings
from coral_lens.scale.worker import ModelSource, ShardTask, ShardWorker
from coral_lens.storage.files import lines_of
from faults.damage import flip
from faults.disks import largest_file
from faults.outcomes import Outcome, Tally, coral
from faults.workshop import content, difference

PAUSE = 0.4
"""Seconds before and after a shard at most: time to be killed in."""
UNLUCKY = 3
"""The shard at which a worker fails."""
GAPS = (0.0, 8.0)
"""Seconds between two kills: a worker takes a few to begin."""
SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
"""What a node has."""


# ------------------------------------------------------------------------------------------------------------- workers


class Slow(ShardWorker):
    """A worker that takes its time, and says in a folder which process it is."""

    def __init__(self, source: ModelSource, threads: int, place: Path, trouble: str, times: int) -> None:
        super().__init__(source, threads)
        self.place, self.trouble, self.times = place, trouble, times
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{os.getpid()}.pid").touch()

    def compute(self, task: ShardTask, extraction: Extraction, folder: Path) -> dict[str, str]:
        """Compute a shard, unless this one is to fail."""
        time.sleep(random.uniform(0, PAUSE))
        with self.failing(task.number):
            digests = super().compute(task, extraction, folder)
        time.sleep(random.uniform(0, PAUSE))
        return digests

    def failing(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Return what the shard of a number is computed in: the first times, trouble."""
        failed = len(list(self.place.glob("*.failed")))
        if not self.trouble or number != UNLUCKY or failed >= self.times:
            return contextlib.nullcontext()
        (self.place / f"{failed}.failed").touch()
        return TROUBLES[self.trouble]()


@contextlib.contextmanager
def killed_for_its_memory() -> Iterator[None]:
    """End the process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    yield


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """Ask for more memory than there is."""
    torch.empty(2**50, dtype=torch.uint8)
    yield


TROUBLES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "a worker is killed for its memory": killed_for_its_memory,
    "a worker has not enough memory": no_memory,
    "the disk is full": lambda: largest_file(1000),
}


@dataclass(frozen=True)
class Disturbed(Spread):
    """Workers to which something happens."""

    place: Path = Path()
    """Where they say who they are."""
    trouble: str = ""
    times: int = 0

    def start(self) -> Worker:
        """Start a worker."""
        return self.cluster.start(Slow, self.source, self.cluster.cpus, self.place, self.trouble, self.times)


# --------------------------------------------------------------------------------------------------------------- scene


@dataclass
class Scene:
    """A cluster of two nodes, and a store that one process has filled undisturbed."""

    nodes: Any
    """Ray's own cluster for tests."""
    home: Path
    model: Model
    questions: list[Question]
    cluster: Cluster
    alone: dict[str, bytes]
    second: Any
    """The node that may be lost."""
    said: list[str] = field(default_factory=list)
    """What the driver said."""

    @property
    def address(self) -> str:
        """Where the cluster is."""
        return str(self.nodes.address)

    def fresh(self) -> Path:
        """Return a new folder whose store is begun as the undisturbed one was: with small batches."""
        folder = self.home / secrets.token_hex(4) / "store"
        planned_together(self.model, self.questions, folder, wanted_of(self.model))
        return folder

    def fill(
        self, folder: Path, *, trouble: str = "", times: int = 0, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """Fill a store on the cluster, and return how that ended."""
        source = ModelSource("model", str(GOLDEN / "model"), dtype="float32")
        place = folder.with_name("workers")
        spread = Disturbed(self.cluster, source, self.said.append, place, trouble, times)
        try:
            extract_on_ray(spread, self.questions, folder, wanted=Wanted(), progress=progress)
        except CoralError as error:
            return Outcome(2, "", f"coral: {error}")
        except Exception:
            return Outcome(None, "", traceback.format_exc())
        return Outcome(0, "", "")

    def judge(self, tally: Tally, case: str, outcome: Outcome, folder: Path) -> None:
        """Count how a run ended; one that ended in a sentence is run again, and must then end well."""
        tally.judge(case, outcome, difference=difference(content(folder), self.alone))
        if outcome.code == 2:
            again = self.fill(folder)
            if again.code == 0:
                tally.judge(f"{case}, then again", again, difference=difference(content(folder), self.alone))
            else:
                tally.add(f"{case}, then again", "traceback", again.last)


def wanted_of(model: Model) -> Extraction:
    """Return what is extracted: in batches of few tokens, so that there are many shards."""
    return Extraction(all_layers(model), token_budget=192)


@contextlib.contextmanager
def scene(home: Path) -> Iterator[Scene]:
    """Have a cluster of two nodes on this machine while the block runs, each with one core."""
    from ray.cluster_utils import Cluster as Nodes

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        tests = str(Path(__file__).parents[1])
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, sys.path)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(extract_module, "SHARD_BYTES", 1)
        torch.set_num_threads(1)
        model, questions = load_model(str(GOLDEN / "model"), dtype="float32"), read_questions(GOLDEN / "train.jsonl")
        extract(model, questions, home / "alone", extraction=wanted_of(model))
        nodes = Nodes(initialize_head=True, head_node_args=SMALL | {"include_dashboard": False})
        try:
            second = nodes.add_node(**SMALL)
            with connected(RaySettings(ray=nodes.address)) as cluster:
                yield Scene(nodes, home, model, questions, cluster, content(home / "alone"), second)
        finally:
            nodes.shutdown()
            torch.set_num_threads(threads)


# -------------------------------------------------------------------------------------------------------------- faults


@contextlib.contextmanager
def killing(place: Path, rng: random.Random, most: int) -> Iterator[list[int]]:
    """Kill workers that are named in a folder at random moments while the block runs; yield who was killed."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < most and not over.wait(rng.uniform(*GAPS)):
            alive = [p for p in sorted(int(path.stem) for path in place.glob("*.pid")) if p not in killed]
            if alive:
                victim = rng.choice(alive)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def workers(on: Scene, n: int) -> Tally:
    """Kill so many workers at random moments, in as many runs as that takes."""
    tally, rng, n_killed = Tally("workers killed"), random.Random(0), 0
    while n_killed < n:
        folder = on.fresh()
        with killing(folder.with_name("workers"), rng, min(4, n - n_killed)) as killed:
            outcome = on.fill(folder)
        on.judge(tally, f"{len(killed)} workers killed", outcome, folder)
        n_killed += len(killed)
    tally.what = f"{n_killed} workers killed"
    return tally


def node(on: Scene) -> Tally:
    """Lose a whole node while workers compute on both."""
    tally, folder, lost = Tally("a node lost"), on.fresh(), list[int]()

    def advance(n: int) -> None:
        if not lost and len(list(folder.with_name("workers").glob("*.pid"))) == 2:
            lost.append(n)
            on.nodes.remove_node(on.second, allow_graceful=False)

    outcome = on.fill(folder, progress=advance)
    on.judge(tally, "a node is lost", outcome if lost else Outcome(None, "", "no node was lost"), folder)
    on.second = on.nodes.add_node(**SMALL)
    return tally


DRIVER = """
import sys, coral_lens.engine.extract as extract
extract.SHARD_BYTES = 1
from coral_lens.cli import main
sys.argv = ["coral", *sys.argv[1:]]
main()
"""


def extract_line(on: Scene, folder: Path | str) -> str:
    """Return the command that fills a store on the cluster."""
    model = f"--model {GOLDEN / 'model'} --dtype float32"
    return f"extract {GOLDEN / 'train.jsonl'} {model} --ray {on.address} --out {folder}"


def driver(on: Scene, n: int) -> Tally:
    """Kill the command that hands out shards, so many times, and run it again."""
    tally, rng = Tally("drivers killed", may_refuse=False), random.Random(1)
    for _ in range(n):
        folder, enough = on.fresh(), rng.randint(1, 12)
        line = extract_line(on, folder)
        command = [sys.executable, "-c", DRIVER, *line.split()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
            while len(lines_of(folder / "journal.jsonl")) < enough and child.poll() is None:
                time.sleep(rng.uniform(0, 0.05))
            child.kill()
            _, err = child.communicate()
        case = f"the driver is killed after {enough} shards"
        if child.returncode not in (0, -signal.SIGKILL):
            tally.add(case, "traceback", err.decode()[-300:])
        ended = coral(on.home, *line.split())
        tally.judge(f"{case}, then again", ended, difference=difference(content(folder), on.alone))
    return tally


def troubles(on: Scene) -> Iterator[Tally]:
    """Let a worker fail at a shard: twice, which others mend, and three times, which ends the run in a sentence."""
    for trouble in TROUBLES:
        tally = Tally(trouble)
        for times in (2, 3):
            folder = on.fresh()
            outcome = on.fill(folder, trouble=trouble, times=times)
            on.judge(tally, f"{trouble}, {times} times", outcome, folder)
            if times == 3 and "disk" not in trouble and not names_questions(outcome.err, on):
                tally.add(trouble, "traceback", f"its questions are not named: {outcome.err}")
        yield tally


def names_questions(said: str, on: Scene) -> bool:
    """Whether a sentence says that the unlucky shard failed three times, and names a question of it."""
    return (
        f"Shard {UNLUCKY} (questions '" in said and "failed 3 times" in said and any(q.id in said for q in on.questions)
    )


def damage(on: Scene, n: int) -> Tally:
    """Damage a finished shard while others are computed; the same command mends it."""
    tally, rng = Tally("shards damaged meanwhile"), random.Random(2)
    for _ in range(n):
        folder, damaged = on.fresh(), list[Path]()

        def advance(_: int, folder: Path = folder, damaged: list[Path] = damaged) -> None:
            shards = sorted(folder.glob("shard-*.safetensors"))
            if shards and not damaged:
                damaged.append(rng.choice(shards))
                flip(damaged[0], rng)

        first = on.fill(folder, progress=advance)
        again = on.fill(folder)
        case = f"{damaged[0].name if damaged else 'no shard'} is damaged meanwhile"
        if first.code is None:
            tally.judge(case, first)
        tally.judge(f"{case}, then again", again, difference=difference(content(folder), on.alone))
    return tally


def study(on: Scene) -> Tally:
    """Run a study in one process and on the cluster, in folders of their own."""
    tally, found = Tally("a study on the cluster", may_refuse=False), []
    for name, more in (("alone", ()), ("helped", ("--ray", on.address))):
        place = furnish(on.home / f"study-{name}-{secrets.token_hex(2)}", large=False)
        line = ["run", "study.toml", "--out", "study", "--work", "states", "--dtype", "float32", *more]
        with usual_shards():
            outcome = coral(place, *line)
        found.append({k: v for k, v in content(place).items() if k.startswith(("study/", "states/"))})
        tally.judge(f"a study, {name}", outcome, difference=difference(found[-1], found[0]))
    return tally


def all_faults(home: Path, kills: int) -> Iterator[Tally]:
    """Do everything, with so many kills of workers."""
    with usual_shards(), scene(home / "cluster") as on:
        yield workers(on, kills)
        yield node(on)
        yield driver(on, max(1, kills // 10))
        yield from troubles(on)
        yield damage(on, max(1, kills // 10))
        yield study(on)
