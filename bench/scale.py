"""Past one process: what the driver, the journal and the store take at sizes that this machine never computes, and what workers
of one thread are worth beside one process with several.

    python bench/scale.py simulate --shards 100000 --workers 64 --dying 0.001
    python bench/scale.py workers --questions 60 --rounds 3

`simulate` is the real driver, journal and store; a stand-in for Ray, without processes, hands shards to a stub that writes small
tensors (which are not flushed: that is the workers' time, not the driver's), and whose workers die at a stated rate. It is done
at a quarter of the size too: what is linear takes as long for each shard. `workers` has real workers on Ray, in turns with one
process of as many threads; loading the model is in neither.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import StorePlan, planned_work
from coral_lens.engine.packing import Plan, PlannedBatch
from coral_lens.engine.planned import Extraction
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered, question_record
from coral_lens.scale.cluster import Cluster, connected
from coral_lens.scale.driver import Driver, Worker
from coral_lens.scale.extract import Spread, dismiss, job_of, never, planned_by_worker
from coral_lens.scale.settings import RaySettings
from coral_lens.scale.worker import ModelSource, ShardTask, ShardWorker
from coral_lens.storage.files import digest
from coral_lens.storage.shards import write_shard


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    simulated = kinds.add_parser("simulate")
    simulated.add_argument("--shards", type=int, default=100_000)
    simulated.add_argument("--per-shard", type=int, default=10, help="questions of a shard")
    simulated.add_argument("--tensors", type=int, default=33, help="layers of a shard, each a line's digest")
    simulated.add_argument("--workers", type=int, default=64)
    simulated.add_argument("--dying", type=float, default=0.001, help="how often a worker dies at a shard")
    simulated.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    beside = kinds.add_parser("workers")
    beside.add_argument("--model", default="smollm2")
    beside.add_argument("--task", default="commonsense_qa_cloze:validation")
    beside.add_argument("--questions", type=int, default=60)
    beside.add_argument("--rounds", type=int, default=3)
    beside.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.what == "workers":
        compare(args)
    elif args.child:
        simulate(args)
    else:
        print(f"{args.workers} workers, of which {args.dying:.3%} die at a shard; load {os.getloadavg()[0]:.1f}")
        for n in (args.shards // 4, args.shards):  # each in a process of its own: memory is a peak
            options = [
                f"--{name}={getattr(args, name.replace('-', '_'))}"
                for name in ("per-shard", "tensors", "workers", "dying")
            ]
            subprocess.run([sys.executable, __file__, "simulate", "--child", f"--shards={n}", *options], check=True)


# ---------------------------------------------------------------------------------------------------------- simulation


@dataclass(eq=False)
class Reference:
    """What a worker will return."""

    find: Callable[[], Any]


@dataclass(eq=False)
class StubActor:
    """Answers at once to all that the driver asks of a worker."""

    stub: Stub

    def __getattr__(self, name: str) -> Any:
        return StubMethod(getattr(self.stub, name, lambda *_, **__: None))


@dataclass
class StubMethod:
    """A method of a worker that is elsewhere."""

    call: Callable[..., Any]

    def options(self, **_: Any) -> StubMethod:
        return self

    def remote(self, *arguments: Any, **named: Any) -> Reference:
        return Reference(lambda: self.call(*arguments, **named))


@dataclass
class Stub:
    """The worker itself: it writes small tensors, or dies."""

    dying: float
    tensors: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    """What writing took: the workers' time."""
    n_died: int = 0

    def compute(self, task: ShardTask, extraction: Extraction, folder: Path) -> dict[str, str]:
        """Write a shard of small tensors."""
        if self.rng.random() < self.dying:
            self.n_died += 1
            raise ray.exceptions.ActorDiedError
        begun = time.perf_counter()
        with unflushed():
            digests = write_shard(folder, task.number, self._tensors(task))
        self.seconds += time.perf_counter() - begun
        return digests

    def _tensors(self, task: ShardTask) -> dict[str, Tensor]:
        n = 2 * len(task.questions)
        facts = {name: torch.ones(n, dtype=torch.int64) for name in ("n_tokens", "n_chars", "n_bytes")}
        states = {f"layer_{i}": torch.full((n, 1), task.number % 100, dtype=torch.float16) for i in range(self.tensors)}
        return {
            "question": torch.tensor(task.questions),
            "logprob": torch.zeros(n, dtype=torch.float64),
            **facts,
            **states,
        }


@contextmanager
def unflushed() -> Iterator[None]:
    """Do not wait for the disk."""
    usual, os.fsync = os.fsync, lambda _: None
    try:
        yield
    finally:
        os.fsync = usual


@contextmanager
def stand_in(rng: random.Random) -> Iterator[None]:
    """Answer in place of Ray."""

    def wait(
        references: Sequence[Reference], *, num_returns: int, timeout: float | None
    ) -> tuple[list[Reference], Any]:
        return ([] if timeout == 0 else [rng.choice(references)]), []

    usual = {name: getattr(ray, name) for name in ("wait", "get", "kill", "put")}
    ray.wait, ray.get = wait, lambda reference: reference.find() if isinstance(reference, Reference) else reference
    ray.kill, ray.put = lambda _: None, lambda value: value
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(ray, name, function)


@dataclass(frozen=True)
class StubSpread(Spread):
    """Starts stubs."""

    stub: Stub | None = None

    def start(self) -> Worker:
        """Start a worker."""
        assert self.stub
        return Worker("worker", StubActor(self.stub))


def synthetic(n_shards: int, per_shard: int, layers: int) -> StorePlan:
    """Return the plan of a store of made-up questions."""
    n = n_shards * per_shard
    questions = tuple(Question(f"q{i}", f"q{i}", f"{i}: which?", ("this", "that"), 0) for i in range(n))
    rendered = (Rendered(("Which?",) * 2, (" this", " that"), ("this", "that")),) * n
    prompts = tuple(Prompt(q.id, ((1, 2, 3),) * 2, ((4,), (5,))) for q in questions)
    groups = (tuple(range(i * per_shard, (i + 1) * per_shard)) for i in range(n_shards))
    shards = tuple(Plan((PlannedBatch((group,), (0,)),), "tree") for group in groups)
    about = {
        "model": {"name": "stub", "layers": layers},
        "style": "stub",
        "layers": list(range(layers)),
        "n_questions": n,
    }
    manifest = {"format": 1, **about, "questions": digest([question_record(q) for q in questions])}
    extraction = Extraction(tuple(range(layers)), token_budget=1, packing="tree")
    return StorePlan(manifest, Prepared(questions, rendered, prompts, {}), extraction, shards)


def simulate(args: argparse.Namespace) -> None:
    """Fill a store by stubs, open it and resume it; print what each took."""
    stub = Stub(args.dying, args.tensors)
    spread = StubSpread(Cluster(args.workers, 1, 0.0), ModelSource("stub"), stub=stub)
    before = memory()
    plan, n = synthetic(args.shards, args.per_shard, args.tensors), args.shards
    planned, n_stops = memory(), 0
    with tempfile.TemporaryDirectory() as home, stand_in(stub.rng):
        folder = Path(home) / "store"

        def fill(todo: Sequence[int], journal: Any, counted: Any) -> None:
            Driver(job_of(spread, plan, journal, counted, []), args.workers).run(todo)

        def run() -> None:
            planned_work(plan, folder, never).run(elsewhere=fill)

        begun = time.perf_counter()
        while True:
            try:
                run()
                break
            except CoralError:  # a shard at which three workers died
                n_stops += 1
        filled = time.perf_counter() - begun - stub.seconds
        driven = memory()
        journal = (folder / "journal.jsonl").stat().st_size
        print(f"{n:,} shards, {n * args.per_shard:,} questions, journal {journal / 1e6:,.0f} MB")
        print(
            f"  driver: {n / filled:,.0f} shards/s, {1e6 * filled / n:,.0f} us a shard; {stub.n_died} died, {n_stops} stops"
        )
        for name, work in (("opened", lambda: ActivationStore(folder)), ("resumed", run)):
            begun = time.perf_counter()
            work()
            took = time.perf_counter() - begun
            print(f"  {name}: {took:.1f} s, {1e6 * took / n:,.0f} us a shard")
    print(
        f"  peak: {before:,.0f} MiB, with the plan {planned:,.0f}, with the driver {driven:,.0f}, at the end {memory():,.0f}",
        flush=True,
    )


def memory() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------------------------------------- workers


class TimedWorker(ShardWorker):
    """A worker that says how long it computed."""

    seconds = 0.0

    def compute(self, task: ShardTask, extraction: Extraction, folder: Path) -> dict[str, str]:
        """Compute a shard."""
        begun = time.perf_counter()
        digests = super().compute(task, extraction, folder)
        self.seconds += time.perf_counter() - begun
        return digests

    def spent(self) -> float:
        """Return the seconds since this was last asked."""
        found, self.seconds = self.seconds, 0.0
        return found


@dataclass(frozen=True)
class TimedSpread(Spread):
    """Starts workers that say how long they computed."""

    def start(self) -> Worker:
        """Start a worker."""
        return self.cluster.start(TimedWorker, self.source, self.cluster.cpus)


def compare(args: argparse.Namespace) -> None:
    """Extract the same questions by workers of one thread and by one process, in turns."""
    from coral_lens.data.questions import load_questions
    from coral_lens.data.settings import TaskOptions
    from coral_lens.engine import extract as extract_module
    from coral_lens.engine.extract import plan_shards, plan_store, store_work
    from coral_lens.engine.loading import load_model
    from coral_lens.engine.planned import all_layers

    torch.set_num_threads(args.workers)
    model = load_model(args.model)
    questions = load_questions(args.task, TaskOptions(limit=args.questions))
    extract_module.SHARD_BYTES = 2**21  # shards that end at about the same time, although there are few questions
    source, ratios, overheads = ModelSource(args.model, dtype=str(model.precision)), [], []
    print(f"{len(questions)} questions, {args.workers} workers, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as home, connected(RaySettings(ray="local", workers=args.workers)) as cluster:
        spread = TimedSpread(cluster, source)
        wanted = Extraction(all_layers(model), token_budget=512)
        for number in range(args.rounds + 1):
            # as for the workers, whose plan is made before their time begins
            one = Path(home) / f"one-{number}"
            planned = plan_store(model, questions, one, wanted)
            work = store_work(planned, plan_shards(planned), one)
            alone = seconds(work.run)
            if number == 0:
                (Path(home) / "first").mkdir()
                manifest = (Path(home) / "one-0" / "manifest.json").read_bytes()
                (Path(home) / "first" / "manifest.json").write_bytes(manifest)
                plan, there = planned_by_worker(spread, questions, Path(home) / "first", Wanted())
                there += [spread.start() for _ in range(args.workers - 1)]
                ray.get([worker.actor.load.remote() for worker in there])
            took, overhead = by_workers(spread, plan, Path(home) / f"many-{number}", there)
            if number:  # the first round warms up
                ratios.append(alone / took)
                overheads.append(overhead)
            print(
                f"  one process {len(questions) / alone:.1f} questions/s, workers {len(questions) / took:.1f}",
                flush=True,
            )
        dismiss(there)
    print(
        f"workers / one process: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); overhead "
        f"{1000 * statistics.median(overheads):.0f} ms a shard of {len(plan.shards)}"
    )


def by_workers(spread: Spread, plan: StorePlan, folder: Path, there: list[Worker]) -> tuple[float, float]:
    """Fill a store by workers that have the model; return the seconds, and those of a shard in which nobody computed."""
    n = len(there)

    def fill(todo: Sequence[int], journal: Any, counted: Any) -> None:
        job = replace(job_of(spread, plan, journal, counted, there), release=there.append)
        Driver(job, n).run(todo)

    ray.get([worker.actor.spent.remote() for worker in there])
    took = seconds(lambda: planned_work(plan, folder, never).run(elsewhere=fill))
    computed = sum(ray.get([worker.actor.spent.remote() for worker in there]))
    return took, (took * n - computed) / len(plan.shards)


def seconds(work: Callable[[], Any]) -> float:
    """Return how long something takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
