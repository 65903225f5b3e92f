"""Fill a store from many machines: workers compute and write shards, this process alone writes the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coral_lens.engine import extract
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import StorePlan, planned_work
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import warn_broken, warn_left_out
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.scale.cluster import Cluster
from coral_lens.scale.driver import Driver, Job, Tell, Worker
from coral_lens.scale.worker import ModelSource, ShardWorker, cut_task
from coral_lens.storage.files import versions
from coral_lens.storage.places import MANIFEST, Place, working_place
from coral_lens.storage.progress import Progress
from coral_lens.storage.remote import is_url, local_folder
from coral_lens.storage.resumable import Counted, locked
from coral_lens.storage.shards import Journal, shard_path

FLUSH_SECONDS = 0.2
"""Between two waits for the disk: many workers finish hundreds of shards a second."""
NAMED = 5
"""So many questions of a shard that failed are named."""


@dataclass(frozen=True)
class Spread:
    """Workers with a model on a cluster, and whom to tell what happens to them."""

    cluster: Cluster
    source: ModelSource
    tell: Tell = lambda _: None

    def start(self) -> Worker:
        """Start a worker."""
        return self.cluster.start(ShardWorker, self.source, self.cluster.cpus)


def extract_on_ray(
    spread: Spread,
    questions: Sequence[Question],
    folder: str | Path,
    *,
    wanted: Wanted,
    progress: Progress | None = None,
) -> ActivationStore:
    """Fill a store as `extract` does, by workers on a cluster; the folder or URL must be the same for all machines."""
    where = folder if is_url(folder) else local_folder(folder).absolute()
    with working_place(where) as place:
        with locked(place.folder):  # a second driver is refused before a worker loads anything
            place.fetch(MANIFEST)
        plan, spares = planned_by_worker(spread, questions, where, wanted)
        try:
            fill(spread, plan, place, spares, progress)
        finally:
            dismiss(spares)
    store = ActivationStore(where, layers=wanted.layers)
    warn_broken(spread.source.name, store.broken)
    return store


def fill(spread: Spread, plan: StorePlan, place: Place, spares: list[Worker], progress: Progress | None) -> None:
    """Have all shards of a plan computed that are not there; `spares` are workers that have the model already."""
    warn_left_out(plan.prepared)
    place.refresh()
    if not place.holds(place.folder / MANIFEST):
        raise CoralError(
            f"A worker has begun {place.name}, which is empty here: --out must be one place for all machines."
        )

    def elsewhere(todo: Sequence[int], journal: Journal, counted: Counted) -> None:
        journal.flush_seconds = FLUSH_SECONDS
        job = job_of(spread, plan, journal, counted, spares)
        Driver(job, spread.cluster.workers, spread.tell).run(todo)

    planned_work(plan, place, never).run(progress, elsewhere=elsewhere)


def never(shards: Sequence[Plan], progress: Progress) -> Any:
    """Stand where one process would compute shards."""
    raise AssertionError("the workers compute")


def dismiss(workers: list[Worker]) -> None:
    """End workers that were not needed."""
    while workers:
        workers.pop().end()


def planned_by_worker(
    spread: Spread, questions: Sequence[Question], where: str | Path, wanted: Wanted
) -> tuple[StorePlan, list[Worker]]:
    """Have a first worker plan the store, and return it with the worker; one that dies on the way is replaced."""
    import ray

    asked, plans, spares = ray.put(list(questions)), list[StorePlan](), list[Worker]()
    job = Job(
        start=spread.start,
        ready=lambda actor: actor.load.options(name="load").remote(),
        submit=lambda actor, _: actor.plan.options(name="plan").remote(asked, where, wanted, extract.SHARD_BYTES),
        done=lambda _, plan: plans.append(plan),
        named=lambda _: f"The plan of {where}",
        release=spares.append,
    )
    try:
        Driver(job, 1, spread.tell).run([0])
    except BaseException:
        dismiss(spares)
        raise
    return plans[0], spares


def job_of(spread: Spread, plan: StorePlan, journal: Journal, counted: Counted, spares: list[Worker]) -> Job:
    """Return how the shards of a store are computed by workers; those that are there already come first."""
    import ray

    extraction, place = ray.put(plan.extraction), journal.place
    where = place.folder if place.appends else place.name
    about = (plan.manifest, versions())

    def submit(actor: Any, number: int) -> Any:
        task = cut_task(plan, number)
        return actor.compute.options(name=f"shard {number}").remote(task, extraction, where)

    def done(number: int, digests: dict[str, str]) -> None:
        path = shard_path(place.folder, number)
        if not place.holds(path):
            raise CoralError(
                f"A worker has written {path}, which is not here: --out must be a folder that all machines share."
            )
        journal.note(number, digests)
        counted(sum(len(batch.questions) for batch in plan.shards[number].batches))

    def named(number: int) -> str:
        ids = [plan.prepared.questions[q].id for batch in plan.shards[number].batches for q in batch.questions]
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        return f"Shard {number} (questions {', '.join(map(repr, ids[:NAMED]))}{more})"

    return Job(
        start=lambda: spares.pop() if spares else spread.start(),
        ready=lambda actor: actor.check.options(name="begin").remote(*about, mixed=plan.extraction.mixed),
        submit=submit,
        done=done,
        named=named,
        note=counted.note,
    )
