"""Score lm-eval's requests through the engine: log-probabilities, greedy flags and, for a lens, pooled states.

The strings are lm-eval's own and are encoded as its HFLM encodes them, so the numbers are HFLM's; but options share their
context here, and it is computed once. Never decides what to answer: see `model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from coral_lens.engine.budget import WORTH_TIMING, choose_budget
from coral_lens.engine.hooks import Reader
from coral_lens.engine.in_use import in_use
from coral_lens.engine.listings import find_listings
from coral_lens.engine.neutral import neutral_prompts
from coral_lens.engine.packing import Packing, Plan, plan_for
from coral_lens.engine.prompts import encode_pairs, fit_length
from coral_lens.engine.readers import FinalStates, PooledResidual, layer_name
from coral_lens.engine.scoring import TOKEN_BUDGET, ScoredBatch, score
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.settings import StatePlace
from coral_lens.engine.shard_work import score_once
from coral_lens.errors import CoralError
from coral_lens.harness.requests import Pair, choices_of
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, OptionTable, Prompt, Question, Rendered
from coral_lens.storage.shards import compact

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


OptionRequests = tuple[Pair, ...]
"""The requests of one question, option by option; or a single request that stands for itself."""


@dataclass(frozen=True)
class ScoredRequests:
    """Scored questions, in the shape in which a lens reads a store (records.Scored)."""

    table: OptionTable
    """Answers are unknown: requests do not tell them."""
    greedy: Bool[np.ndarray, " row"]
    """Whether the model itself, taking the likeliest token each time, would write the option."""
    states: Mapping[str, Float[np.ndarray, "row width"]]
    """By layer and place, as a store names them."""
    layers: tuple[int, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states."""
        return self.states[layer_name(layer, place)]


@dataclass(frozen=True, slots=True)
class Shape:
    """How prompts are laid out: what a store records in its manifest."""

    packing: Packing
    token_budget: int


def choose_shape(model: Model) -> Shape:
    """Return how this model is scored on this machine, by the rules of an activation store."""
    packing = packing_of(model)
    # how many questions lm-eval will ask is not known: a benchmark, mostly
    return Shape(packing, choose_budget(model, WORTH_TIMING) if packing == "tree" else TOKEN_BUDGET)


def score_requests(
    model: Model,
    questions: Mapping[OptionRequests, str],
    shape: Shape,
    *,
    layers: tuple[int, ...] = (),
    read: tuple[StatePlace, ...] = ("answer",),
    neutral: bool = False,
    exits: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ScoredRequests:
    """Score questions, each with a name for errors; `progress` is told how many more are done.

    The states of `layers` are rounded as a store rounds them: a lens sees the same. `exits`: nothing above them is computed,
    so that there are no scores, and nothing is known of what the model would write.
    """
    rendered = [rendered_requests(requests) for requests in questions]
    encoded = zip(questions.values(), encode_pairs(rendered, model), strict=True)
    prompts = [fit_length(name, pairs, model.max_length) for name, pairs in encoded]
    if "listed" in read:
        prompts = with_lists(prompts, rendered, model)
    warn_truncated(prompts)
    plan = plan_for(prompts, token_budget=shape.token_budget, packing=shape.packing, border=model.rope_border)
    options = Options.of_sizes([len(p.options) for p in prompts])
    logprobs, greedy = np.zeros(options.n_rows), np.zeros(options.n_rows, dtype=bool)
    names = [layer_name(layer, place) for place in read for layer in layers]
    states = {name: torch.zeros(options.n_rows, model.width) for name in names}
    pooled: list[Reader] = [PooledResidual(layers, place) for place in read] if layers else []
    readers = pooled if exits else [FinalStates(), *pooled]
    for scored in score(model, prompts, plan, readers=readers, last=max(layers) if exits else None):
        rows = options.rows_of(scored.batch.questions)
        logprobs[rows] = scored.logprobs.numpy()
        if not exits:
            greedy[rows] = greedy_options(model, scored)
        for name in names:
            states[name][torch.from_numpy(rows)] = scored.readings[name]
        if progress:
            progress(len(scored.batch.questions))
    choices = [choice for r in rendered for choice in r.choices]
    table = OptionTable(
        logprobs=logprobs,
        n_tokens=np.array([len(ids) for p in prompts for ids in p.options]),
        n_chars=np.array([len(choice) for choice in choices]),
        n_bytes=np.array([len(choice.encode()) for choice in choices]),
        offsets=options.edges,
        answers=np.full(len(prompts), UNKNOWN),
        neutral=score_neutral(model, questions.values(), rendered, shape) if neutral else None,
    )
    return ScoredRequests(table, greedy, {name: compact(s).float().numpy() for name, s in states.items()}, layers)


def score_neutral(
    model: Model, names: Iterable[str], rendered: Sequence[Rendered], shape: Shape
) -> Float[np.ndarray, " row"]:
    """Return the log-probabilities of options after a neutral context."""

    def plan(prompts: Sequence[Prompt]) -> Plan:
        return plan_for(prompts, token_budget=shape.token_budget, packing=shape.packing, border=model.rope_border)

    return score_once(model, neutral_prompts(list(names), rendered, model), plan).numpy()


def with_lists(prompts: Sequence[Prompt], rendered: Sequence[Rendered], model: Model) -> list[Prompt]:
    """Return the prompts with the places of their listed options; one whose list does not fit is an error."""
    found, broken = find_listings(["" for _ in prompts], rendered, prompts, model)
    for reason in broken.values():
        raise CoralError(reason)
    return found


def rendered_requests(requests: OptionRequests) -> Rendered:
    """Return the strings of a question."""
    continuations = tuple(continuation for _, continuation in requests)
    return Rendered(tuple(context for context, _ in requests), continuations, choices_of(continuations))


def warn_truncated(prompts: Sequence[Prompt]) -> None:
    """Say how many prompts were too long."""
    n_cut = sum(p.truncated for p in prompts)
    if n_cut:
        message = f"{n_cut} of {len(prompts)} prompts were longer than the model reads and were cut on the left."
        warnings.warn(message, stacklevel=3)


@torch.inference_mode()
def greedy_options(model: Model, scored: ScoredBatch) -> Bool[np.ndarray, " option"]:
    """Return which options are what the model itself would write.

    Few options begin with the likeliest token, and the rest of these alone is looked at: the vocabulary head, which costs
    most, runs about once per question.
    """
    batch, final = scored.batch, scored.readings["final"]
    starts, ends = batch.answer_offsets[:-1], batch.answer_offsets[1:]
    # options with the same last context token are predicted from one state
    _, first, stem = np.unique(batch.stems.numpy(), return_index=True, return_inverse=True)
    likeliest = likeliest_tokens(model, final[starts[torch.from_numpy(first)]])[torch.from_numpy(stem)]
    greedy = likeliest == batch.targets[starts]
    for option in greedy.nonzero().flatten().tolist():
        rest = slice(int(starts[option]) + 1, int(ends[option]))
        if rest.start < rest.stop:
            greedy[option] = bool((likeliest_tokens(model, final[rest]) == batch.targets[rest]).all())
    return greedy.numpy()


def likeliest_tokens(model: Model, states: Tensor) -> Tensor:
    """Return the token that the vocabulary head likes best after each normed state."""
    with in_use(model):
        return model.logits(states.to(model.device)).argmax(dim=-1).cpu()
