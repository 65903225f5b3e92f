"""Whole batches side by side on the CPU, each on a thread of its own.

Threads that divide every product wait for each other at every operation: beside a busy program all of them go at the pace of
the slowest. Batches side by side do not wait, and what comes out does not depend on the number of threads, to the bit.

Every worker has modules of its own, because hooks hang on them; the weights are shared. The model that was given is not touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import torch

from coral_lens.engine._seals import Seal, devices_of, last_seal, remember
from coral_lens.engine.architectures import find_parts
from coral_lens.engine.in_use import in_use

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coral_lens.engine.model import Model

Job = TypeVar("Job")
Result = TypeVar("Result")
Worker = TypeVar("Worker")


def n_workers(model: Model, n_batches: int) -> int:
    """Return how many batches of a model are computed at a time: one for each thread that torch may use, on the CPU."""
    if devices_of(model.hf) != {"cpu"} or getattr(model.hf, "hf_device_map", None):
        return 1
    return min(torch.get_num_threads(), n_batches)


# ---------------------------------------------------------------------------------------------------------------- twins

_TWINS: WeakKeyDictionary[PreTrainedModel, tuple[Seal | None, list[Model]]] = WeakKeyDictionary()
_TABLE = Lock()


def twins_of(model: Model, n: int) -> list[Model]:
    """Return n models with modules of their own and the weights of this one; they are kept while its weights stay."""
    with in_use(model), _TABLE:  # which refuses weights that have changed
        seal, twins = _TWINS.get(model.hf, (None, []))
        if seal is not last_seal(model.hf):
            twins = []
        twins += [twin_of(model) for _ in range(n - len(twins))]
        _TWINS[model.hf] = last_seal(model.hf), twins
        # what a user changes in a Model, such as its longest input, holds for its twins too
        return [replace(model, hf=twin.hf, **vars(find_parts(twin.hf))) for twin in twins[:n]]


def twin_of(model: Model) -> Model:
    """Return a model with modules of its own and the same weights."""
    shared = {id(tensor): tensor for tensor in (*model.hf.parameters(), *model.hf.buffers())}
    hf, seal = deepcopy(model.hf, shared), last_seal(model.hf)
    remember(hf, None if seal is None else seal.bits)
    return replace(model, hf=hf, **vars(find_parts(hf)))


# -------------------------------------------------------------------------------------------------------------- threads


def side_by_side(
    jobs: Iterable[Job], workers: Sequence[Worker], compute: Callable[[Worker, Job], Result]
) -> Generator[Result, None, None]:
    """Yield the results of jobs in their order, each computed by a free worker on one thread, with little look-ahead."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def run(job: Job) -> Result:
        worker = free.get()
        try:
            return compute(worker, job)
        finally:
            free.put(worker)

    waiting: deque[Future[Result]] = deque()
    # torch counts its threads for each thread of Python, but what it multiplies with counts them for all
    n_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(workers), "coral", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for job in jobs:
            waiting.append(pool.submit(run, job))
            if len(waiting) > len(workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also where nobody asks for more, or a job failed
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(n_threads)
