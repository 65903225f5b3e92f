"""The shards of a store: the scores and states of some batches, whole or not there at all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine.hooks import Edit
from coral_lens.engine.neutral import neutral_prompts
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import PlannedQuestions
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.readers import layer_name
from coral_lens.engine.scoring import ScoredJob, score, score_plans
from coral_lens.records import Prompt
from coral_lens.storage.progress import Progress
from coral_lens.storage.shards import compact

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


def cut_shards(planned: PlannedQuestions, shard_bytes: int) -> list[Plan]:
    """Cut the plan of questions into shards of whole batches."""
    plan, prompts = planned.plan(), planned.prepared.prompts
    row_bytes = planned.extraction.row_bytes(planned.model.width)
    shards, batches, size = [], [], 0
    for batch in plan.batches:
        batches.append(batch)
        size += row_bytes * sum(len(prompts[q].options) for q in batch.questions)
        if size >= shard_bytes:
            shards.append(Plan(tuple(batches), plan.packing))
            batches, size = [], 0
    return [*shards, Plan(tuple(batches), plan.packing)] if batches else shards


def count_questions(plan: Plan) -> int:
    """Return how many questions a plan covers."""
    return sum(len(batch.questions) for batch in plan.batches)


def compute_shard(
    planned: PlannedQuestions, shard: Plan, progress: Progress, *, divide: bool = False
) -> dict[str, Tensor]:
    """Score the questions of one shard and return its tensors. With `divide` a single batch is divided over all threads."""
    with closing(compute_shards(planned, [shard], progress, divide=divide)) as shards:
        return next(shards)


def compute_shards(
    planned: PlannedQuestions, shards: Sequence[Plan], progress: Progress, *, divide: bool = False
) -> Generator[dict[str, Tensor], None, None]:
    """Score the questions of shards and yield the tensors of each; while one is kept, batches of the next are computed."""
    extraction = planned.extraction
    # after a shard its options are scored in a neutral context, which nothing may be computed beside
    for company in [[shard] for shard in shards] if extraction.neutral else [shards]:
        scored = score_plans(
            planned.model,
            planned.prepared.prompts,
            company,
            readers=extraction.readers,
            edits=extraction.edits,
            skips_broken=True,
            divide=divide,
            last=extraction.last,
            table=planned.kept.table if planned.kept else None,
        )
        with closing(scored):
            for jobs in scored:
                yield gather_shard(planned, jobs, progress)


def gather_shard(planned: PlannedQuestions, jobs: Iterator[ScoredJob], progress: Progress) -> dict[str, Tensor]:
    """Return the tensors of one shard; questions that are broken are listed in one of their own."""
    model, prompts, extraction = planned.model, planned.prepared.prompts, planned.extraction
    # an empty part of each, so that a shard of which nothing is left has its columns too
    parts = {"question": [torch.zeros(0, dtype=torch.int64)], "logprob": [torch.zeros(0, dtype=torch.float64)]}
    names = [layer_name(layer, place) for place in extraction.read for layer in extraction.layers]
    parts |= {name: [torch.zeros(0, model.width, dtype=torch.float32)] for name in names}
    broken: list[int] = []
    for job in jobs:
        broken += job.broken
        for scored in job.batches:
            parts["question"].append(torch.tensor(scored.batch.questions))
            parts["logprob"].append(scored.logprobs)
            for name, tensor in scored.readings.items():
                parts.setdefault(name, []).append(tensor)
            progress(len(scored.batch.questions))
    # what is compact is no longer kept as it came
    tensors = {name: compact(torch.cat(parts.pop(name))) for name in list(parts)}
    if broken:
        tensors["broken"] = torch.tensor(broken)
        progress(len(broken))
    asked = tensors["question"].tolist()
    if extraction.neutral:
        neutral = neutral_prompts([prompts[q].id for q in asked], [planned.prepared.rendered[q] for q in asked], model)
        tensors["neutral"] = score_once(model, neutral, planned.plan, edits=extraction.edits)
    return tensors | lengths_of(planned.prepared, asked)


def score_once(
    model: Model, prompts: Sequence[Prompt], plan: Callable[[Sequence[Prompt]], Plan], *, edits: Sequence[Edit] = ()
) -> Float[Tensor, " option"]:
    """Return the log-probabilities of the options of prompts; prompts that are alike are computed once."""
    known = {(p.contexts, p.options): p for p in prompts}
    distinct, scores = list(known.values()), dict[int, Tensor]()
    for scored in score(model, distinct, plan(distinct), edits=edits):
        edges = scored.batch.option_offsets
        scores |= {q: scored.logprobs[edges[i] : edges[i + 1]] for i, q in enumerate(scored.batch.questions)}
    number = {key: i for i, key in enumerate(known)}
    none = torch.zeros(0, dtype=torch.float64)
    return torch.cat([none, *(scores[number[p.contexts, p.options]] for p in prompts)])


def lengths_of(prepared: Prepared, questions: Sequence[int]) -> dict[str, Tensor]:
    """Return how long the options of questions are, in tokens, characters and bytes."""
    tokens = [len(option) for q in questions for option in prepared.prompts[q].options]
    choices = [choice for q in questions for choice in prepared.rendered[q].choices]
    return {
        "n_tokens": torch.tensor(tokens, dtype=torch.int64),
        "n_chars": torch.tensor([len(choice) for choice in choices], dtype=torch.int64),
        "n_bytes": torch.tensor([len(choice.encode()) for choice in choices], dtype=torch.int64),
    }
