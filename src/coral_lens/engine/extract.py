"""Score questions and keep the pooled states of each option: few of them in memory, many in a folder, where a killed run goes on.

The questions are prepared, laid out and described here for every other work that runs them through a model piece by piece.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.data.settings import Style
from coral_lens.data.wording import asked_as
from coral_lens.engine.activations import FORMAT, ActivationStore, MemoryStore, ScoredShards, places_of
from coral_lens.engine.budget import choose_budget
from coral_lens.engine.hooks import Edit, Reader
from coral_lens.engine.neutral import neutral_prompts
from coral_lens.engine.packing import Packing, Plan, plan_for, tree_size
from coral_lens.engine.prompts import Prepared, prepare
from coral_lens.engine.readers import HeadInputs, PooledResidual, layer_name
from coral_lens.engine.scoring import TOKEN_BUDGET, PrefixTable, score
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.settings import StatePlace
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, question_record
from coral_lens.storage.files import canonical, digest, versions
from coral_lens.storage.parts import Part
from coral_lens.storage.places import Place, as_place, working_place
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import Resumable, read_manifest
from coral_lens.storage.shards import Journal, compact, open_journal
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
BARE_ROW_BYTES = SHARD_BYTES // 1024
"""What a row without states counts as: scores alone are tiny, but computing them is not, so shards stay short."""


@dataclass(frozen=True)
class Edited:
    """Changes to the hidden states on the way."""

    edits: tuple[Edit, ...]
    about: dict[str, Any]
    """What they depend on, as JSON: it tells one edited store from another."""


@dataclass(frozen=True)
class Readings:
    """What else is kept of each option: all that these readers take, which must be one row per option."""

    readers: tuple[Reader, ...]
    about: dict[str, Any]
    """What it is, as JSON: it tells one store from another."""
    row_bytes: int
    """Of an option, about; shards are cut by it."""


@dataclass(frozen=True)
class Extraction:
    """What to extract and how; part of the store's identity."""

    layers: tuple[int, ...]
    """None at all: no pooled states are kept."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    token_budget: int | None = None
    """Tokens in a batch. None: what is fastest for this model on this machine, timed at its first use."""
    packing: Packing | None = None
    """None: the tree, unless a self-check shows that this model does not take it."""
    edited: Edited | None = None
    """None: the model as it is."""
    readings: Readings | None = None
    """None: nothing else is read."""
    read: tuple[StatePlace, ...] = ("answer",)
    """The places whose states are kept."""
    neutral: bool = False
    """Score options after a neutral context too."""
    exits: bool = False
    """Run no block above the highest layer, and no vocabulary head: options then have states and no scores."""
    mixed: bool = False
    """Go on with a store that was begun on another kind of device, which rounds in another way. No part of its identity."""

    @property
    def last(self) -> int | None:
        """The layer after which a pass ends, or None."""
        return max(self.layers) if self.exits else None

    def row_bytes(self, width: int) -> int:
        """Return the size of an option in a shard, for a model of this width."""
        least = 0 if self.layers else BARE_ROW_BYTES
        states = 2 * width * len(self.layers) * len(self.read)
        return max(least, states + (self.readings.row_bytes if self.readings else 0))

    @property
    def about(self) -> dict[str, str]:
        """What is kept beside scores and pooled states, and what it depends on, as text."""
        parts = {"edited": self.edited, "readings": self.readings}
        found = {name: canonical(part.about) for name, part in parts.items() if part}
        found |= {} if self.read == ("answer",) else {"read": " ".join(self.read)}
        found |= {"neutral": "scored"} if self.neutral else {}
        return found | ({"exit": f"after layer {self.last}"} if self.exits else {})

    @property
    def readers(self) -> list[Reader]:
        """What reads the states that are kept."""
        pooled = [PooledResidual(self.layers, place) for place in self.read]
        return [*pooled, *(self.readings.readers if self.readings else ())]


def all_layers(model: Model) -> tuple[int, ...]:
    """Return every layer of a model: the embeddings and each block's output."""
    return tuple(range(model.n_layers + 1))


def all_blocks(model: Model) -> tuple[int, ...]:
    """Return every block of a model, numbered as the layer that it puts out: those that have heads."""
    return tuple(range(1, model.n_layers + 1))


def head_outputs(model: Model, blocks: tuple[int, ...]) -> Readings:
    """Return what keeps the outputs of these blocks' heads, before the projection and at the option's last token."""
    if not model.projections:
        raise CoralError(f"{model.name!r} has no attention output projection, so that its heads cannot be read.")
    unknown = [block for block in blocks if not 1 <= block <= model.n_layers]
    if unknown:
        raise CoralError(f"Block {unknown[0]} has no heads: the blocks of {model.name!r} are 1 to {model.n_layers}.")
    return Readings(
        (HeadInputs(blocks, model.n_heads),), {"heads": list(blocks)}, row_bytes=2 * model.width * len(blocks)
    )


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

    It may be a URL such as s3://bucket/states. A finished store is returned at once, also if it has more layers than are asked
    for. A shard whose bytes do not match its digests is computed again. A question that cannot be asked (an option without
    tokens, or too long for the model) or whose scores or states are not finite is left out with a warning that names it.
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
    return planned_work(plan, where, lambda shard, advance: compute_shard(planned, shard, advance), part=part)


def planned_work(
    plan: StorePlan,
    where: Path | Place,
    compute: Callable[[Plan, Progress], dict[str, Tensor]],
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
        part=part,
        mixed=plan.extraction.mixed,
    )


DIFFERING = {
    "model.weights": "the states of another model",
    "model.tokenizer": "the states of a model with another tokenizer",
    "model.dtype": "the states of the model in another dtype",
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
class KeptPrefixes:
    """The starts of prompts that are computed once and kept for prompts that come later."""

    table: PrefixTable
    lengths: tuple[int, ...]
    """Of each prompt, how many tokens; 0: nothing of it."""


@dataclass(frozen=True)
class PlannedQuestions:
    """Questions that are ready to be run through a model: their prompts, and how they are laid out."""

    model: Model
    prepared: Prepared
    extraction: Extraction
    """With nothing left open."""
    kept: KeptPrefixes | None = None
    """What is kept from one call to the next; None: nothing."""

    @property
    def packing(self) -> Packing:
        """How questions are laid out."""
        assert self.extraction.packing is not None, "the defaults are filled in"
        return self.extraction.packing

    def plan(self, prompts: Sequence[Prompt] | None = None) -> Plan:
        """Return the batches of all prompts, or of these."""
        budget = self.extraction.token_budget
        assert budget is not None, "the defaults are filled in"
        return plan_for(
            self.prepared.prompts if prompts is None else prompts,
            token_budget=budget,
            packing=self.packing,
            border=self.model.rope_border,
            kept=self.kept.lengths if self.kept and prompts is None else None,
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything that the bytes of results depend on."""
        return describe(self.model, self.prepared, self.extraction)


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


def plan_questions(
    model: Model, questions: Sequence[Question], extraction: Extraction, *, folder: Path | None = None
) -> PlannedQuestions:
    """Prepare questions, and say which are left out; what is open is filled in by the results in `folder`, if there are any."""
    refuse_layers(model, extraction.layers)
    filled = fill_defaults(model, folder, extraction, len(questions))
    prepared = prepare(asked_as(questions, filled.style), filled.style, model, listed="listed" in filled.read)
    warn_left_out(prepared)
    return PlannedQuestions(model, prepared, filled)


def warn_left_out(prepared: Prepared) -> None:
    """Say once which questions cannot be asked, and which prompts were too long."""
    if prepared.left_out:
        warn_of(list(prepared.left_out.values()))
    n_cut = sum(p.truncated for p in prepared.prompts)
    if n_cut:
        message = (
            f"{n_cut} of {len(prepared.prompts)} prompts were longer than the model reads and were cut on the left."
        )
        warnings.warn(message, stacklevel=4)


def warn_broken(model: str, ids: Sequence[str]) -> None:
    """Say once which questions the model of this name cannot score."""
    if ids:
        warn_of([f"Question {name!r}: {model!r} gives scores or states that are not finite." for name in ids])


def warn_of(reasons: Sequence[str]) -> None:
    """Say how many questions are left out, and why the first three are."""
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    warnings.warn(f"{len(reasons)} question(s) left out. {' '.join(reasons[:3])}{more}", stacklevel=5)


# ------------------------------------------------------------------------------------------------------- identity


def describe(model: Model, prepared: Prepared, extraction: Extraction) -> dict[str, Any]:
    """Return the manifest of results: everything that their bytes depend on."""
    prompts = prepared.prompts
    return {
        "format": FORMAT,
        "model": {"name": model.name, **model.identity, "dtype": model.precision_record, "layers": model.n_layers},
        "questions": digest([question_record(q) for q in prepared.questions]),
        "prompts": digest([[p.contexts[0], [c for c in p.contexts if c != p.contexts[0]], p.options] for p in prompts]),
        "style": str(extraction.style),
        "layers": list(extraction.layers),
        "token_budget": extraction.token_budget,
        "packing": extraction.packing,
        "n_questions": len(prompts),
        "left_out": prepared.left_out,
        "n_truncated": sum(p.truncated for p in prompts),
        "versions": versions(),
        "device": model.device_kind,
        **extraction.about,
    }


def refuse_layers(model: Model, layers: Sequence[int]) -> None:
    """Refuse layers that the model does not have, before anything is written."""
    unknown = [layer for layer in layers if not 0 <= layer <= model.n_layers]
    if unknown:
        raise CoralError(f"Layer {unknown[0]} does not exist: {model.name!r} has layers 0 to {model.n_layers}.")


def fill_defaults(model: Model, folder: Path | None, extraction: Extraction, n_questions: int) -> Extraction:
    """Fill in what was left open, by the results that are already in a folder: a resumed run does not choose again."""
    path = folder / "manifest.json" if folder else None
    recorded = read_manifest(path) if path and path.exists() else {}
    packing = extraction.packing or recorded.get("packing") or packing_of(model)
    budget = extraction.token_budget or recorded.get("token_budget")
    if not budget:
        # options in rows of their own are not what the calibration times
        budget = choose_budget(model, n_questions) if packing == "tree" else TOKEN_BUDGET
    return replace(extraction, packing=packing, token_budget=budget)


def question_lines(questions: Sequence[Question]) -> bytes:
    """Return the questions as the lines of a file."""
    records = [json.dumps(question_record(q), ensure_ascii=False, sort_keys=True) for q in questions]
    return "".join(f"{record}\n" for record in records).encode()


# ---------------------------------------------------------------------------------------------------------- shards


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
    """Score the questions of one shard and return its tensors; those that are broken are listed in one of their own.

    With `divide` a single batch is divided over all threads.
    """
    model, prompts, extraction = planned.model, planned.prepared.prompts, planned.extraction
    edited = extraction.edited
    # an empty part of each, so that a shard of which nothing is left has its columns too
    parts = {"question": [torch.zeros(0, dtype=torch.int64)], "logprob": [torch.zeros(0, dtype=torch.float64)]}
    names = [layer_name(layer, place) for place in extraction.read for layer in extraction.layers]
    parts |= {name: [torch.zeros(0, model.width, dtype=torch.float32)] for name in names}
    broken: list[int] = []
    edits = edited.edits if edited else ()
    batches = score(
        model,
        prompts,
        shard,
        readers=extraction.readers,
        edits=edits,
        on_broken=broken.append,
        divide=divide,
        last=extraction.last,
        table=planned.kept.table if planned.kept else None,
    )
    for scored in batches:
        parts["question"].append(torch.tensor(scored.batch.questions))
        parts["logprob"].append(scored.logprobs)
        for name, tensor in scored.readings.items():
            parts.setdefault(name, []).append(tensor)
        progress(len(scored.batch.questions))
    tensors = {name: compact(torch.cat(column)) for name, column in parts.items()}
    if broken:
        tensors["broken"] = torch.tensor(broken)
        progress(len(broken))
    asked = tensors["question"].tolist()
    if extraction.neutral:
        neutral = neutral_prompts([prompts[q].id for q in asked], [planned.prepared.rendered[q] for q in asked], model)
        tensors["neutral"] = score_once(model, neutral, planned.plan, edits=edits)
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
