"""Score questions and keep the pooled states of each option in a folder; goes on where it was stopped."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coral_lens.data.settings import Style
from coral_lens.engine.activations import FORMAT, ActivationStore, question_record
from coral_lens.engine.budget import choose_budget
from coral_lens.engine.hooks import Edit, Reader
from coral_lens.engine.packing import Packing, Plan, plan_for
from coral_lens.engine.prompts import Prepared, prepare
from coral_lens.engine.readers import HeadInputs, PooledResidual, layer_name
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.engine.self_check import choose_packing
from coral_lens.errors import CoralError
from coral_lens.progress import Progress
from coral_lens.records import Prompt, Question
from coral_lens.storage.files import canonical, digest, read_json, versions, write_atomic
from coral_lens.storage.shards import Journal, compact, locked, open_manifest, thread_count

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

SHARD_BYTES = 32 * 2**20
"""Aimed-at size of a shard: small enough to lose little when killed, large enough to be read at the disk's speed."""
BARE_ROW_BYTES = SHARD_BYTES // 1024
"""What a row without states counts as: scores alone are tiny, but computing them is not, so that shards stay short."""


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

    def row_bytes(self, width: int) -> int:
        """Return the size of an option in a shard, for a model of this width."""
        least = 0 if self.layers else BARE_ROW_BYTES
        return max(least, 2 * width * len(self.layers) + (self.readings.row_bytes if self.readings else 0))

    @property
    def about(self) -> dict[str, str]:
        """What edits and readings depend on, as text."""
        parts = {"edited": self.edited, "readings": self.readings}
        return {name: canonical(part.about) for name, part in parts.items() if part}


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


def extract(
    model: Model, questions: Sequence[Question], folder: Path, *, what: Extraction, progress: Progress | None = None
) -> ActivationStore:
    """Score the questions and keep their pooled states in `folder`, going on where an earlier run was stopped.

    A finished store is returned at once. A shard whose bytes do not match its digests is computed again. A question that
    cannot be asked (an option without tokens, or too long for the model) or whose scores or states are not finite is left
    out with a warning that names it.
    """
    refuse_layers(model, what.layers)
    what = settled(model, folder, what)
    assert what.packing is not None
    assert what.token_budget is not None
    asked = prepare(questions, what.style, model)
    warn_left_out(asked)
    with locked(folder):
        manifest = open_manifest(folder, describe(model, asked, what))
        write_questions(folder, asked.questions)
        plan = plan_for(asked.prompts, token_budget=what.token_budget, packing=what.packing, border=model.rope_border)
        shards = cut_shards(plan, asked.prompts, row_bytes=what.row_bytes(model.width))
        journal = Journal(folder)
        journal.drop_damaged()
        done = sum(count_questions(shards[i]) for i in journal.entries)
        if progress:
            progress(done)
        todo = [i for i in range(len(shards)) if i not in journal.entries]
        with thread_count(manifest["threads"]):
            for i in todo:
                journal.add(i, compute_shard(model, asked, shards[i], what=what, progress=progress))
        journal.finish(len(shards))
    store = ActivationStore(folder)
    warn_broken(model, store.broken)
    return store


def warn_left_out(asked: Prepared) -> None:
    """Say once which questions cannot be asked, and which prompts were too long."""
    if asked.left_out:
        warn_of(list(asked.left_out.values()))
    n_cut = sum(p.truncated for p in asked.prompts)
    if n_cut:
        message = f"{n_cut} of {len(asked.prompts)} prompts were longer than the model reads and were cut on the left."
        warnings.warn(message, stacklevel=3)


def warn_broken(model: Model, ids: Sequence[str]) -> None:
    """Say once which questions the model cannot score."""
    if ids:
        warn_of([f"Question {name!r}: {model.name!r} gives scores or states that are not finite." for name in ids])


def warn_of(reasons: Sequence[str]) -> None:
    """Say how many questions are left out, and why the first three are."""
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    warnings.warn(f"{len(reasons)} question(s) left out. {' '.join(reasons[:3])}{more}", stacklevel=4)


# ------------------------------------------------------------------------------------------------------- identity


def describe(model: Model, asked: Prepared, what: Extraction) -> dict[str, Any]:
    """Return the manifest of a store: everything that its bytes depend on."""
    prompts = asked.prompts
    return {
        "format": FORMAT,
        "model": {"name": model.name, **model.fingerprint, "dtype": str(model.dtype), "layers": model.n_layers},
        "questions": digest([question_record(q) for q in asked.questions]),
        "prompts": digest([[p.contexts[0], [c for c in p.contexts if c != p.contexts[0]], p.options] for p in prompts]),
        "style": str(what.style),
        "layers": list(what.layers),
        "token_budget": what.token_budget,
        "packing": what.packing,
        "n_questions": len(prompts),
        "left_out": asked.left_out,
        "n_truncated": sum(p.truncated for p in prompts),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **what.about,
    }


def refuse_layers(model: Model, layers: Sequence[int]) -> None:
    """Refuse layers that the model does not have, before anything is written."""
    unknown = [layer for layer in layers if not 0 <= layer <= model.n_layers]
    if unknown:
        raise CoralError(f"Layer {unknown[0]} does not exist: {model.name!r} has layers 0 to {model.n_layers}.")


def settled(model: Model, folder: Path, what: Extraction) -> Extraction:
    """Fill in what was left open, by the store that is already there: a resumed run does not choose again."""
    path = folder / "manifest.json"
    recorded = read_json(path) if path.exists() else {}
    packing = what.packing or recorded.get("packing") or choose_packing(model)
    budget = what.token_budget or recorded.get("token_budget")
    if not budget:
        # options in rows of their own are not what the calibration times
        budget = choose_budget(model) if packing == "tree" else TOKEN_BUDGET
    return replace(what, packing=packing, token_budget=budget)


def write_questions(folder: Path, questions: Sequence[Question]) -> None:
    """Write the questions once, and again if they were damaged."""
    path = folder / "questions.jsonl"
    lines = "".join(json.dumps(question_record(q), ensure_ascii=False, sort_keys=True) + "\n" for q in questions)
    if not path.exists() or path.read_bytes() != lines.encode():
        write_atomic(path, lines.encode())


# --------------------------------------------------------------------------------------------------------- writing


def cut_shards(plan: Plan, prompts: Sequence[Prompt], *, row_bytes: int) -> list[Plan]:
    """Cut a plan into shards of whole batches."""
    shards, batches, size = [], [], 0
    for batch in plan.batches:
        batches.append(batch)
        size += row_bytes * sum(len(prompts[q].options) for q in batch.questions)
        if size >= SHARD_BYTES:
            shards.append(Plan(tuple(batches), plan.packing))
            batches, size = [], 0
    return [*shards, Plan(tuple(batches), plan.packing)] if batches else shards


def count_questions(plan: Plan) -> int:
    """Return how many questions a plan covers."""
    return sum(len(batch.questions) for batch in plan.batches)


def compute_shard(
    model: Model, asked: Prepared, shard: Plan, *, what: Extraction, progress: Progress | None
) -> dict[str, Tensor]:
    """Score the questions of one shard and return its tensors; those that are broken are listed in one of their own."""
    prompts, rendered = asked.prompts, asked.rendered
    readers: list[Reader] = [PooledResidual(what.layers), *(what.readings.readers if what.readings else ())]
    edits = what.edited.edits if what.edited else ()
    # an empty piece of each, so that a shard of which nothing is left has its columns too
    parts = {"question": [torch.zeros(0, dtype=torch.int64)], "logprob": [torch.zeros(0, dtype=torch.float64)]}
    parts |= {layer_name(layer): [torch.zeros(0, model.width)] for layer in what.layers}
    broken: list[int] = []
    for scored in score(model, prompts, shard, readers=readers, edits=edits, on_broken=broken.append):
        parts["question"].append(torch.tensor(scored.batch.questions))
        parts["logprob"].append(scored.logprobs)
        for name, tensor in scored.readings.items():
            parts.setdefault(name, []).append(tensor)
        if progress:
            progress(len(scored.batch.questions))
    tensors = {name: compact(torch.cat(some)) for name, some in parts.items()}
    if broken:
        tensors["broken"] = torch.tensor(broken)
        if progress:
            progress(len(broken))
    order = tensors["question"].tolist()
    tensors["n_tokens"] = torch.tensor([len(o) for q in order for o in prompts[q].options], dtype=torch.int64)
    tensors["n_chars"] = torch.tensor([len(c) for q in order for c in rendered[q].choices], dtype=torch.int64)
    tensors["n_bytes"] = torch.tensor([len(c.encode()) for q in order for c in rendered[q].choices], dtype=torch.int64)
    return tensors
