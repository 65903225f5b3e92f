"""Token states for an autoencoder: streamed from the engine into a resumable folder of shards, and read back shuffled.

    manifest.json             what the states are of
    journal.jsonl             finished shards with the digests of their tensors
    shard-00000.safetensors   `states` [token, width] of some questions, drawn at random, and the numbers of those questions

A pass ends at the layer that is read: the blocks above it are never run. Questions are drawn at random before they are laid
out, so that every shard is a sample of all, and shuffling a few shards at a time is shuffling enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine import Prefixes, Site, body, refuse_broken, tapped
from coral_lens.errors import CoralError
from coral_lens.fused import fused
from coral_lens.layout import Batch, Plan, build_tree, lay_out, plan_for
from coral_lens.manifest import digest
from coral_lens.progress import Bar, silent
from coral_lens.prompts import prepare
from coral_lens.readers import TOKENS, TokenPlace
from coral_lens.records import Prompt, Question, Style
from coral_lens.sae.states import FEWEST, TokenStore
from coral_lens.shards import Journal, compact, locked, open_manifest, thread_count
from coral_lens.store import Extraction, describe, refuse_layers, settled, warn_left_out

if TYPE_CHECKING:
    from coral_lens.models import Model

SHARD_TOKENS = 16_384
"""Aimed-at tokens of a shard."""


@dataclass(frozen=True)
class Sampling:
    """Which states are collected."""

    layer: int
    tokens: int = 500_000
    """So many at least, if there are enough questions; 0 takes all. Ten thousand would be too few for thousands of features."""
    where: TokenPlace = "all"
    """Answer and context tokens, or only one kind: an autoencoder should see what it will be patched into."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    shard_tokens: int = SHARD_TOKENS
    seed: int = 0


# ------------------------------------------------------------------------------------------------------- collecting


class LayerReached(Exception):  # noqa: N818  (not an error)
    """The layer was read; what lies above it is not wanted."""


@dataclass
class Tap:
    """An Edit that changes nothing: it keeps the states that it is shown, those of cached prefixes too, and ends the pass."""

    site: Site
    where: TokenPlace
    _found: list[Tensor] = field(default_factory=list)

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.site,)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        positions = TOKENS[self.where](batch).to(states.device)
        self._found.append(states.reshape(-1, states.shape[-1])[positions].float().cpu())
        if batch.n_options:
            raise LayerReached
        return states  # a prefix goes on to the top, because rows attend to it there

    def take(self) -> Float[Tensor, "token width"]:
        found, self._found = self._found, []
        return torch.cat(found)


def iter_states(
    model: Model, prompts: Sequence[Prompt], plan: Plan, *, layer: int, where: TokenPlace = "all"
) -> Iterator[tuple[Batch, Float[Tensor, "token width"]]]:
    """Yield each batch of a plan with its token states, computed no further than the layer."""
    tap = Tap(Site("residual", layer), where)
    prefixes = Prefixes(model, [tap])
    for planned in plan.batches:
        batch = lay_out(prompts, planned, packing=plan.packing, joined=model.attends_in_blocks)
        with torch.inference_mode(), fused(model.hf):
            cache = prefixes.for_batch(batch)
            with suppress(LayerReached), tapped(model, batch, edits=[tap]):
                body(model, batch, cache)
        states = tap.take()
        refuse_broken(model, batch, states)
        yield batch, states


def collect(
    model: Model, questions: Sequence[Question], folder: Path, *, what: Sampling, bar: Bar = silent
) -> TokenStore:
    """Write the token states of questions drawn at random, going on where an earlier run was stopped."""
    refuse_layers(model, (what.layer,))
    how = settled(model, folder, Extraction(layers=(what.layer,), style=what.style))
    asked = prepare(questions, what.style, model)
    warn_left_out(asked)

    def planned(some: Sequence[int]) -> tuple[list[Prompt], Plan]:
        assert how.packing is not None
        assert how.token_budget is not None
        prompts = [asked.prompts[q] for q in some]
        budget, border = how.token_budget, model.rope_border
        return prompts, plan_for(prompts, token_budget=budget, packing=how.packing, border=border)

    cuts = draw_questions(len(asked.prompts), what, lambda some: count_states(*planned(some), what.where))
    with locked(folder):
        sampling = {"where": what.where, "seed": what.seed, "shard_tokens": what.shard_tokens, "drawn": digest(cuts)}
        manifest = open_manifest(folder, describe(model, asked, how) | {"sampling": sampling, "n_shards": len(cuts)})
        journal = Journal(folder)
        journal.drop_damaged()
        n_drawn = sum(map(len, cuts))
        with thread_count(manifest["threads"]), bar("collecting states", n_drawn, "questions") as advance:
            advance(sum(len(cuts[i]) for i in journal.entries))
            for i in (i for i in range(len(cuts)) if i not in journal.entries):
                prompts, plan = planned(cuts[i])
                states = [s for _, s in iter_states(model, prompts, plan, layer=what.layer, where=what.where)]
                journal.add(i, {"states": compact(torch.cat(states)), "questions": torch.tensor(cuts[i])})
                advance(len(cuts[i]))
        journal.finish(len(cuts))
    return TokenStore(folder)


def draw_questions(n_questions: int, what: Sampling, count: Callable[[Sequence[int]], int]) -> list[list[int]]:
    """Return the numbers of the questions of each shard, in random order, until there are enough states.

    `count` says how many states the questions of a shard give together: a prefix that they share is among them once.
    """
    left = np.random.default_rng(what.seed).permutation(n_questions).tolist()
    cuts: list[list[int]] = []
    total = 0
    while left and not (what.tokens and total >= what.tokens):
        aim = min(what.shard_tokens, what.tokens - total) if what.tokens else what.shard_tokens
        n, found = 1, count(left[:1])
        while found < aim and n < len(left):
            more = max(1, (aim - found) * n // max(1, found))
            n = min(n + min(n, more), len(left))  # at most twice as many: the first ones may be short
            found = count(left[:n])
        cuts.append(left[:n])
        left, total = left[n:], total + found
    cuts = [*cuts[-1:], *cuts[:-1]]  # the last ones are held out, so that the one that may be small comes first
    if len(cuts) < FEWEST:
        # too little for whole shards: cut what there is into a few small ones
        flat = [q for cut in cuts for q in cut]
        cuts = [part.tolist() for part in np.array_split(np.array(flat, dtype=np.int64), FEWEST) if len(part)]
    if len(cuts) < FEWEST:
        raise CoralError(f"An autoencoder cannot be trained on {n_questions} question(s); give some hundreds at least.")
    return cuts


def count_states(prompts: Sequence[Prompt], plan: Plan, where: TokenPlace) -> int:
    """Return how many states `iter_states` gives: those of a prefix each time that its cache is made."""
    total, cached = 0, set[tuple[int, ...]]()
    for planned in plan.batches:
        rows = list(zip(planned.rows, planned.prefixes, strict=True))
        prefixes = {prompts[row[0]].contexts[0][:length] for row, length in rows if length}
        if not prefixes <= cached:
            cached = prefixes
            total += 0 if where == "answer" else sum(map(len, prefixes))
        plain = planned.plain or plan.packing == "plain"
        total += sum(count_tokens(prompts[q], where, skip=length, plain=plain) for row, length in rows for q in row)
    return total


def count_tokens(prompt: Prompt, where: TokenPlace, *, skip: int = 0, plain: bool = False) -> int:
    """Return how many states a question gives after `skip` tokens, as a tree or (plain) in a row for each option."""
    if plain:
        n_answer, n_context = sum(map(len, prompt.options)), sum(map(len, prompt.contexts))
    else:
        tree = build_tree(prompt, skip=skip)
        n_answer = len({int(node) for path in tree.paths for node in path})
        n_context = len(tree) - n_answer
    return {"all": n_answer + n_context, "answer": n_answer, "context": n_context}[where]
