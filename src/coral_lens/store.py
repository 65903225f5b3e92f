"""The activation store: a folder of checked shards that a killed run resumes and ends with the same bytes.

    manifest.json             what the activations are of, and how they were made
    questions.jsonl           the questions, without their prompts
    journal.jsonl             one line per finished shard, with a digest for each of its tensors
    shard-00000.safetensors   one tensor per layer, whatever else was read, and the scores of the options

Nothing is ever changed in place: files are written under a temporary name and renamed. Never pickle.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.engine import TOKEN_BUDGET, Edit, PooledResidual, Reader, choose_packing, layer_name, score
from coral_lens.errors import CoralError
from coral_lens.layout import Packing, Plan, plan_for
from coral_lens.manifest import (
    canonical,
    digest,
    read_json,
    versions,
    write_atomic,
)
from coral_lens.prompts import Prepared, prepare
from coral_lens.readers import HeadInputs, heads_name
from coral_lens.records import OptionTable, Prompt, Question, Style, offsets_of
from coral_lens.scratch import let_go, room
from coral_lens.shards import (
    Journal,
    compact,
    locked,
    open_manifest,
    read_tensor,
    shard_path,
    thread_count,
)
from coral_lens.token_budget import choose_budget

if TYPE_CHECKING:
    from coral_lens.models import Model

FORMAT = 1
SHARD_BYTES = 32 * 2**20
"""Aimed-at size of a shard: small enough to lose little when killed, large enough to be read at the disk's speed."""
BARE_ROW_BYTES = SHARD_BYTES // 1024
"""What a row without states counts as: scores alone are tiny, but computing them is not, so that shards stay short."""

Progress = Callable[[int], None]
"""Told how many more questions are done."""


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


def question_record(question: Question) -> dict[str, Any]:
    """Return what is kept of a question: all but the rendered prompt, whose token ids have a digest of their own."""
    record = asdict(question)
    record.pop("rendered")
    return record


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


# --------------------------------------------------------------------------------------------------------- reading


class ActivationStore:
    """A finished store. Everything it returns is in the order of its questions and checked against its digests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_json(folder / "manifest.json")
        if self.manifest.get("format") != FORMAT:
            raise CoralError(f"{folder} has format {self.manifest.get('format')!r}, but this version reads {FORMAT}.")
        self._journal = Journal(folder).entries
        n_kept = sum(len(self._column("question", i)) for i in self._journal)
        if n_kept + len(self._broken) != self.manifest["n_questions"]:
            raise CoralError(
                f"{folder} is not finished; run the same `coral` command again and it goes on where it was."
            )
        if not n_kept:
            name = self.manifest["model"]["name"]
            raise CoralError(
                f"The model {name!r} gives scores or states that are not finite for every question, first "
                f"{self.broken[0]!r}: its weights or dtype are broken; try --dtype float32 and another folder than {folder}."
            )

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.manifest["layers"])

    @cached_property
    def questions(self) -> list[Question]:
        """The questions that have scores."""
        return [q for i, q in enumerate(self._asked) if i not in self._broken]

    @property
    def broken(self) -> list[str]:
        """Ids of the questions that were left out because their scores or states are not finite."""
        return [self._asked[i].id for i in sorted(self._broken)]

    @cached_property
    def _broken(self) -> set[int]:
        shards = [i for i, digests in self._journal.items() if "broken" in digests]
        return {int(q) for i in shards for q in self._column("broken", i)}

    @cached_property
    def _asked(self) -> list[Question]:
        path = self.folder / "questions.jsonl"
        try:
            # bytes, because str.splitlines would also cut at U+2028 and its like, which a question may hold
            records = [json.loads(line) for line in path.read_bytes().splitlines()]
            questions = [Question(**{**r, "options": tuple(r["options"])}) for r in records]
            intact = digest([question_record(q) for q in questions]) == self.manifest["questions"]
        except (OSError, ValueError, KeyError, TypeError, CoralError):
            intact = False
        if not intact:
            raise CoralError(
                f"{path} is missing or was changed after it was written; run the `coral` command that made it again."
            )
        return questions

    @cached_property
    def table(self) -> OptionTable:
        columns = {name: self._gather(name) for name in ("logprob", "n_tokens", "n_chars", "n_bytes")}
        answers = np.array([q.answer for q in self.questions], dtype=np.int64)
        return OptionTable(
            logprobs=columns["logprob"],
            n_tokens=columns["n_tokens"],
            n_chars=columns["n_chars"],
            n_bytes=columns["n_bytes"],
            offsets=self._offsets,
            answers=answers,
        )

    def layer(self, layer: int) -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states in float32, reading and checking that layer only, a shard at a time."""
        if layer not in self.layers:
            raise CoralError(
                f"{self.folder} holds layers {list(self.layers)}, not {layer}; extract again with --layers {layer}."
            )
        out = None
        for shard, rows in self._places.items():
            states = self._column(layer_name(layer), shard)
            out = room(int(self._offsets[-1]), states.shape[1]) if out is None else out
            out[rows] = states
            let_go(out)
        assert out is not None, "a store that can be opened has a shard"
        return out

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads can be read, whoever had them kept."""
        names = {name for digests in self._journal.values() for name in digests}
        return tuple(b for b in range(1, self.manifest["model"]["layers"] + 1) if heads_name(b) in names)

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out at the options' last tokens, in float32."""
        if block not in self.blocks:
            held = f"the heads of blocks {list(self.blocks)}" if self.blocks else "no heads"
            raise CoralError(
                f"{self.folder} holds {held}, not those of block {block}; make a store that does: "
                "`coral extract TASK --out NEW_FOLDER --heads all`."
            )
        return self._gather(heads_name(block)).astype(np.float32)

    def reading(self, name: str) -> Float[np.ndarray, "row ..."]:
        """Return what a reader took of each option, as it was kept."""
        return self._gather(name)

    @cached_property
    def _offsets(self) -> Int[np.ndarray, " edge"]:
        return offsets_of([len(q.options) for q in self.questions])

    @cached_property
    def _places(self) -> dict[int, Int[np.ndarray, " row"]]:
        """Where the rows of each shard belong in the order of the questions; a shard of which nothing is left has none."""
        broken, places = sorted(self._broken), {}
        for shard in self._journal:
            order = self._column("question", shard)
            order = order - np.searchsorted(broken, order)  # numbers among the questions that have scores
            sizes = np.diff(self._offsets)[order]
            within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            if len(order):
                places[shard] = np.repeat(self._offsets[:-1][order], sizes) + within
        return places

    def _gather(self, name: str) -> np.ndarray:
        """Concatenate a column over the shards and put its rows into the order of the questions."""
        values = np.concatenate([self._column(name, shard) for shard in self._places])
        out = np.empty_like(values)
        out[np.concatenate(list(self._places.values()))] = values
        return out

    def _column(self, name: str, shard: int) -> np.ndarray:
        tensor = read_tensor(shard_path(self.folder, shard), name, self._journal[shard].get(name, ""))
        if tensor is None:
            raise CoralError(
                f"{shard_path(self.folder, shard)} is damaged ({name} does not match its digest); run the `coral` "
                "command that made it again and only this shard is computed anew."
            )
        return np.asarray(tensor.numpy())
