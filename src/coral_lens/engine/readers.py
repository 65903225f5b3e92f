"""Read states while options are scored: pooled residuals (the lens), heads (ITI), tokens (SAEs), final states (CCPS).

Each is a `hooks.Reader`. It takes its part inside the hook: memory grows with what is taken from one batch, and never with the
number of questions. Readers never change a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.engine.batches import Batch
from coral_lens.engine.hooks import Site
from coral_lens.engine.in_use import in_use
from coral_lens.engine.settings import StatePlace, TokenPlace

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


HEAD_ROWS = 256
"""Rows of the vocabulary head at a time: its logits stay small, however many states there are."""
FINAL = Site("final", 0)


# --------------------------------------------------------------------------------------------------- one row per option

OptionPlace = Literal["last", "mean", "stem"]


def at_last(flat: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "option width"]:
    """Return the states at the last token of each option."""
    return flat[batch.answer_tokens[batch.answer_offsets[1:] - 1].to(flat.device)].float()


def at_mean(flat: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "option width"]:
    """Return the mean of the states over each option's own tokens."""
    tokens = flat[batch.answer_tokens.to(flat.device)].float()
    return torch.segment_reduce(tokens, "mean", lengths=batch.answer_offsets.diff().to(flat.device), axis=0)


def at_stem(flat: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "option width"]:
    """Return the states at the last context token of each option; options that share it have equal rows."""
    return flat[batch.stems.to(flat.device)].float()


def at_listed(flat: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "option width"]:
    """Return the mean of the states over each option's text where it stands listed; else over its own tokens."""
    if not batch.listed:
        return at_mean(flat, batch)
    places = torch.from_numpy(np.concatenate(batch.listed)).to(flat.device)
    lengths = torch.tensor([len(one) for one in batch.listed], device=flat.device)
    return torch.segment_reduce(flat[places].float(), "mean", lengths=lengths, axis=0)


POOLS: dict[OptionPlace, Callable[[Tensor, Batch], Tensor]] = {"last": at_last, "mean": at_mean, "stem": at_stem}
STATES: dict[StatePlace, Callable[[Tensor, Batch], Tensor]] = {
    "answer": at_mean,
    "listed": at_listed,
    "context": at_stem,
}


@dataclass
class PooledResidual:
    """Reads a residual state of each option at the given layers: the mean over its own tokens (the paper's Eq. 2).

    Other places are read in the same way, and have names of their own.
    """

    layers: tuple[int, ...]
    place: StatePlace = "answer"
    _states: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site("residual", layer) for layer in self.layers)

    def fresh(self) -> PooledResidual:
        return PooledResidual(self.layers, self.place)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        rows = STATES[self.place](states.reshape(-1, states.shape[-1]), batch)
        self._states[layer_name(site.layer, self.place)] = rows

    def take(self) -> dict[str, Tensor]:
        states, self._states = self._states, {}
        return states


def layer_name(layer: int, place: str = "answer") -> str:
    """Return the name under which a layer's pooled states are kept."""
    return f"layer.{layer}" if place == "answer" else f"{place}.{layer}"


@dataclass
class HeadInputs:
    """Reads the outputs of the attention heads: the input of each block's output projection, split by query head.

    `take` gives `heads.<layer>` of shape [option, head, head_dim] in float32 for each layer. With grouped-query attention
    there are still as many as there are query heads.
    """

    layers: tuple[int, ...]
    n_heads: int
    """Query heads of a block: `model.n_heads`."""
    where: OptionPlace = "last"
    """The option's last token, the mean over its own tokens, or the last context token."""
    _states: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site("heads", layer) for layer in self.layers)

    def fresh(self) -> HeadInputs:
        return HeadInputs(self.layers, self.n_heads, self.where)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        rows = POOLS[self.where](states.reshape(-1, states.shape[-1]), batch)
        self._states[heads_name(site.layer)] = rows.reshape(len(rows), self.n_heads, -1)

    def take(self) -> dict[str, Tensor]:
        states, self._states = self._states, {}
        return states


def heads_name(layer: int) -> str:
    """Return the name under which the head inputs of a layer are read."""
    return f"heads.{layer}"


# ---------------------------------------------------------------------------------------------------- one row per token


def answer_positions(batch: Batch) -> Int[Tensor, " position"]:
    """Return the flat positions of answer tokens in order, those that options share once."""
    return batch.answer_tokens.unique()


def context_positions(batch: Batch) -> Int[Tensor, " position"]:
    """Return the flat positions of the tokens that are in no option."""
    everything = all_positions(batch)
    return everything[~torch.isin(everything, batch.answer_tokens)]


def all_positions(batch: Batch) -> Int[Tensor, " position"]:
    """Return the flat positions of all tokens; padding is none."""
    rows, width = batch.input_ids.shape
    return (torch.arange(width).expand(rows, -1) < batch.lengths[:, None]).reshape(-1).nonzero()[:, 0]


TOKENS: dict[TokenPlace, Callable[[Batch], Tensor]] = {
    "answer": answer_positions,
    "context": context_positions,
    "all": all_positions,
}


@dataclass
class ResidualTokens:
    """Reads residual states token by token, each position of the tree once: what a sparse autoencoder is trained on.

    `take` gives `tokens.<layer>` [token, width] in the model's own dtype, and `tokens.offsets` [row + 1]: the tokens of the
    batch's row r are offsets[r] to offsets[r + 1]. Prefixes that questions share through a cache are not among them.
    """

    layers: tuple[int, ...]
    where: TokenPlace = "all"
    """Answer tokens, context tokens, or both."""
    _states: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site("residual", layer) for layer in self.layers)

    def fresh(self) -> ResidualTokens:
        return ResidualTokens(self.layers, self.where)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        positions = TOKENS[self.where](batch)
        rows, width = batch.input_ids.shape
        self._states[tokens_name(site.layer)] = states.reshape(-1, states.shape[-1])[positions.to(states.device)]
        self._states["tokens.offsets"] = torch.searchsorted(positions, torch.arange(rows + 1) * width)

    def take(self) -> dict[str, Tensor]:
        states, self._states = self._states, {}
        return states


def tokens_name(layer: int) -> str:
    """Return the name under which the token states of a layer are read."""
    return f"tokens.{layer}"


@dataclass
class FinalStates:
    """Reads the normed state from which the vocabulary head predicts each answer token.

    `take` gives `final` [token, width], one row per answer token in the model's own dtype (the head gives the very logits
    that were scored), and `final.offsets` [option + 1]: the rows of option j are offsets[j] to offsets[j + 1].
    """

    _states: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return (FINAL,)

    def fresh(self) -> FinalStates:
        return FinalStates()

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        flat = states.reshape(-1, states.shape[-1])
        self._states = {"final": flat[batch.before_tokens.to(flat.device)], "final.offsets": batch.answer_offsets}

    def take(self) -> dict[str, Tensor]:
        states, self._states = self._states, {}
        return states


def iter_logits(
    model: Model, states: Float[Tensor, "row width"], rows: int = HEAD_ROWS
) -> Iterator[tuple[slice, Float[Tensor, "piece vocabulary"]]]:
    """Yield the float32 logits of normed states, `rows` at a time, with the slice of the states that they belong to.

    Full-vocabulary logits are large: use each piece and let it go.
    """
    device = next(model.head.parameters()).device
    for start in range(0, len(states), rows):
        piece = slice(start, min(start + rows, len(states)))
        with in_use(model):
            logits = model.logits(states[piece].to(device))
        yield piece, logits
