"""Decide whether a model may be scored by token trees, and say for `coral doctor` what the engine makes of it.

The self-check scores the same prompts packed and plain. Where they differ by more than rounding (an unknown mask, ALiBi, a
recurrent state), every option gets a row of its own. A model that makes more of its logits than is known of its family is
refused. The doctor names the parts that were found as well, and compares the states that are read with Hugging Face's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coral_lens.engine import _flex
from coral_lens.engine._machine import is_tiny, keep, record_path
from coral_lens.engine._seals import n_weights
from coral_lens.engine.batches import Batch, collate
from coral_lens.engine.hooks import Site
from coral_lens.engine.in_use import in_use
from coral_lens.engine.packing import Packing, plan_for
from coral_lens.engine.precision import rounding
from coral_lens.engine.readers import PooledResidual, layer_name
from coral_lens.engine.scoring import NotFiniteError, ScoredBatch, score, score_batch
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt
from coral_lens.storage.files import kept_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coral_lens.engine.model import Model


CHECK_TEXTS = (
    ("Question: Which of these is a colour?\nAnswer:", (" red", " a wooden table", " red wine glasses")),
    ("The sun rises in the", (" east", " west, as everybody knows")),
)
"""A context and its options: ragged ones, two of which begin alike."""
TOLERANCE = {"float32": 2e-3, "float64": 1e-6}
"""Log-probabilities of the tree and of plain passes may differ by this much."""
ROUNDINGS = 1.5
"""In half precision log-probabilities move by tenths of a nat from rounding alone, and no fixed tolerance tells it from a
wrong mask. States of the tree may differ from plain ones by so many times what one more rounding of every layer does."""
MASK_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of models that cannot take the tree's attention mask; some look for an attribute of a mask of another form."""
ROUND_TRIP = "Hello, wörld! 3 < 4 and  two spaces."
"""Text that a tokenizer should give back as it was."""


# -------------------------------------------------------------------------------------------------------- tree or plain


_TREES: WeakKeyDictionary[PreTrainedModel, set[tuple[object, ...]]] = WeakKeyDictionary()
"""Models whose trees were found exact in this process, and what that holds for."""


def packing_of(model: Model) -> Packing:
    """Return what `choose_packing` does; that trees are exact is found out once for a model, machine and set of versions."""
    holds_for = (model.family, model.precision, model.device, model.max_length)
    known = _TREES.setdefault(model.hf, set())
    if holds_for in known:
        return "tree"
    path = None if is_tiny(model) else record_path(model, "packings")
    record = (kept_record(path) if path else None) or {}
    if record.get("is_flex_refused"):
        _flex.refuse(model.hf)
    packing: Packing = "tree" if record.get("packing") == "tree" else choose_packing(model)
    if packing == "tree":
        known.add(holds_for)
        if path and not path.exists():
            keep(path, {"packing": packing, "is_flex_refused": _flex.is_refused(model.hf)})
    return packing


def choose_packing(model: Model) -> Packing:
    """Return `tree` if the model scores a question the same way packed and plain, else `plain`, and say so."""
    refuse_other_logits(model)
    try_flex_attention(model)
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


def try_flex_attention(model: Model) -> None:
    """Let a model attend under dense masks if flex attention fails with it or is wrong, and say so."""
    if not model.attends_flexibly:
        return
    try:
        reason = (
            ""
            if self_check(model, check_prompts(model)).sound
            else "it differs from plain passes by more than rounding"
        )
    except NotFiniteError:
        return  # whatever the attention: the next check says it
    except Exception as error:  # of a compiler: there is no telling which
        reason = f"it cannot be compiled here ({type(error).__name__})"
    if reason:
        _flex.refuse(model.hf)
        warnings.warn(
            f"{model.name}: flex attention is not used, because {reason}; trees have dense masks.", stacklevel=3
        )


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
    if model.precision in TOLERANCE:
        return SelfCheck(difference, difference / TOLERANCE[model.precision])
    rounded = score_batch(model, rows, readers=[reader], edits=[Rounding(reader.sites, rounding(model.precision))])
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
    unit: float
    """One unit in the last place, relative to the state."""
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        moves = torch.rand(states.shape, generator=self._random).to(states.device) * 2 - 1
        return (states.float() * (1 + self.unit * moves)).to(states.dtype)


def refuse_other_logits(model: Model) -> None:
    """Refuse a model that does with its logits what is not known here: all its scores would be wrong, packed or plain."""
    if logits_difference(model) > most_different(model):
        kind = model.hf.config.get_text_config().model_type
        raise CoralError(
            f"The model {model.name!r} (model type {kind!r}) does not take its logits from its vocabulary head as they are, and "
            "what it does with them is not known here, so that its scores would be wrong; take another model."
        )


@torch.inference_mode()
def logits_difference(model: Model) -> float:
    """Return how far the logits of the engine are from those of the whole model, relative to the largest of these."""
    ids = torch.tensor([check_prompts(model)[0].contexts[0]], device=model.device)
    with in_use(model):
        theirs = model.hf(input_ids=ids, use_cache=False).logits[0].float()
        ours = model.logits(model.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
    return float((ours - theirs.to(ours.device)).abs().max() / theirs.abs().max())


def most_different(model: Model) -> float:
    """Return by how much of their range numbers of the engine and of the whole model may differ."""
    return 1e-4 if model.precision == "float32" else 5e-2


def refuse_checkpoint(model: Model) -> None:
    """Refuse a model that gives nothing finite for any prompt of the self-check, before it does so for every question."""
    prompts = check_prompts(model)
    sound = score(model, prompts, plan_for(prompts, token_budget=1, packing="plain"), on_broken=lambda _: None)
    if not any(True for _ in sound):
        raise CoralError(
            f"The model {model.name!r} gives scores that are not finite, whatever it is asked: its weights or dtype are "
            "broken; try --dtype float32."
        )


# ----------------------------------------------------------------------------------------------------------- the doctor


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    name: str
    """The part or the check."""
    text: str
    ok: bool = True


def examine(model: Model) -> list[Finding]:
    """Return the parts of a model and the outcome of each check."""
    findings = [*named_parts(model), *tokenizer_checks(model)]
    try:
        return [*findings, packing_check(model), layer_check(model), logits_check(model)]
    except NotFiniteError as error:
        return [*findings, Finding("scores and states", str(error), ok=False)]


def named_parts(model: Model) -> list[Finding]:
    """Name the parts that the engine uses."""
    names = {module: name for name, module in model.hf.named_modules()}
    config = model.hf.config.get_text_config()
    heads = getattr(config, "num_attention_heads", "?")
    projections = [names[module] for module in model.projections]
    millions = n_weights(model.hf) / 1e6
    return [
        Finding("architecture", f"{type(model.hf).__name__} ({config.model_type}), {millions:,.0f} M parameters"),
        Finding("layers", f"0 (embeddings) to {model.n_layers}, width {model.width}, {heads} heads"),
        Finding("blocks", f"{names[model.blocks[0]]} ... {names[model.blocks[-1]]}"),
        Finding("final norm, head", f"{names[model.norm]}, {names[model.head]}"),
        Finding("output projections", f"{projections[0]} ... {projections[-1]}" if projections else "none"),
        Finding("attention mask", model.mask_form),
        Finding("dtype, device", f"{model.precision}, {model.device}"),
        Finding("longest input", f"{model.max_length} tokens"),
        Finding("weights", model.fingerprint["weights"][:16]),
        Finding("tokenizer", model.fingerprint["tokenizer"][:16]),
    ]


def tokenizer_checks(model: Model) -> list[Finding]:
    """Say whether prompts begin with BOS, and whether text survives the tokenizer."""
    tokenizer = model.tokenizer
    ids = tokenizer.encode("a")
    adds = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    bos = f"{'added' if adds else 'not added'} by the tokenizer (bos_token is {tokenizer.bos_token!r})"
    back = str(tokenizer.decode(tokenizer.encode(ROUND_TRIP, add_special_tokens=False)))
    same = back.strip() == ROUND_TRIP
    return [
        Finding("BOS", bos),
        Finding("text round trip", "kept" if same else f"{ROUND_TRIP!r} became {back!r}", same),
    ]


def packing_check(model: Model) -> Finding:
    """Compare the packed tree with plain passes."""
    try:
        check = self_check(model, check_prompts(model))
    except MASK_REFUSALS as error:
        return Finding("packed against plain", f"refused: {error}", ok=False)
    outcome = f"log-probs differ by {check.difference:.1e}, {check.excess:.2g} times what rounding may do"
    return Finding("packed against plain", outcome, check.sound)


@torch.inference_mode()
def layer_check(model: Model) -> Finding:
    """Compare the states that the engine reads with Hugging Face's own, the last ones after the final norm."""
    first = check_prompts(model)[0]
    context, option = first.contexts[0], first.options[0]
    # the second option is one token: its mean is that token's state, to which the norm can be applied
    prompt = Prompt("check", (context, context), (option, option[:1]))
    reader = PooledResidual(tuple(range(model.n_layers + 1)))
    batch = collate({0: build_tree(prompt)}, [(0,)], packing="plain")  # the other check is for the tree's mask
    readings = score_batch(model, batch, readers=[reader]).readings
    ids = torch.tensor([[*context, *option]], device=model.device)
    with in_use(model):
        states = model.hf(ids, output_hidden_states=True).hidden_states
    start, normed = len(context), states[-1]
    # Mamba's list begins after the first block: the state before the normed one is then that of the last block
    first_layer = 1 if torch.allclose(model.norm(states[-2]), normed) else 0
    ours = [readings[layer_name(layer)][0] for layer in range(first_layer, model.n_layers + first_layer)]
    theirs = [s[0, start:].float().mean(dim=0).cpu() for s in states[:-1]]
    ours.append(model.norm(readings[layer_name(model.n_layers)][1].to(normed.device, normed.dtype)).float().cpu())
    theirs.append(normed[0, start].float().cpu())
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    return Finding(
        "layer map",
        f"states equal Hugging Face's to {worst:.1e} of their range; the last is read before the final norm",
        worst < most_different(model),
    )


def logits_check(model: Model) -> Finding:
    """Compare the logits of the engine with those of the whole model, which may scale or bend what its head gives."""
    worst = logits_difference(model)
    return Finding("logits", f"equal Hugging Face's to {worst:.1e} of the largest", not worst > most_different(model))
