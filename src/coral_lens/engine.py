"""Score every option of every question in one pass over its token tree; read or edit hidden states on the way.

There is one scoring path. Whatever wants states (pooled residuals, head inputs) is a Reader, whatever changes them (ITI,
SAE patching) is an Edit; both are told by the Batch where each option's tokens lie. The engine keeps nothing between
batches, so memory does not grow with the number of questions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from coral_lens.attention import cut_blocks
from coral_lens.errors import CoralError
from coral_lens.fused import fused
from coral_lens.layout import Batch, Packing, Plan, PlannedBatch, build_tree, collate, lay_out, plan_for, prefix_batch
from coral_lens.records import Prompt

if TYPE_CHECKING:
    from torch import nn

    from coral_lens.models import Model, PrefixCache

TOKEN_BUDGET = 2048


class Site(NamedTuple):
    """A place in the model whose tensor [batch, token, feature] can be read or replaced."""

    kind: Literal["residual", "heads", "final"]
    """`residual`: the stream after block `layer` (0: the embeddings). `heads`: the input of block `layer`'s projection.
    `final`: the normed states that the vocabulary head reads; its `layer` is 0."""
    layer: int


@runtime_checkable
class Reader(Protocol):
    """Takes what it needs at its sites while a batch runs, then gives one row per option."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where it reads."""

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        """Take what is needed of the states [batch, token, feature]; called once per site and batch."""

    def take(self) -> dict[str, Tensor]:
        """Return what was read of the batch that has just run, and forget it: one row per option, unless the reader says
        otherwise (one row per token, and a tensor of offsets)."""


@runtime_checkable
class Edit(Protocol):
    """Replaces the tensor at its sites; runs before the readers of the same site."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it replaces."""

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        """Return the states to go on with; the argument must be left as it is."""


@dataclass
class PooledResidual:
    """Reads the mean residual state over each option's own tokens, at the given layers (the paper's Eq. 2)."""

    layers: tuple[int, ...]
    _pooled: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site("residual", layer) for layer in self.layers)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        tokens = states.reshape(-1, states.shape[-1])[batch.answer_tokens.to(states.device)].float()
        lengths = batch.answer_offsets.diff().to(states.device)
        self._pooled[layer_name(site.layer)] = torch.segment_reduce(tokens, "mean", lengths=lengths, axis=0)

    def take(self) -> dict[str, Tensor]:
        pooled, self._pooled = self._pooled, {}
        return pooled


def layer_name(layer: int) -> str:
    """Return the name under which a layer's pooled states are kept."""
    return f"layer.{layer}"


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The scores of one batch: options question by question."""

    batch: Batch
    logprobs: Float[Tensor, " option"]
    """Summed log-probability of each option's tokens, float64 sums of float32 terms."""
    readings: dict[str, Tensor]


def score(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    on_broken: OnBroken | None = None,
) -> Iterator[ScoredBatch]:
    """Yield the scores and readings of each batch of the plan, in its order.

    One token that is not finite spoils its whole row. The questions of such a batch are scored one by one, each a batch:
    those that are broken by themselves have no scores, and `on_broken` is told their numbers. Without it they are an error.
    """
    prefixes = Prefixes(model, edits)

    def scored(planned: PlannedBatch) -> ScoredBatch:
        batch = lay_out(prompts, planned, packing=plan.packing, joined=model.attends_in_blocks)
        return score_batch(model, batch, readers=readers, edits=edits, prefixes=prefixes)

    for planned in plan.batches:
        try:
            some = iter([scored(planned)])
        except NotFiniteError:
            some = one_by_one(planned, scored, on_broken)
        yield from some


OnBroken = Callable[[int], None]
"""Told the number of a question whose own scores or states are not finite."""


def one_by_one(
    planned: PlannedBatch, scored: Callable[[PlannedBatch], ScoredBatch], on_broken: OnBroken | None
) -> Iterator[ScoredBatch]:
    """Yield each question of a batch in a batch of its own, but for those that are broken by themselves."""
    for question in planned.questions:
        try:
            alone = scored(replace(planned, rows=((question,),), prefixes=(0,)))
        except NotFiniteError:
            if on_broken is None:
                raise
            on_broken(question)
        else:
            yield alone


class Prefixes:
    """The key-value cache of the prefixes of one batch, kept for the next: batches of one prefix follow each other."""

    def __init__(self, model: Model, edits: Sequence[Edit] = ()) -> None:
        self._model, self._edits = model, edits
        self._known: tuple[tuple[int, ...], ...] = ()
        self._cache: PrefixCache | None = None

    def for_batch(self, batch: Batch) -> PrefixCache | None:
        """Return the cache that the rows of a batch attend to, or None where they have no prefix."""
        if not batch.prefixes:
            return None
        if self._cache is None or not set(batch.prefixes) <= set(self._known):
            with tapped(self._model, prefix_batch(batch.prefixes), edits=self._edits):
                self._cache = self._model.prefill(batch.prefixes)
            self._known = batch.prefixes
        at = [self._known.index(batch.prefixes[i]) for i in batch.row_prefix]
        return self._cache.for_rows(at, max(len(p) for p in batch.prefixes))


@torch.inference_mode()
def score_batch(
    model: Model,
    batch: Batch,
    *,
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
    prefixes: Prefixes | None = None,
) -> ScoredBatch:
    """Run one batch through the model."""
    with fused(model.hf):
        cache = (prefixes or Prefixes(model, edits)).for_batch(batch)
        with tapped(model, batch, readers=readers, edits=edits):
            states = body(model, batch, cache)
    token_logprobs = answer_logprobs(model, states, batch)
    sums = torch.segment_reduce(token_logprobs.double(), "sum", lengths=batch.answer_offsets.diff(), axis=0)
    readings: dict[str, Tensor] = {}
    for reader in readers:
        readings |= {name: tensor.cpu() for name, tensor in reader.take().items()}
    refuse_broken(model, batch, token_logprobs, *readings.values())
    return ScoredBatch(batch, sums, readings)


def body(model: Model, batch: Batch, cache: PrefixCache | None) -> Float[Tensor, "batch width feature"]:
    """Return the final, normed states of a batch, computed the way that its layout and the model allow."""
    ids, positions = batch.input_ids.to(model.device), batch.position_ids.to(model.device)
    if batch.allowed is None:
        return model.plain_body(ids, batch.lengths)
    if batch.blocks and model.attends_in_blocks:
        return model.block_body(ids, positions, cut_blocks(batch.allowed[0], batch.blocks), cache)
    return model.tree_body(ids, positions, batch.allowed.to(model.device), cache)


class NotFiniteError(CoralError):
    """Scores or states of a batch are not finite."""


def refuse_broken(model: Model, batch: Batch, *found: Tensor) -> None:
    """Refuse scores and states that are not finite; the question at fault is known only where it is alone in its batch."""
    if all(bool(tensor.isfinite().all()) for tensor in found):
        return
    others = f" or one of the {len(batch.names) - 1} scored with it" if len(batch.names) > 1 else ""
    raise NotFiniteError(
        f"The model {model.name!r} gives scores or states that are not finite for question {batch.names[0]!r}{others}: "
        "its weights or dtype are broken; try --dtype float32. Finished work is kept."
    )


def answer_logprobs(model: Model, states: Tensor, batch: Batch) -> Float[Tensor, " token"]:
    """Return the log-probability of every answer token; the head runs once on each position that predicts one."""
    rows, at = torch.unique(batch.before_tokens, return_inverse=True)
    flat = states.reshape(-1, states.shape[-1])
    device = flat.device
    return model.log_probs(flat[rows.to(device)], at.to(device), batch.targets.to(device)).cpu()


# ---------------------------------------------------------------------------------------------------------- hooks


@contextmanager
def tapped(model: Model, batch: Batch, *, readers: Sequence[Reader] = (), edits: Sequence[Edit] = ()) -> Iterator[None]:
    """Let edits and readers at their sites while the block runs; our hooks, and only ours, are gone afterwards."""
    sites = dict.fromkeys([s for e in edits for s in e.sites] + [s for r in readers for s in r.sites])
    with ExitStack() as stack:
        for site in sites:
            at_edits = [e for e in edits if site in e.sites]
            at_readers = [r for r in readers if site in r.sites]
            hook = make_hook(site, batch, at_edits, at_readers)
            handle = attach(model, site, hook)
            stack.callback(handle.remove)
        yield


Hook = Callable[[Tensor], Tensor]


def make_hook(site: Site, batch: Batch, edits: Sequence[Edit], readers: Sequence[Reader]) -> Hook:
    """Return a function that edits the states at a site, shows the result to the readers, and returns it."""

    def hook(states: Tensor) -> Tensor:
        for edit in edits:
            states = edit.edit(site, states, batch)
        for reader in readers:
            reader.read(site, states, batch)
        return states

    return hook


def attach(model: Model, site: Site, hook: Hook) -> Any:
    """Register a hook at a site and return its handle."""
    if site.kind == "final":
        return after(model.norm, hook)
    if not 0 <= site.layer <= model.n_layers or (site.kind == "heads" and site.layer == 0):
        raise CoralError(f"Layer {site.layer} does not exist: {model.name!r} has layers 0 to {model.n_layers}.")
    if site.kind == "heads" and not model.projections:
        raise CoralError(
            f"{model.name!r} has no attention output projection, so that its heads cannot be read or edited."
        )
    if site.kind == "heads":
        return before(model.projections[site.layer - 1], hook)
    if site.layer == 0:
        return before(model.blocks[0], hook)
    return after(model.blocks[site.layer - 1], hook)


def before(module: nn.Module, hook: Hook) -> Any:
    """Hook the first argument of a module."""

    def pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (hook(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hook(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(pre_hook, with_kwargs=True)


def after(module: nn.Module, hook: Hook) -> Any:
    """Hook the output of a block, which is the states or a tuple that begins with them."""

    def post_hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (hook(output[0]), *output[1:]) if isinstance(output, tuple) else hook(output)

    return module.register_forward_hook(post_hook)


# ----------------------------------------------------------------------------------------------------- self-check

CHECK_TEXTS = (
    ("Question: Which of these is a colour?\nAnswer:", (" red", " a wooden table", " red wine glasses")),
    ("The sun rises in the", (" east", " west, as everybody knows")),
)
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Log-probabilities of the tree and of plain passes may differ by this much."""
ROUNDINGS = 1.5
"""In half precision log-probabilities move by tenths of a nat from rounding alone, so that no fixed tolerance tells it from
a wrong mask. States of the tree may differ from plain ones by so many times what one more rounding of every layer does."""

MASK_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What models raise that cannot take the tree's attention mask; some look for an attribute of a mask of another form."""


def check_prompts(model: Model) -> list[Prompt]:
    """Return two small prompts of ragged options, two of which begin alike."""
    encode = model.tokenizer.encode
    prompts = []
    for i, (context, options) in enumerate(CHECK_TEXTS):
        ids = tuple(encode(context))
        tails = tuple(tuple(encode(o, add_special_tokens=False)) for o in options)
        prompts.append(Prompt(f"check {i}", (ids,) * len(tails), tails))
    return prompts


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """How far the packed tree is from plain passes over the same prompts."""

    difference: float
    """Largest difference in an option's log-probability."""
    excess: float
    """The difference, of log-probabilities or in half precision of states, divided by what rounding explains."""

    @property
    def sound(self) -> bool:
        return self.excess <= 1


def self_check(model: Model, prompts: Sequence[Prompt]) -> SelfCheck:
    """Compare the tree with plain passes over the same prompts."""
    reader = PooledResidual(tuple(range(model.n_layers + 1)))
    trees = dict(enumerate(build_tree(p) for p in prompts))
    packed = score_batch(model, collate(trees, [tuple(trees)], packing="tree"), readers=[reader])
    rows = collate(trees, [(i,) for i in trees], packing="plain")
    plain = score_batch(model, rows, readers=[reader])
    difference = float((packed.logprobs - plain.logprobs).abs().max())
    if model.dtype in TOLERANCE:
        return SelfCheck(difference, difference / TOLERANCE[model.dtype])
    rounded = score_batch(model, rows, readers=[reader], edits=[Rounding(reader.sites)])
    # layer by layer: rounding grows on its way up, and would hide in the last layer what is plain to see in the first
    ratios = [distance(packed, plain, name) / (distance(rounded, plain, name) or 1.0) for name in plain.readings]
    return SelfCheck(difference, max(ratios) / ROUNDINGS)


def distance(one: ScoredBatch, other: ScoredBatch, name: str) -> float:
    """Return the distance between two readings of the same name."""
    return float((one.readings[name] - other.readings[name]).norm())


@dataclass
class Rounding:
    """Moves every state by up to one unit in its last place, as if it had been rounded once more."""

    sites: tuple[Site, ...]
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        moves = torch.rand(states.shape, generator=self._random).to(states.device) * 2 - 1
        return (states.float() * (1 + torch.finfo(states.dtype).eps * moves)).to(states.dtype)


def choose_packing(model: Model) -> Packing:
    """Return `tree` if the model scores a question the same way packed and plain, else `plain`, and say so."""
    try:
        check = self_check(model, check_prompts(model))
    except MASK_REFUSALS as error:
        reason = f"it refuses the tree's attention mask ({type(error).__name__})"
    except NotFiniteError:
        refuse_checkpoint(model)
        reason = "not all scores and states of its self-check are finite"
    else:
        if check.sound and model.knows_window:
            return "tree"
        reason = "its family has a sliding window that is not known here"
        if model.knows_window:
            reason = f"packed and plain log-probabilities differ by {check.difference:.2g}"
    warnings.warn(
        f"{model.name}: {reason}, so every option is scored in a row of its own, which is slower.", stacklevel=2
    )
    return "plain"


def refuse_checkpoint(model: Model) -> None:
    """Refuse a model that gives nothing finite for any prompt of the self-check, before it does so for every question."""
    prompts = check_prompts(model)
    sound = score(model, prompts, plan_for(prompts, token_budget=1, packing="plain"), on_broken=lambda _: None)
    if not any(True for _ in sound):
        raise CoralError(
            f"The model {model.name!r} gives scores that are not finite, whatever it is asked: its weights or dtype are "
            "broken; try --dtype float32."
        )
