"""Score every option of every question in one pass over its token tree; read or edit hidden states on the way.

There is one scoring path. Whatever wants states (pooled residuals, head inputs) is a Reader, whatever changes them (ITI, SAE
patching) is an Edit; both are told by the Batch where each option's tokens lie. Nothing is kept between batches but the last
prefix, so memory does not grow with the number of questions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine._kernels import cut_blocks, fused
from coral_lens.engine._workers import n_workers, side_by_side, twins_of
from coral_lens.engine.batches import Batch, batch_prefixes, lay_out, prefix_batch
from coral_lens.engine.hooks import Edit, Reader, leaving_after, tapped
from coral_lens.engine.in_use import in_use
from coral_lens.engine.packing import Packing, Plan, PlannedBatch
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

if TYPE_CHECKING:
    from coral_lens.engine.model import Model, PrefixCache


TOKEN_BUDGET = 1024
"""Tokens of a batch, padding included, unless `budget` finds a better number for a model and machine."""
OnBroken = Callable[[int], None]
"""Told the number of a question whose own scores or states are not finite."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The scores of one batch: options question by question."""

    batch: Batch
    logprobs: Float[Tensor, " option"]
    """Summed log-probability of each option's tokens, float64 sums of float32 terms."""
    readings: dict[str, Tensor]


def score(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    on_broken: OnBroken | None = None,
    divide: bool = False,
    last: int | None = None,
    table: PrefixTable | None = None,
) -> Iterator[ScoredBatch]:
    """Yield the scores and readings of each batch of the plan, in its order.

    One token that is not finite spoils its whole row. The questions of such a batch are scored one by one, each a batch:
    those that are broken by themselves have no scores, and `on_broken` is told their numbers. Without it they are an error.
    All else is as in `score_plans`.
    """
    scored = score_plans(
        model, prompts, [plan], readers=readers, edits=edits, skips_broken=on_broken is not None, divide=divide,
        last=last, table=table,
    )  # fmt: skip
    with closing(scored):
        for result in chain.from_iterable(scored):
            for question in result.broken:
                assert on_broken is not None, "without it, a broken question is an error"
                on_broken(question)
            yield from result.batches


def score_plans(
    model: Model,
    prompts: Sequence[Prompt],
    plans: Sequence[Plan],
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    skips_broken: bool = False,
    divide: bool = False,
    last: int | None = None,
    table: PrefixTable | None = None,
) -> Generator[Iterator[ScoredJob], None, None]:
    """Yield what comes of the batches of each plan, in their order; all of one plan must be taken before the next.

    On the CPU several batches are computed at a time, each on one thread, and what comes out does not depend on the number of
    threads; at the end of a plan those that are free begin with the next. `divide` is for few questions that are wanted soon: a
    batch that is alone is divided over all threads.

    `last` is the layer after which the pass ends: no block above it runs, nor the vocabulary head, readers read nothing beyond
    it, and every option has the log-probability 0.

    `table` keeps the caches of prefixes from one call to the next; without it they are gone at the end.
    """
    n = n_workers(model, sum(len(plan.batches) for plan in plans))
    table, packing = table or PrefixTable(), plans[0].packing

    def caches(of: Model) -> PrefixCaches:
        return PrefixCaches(of, edits, table, last=last)

    # prefixes that are computed together are of one plan: what comes of it does not depend on the plans before
    jobs = (job for plan in plans for job in zip(plan.batches, companies(prompts, plan), strict=True))

    def compute(worker: BatchScorer, job: tuple[PlannedBatch, Company]) -> ScoredJob:
        return worker.score(*job, skips_broken=skips_broken)

    if n == 1 and (divide or torch.get_num_threads() == 1 or model.device.type != "cpu"):
        alone = BatchScorer(model, prompts, packing, readers, edits, caches(model))
        results: Generator[ScoredJob, None, None] = (compute(alone, job) for job in jobs)
    else:
        scorers = [
            BatchScorer(twin, prompts, packing, [r.fresh() for r in readers], edits, caches(twin))
            for twin in twins_of(model, n)
        ]
        results = side_by_side(jobs, scorers, compute)
    with closing(results):
        for plan in plans:
            yield islice(results, len(plan.batches))


class ScoredJob(NamedTuple):
    """What came of one planned batch: itself, or its questions one by one."""

    batches: list[ScoredBatch]
    broken: list[int]
    """Questions without scores."""


@dataclass(frozen=True)
class BatchScorer:
    """Scores one planned batch after the other with a model and readers of its own."""

    model: Model
    prompts: Sequence[Prompt]
    packing: Packing
    readers: Sequence[Reader]
    edits: Sequence[Edit]
    prefixes: PrefixCaches

    def score(self, planned: PlannedBatch, company: Company, *, skips_broken: bool) -> ScoredJob:
        """Score a batch; where it is not finite, question by question."""
        try:
            return ScoredJob([self._score(planned, company)], [])
        except NotFiniteError:
            return self._score_apart(planned, skips_broken=skips_broken)

    def _score(self, planned: PlannedBatch, company: Company = ()) -> ScoredBatch:
        batch = lay_out(self.prompts, planned, packing=self.packing, joined=self.model.joins_rows)
        with torch.inference_mode():
            self.prefixes.prepare(company)
        return score_batch(self.model, batch, readers=self.readers, edits=self.edits, prefixes=self.prefixes)

    def _score_apart(self, planned: PlannedBatch, *, skips_broken: bool) -> ScoredJob:
        job = ScoredJob([], [])
        for question in planned.questions:
            try:
                job.batches.append(self._score(replace(planned, rows=((question,),), prefixes=(0,))))
            except NotFiniteError:
                if not skips_broken:
                    raise
                job.broken.append(question)
        return job


@torch.inference_mode()
def score_batch(
    model: Model,
    batch: Batch,
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    prefixes: PrefixCaches | None = None,
) -> ScoredBatch:
    """Run one batch through the model."""
    with in_use(model):
        states = run_batch(model, batch, readers=readers, edits=edits, prefixes=prefixes)
        token_logprobs = torch.zeros(len(batch.targets)) if states is None else answer_logprobs(model, states, batch)
        readings: dict[str, Tensor] = {}
        for reader in readers:
            readings |= {name: tensor.cpu() for name, tensor in reader.take().items()}
    sums = torch.segment_reduce(token_logprobs.double(), "sum", lengths=batch.answer_offsets.diff(), axis=0)
    refuse_broken(model, batch, token_logprobs, *readings.values())
    return ScoredBatch(batch, sums, readings)


def run_batch(
    model: Model,
    batch: Batch,
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    prefixes: PrefixCaches | None = None,
) -> Float[Tensor, "batch width feature"] | None:
    """Return the final, normed states of a batch; readers and edits see it on its way through the model.

    None where the pass ends before, as the caches of prefixes say.
    """
    prefixes, final = prefixes or PrefixCaches(model, edits), None
    with in_use(model), fused(model.hf):
        cache = prefixes.for_batch(batch)
        with tapped(model, batch, readers=readers, edits=edits), leaving_after(model, prefixes.last):
            final = body(model, batch, cache)
    return final


Company = tuple[tuple[int, ...], ...]
"""Token prefixes that are computed together: which these are changes the rounding of each."""


def companies(prompts: Sequence[Prompt], plan: Plan) -> list[Company]:
    """Return for each batch the prefixes that are computed when its own are: batches of one prefix follow each other."""
    found: list[Company] = []
    for planned in plan.batches:
        own = batch_prefixes(prompts, planned)
        last = found[-1] if found else ()
        found.append((last if set(own) <= set(last) else own) if own else last)
    return found


class PrefixTable:
    """Key-value caches that threads share: each is computed once, by the thread that wants it first, while others wait.

    Those that were used last are kept: a few of them, or as many as `most_bytes` hold, and always the very last.
    """

    FEW = 3
    """Caches that are kept where no number of bytes is said: threads may be at the end of one company and at the beginning of
    the next."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._caches: dict[Company, PrefixCache] = {}
        self._lock = Lock()

    def get(self, company: Company, compute: Callable[[Company], PrefixCache]) -> PrefixCache:
        """Return the cache of a company."""
        with self._lock:
            cache = self._caches.pop(company, None) or compute(company)
            self._caches[company] = cache
            while len(self._caches) > 1 and self._is_full:
                del self._caches[next(iter(self._caches))]
            return cache

    @property
    def _is_full(self) -> bool:
        return len(self._caches) > self.FEW if self._most_bytes is None else self.n_bytes > self._most_bytes

    @property
    def n_bytes(self) -> int:
        """How large all caches are together."""
        return sum(cache.n_bytes for cache in self._caches.values())

    def longest(self, context: tuple[int, ...]) -> int:
        """Return how many tokens at the start of a context are known, but for its last one, which predicts the options."""
        alone = [company[0] for company in tuple(self._caches) if len(company) == 1]
        return max((len(p) for p in alone if len(p) < len(context) and context[: len(p)] == p), default=0)


class PrefixCaches:
    """The key-value cache of the prefixes of one batch, kept for the next: batches of one prefix follow each other."""

    def __init__(
        self, model: Model, edits: Sequence[Edit] = (), table: PrefixTable | None = None, *, last: int | None = None
    ) -> None:
        """`last`: the layer after which passes end, those of batches too."""
        self.last = last
        self._model, self._edits, self._table = model, edits, table or PrefixTable()
        self._known: Company = ()
        self._cache: PrefixCache | None = None

    def prepare(self, company: Company) -> None:
        """Have the cache of prefixes that are computed together."""
        if company and company != self._known:
            self._cache, self._known = self._table.get(company, self._compute), company

    def _compute(self, company: Company) -> PrefixCache:
        with in_use(self._model), fused(self._model.hf), tapped(self._model, prefix_batch(company), edits=self._edits):
            return self._model.prefill(company, last=self.last)

    def for_batch(self, batch: Batch) -> PrefixCache | None:
        """Return the cache that the rows of a batch attend to, or None where they have no prefix."""
        if not batch.prefixes:
            return None
        if not set(batch.prefixes) <= set(self._known):
            self.prepare(batch.prefixes)
        assert self._cache is not None, "it is made with what is known"
        at = [self._known.index(batch.prefixes[i]) for i in batch.row_prefix]
        return self._cache.for_rows(at, max(len(p) for p in batch.prefixes))


def body(model: Model, batch: Batch, cache: PrefixCache | None) -> Float[Tensor, "batch width feature"]:
    """Return the final, normed states of a batch, computed the way that its layout and the model allow."""
    ids, positions = batch.input_ids.to(model.device), batch.position_ids.to(model.device)
    if batch.allowed is None:
        return model.plain_body(ids, batch.lengths)
    if batch.blocks and model.attends_in_blocks:
        return model.block_body(ids, positions, cut_blocks(batch.allowed[0], batch.blocks), cache)
    return model.tree_body(ids, positions, batch.allowed.to(model.device), cache)


def answer_logprobs(model: Model, states: Tensor, batch: Batch) -> Float[Tensor, " token"]:
    """Return the log-probability of every answer token; the head runs once on each position that predicts one."""
    rows, at = torch.unique(batch.before_tokens, return_inverse=True)
    flat = states.reshape(-1, states.shape[-1])
    device = flat.device
    return model.log_probs(flat[rows.to(device)], at.to(device), batch.targets.to(device)).cpu()


class NotFiniteError(CoralError):
    """Scores or states of a batch are not finite."""


def refuse_broken(model: Model, batch: Batch, *tensors: Tensor) -> None:
    """Refuse scores and states that are not finite; the question at fault is known only where it is alone in its batch."""
    if all(bool(tensor.isfinite().all()) for tensor in tensors):
        return
    others = f" or one of the {len(batch.names) - 1} scored with it" if len(batch.names) > 1 else ""
    raise NotFiniteError(
        f"The model {model.name!r} gives scores or states that are not finite for question {batch.names[0]!r}{others}: "
        "its weights or dtype are broken; try --dtype float32. Finished work is kept."
    )
