"""Score the same questions under many edits: what no edit reaches is computed once.

The edits that are compared act at the last context token and after it, so that keys and values of the context before that
token are the same under all of them. They are computed once for a batch; a variant then runs its questions' last context tokens
and options alone, all in one row without padding, each question against its own part of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine.batches import Batch, collate, lay_out
from coral_lens.engine.hooks import Edit
from coral_lens.engine.model import PrefixCache
from coral_lens.engine.packing import Packing, PlannedBatch, batch_questions, longest, tree_size
from coral_lens.engine.scoring import PrefixCaches, score_batch
from coral_lens.engine.trees import build_tree, shared_context
from coral_lens.ragged import Options
from coral_lens.records import Prompt
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import Resumable, each
from coral_lens.storage.shards import Journal

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Variants:
    """Edits to compare, each of them a variant of the same run."""

    edits: Sequence[Sequence[Edit]]
    """Of each variant. None may change a position before an option's last context token."""
    about: dict[str, Any]
    """What the edits depend on, as JSON: results in a folder belong to these edits and to no others."""


def score_variants(
    model: Model,
    prompts: Sequence[Prompt],
    variants: Variants,
    folder: Path,
    *,
    packing: Packing,
    progress: Progress | None = None,
) -> Float[np.ndarray, "variant row"]:
    """Return the summed log-probability of every option under every variant, in the order of the prompts.

    Finished batches are kept in `folder`, where an interrupted run finds them. `progress` is told of scored questions, each
    counted once for every variant.
    """
    plan = plan_variants(prompts, packing=packing, border=model.rope_border)
    about = {"about": variants.about, "packing": packing, "n_questions": len(prompts)}
    Resumable(
        folder,
        about | {"threads": torch.get_num_threads()},
        plan,
        each(lambda planned, advance: score_planned(model, prompts, planned, variants, advance)),
        size=lambda planned: len(planned.questions) * len(variants.edits),
        form=Journal,
    ).run(progress)
    return gathered(Journal(folder), plan, prompts)


def score_planned(
    model: Model, prompts: Sequence[Prompt], planned: PlannedBatch, variants: Variants, progress: Progress
) -> dict[str, Tensor]:
    """Return the scores of a batch under every variant."""
    batch = lay_out(prompts, planned) if planned.plain else one_row(prompts, planned)
    contexts, logprobs = Contexts(model, contexts_of(prompts, planned)), []
    for edits in variants.edits:
        # the cache of the contexts is made by the first and used by all
        logprobs.append(score_batch(model, batch, edits=edits, prefixes=contexts).logprobs)
        progress(len(planned.questions))
    return {"logprob": torch.stack(logprobs)}


def contexts_of(prompts: Sequence[Prompt], planned: PlannedBatch) -> list[tuple[int, ...]]:
    """Return what is computed once of each question's context; nothing for questions that share none."""
    pairs = zip(planned.questions, planned.prefixes, strict=True)
    return [prompts[q].contexts[0][:length] for q, length in pairs]


def one_row(prompts: Sequence[Prompt], planned: PlannedBatch) -> Batch:
    """Lay what is left of all questions side by side; the keys of all contexts come first, and each sees its own."""
    trees = [build_tree(prompts[q], skip=n) for q, n in zip(planned.questions, planned.prefixes, strict=True)]
    batch = collate(dict(zip(planned.questions, trees, strict=True)), [planned.questions])
    assert batch.allowed is not None, "a tree has a mask"
    rows, keys = Options.of_sizes([len(tree) for tree in trees]), Options.of_sizes(planned.prefixes)
    seen = torch.zeros(1, rows.n_rows, keys.n_rows, dtype=torch.bool)
    for i in range(len(trees)):
        seen[0, rows.of(i), keys.of(i)] = True
    return replace(batch, allowed=torch.cat([seen, batch.allowed], dim=2))


class Contexts(PrefixCaches):
    """The key-value cache of the contexts of several questions, end to end; made at its first use."""

    def __init__(self, model: Model, contexts: Sequence[tuple[int, ...]]) -> None:
        super().__init__(model)
        self._contexts = [context for context in contexts if context]

    def for_batch(self, batch: Batch) -> PrefixCache | None:
        """Return the cache, or None where no question has a context that is computed once."""
        if self._contexts and self._cache is None:
            self._cache = end_to_end(self._model.prefill(self._contexts), [len(c) for c in self._contexts])
        return self._cache


def end_to_end(cache: PrefixCache, lengths: Sequence[int]) -> PrefixCache:
    """Return a cache of one entry that holds those of several without their padding."""

    def joined(states: Float[Tensor, "prefix head token feature"]) -> Float[Tensor, "1 head key feature"]:
        return torch.cat([one[:, :n] for one, n in zip(states, lengths, strict=True)], dim=1)[None]

    positions = torch.cat([one[:n] for one, n in zip(cache.positions, lengths, strict=True)])[None]
    return PrefixCache([(joined(k), joined(v)) for k, v in cache.layers], positions)


def gathered(
    journal: Journal, plan: Sequence[PlannedBatch], prompts: Sequence[Prompt]
) -> Float[np.ndarray, "variant row"]:
    """Put the scores of all batches into the order of the prompts."""
    options = Options.of_sizes([len(p.options) for p in prompts])
    order = options.rows_of([q for planned in plan for q in planned.questions])
    scores = np.concatenate([journal.tensors(i)["logprob"].numpy() for i in range(len(plan))], axis=1)
    out = np.empty_like(scores)
    out[:, order] = scores
    return out


TOKENS = 2048
"""Of contexts and options in a batch, so that its cache stays small."""


def plan_variants(prompts: Sequence[Prompt], *, packing: Packing, border: int | None) -> list[PlannedBatch]:
    """Give every question a prefix: its context without the last token.

    Where options have contexts of their own, every option has a row: in a tree the context of one could hold the last
    context token of another, which an edit changes. Such batches, and models that take no tree, have no prefix.
    """
    lengths = [prefix_length(p, packing=packing, border=border) for p in prompts]
    planned: list[PlannedBatch] = []
    for alone in (False, True):
        counted: Packing = "plain" if alone else "tree"
        sizes = {q: tree_size(build_tree(prompts[q]), counted) for q, n in enumerate(lengths) if (n is None) == alone}
        for batch in batch_questions(sizes, token_budget=TOKENS, packing="plain"):
            rows = tuple((q,) for q in batch.questions)
            planned.append(PlannedBatch(rows, tuple(lengths[q] or 0 for q in batch.questions), plain=alone))
    return planned


def prefix_length(prompt: Prompt, *, packing: Packing, border: int | None) -> int | None:
    """Return how much of a prompt's context no variant changes; None if its options cannot share it."""
    context = shared_context(prompt)
    crosses = border is not None and longest(prompt) > border
    return None if packing == "plain" or context is None or crosses else len(context) - 1
