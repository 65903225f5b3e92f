"""Score questions and keep the pooled states of each option: few in memory, many in a folder, where a killed run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coral_lens.engine.activations import ActivationStore, MemoryStore, ScoredShards, places_of
from coral_lens.engine.packing import Plan, tree_size
from coral_lens.engine.planned import Extraction, PlannedQuestions, plan_questions, refuse_layers, warn_broken
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.shard_work import compute_shard, compute_shards, count_questions, cut_shards
from coral_lens.engine.trees import build_tree
from coral_lens.records import Question, question_record
from coral_lens.storage.parts import Part
from coral_lens.storage.places import Place, as_place, working_place
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import Compute, Resumable, read_manifest
from coral_lens.storage.shards import Journal, open_journal
from coral_lens.storage.temporary import temporary_folder

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

SHARD_BYTES = 32 * 2**20
"""Aimed-at size of a shard: small enough to lose little when killed, large enough to be read at the disk's speed."""
MANY_ROUNDS = 4
"""So many batches for each thread end at about the same time by themselves."""
LEAST_BUDGET = 256
"""Tokens of a batch at least: smaller products are slower."""
QUESTIONS = "questions.jsonl"


# ---------------------------------------------------------------------------------------------------------- scoring


@contextmanager
def score_questions(
    model: Model,
    questions: Sequence[Question],
    extraction: Extraction,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[ScoredShards]:
    """Score questions and yield their scores and states, which are the same wherever they lie, up to rounding.

    With `folder` they are kept there, and an interrupted run goes on. Without, few stay in memory, and many are in a temporary
    folder until the block ends. Questions are left out, and named, as by `extract`.
    """
    if folder is None and is_small(model, questions, extraction):
        yield score_in_memory(model, questions, extraction, progress=progress)
        return
    with nullcontext(folder) if folder else temporary_folder() as place:
        yield extract(model, questions, place, extraction=extraction, progress=progress)


def is_small(model: Model, questions: Sequence[Question], extraction: Extraction) -> bool:
    """Return whether questions would fill no more than one shard: a killed run would begin anew with or without a folder."""
    return extraction.row_bytes(model.width) * sum(len(q.options) for q in questions) < SHARD_BYTES


def score_in_memory(
    model: Model, questions: Sequence[Question], extraction: Extraction, *, progress: Progress | None = None
) -> MemoryStore:
    """Score the questions and return what `extract` would keep of them, as soon as the machine can."""
    planned = plan_questions(model, questions, extraction)
    store = score_planned(planned, evenly=extraction.token_budget is None, progress=progress)
    warn_broken(model.name, store.broken)
    return store


def score_planned(planned: PlannedQuestions, *, evenly: bool = True, progress: Progress | None = None) -> MemoryStore:
    """Score questions that are ready, as `score_in_memory` does; `evenly`: in smaller batches where threads would wait.

    Nothing is said of questions that are broken: the store names them.
    """
    if evenly:
        planned = replace(planned, extraction=replace(planned.extraction, token_budget=even_budget(planned)))
    tensors = compute_shard(planned, planned.plan(), progress or (lambda _: None), divide=True)
    return MemoryStore(planned.manifest, planned.prepared.questions, [tensors])


def even_budget(planned: PlannedQuestions) -> int:
    """Return the token budget at which all threads end at about the same time, where there are few batches."""
    budget, threads = planned.extraction.token_budget, torch.get_num_threads()
    assert budget is not None, "the defaults are filled in"
    total = sum(tree_size(build_tree(prompt), planned.packing) for prompt in planned.prepared.prompts)
    rounds = -(-total // (budget * threads))
    if threads == 1 or rounds > MANY_ROUNDS:
        return budget
    return min(budget, max(LEAST_BUDGET, -(-total // (rounds * threads))))


def extract(
    model: Model,
    questions: Sequence[Question],
    folder: str | Path,
    *,
    extraction: Extraction,
    progress: Progress | None = None,
) -> ActivationStore:
    """Score the questions and keep their pooled states in `folder`, going on where an earlier run was stopped.

    The folder may be a URL such as s3://bucket/states. A finished store is returned at once, even if it has more layers than
    are asked for. A shard whose bytes do not match its digests is computed again. A question is left out, with a warning that
    names it, if it cannot be asked (an option has no tokens, or it is too long for the model) or if its scores or states are
    not finite.
    """
    with working_place(folder) as place:
        place.refresh()
        planned = plan_store(model, questions, place.folder, extraction)
        store_work(planned, plan_shards(planned), place).run(progress)
    store = ActivationStore(folder, layers=extraction.layers)
    warn_broken(model.name, store.broken)
    return store


def plan_store(model: Model, questions: Sequence[Question], folder: Path, extraction: Extraction) -> PlannedQuestions:
    """Plan questions whose results will be kept in a folder, by what is there already."""
    refuse_layers(model, extraction.layers)
    return plan_questions(model, questions, as_stored(folder, extraction), folder=folder)


def store_work(
    planned: PlannedQuestions, plan: StorePlan, where: Path | Place, *, part: Part | None = None
) -> Resumable[Plan, dict[str, Tensor]]:
    """Return the work that fills a store, or a part of it."""
    return planned_work(plan, where, partial(compute_shards, planned), part=part)


def planned_work(
    plan: StorePlan,
    where: Path | Place,
    compute: Compute[Plan, dict[str, Tensor]],
    *,
    part: Part | None = None,
) -> Resumable[Plan, dict[str, Tensor]]:
    """Return the work that fills a store, or a part of it, whoever computes its shards."""
    place = as_place(where)

    def begun(_: Path) -> Journal:
        place.publish(QUESTIONS)
        return open_journal(place, part, len(plan.shards))

    return Resumable(
        place.folder,
        plan.manifest,
        plan.shards,
        compute,
        size=count_questions,
        form=begun,
        other_files={QUESTIONS: question_lines(plan.prepared.questions)},
        differing=DIFFERING,
        name=place.name,
        part=part,
        mixed=plan.extraction.mixed,
    )


DIFFERING = {
    "model.weights": "the states of another model",
    "model.tokenizer": "the states of a model with another tokenizer",
    "model.dtype": "the states of the model in another dtype",
    "model.logits": "the scores of an earlier version, which left out that this model scales its logits",
    "questions": "the states of other questions (their file, the split or the limit has changed since)",
    "style": "the states of questions that were asked in another style",
    "prompts": "the states of the same questions in other prompts",
    "layers": "the states of other layers than are asked for",
    "read": "the states of other tokens than are asked for",
    "neutral": "options that were not scored after a neutral context",
    "exit": "states with scores where none are asked for, or states that end at another layer",
}
"""What a store holds that is not the one asked for, by what differs; the first that applies is said."""


def as_stored(folder: Path, asked: Extraction) -> Extraction:
    """Return what the store in a folder keeps if what is asked for is among it, else the latter."""
    path = folder / "manifest.json"
    stored = read_manifest(path) if path.exists() else {}
    layers, read, neutral = stored.get("layers"), places_of(stored), "neutral" in stored
    if not isinstance(layers, list) or not set(asked.layers) <= set(layers):
        return asked
    if not set(asked.read) <= set(read) or neutral < asked.neutral:
        return replace(asked, layers=tuple(layers))
    return replace(asked, layers=tuple(layers), read=read, neutral=neutral)


# ---------------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class StorePlan:
    """What is known of a store before it is filled; a process that has no model can hand out its shards."""

    manifest: dict[str, Any]
    prepared: Prepared
    extraction: Extraction
    shards: tuple[Plan, ...]


def plan_shards(planned: PlannedQuestions, shard_bytes: int | None = None) -> StorePlan:
    """Cut planned questions into shards, of another size than the usual one if that is said."""
    shards = cut_shards(planned, shard_bytes or SHARD_BYTES)
    return StorePlan(planned.manifest, planned.prepared, planned.extraction, tuple(shards))


def question_lines(questions: Sequence[Question]) -> bytes:
    """Return the questions as the lines of a file."""
    records = [json.dumps(question_record(q), ensure_ascii=False, sort_keys=True) for q in questions]
    return "".join(f"{record}\n" for record in records).encode()
