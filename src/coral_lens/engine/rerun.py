"""Run only the blocks above a layer, from stored residual states: for edits that are tried many times, such as ablations.

`capture` runs a batch once and keeps its residual states at a layer, the keys and values of the blocks above it, and its
scores. `rerun` goes on from edited states. It computes only positions that a changed one can reach and from which an answer
token is predicted: the others keep their keys and values, and an option out of reach keeps its score, to the bit. The model
is patched inside a `with` and left as it was, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coral_lens.engine._kernels import fused
from coral_lens.engine.architectures import mlp_of
from coral_lens.engine.batches import Batch, prefix_batch
from coral_lens.engine.hooks import Edit, Site, attach, tapped
from coral_lens.engine.in_use import in_use
from coral_lens.engine.model import PrefixCache
from coral_lens.engine.scoring import PrefixCaches, answer_logprobs, refuse_broken

if TYPE_CHECKING:
    from torch import nn

    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Checkpoint:
    """A batch that has run once, and from whose states at `layer` the model can go on."""

    batch: Batch
    layer: int
    states: Float[Tensor, "batch width feature"]
    """The residual stream after block `layer`, at every position."""
    keys: PrefixCache | None
    """Keys and values of the blocks above `layer`, those of the prefix first; None for plain rows."""
    token_logprobs: Float[Tensor, " token"]
    """Log-probability of each answer token in the run that was captured."""
    in_tuple: bool
    """Whether the model's blocks return their states in a tuple."""

    @property
    def logprobs(self) -> Float[Tensor, " option"]:
        """Summed log-probability of each option in the run that was captured."""
        return summed(self.token_logprobs, self.batch.answer_offsets.diff())

    def options_of(self, rows: Int[Tensor, " entry"]) -> Int[Tensor, " option"]:
        """Return the numbers of the options that lie in the given rows of the batch, row after row."""
        counts = self.option_counts
        return ranges((counts.cumsum(0) - counts)[rows], counts[rows])

    @property
    def option_counts(self) -> Int[Tensor, " batch"]:
        """How many options lie in each row; options are numbered row by row."""
        n_rows, width = self.batch.input_ids.shape
        return torch.bincount(self.batch.stems // width, minlength=n_rows)


def ranges(starts: Int[Tensor, " range"], lengths: Int[Tensor, " range"]) -> Int[Tensor, " _"]:
    """Return start, start + 1, ... for each range, one range after the other."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()))


def summed(token_logprobs: Float[Tensor, " token"], lengths: Int[Tensor, " option"]) -> Float[Tensor, " option"]:
    """Return the sum over each option's tokens, in float64 as the engine sums them."""
    if not len(lengths):
        return token_logprobs.double()
    return torch.segment_reduce(token_logprobs.double(), "sum", lengths=lengths, axis=0)


# -------------------------------------------------------------------------------------------------------- capturing


@torch.inference_mode()
def capture(
    model: Model, batch: Batch, layer: int, *, edits: Sequence[Edit] = (), prefixes: PrefixCaches | None = None
) -> Checkpoint:
    """Run a batch and keep what is needed to go on from its states at `layer`; edits and prefixes as in `score_batch`.

    Where variants of an edit are compared (ablations of a reconstruction), capture the run with the edit itself: a rerun
    then computes only what a variant changes in it.
    """
    assert all(site.kind != "final" and site.layer <= layer for edit in edits for site in edit.sites), (
        "edits come before"
    )
    # fused as the engine runs, whose bits these are to be
    with in_use(model), fused(model.hf):
        cache = (prefixes or PrefixCaches(model, edits)).for_batch(batch)
        ids, positions = batch.input_ids.to(model.device), batch.position_ids.to(model.device)
        reader, keys = WholeStates(Site("residual", layer)), None
        with tapped(model, batch, readers=[reader], edits=edits), outputs_seen(model.blocks[0]) as outputs:
            if batch.allowed is None:
                final = model.plain_body(ids, batch.lengths)
            else:
                final, all_keys = model.tree_keys(ids, positions, batch.allowed.to(model.device), cache)
                keys = replace(all_keys, layers=all_keys.layers[layer:])
        token_logprobs = answer_logprobs(model, final, batch)
    refuse_broken(model, batch, token_logprobs)
    return Checkpoint(batch, layer, reader.take()["states"], keys, token_logprobs, tuple in outputs)


@torch.inference_mode()
def prefix_states(
    model: Model, batch: Batch, layer: int, *, edits: Sequence[Edit] = ()
) -> Float[Tensor, "prefix token feature"]:
    """Return the residual states of a batch's shared prefixes, for reruns that change those too; edits as in `capture`."""
    reader = WholeStates(Site("residual", layer))
    with in_use(model), fused(model.hf), tapped(model, prefix_batch(batch.prefixes), readers=[reader], edits=edits):
        model.prefill(batch.prefixes)
    return reader.take()["states"]


@dataclass
class WholeStates:
    """Reads all states at one site."""

    site: Site
    _states: Tensor | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.site,)

    def fresh(self) -> WholeStates:
        return WholeStates(self.site)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        self._states = states.clone()

    def take(self) -> dict[str, Tensor]:
        states, self._states = self._states, None
        return {} if states is None else {"states": states}


@contextmanager
def outputs_seen(module: nn.Module) -> Iterator[set[type]]:
    """Yield the set of the types that the module returns while the block runs."""
    seen: set[type] = set()

    def note(_: nn.Module, __: Any, output: Any) -> None:
        seen.add(type(output))

    handle = module.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


# --------------------------------------------------------------------------------------------------------- going on


@torch.inference_mode()
def rerun(
    model: Model,
    checkpoint: Checkpoint,
    states: Float[Tensor, "entry width feature"],
    *,
    rows: Int[Tensor, " entry"] | None = None,
    prefix: Float[Tensor, "prefix token feature"] | None = None,
) -> Float[Tensor, " option"]:
    """Return the log-probs of the options in `rows`, row after row, with `states` in place of the checkpoint's.

    `rows` are rows of the batch, by default all of them; one may come several times, so that many edits run together (the
    options are those of `checkpoint.options_of(rows)`). `prefix` holds edited states of the shared prefixes, if those are
    edited (see `prefix_states`). The result is that of a whole pass under the same edit, to rounding.
    """
    batch = checkpoint.batch
    rows = torch.arange(len(checkpoint.states)) if rows is None else rows
    states = states.to(checkpoint.states)
    again = to_compute(model, checkpoint, states, rows, everything=prefix is not None)
    options = checkpoint.options_of(rows)
    lengths = batch.answer_offsets.diff()[options]
    tokens = ranges(batch.answer_offsets[options], lengths)
    entry = torch.repeat_interleave(torch.arange(len(rows)), checkpoint.option_counts[rows]).repeat_interleave(lengths)
    column = batch.before_tokens[tokens] % batch.input_ids.shape[1]
    token_logprobs, fresh = checkpoint.token_logprobs[tokens], again[entry, column]
    if fresh.any():
        live = again.any(dim=1)
        slots = Slots(checkpoint, rows[live], again[live])
        at = slots.flat_positions((live.cumsum(0) - 1)[entry[fresh]], column[fresh])
        predicted = replace(batch, answer_tokens=at, before_tokens=at, targets=batch.targets[tokens[fresh]])
        with in_use(model), fused(model.hf):
            final = slots.run(model, states[live.to(states.device)], prefix, needed=at.unique())
            token_logprobs[fresh] = answer_logprobs(model, final, predicted)
    refuse_broken(model, batch, token_logprobs)
    return summed(token_logprobs, lengths)


def to_compute(
    model: Model,
    checkpoint: Checkpoint,
    states: Float[Tensor, "entry width feature"],
    rows: Int[Tensor, " entry"],
    *,
    everything: bool,
) -> Bool[Tensor, "entry width"]:
    """Return the positions that see a changed one (themselves included) and that lead to the prediction of an answer token.

    `everything`: the prefix has changed, and every position sees it.
    """
    batch, width = checkpoint.batch, checkpoint.batch.input_ids.shape[1]
    changed = (states != checkpoint.states[rows.to(checkpoint.states.device)]).any(dim=-1).cpu()
    changed |= torch.full_like(changed, everything)
    border = model.rope_border
    if batch.allowed is None or (border is not None and int(batch.position_ids.max()) >= border):
        # plain rows have no keys to go on from; LongRoPE looks at the longest position of what it is given
        return changed.any(dim=1, keepdim=True).expand(-1, width)
    sees = batch.allowed[rows, :, -width:]
    predicts = torch.zeros(batch.input_ids.numel(), dtype=torch.bool)
    predicts[batch.before_tokens] = True
    leads = (sees & predicts.reshape(-1, width)[rows][:, :, None]).any(dim=1)
    return (sees & changed[:, None, :]).any(dim=2) & leads


@dataclass(frozen=True)
class Slots:
    """The positions of some rows that are computed again, moved together into slots; rows are ragged, so some stay empty."""

    checkpoint: Checkpoint
    rows: Int[Tensor, " entry"]
    again: Bool[Tensor, "entry width"]

    @property
    def n_slots(self) -> int:
        return int(self.again.sum(dim=1).max())

    @property
    def columns(self) -> Int[Tensor, "entry slot"]:
        """The column of the row that each slot holds."""
        return self.again.int().argsort(dim=1, descending=True, stable=True)[:, : self.n_slots]

    @property
    def filled(self) -> Bool[Tensor, "entry slot"]:
        return torch.arange(self.n_slots) < self.again.sum(dim=1, keepdim=True)

    def flat_positions(self, entry: Int[Tensor, " token"], column: Int[Tensor, " token"]) -> Int[Tensor, " token"]:
        """Return where columns of entries lie among the slots laid end to end."""
        return entry * self.n_slots + (self.again.cumsum(dim=1) - 1)[entry, column]

    def run(
        self, model: Model, states: Tensor, prefix: Tensor | None, *, needed: Int[Tensor, " position"]
    ) -> Float[Tensor, "entry slot feature"]:
        """Return the final, normed states of the slots, going on from the states [entry, width, feature] of their rows.

        Only those at `needed` flat positions mean anything: nobody attends to what the last block puts out, so its MLP runs
        at these alone.
        """
        batch, keys = self.checkpoint.batch, self.checkpoint.keys
        rows, columns = self.rows[:, None], self.columns
        ids = batch.input_ids[rows, columns].to(model.device)
        positions = batch.position_ids[rows, columns].to(model.device)
        if keys is not None and prefix is not None:
            keys = with_prefix(model, self.checkpoint, keys, prefix)
        given = states.gather(1, columns[:, :, None].expand(-1, -1, states.shape[-1]).to(states.device))
        with resumed(model, self.checkpoint, given), sparing(mlp_of(model.blocks[-1]), needed):
            if keys is None or batch.allowed is None:
                return model.plain_body(ids, batch.lengths[self.rows])
            old, new = self.masks(batch.allowed)
            # columns that nobody sees are left out; above the last block nobody looks at all
            used = old.flatten(0, 1).any(dim=0).nonzero()[:, 0] if keys.layers else torch.zeros(0, dtype=torch.int64)
            allowed = torch.cat([old[:, :, used], new], dim=2).to(model.device)
            return model.tree_body(ids, positions, allowed, self.known(keys, used))

    def masks(
        self, allowed: Bool[Tensor, "batch width key"]
    ) -> tuple[Bool[Tensor, "entry slot key"], Bool[Tensor, "entry slot slot"]]:
        """Return which kept keys, and which slots, each slot sees; an empty slot sees itself alone."""
        columns, filled, width = self.columns, self.filled, allowed.shape[1]
        sees = allowed[self.rows[:, None], columns]
        new = sees[:, :, -width:].gather(2, columns[:, None, :].expand(-1, columns.shape[1], -1))
        new = torch.where(filled[:, :, None], new & filled[:, None, :], torch.eye(columns.shape[1], dtype=torch.bool))
        old = sees & filled[:, :, None]
        old[:, :, -width:] &= ~self.again[:, None, :]
        return old, new

    def known(self, keys: PrefixCache, used: Int[Tensor, " key"]) -> PrefixCache | None:
        """Return the kept keys that some slot sees, one entry per row; blocks that are skipped have none."""
        if not len(used):
            return None

        def pick(states: Tensor, dim: int) -> Tensor:
            return states.index_select(dim, used.to(states.device))[self.rows.to(states.device)]

        upper = [(pick(k, 2), pick(v, 2)) for k, v in keys.layers]
        nothing = (upper[0][0][:, :, :0], upper[0][1][:, :, :0])
        return PrefixCache([nothing] * self.checkpoint.layer + upper, pick(keys.positions, 1))


def with_prefix(model: Model, checkpoint: Checkpoint, keys: PrefixCache, prefix: Tensor) -> PrefixCache:
    """Return the keys with those of the prefix computed from its edited states."""
    batch, length = checkpoint.batch, max(len(p) for p in checkpoint.batch.prefixes)
    with resumed(model, checkpoint, prefix):
        fresh = model.prefill(batch.prefixes).for_rows(batch.row_prefix, length)
    pairs = zip(fresh.layers, keys.layers, strict=True)
    layers = [
        (torch.cat([k, kept_k[:, :, length:]], dim=2), torch.cat([v, kept_v[:, :, length:]], dim=2))
        for (k, v), (kept_k, kept_v) in pairs
    ]
    return replace(keys, layers=layers)


# ---------------------------------------------------------------------------------------------------------- patches


@contextmanager
def resumed(model: Model, checkpoint: Checkpoint, states: Tensor) -> Iterator[None]:
    """Skip the blocks up to the checkpoint's layer, and put `states` in the place of what they give."""
    with ExitStack() as stack:
        for block in model.blocks[: checkpoint.layer]:
            stack.enter_context(skipped(block, in_tuple=checkpoint.in_tuple))
        handle = attach(model, Site("residual", checkpoint.layer), lambda old: states.to(old.device))
        stack.callback(handle.remove)
        yield


@contextmanager
def sparing(module: nn.Module | None, positions: Int[Tensor, " position"]) -> Iterator[None]:
    """Let a module that works position by position see these flat positions alone; at others it gives zeros.

    One that takes more than the states (BLOOM's adds the residual itself) is left as it is.
    """
    shapes: list[torch.Size] = []

    def gather(_: nn.Module, args: tuple[Any, ...]) -> Any:
        if len(args) != 1:
            return args
        flat = args[0].reshape(-1, args[0].shape[-1])
        shapes.append(args[0].shape)
        return (flat[positions.to(flat.device)][None],)

    def scatter(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if not shapes:
            return output
        shape = shapes.pop()
        flat = output.new_zeros(shape[0] * shape[1], output.shape[-1])
        return flat.index_copy_(0, positions.to(output.device), output[0]).reshape(*shape[:2], -1)

    with ExitStack() as stack:
        if module is not None:
            stack.callback(module.register_forward_pre_hook(gather).remove)
            stack.callback(module.register_forward_hook(scatter).remove)
        yield


@contextmanager
def skipped(block: nn.Module, *, in_tuple: bool) -> Iterator[None]:
    """Let a block return what it is given."""

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if in_tuple else hidden_states

    own = vars(block).get("forward")  # accelerate puts one there that moves states between devices
    block.forward = forward
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
