"""Token states on the disk, read back in shuffled minibatches, if wished without massive ones; pooled states are read alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.manifest import read_json
from coral_lens.shards import Journal, read_tensor, shard_path

if TYPE_CHECKING:
    from coral_lens.joined import Scored

BUFFER_SHARDS = 8
"""Shards that are shuffled together; so many are in memory."""
HELD_OUT = 0.05
"""Share of the shards, at least one, that training does not see: quality is measured there."""
POOLED_PARTS = 20
"""Parts of the questions of an activation store; the last one is held out."""
MEDIAN_STATES = 16_384
"""States from whose norms the median is taken, of the first training shards."""
FEWEST = 4
"""Shards: fewer leave nothing to train on beside what is held out."""


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
        self.manifest = read_json(folder / "manifest.json")
        self._journal = Journal(folder).entries
        if len(self._journal) != self.manifest["n_shards"]:
            raise CoralError(f"{folder} is not finished; run the same command again and it goes on where it was.")
        self.n_shards = len(self._journal)

    @property
    def held_out(self) -> range:
        return range(self.n_shards - max(1, round(HELD_OUT * self.n_shards)), self.n_shards)

    @property
    def training(self) -> range:
        return range(self.held_out.start)

    def states(self, shard: int) -> Float[Tensor, "token width"]:
        """Return the states of a shard in float32, checked against its digest."""
        return self._read(shard, "states").float()

    def questions(self, shards: Sequence[int]) -> list[int]:
        """Return the numbers of the questions of some shards, among those that could be asked."""
        return [int(q) for shard in shards for q in self._read(shard, "questions")]

    def _read(self, shard: int, name: str) -> Tensor:
        path = shard_path(self.folder, shard)
        found = read_tensor(path, name, self._journal[shard][name])
        if found is None:
            raise CoralError(f"{path} is damaged; run the same command again and only this shard is computed anew.")
        return found


class PooledStates:
    """Pooled answer states of an activation store, read like token states: fewer, and not those of the patched tokens."""

    def __init__(self, scored: Scored, layer: int, *, seed: int = 0) -> None:
        if layer not in scored.layers:
            raise CoralError(
                f"The store holds layers {list(scored.layers)}, not {layer}; extract with --layers {layer}."
            )
        states, offsets = torch.from_numpy(scored.layer(layer)), scored.table.offsets.tolist()
        drawn = np.random.default_rng(seed).permutation(len(offsets) - 1)
        # whole questions: the states of one question's options are alike, and what is held out must be new
        parts = [part.tolist() for part in np.array_split(drawn, POOLED_PARTS) if len(part)]
        self._shards = [torch.cat([states[offsets[q] : offsets[q + 1]] for q in part]) for part in parts]
        if len(self._shards) < FEWEST:
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
class Ordinary:
    """The states of a source without the massive ones.

    Many models park attention at a few tokens, the first one above all, whose states are some hundred times as long as
    others. One in thirty is enough to make nearly all of the variance; z-scored by it, the other states would all look alike.
    """

    source: StateSource
    norm_limit: float | None
    """Longer states are left out; None leaves out none."""

    @staticmethod
    def of(source: StateSource, massive: float) -> Ordinary:
        """Leave out states more than `massive` times as long as the median; 0 leaves out none."""
        if not massive:
            return Ordinary(source, None)
        norms: list[Tensor] = []
        for shard in source.training:
            norms.append(source.states(shard).norm(dim=1))
            if sum(map(len, norms)) >= MEDIAN_STATES:
                break
        return Ordinary(source, massive * float(torch.cat(norms).median()))

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
        found = self.source.states(shard)
        return found if self.norm_limit is None else found[found.norm(dim=1) <= self.norm_limit]


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
