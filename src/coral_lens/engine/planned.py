"""Questions on their way to a model: what is wanted of each, their prompts, how they are laid out, and what results depend on.

All work that runs questions through a model begins here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.data.settings import Style
from coral_lens.data.wording import asked_as
from coral_lens.engine.activations import FORMAT
from coral_lens.engine.budget import choose_budget
from coral_lens.engine.hooks import Edit, Reader
from coral_lens.engine.packing import Packing, Plan, plan_for
from coral_lens.engine.prompts import Prepared, prepare
from coral_lens.engine.readers import HeadInputs, PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, PrefixTable
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.settings import StatePlace
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, question_record
from coral_lens.storage.files import canonical, digest, versions
from coral_lens.storage.resumable import read_manifest

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

BARE_ROW_BYTES = 2**15
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
    def edits(self) -> tuple[Edit, ...]:
        """What is changed on the way through the model."""
        return self.edited.edits if self.edited else ()

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


# ------------------------------------------------------------------------------------------------------- planning


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
