"""Score every option of every question in one pass over its token tree; read or edit hidden states on the way.

There is one scoring path. Whatever wants states (pooled residuals, head inputs) is a Reader, whatever changes them (ITI, SAE
patching) is an Edit; both are told by the Batch where each option's tokens lie. Nothing is kept between batches but the last
prefix, so memory does not grow with the number of questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine._kernels import cut_blocks, fused
from coral_lens.engine.batches import Batch, lay_out, prefix_batch
from coral_lens.engine.hooks import Edit, Reader, tapped
from coral_lens.engine.in_use import in_use
from coral_lens.engine.packing import Plan, PlannedBatch
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

if TYPE_CHECKING:
    from coral_lens.engine.model import Model, PrefixCache


TOKEN_BUDGET = 2048
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
) -> Iterator[ScoredBatch]:
    """Yield the scores and readings of each batch of the plan, in its order.

    One token that is not finite spoils its whole row. The questions of such a batch are scored one by one, each a batch:
    those that are broken by themselves have no scores, and `on_broken` is told their numbers. Without it they are an error.
    """
    prefixes = PrefixCaches(model, edits)

    def scored(planned: PlannedBatch) -> ScoredBatch:
        batch = lay_out(prompts, planned, packing=plan.packing, joined=model.attends_in_blocks)
        return score_batch(model, batch, readers=readers, edits=edits, prefixes=prefixes)

    for planned in plan.batches:
        try:
            batches = iter([scored(planned)])
        except NotFiniteError:
            batches = one_by_one(planned, scored, on_broken)
        yield from batches


def one_by_one(
    planned: PlannedBatch, scored: Callable[[PlannedBatch], ScoredBatch], on_broken: OnBroken | None
) -> Iterator[ScoredBatch]:
    """Yield each question of a batch in a batch of its own, but for those that are broken by themselves."""
    for question in planned.questions:
        try:
            alone = scored(replace(planned, rows=((question,),), prefixes=(0,)))
        except NotFiniteError:
            if on_broken is None:
                raise
            on_broken(question)
        else:
            yield alone


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
        token_logprobs = answer_logprobs(model, states, batch)
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
) -> Float[Tensor, "batch width feature"]:
    """Return the final, normed states of a batch; readers and edits see it on its way through the model."""
    with in_use(model), fused(model.hf):
        cache = (prefixes or PrefixCaches(model, edits)).for_batch(batch)
        with tapped(model, batch, readers=readers, edits=edits):
            return body(model, batch, cache)


class PrefixCaches:
    """The key-value cache of the prefixes of one batch, kept for the next: batches of one prefix follow each other."""

    def __init__(self, model: Model, edits: Sequence[Edit] = ()) -> None:
        self._model, self._edits = model, edits
        self._known: tuple[tuple[int, ...], ...] = ()
        self._cache: PrefixCache | None = None

    def for_batch(self, batch: Batch) -> PrefixCache | None:
        """Return the cache that the rows of a batch attend to, or None where they have no prefix."""
        if not batch.prefixes:
            return None
        if self._cache is None or not set(batch.prefixes) <= set(self._known):
            with tapped(self._model, prefix_batch(batch.prefixes), edits=self._edits):
                self._cache = self._model.prefill(batch.prefixes)
            self._known = batch.prefixes
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
