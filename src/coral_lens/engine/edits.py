"""Change hidden states while options are scored: add a direction (ITI, steering), or replace states (SAE patching).

Each is a `hooks.Edit`. The tensor it is given is left as it is; positions that it does not name keep their bits, and padding
is never touched. A position that several options share (their last context token, first tokens that are alike) is edited
once, which is right because every one of them sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.engine.batches import Batch
from coral_lens.engine.hooks import Site
from coral_lens.engine.readers import all_positions, answer_positions
from coral_lens.errors import CoralError

EditPlace = Literal["stem_and_answer", "answer", "all"]
"""The last context token and the answer tokens; the answer tokens alone; every token, those of cached prefixes included."""

States = Float[Tensor, "position feature"]


def stem_and_answer_positions(batch: Batch) -> Int[Tensor, " position"]:
    """Return the flat positions of the last context tokens and of the answer tokens, shared ones once."""
    return torch.cat([batch.stems, batch.answer_tokens]).unique()


POSITIONS: dict[EditPlace, Callable[[Batch], Tensor]] = {
    "stem_and_answer": stem_and_answer_positions,
    "answer": answer_positions,
    "all": all_positions,
}


def edited_positions(batch: Batch, where: EditPlace) -> Int[Tensor, " position"]:
    """Return the flat positions to edit; a batch of prefixes has no options, so only `all` names any in it."""
    positions = POSITIONS[where](batch)
    if where != "all":
        refuse_shared_context(batch, positions, own=batch.answer_offsets.diff() + (where == "stem_and_answer"))
    return positions


def refuse_shared_context(batch: Batch, positions: Int[Tensor, " position"], *, own: Int[Tensor, " option"]) -> None:
    """Refuse a tree in which an option sees an edited position that is not its own.

    That can happen only where the options of a question have contexts of their own, and the context of one goes on where
    that of another ends.
    """
    if batch.allowed is None or not batch.n_options:
        return
    rows, width = batch.input_ids.shape
    edited = torch.zeros(rows * width, dtype=torch.bool)
    edited[positions] = True
    last = batch.answer_tokens[batch.answer_offsets[1:] - 1]
    seen = (batch.allowed[last // width, last % width, -width:] & edited.reshape(rows, width)[last // width]).sum(dim=1)
    if not torch.equal(seen, own):
        option = int((seen != own).nonzero()[0])
        question = batch.names[int((torch.from_numpy(batch.option_offsets) <= option).sum()) - 1]
        raise CoralError(
            f"Question {question!r} has options whose contexts run into each other, so an edit of one would reach "
            "another; score it with the packing 'plain'."
        )


def replaced(states: Tensor, positions: Int[Tensor, " position"], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a copy of the states [batch, token, feature] with those at flat positions put through the function."""
    if not len(positions):
        return states
    at = positions.to(states.device)
    flat = states.reshape(-1, states.shape[-1])
    return flat.index_copy(0, at, function(flat[at]).to(states.dtype)).reshape(states.shape)


@dataclass(frozen=True)
class AddDirection:
    """Adds alpha times a direction to the states; with alpha = 0 the run is the unedited one, to the bit."""

    directions: Mapping[Site, Tensor]
    """For a residual site [width]; for a heads site [head, head_dim], zeros for heads that are left alone."""
    alpha: float
    where: EditPlace = "stem_and_answer"

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self.directions)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        direction = self.directions[site].reshape(-1)
        if len(direction) != states.shape[-1]:
            raise CoralError(
                f"The direction for {site.kind} of layer {site.layer} has {len(direction)} numbers, but the states there "
                f"have {states.shape[-1]}: it was made for another model."
            )
        if self.alpha == 0:
            return states
        shift = self.alpha * direction.to(states.device, states.dtype)
        return replaced(states, edited_positions(batch, self.where), lambda chosen: chosen + shift)


def head_directions(
    chosen: Mapping[tuple[int, int], Float[Tensor, " head_dim"]], *, n_heads: int
) -> dict[Site, Float[Tensor, "head head_dim"]]:
    """Gather one direction per (layer, head) into one tensor per layer, zero for the heads that are not named."""
    gathered: dict[Site, Tensor] = {}
    for (layer, head), direction in chosen.items():
        if not 0 <= head < n_heads:
            raise CoralError(f"Head {head} does not exist: the model has heads 0 to {n_heads - 1} in each layer.")
        site = Site("heads", layer)
        gathered.setdefault(site, torch.zeros(n_heads, len(direction)))[head] = direction
    return gathered


@dataclass(frozen=True)
class ReplaceStates:
    """Puts the states at one site through a function [position, feature] -> [position, feature], such as an SAE.

    A function that returns what it is given makes the run the unedited one, to the bit.
    """

    site: Site
    function: Callable[[Tensor], Tensor]
    where: EditPlace = "all"

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.site,)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return replaced(states, edited_positions(batch, self.where), self.function)
