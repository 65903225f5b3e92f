"""Token states for an autoencoder: streamed from the engine into a resumable folder of shards, and read back shuffled.

    manifest.json             what the states are of
    journal.jsonl             finished shards with the digests of their tensors
    shard-00000.safetensors   `states` [token, width] of some questions, drawn at random, and the numbers of those questions

A pass ends at the layer that is read: the blocks above it are never run. Questions are drawn at random before they are laid
out: every shard is then a sample of all, and shuffling a few shards at a time is shuffling enough. The pooled states of an
activation store are read in the same way. Massive states may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.engine.batches import Batch, lay_out
from coral_lens.engine.hooks import Site
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import Extraction, plan_questions
from coral_lens.engine.readers import TOKENS
from coral_lens.engine.scoring import PrefixCaches, refuse_broken, run_batch
from coral_lens.engine.settings import TokenPlace
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question
from coral_lens.sae.settings import Sampling
from coral_lens.storage.files import digest
from coral_lens.storage.progress import Bar, Progress, silent
from coral_lens.storage.resumable import Resumable, each, read_manifest
from coral_lens.storage.shards import Journal, compact

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.records import Scored


BUFFER_SHARDS = 8
"""Shards that are shuffled together; so many are in memory."""
HELD_OUT_SHARE = 0.05
"""Share of the shards, at least one, that training does not see: quality is measured there."""
POOLED_PARTS = 20
"""Parts of the questions of an activation store; the last one is held out."""
MEDIAN_STATES = 16_384
"""States from whose norms the median is taken, of the first training shards."""
FEWEST_SHARDS = 4
"""Shards at least: fewer leave nothing to train on beside what is held out."""


# ------------------------------------------------------------------------------------------------------- collecting


class LayerReached(Exception):  # noqa: N818  (not an error)
    """The layer was read; what lies above it is not wanted."""


@dataclass
class Tap:
    """An Edit that changes nothing: it keeps the states that it is shown, those of cached prefixes too, and ends the pass."""

    site: Site
    where: TokenPlace
    _states: list[Tensor] = field(default_factory=list)

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.site,)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        positions = TOKENS[self.where](batch).to(states.device)
        self._states.append(states.reshape(-1, states.shape[-1])[positions].float().cpu())
        if batch.n_options:
            raise LayerReached
        return states  # a prefix goes on to the top, because rows attend to it there

    def take(self) -> Float[Tensor, "token width"]:
        states, self._states = self._states, []
        return torch.cat(states)


def iter_states(
    model: Model, prompts: Sequence[Prompt], plan: Plan, *, layer: int, where: TokenPlace = "all"
) -> Iterator[tuple[Batch, Float[Tensor, "token width"]]]:
    """Yield each batch of a plan with its token states, computed no further than the layer."""
    tap = Tap(Site("residual", layer), where)
    prefixes = PrefixCaches(model, [tap])
    for planned in plan.batches:
        batch = lay_out(prompts, planned, packing=plan.packing, joined=model.joins_rows)
        with torch.inference_mode(), suppress(LayerReached):
            run_batch(model, batch, edits=[tap], prefixes=prefixes)
        states = tap.take()
        refuse_broken(model, batch, states)
        yield batch, states


def collect(
    model: Model, questions: Sequence[Question], folder: Path, sampling: Sampling, *, bar: Bar = silent
) -> TokenStore:
    """Write the token states of questions drawn at random, going on where an earlier run was stopped."""
    extraction = Extraction(layers=(sampling.layer,), style=sampling.style)
    planned = plan_questions(model, questions, extraction, folder=folder)
    prompts, where = planned.prepared.prompts, sampling.where

    def plan(drawn: Sequence[int]) -> tuple[list[Prompt], Plan]:
        chosen = [prompts[q] for q in drawn]
        return chosen, planned.plan(chosen)

    def states_of(drawn: list[int], _: Progress) -> dict[str, Tensor]:
        batches = iter_states(model, *plan(drawn), layer=sampling.layer, where=where)
        return {"states": compact(torch.cat([states for _, states in batches])), "questions": torch.tensor(drawn)}

    cuts = draw_questions(len(prompts), sampling, lambda drawn: count_states(*plan(drawn), where))
    about = {"where": where, "seed": sampling.seed, "shard_tokens": sampling.shard_tokens, "drawn": digest(cuts)}
    threads = torch.get_num_threads()
    identity = planned.manifest | {"threads": threads, "sampling": about, "n_shards": len(cuts)}
    with bar("collecting states", sum(map(len, cuts)), "questions") as advance:
        Resumable(folder, identity, cuts, each(states_of), size=len, form=Journal).run(advance)
    return TokenStore(folder)


def draw_questions(n_questions: int, sampling: Sampling, count: Callable[[Sequence[int]], int]) -> list[list[int]]:
    """Return the numbers of the questions of each shard, in random order, until there are enough states.

    `count` says how many states the questions of a shard give together: a prefix that they share is among them once.
    """
    left = np.random.default_rng(sampling.seed).permutation(n_questions).tolist()
    cuts: list[list[int]] = []
    total = 0
    while left and not (sampling.tokens and total >= sampling.tokens):
        aim = min(sampling.shard_tokens, sampling.tokens - total) if sampling.tokens else sampling.shard_tokens
        n, n_states = 1, count(left[:1])
        while n_states < aim and n < len(left):
            more = max(1, (aim - n_states) * n // max(1, n_states))
            n = min(n + min(n, more), len(left))  # at most twice as many: the first ones may be short
            n_states = count(left[:n])
        cuts.append(left[:n])
        left, total = left[n:], total + n_states
    cuts = [*cuts[-1:], *cuts[:-1]]  # the last ones are held out, so the one that may be small comes first
    if len(cuts) < FEWEST_SHARDS:
        # too little for whole shards: cut what there is into a few small ones
        drawn = [q for cut in cuts for q in cut]
        cuts = [part.tolist() for part in np.array_split(np.array(drawn, dtype=np.int64), FEWEST_SHARDS) if len(part)]
    if len(cuts) < FEWEST_SHARDS:
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


# ----------------------------------------------------------------------------------------------------------- reading


@runtime_checkable
class StateSource(Protocol):
    """States in shards, some of them held out."""

    @property
    def manifest(self) -> dict[str, Any]:
        """The model, and under `sampling` which states of it these are."""

    @property
    def training(self) -> range:
        """The shards to train on."""

    @property
    def held_out(self) -> range:
        """The shards to measure on."""

    def states(self, shard: int) -> Float[Tensor, "token width"]:
        """Return the states of a shard in float32."""


class TokenStore:
    """A finished folder of token states. Its last shards are held out from training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder / "manifest.json", needs=("n_shards",))
        self._journal = Journal(folder)
        self.n_shards = len(self._journal.entries)
        if self.n_shards != self.manifest["n_shards"]:
            raise CoralError(f"{folder} is not finished; run the same command again and it goes on where it was.")

    @property
    def held_out(self) -> range:
        return range(self.n_shards - max(1, round(HELD_OUT_SHARE * self.n_shards)), self.n_shards)

    @property
    def training(self) -> range:
        return range(self.held_out.start)

    def states(self, shard: int) -> Float[Tensor, "token width"]:
        """Return the states of a shard in float32, checked against its digest."""
        return self._journal.tensors(shard, "states")["states"].float()

    def questions(self, shards: Sequence[int]) -> list[int]:
        """Return the numbers of the questions of some shards, among those that could be asked."""
        return [int(q) for shard in shards for q in self._journal.tensors(shard, "questions")["questions"]]


class PooledStates:
    """Pooled answer states of an activation store, read like token states: fewer, and not those of the patched tokens."""

    def __init__(self, scored: Scored, layer: int, *, seed: int = 0) -> None:
        if layer not in scored.layers:
            raise CoralError(
                f"The store holds layers {list(scored.layers)}, not {layer}; extract with --layers {layer}."
            )
        states, options = torch.from_numpy(scored.layer(layer)), scored.table.options
        drawn = np.random.default_rng(seed).permutation(len(options))
        # whole questions: the states of one question's options are alike, and what is held out must be new
        parts = [part.tolist() for part in np.array_split(drawn, POOLED_PARTS) if len(part)]
        self._shards = [torch.cat([states[options.of(q)] for q in part]) for part in parts]
        if len(self._shards) < FEWEST_SHARDS:
            raise CoralError(f"An autoencoder cannot be trained on {len(states)} pooled states; give more questions.")
        self.manifest: dict[str, Any] = {
            **scored.manifest,
            "sampling": {"where": "pooled", "layer": layer, "seed": seed},
        }
        self.n_shards = len(self._shards)

    @property
    def held_out(self) -> range:
        return range(self.n_shards - 1, self.n_shards)

    @property
    def training(self) -> range:
        return range(self.held_out.start)

    def states(self, shard: int) -> Float[Tensor, "token width"]:
        """Return the states of a part."""
        return self._shards[shard]


@dataclass(frozen=True)
class OrdinaryStates:
    """The states of a source without the massive ones.

    Many models park attention at a few tokens, the first one above all, whose states are some hundred times as long as
    others. One in thirty is enough to make nearly all of the variance; z-scored by it, the other states would all look alike.
    """

    source: StateSource
    norm_limit: float | None
    """Longer states are left out; None leaves out none."""

    @staticmethod
    def of(source: StateSource, massive: float) -> OrdinaryStates:
        """Leave out states more than `massive` times as long as the median; 0 leaves out none."""
        if not massive:
            return OrdinaryStates(source, None)
        norms: list[Tensor] = []
        for shard in source.training:
            norms.append(source.states(shard).norm(dim=1))
            if sum(map(len, norms)) >= MEDIAN_STATES:
                break
        return OrdinaryStates(source, massive * float(torch.cat(norms).median()))

    @property
    def manifest(self) -> dict[str, Any]:
        return self.source.manifest

    @property
    def training(self) -> range:
        return self.source.training

    @property
    def held_out(self) -> range:
        return self.source.held_out

    def states(self, shard: int) -> Float[Tensor, "token width"]:
        """Return the states of a shard that are not massive."""
        states = self.source.states(shard)
        return states if self.norm_limit is None else states[states.norm(dim=1) <= self.norm_limit]


@dataclass(frozen=True)
class Minibatches:
    """The order in which training reads states: the same for the same seed, from any step on."""

    source: StateSource
    counts: dict[int, int]
    """States of each training shard."""
    batch_size: int
    epochs: int = 1
    seed: int = 0

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the groups of shards that are shuffled together, with the seed of their shuffling."""
        for epoch in range(self.epochs):
            order = np.random.default_rng([self.seed, epoch]).permutation(list(self.source.training)).tolist()
            for start in range(0, len(order), BUFFER_SHARDS):
                yield epoch * 1_000_000 + start, order[start : start + BUFFER_SHARDS]

    def sizes(self) -> list[int]:
        """Return the number of steps of each group."""
        totals = [sum(self.counts[i] for i in shards) for _, shards in self.groups()]
        return [max(1, round(total / self.batch_size)) for total in totals]

    def iterate(self, *, start: int = 0) -> Iterator[Float[Tensor, "row width"]]:
        """Yield minibatches of nearly equal size from step `start` on; groups before it are not read."""
        step = 0
        for (seed, shards), n in zip(self.groups(), self.sizes(), strict=True):
            if step + n > start:
                states = torch.cat([self.source.states(i) for i in shards])
                order = torch.from_numpy(np.random.default_rng([self.seed, 1, seed]).permutation(len(states)))
                yield from (states[part] for part in order.tensor_split(n)[max(0, start - step) :])
            step += n
