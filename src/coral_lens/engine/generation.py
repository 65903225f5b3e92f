"""Let the model write: batched answers to prompts, greedy or sampled, for baselines that read what a model says.

Every (prompt, sample) has a random stream of its own, seeded by its text and number: an answer does not depend on the other
prompts or on the batch (but for rounding). Chat templates are the caller's business, and the tokenizer is left
as it is: padding is done here, before what prompts do not share, under an attention mask.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.engine._kernels import fused, grouped_attention
from coral_lens.engine.draws import NextToken, stream_of
from coral_lens.engine.in_use import in_use
from coral_lens.engine.prompts import encode, prefix_token
from coral_lens.engine.settings import GenerationSettings
from coral_lens.engine.trees import common_length
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


CACHE_BYTES = 2**31
"""Keys and values of the answers that are written at a time."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer."""

    text: str
    """Without the prompt, special tokens, and the stop string and what follows it."""
    tokens: tuple[int, ...]
    """What was generated, without the token that ended it."""
    finished: bool
    """False where the answer was cut at the limit."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Draft:
    """An answer while it is being written."""

    prompt: int
    ids: tuple[int, ...]
    stream: int
    """What its random numbers begin with."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False


def generate_answers(
    model: Model,
    texts: Sequence[str],
    *,
    settings: GenerationSettings,
    stop: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> list[list[Generated]]:
    """Return `n_samples` answers to each text; an answer ends at an end token or where it contains a `stop` string.

    `progress` is told how many prompts have been answered. A prompt that leaves no room for an answer loses its beginning.
    """
    if not model.projections:
        raise CoralError(f"{model.name!r} has no attention, and answers cannot be generated with such models.")
    ids = prompt_ids(model, texts, settings.max_new_tokens)
    answers: list[list[Generated]] = [[] for _ in texts]
    for batch in batches(ids, settings, border=model.rope_border, tokens=CACHE_BYTES // model.cache_bytes):
        drafts = [
            Draft(prompt, ids[prompt], stream_of(texts[prompt], sample, settings.seed))
            for prompt in batch
            for sample in range(settings.first_sample, settings.first_sample + settings.n_samples)
        ]
        with in_use(model), fused(model.hf):
            write(model, drafts, settings, stop)
        for draft in drafts:
            answers[draft.prompt].append(Generated(draft.text, tuple(draft.tokens), draft.finished))
        if progress is not None:
            progress(len(batch))
    return answers


def prompt_ids(model: Model, texts: Sequence[str], room: int) -> list[tuple[int, ...]]:
    """Return the token ids of the prompts, cut on the left where they leave less than `room` tokens."""
    limit = model.max_length - room
    if limit < 1:
        raise CoralError(f"max_new_tokens must be below the model's length, {model.max_length}. Got {room} instead.")
    encoded = encode(list(dict.fromkeys(texts)), model)
    ids = [encoded[text] or (prefix_token(model),) for text in texts]
    if n_long := sum(len(i) > limit for i in ids):
        warnings.warn(
            f"{n_long} of {len(ids)} prompts are longer than {limit} tokens and lost their beginning.", stacklevel=3
        )
    return [i[-limit:] for i in ids]


def batches(
    ids: Sequence[tuple[int, ...]], settings: GenerationSettings, *, border: int | None = None, tokens: int = 2**40
) -> Iterator[list[int]]:
    """Yield prompt numbers, prompts of like length together and the longest first; no more than fill `tokens`.

    A prompt whose answer may reach beyond `border` comes alone, for models (LongRoPE) in which the longest sequence of a
    batch changes how all of it is computed.
    """
    order = sorted(range(len(ids)), key=lambda i: (-len(ids[i]), i))
    crossing = [i for i in order if border is not None and len(ids[i]) + settings.max_new_tokens > border]
    yield from ([i] for i in crossing)
    order = order[len(crossing) :]
    start = 0
    while start < len(order):
        longest = len(ids[order[start]]) + settings.max_new_tokens
        size = max(1, min(settings.batch_size, tokens // longest) // settings.n_samples)
        yield order[start : start + size]
        start += size


# ------------------------------------------------------------------------------------------------------------ writing


@torch.inference_mode()
def write(model: Model, drafts: Sequence[Draft], settings: GenerationSettings, stop: Sequence[str]) -> None:
    """Write drafts to their end; those of one prompt come one after the other.

    Drafts of a prompt are one row of the model as long as they say the same: nothing is read twice.
    """
    ends = end_tokens(model)
    prompts = [draft.ids for draft in drafts[:: settings.n_samples]]
    reading = Reading(model, prompts, room=settings.max_new_tokens)
    logits = reading.first()
    # unfinished drafts, each with its row
    going = [(draft, i // settings.n_samples) for i, draft in enumerate(drafts)]
    for step in range(settings.max_new_tokens):
        coming = [NextToken.after(row, settings.temperature) for row in logits]
        for draft, row in going:
            extend(draft, coming[row].draw(draft.stream, step), model, ends, stop)
        going = [(draft, row) for draft, row in going if not draft.finished]
        if not going or step == settings.max_new_tokens - 1:
            return
        said = [(row, draft.tokens[-1]) for draft, row in going]
        rows = {pair: i for i, pair in enumerate(dict.fromkeys(said))}
        logits = reading.next([row for row, _ in rows], [token for _, token in rows])
        going = [(draft, rows[pair]) for (draft, _), pair in zip(going, said, strict=True)]


def end_tokens(model: Model) -> set[int]:
    """Return the tokens that end an answer: those of the model's generation settings and the tokenizer's own."""
    known = getattr(model.hf.generation_config, "eos_token_id", None)
    listed = known if isinstance(known, list) else [known]
    return {int(token) for token in (*listed, model.tokenizer.eos_token_id) if token is not None}


def extend(draft: Draft, token: int, model: Model, ends: set[int], stop: Sequence[str]) -> None:
    """Add a token to a draft, and end it where the token or a stop string says so."""
    if token in ends:
        draft.finished = True
        return
    draft.tokens.append(token)
    draft.text = str(model.tokenizer.decode(draft.tokens, skip_special_tokens=True))
    ends_at = [at for at in (draft.text.find(s) for s in stop) if at >= 0]
    if ends_at:
        draft.text, draft.finished = draft.text[: min(ends_at)], True


def shared_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all prompts begin with, leaving at least one of each: its logits are wanted."""
    return common_length(min(prompts), max(prompts)) if len(prompts) > 1 else 0


class Reading:
    """What the model has read: prompts padded on the left, and then one token of each answer at a time.

    What all prompts begin with is read once, and the padding then stands between it and the rest. Where a model would take that
    amiss, nothing is shared.
    """

    def __init__(self, model: Model, prompts: Sequence[tuple[int, ...]], *, room: int) -> None:
        from transformers import DynamicCache

        self._model = model
        self._body = model.hf.base_model
        self._cache = DynamicCache(config=model.hf.config)
        n_shared = shared_length(prompts) if model.takes_gaps(max(map(len, prompts)) + room) else 0
        self._shared, self._rest = prompts[0][:n_shared], [p[n_shared:] for p in prompts]
        self._mask = torch.ones(1, n_shared, dtype=torch.int64)
        # families without position ids (ALiBi) count the mask themselves
        self._takes_positions = "position_ids" in inspect.signature(self._body.forward).parameters

    def first(self) -> Float[Tensor, "row vocabulary"]:
        """Read the prompts and return the logits of the first token of an answer to each."""
        if self._shared:
            self._step(torch.tensor([self._shared]))
            self._cache.batch_repeat_interleave(len(self._rest))
        width = max(map(len, self._rest))
        ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in self._rest])
        padded = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in self._rest])
        self._mask = torch.cat([self._mask.expand(len(ids), -1), padded], dim=1)
        return self._step(ids)

    def next(self, rows: list[int], tokens: list[int]) -> Float[Tensor, "row vocabulary"]:
        """Go on from these rows, of which one may be named twice, with a token each, and return their next logits."""
        if rows != list(range(len(self._mask))):
            self._cache.batch_select_indices(torch.tensor(rows))
            self._mask = self._mask[rows]
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        with grouped_attention(self._model.hf) if self._model.attends_in_blocks else nullcontext():
            return self._step(torch.tensor(tokens)[:, None])

    def _step(self, ids: Int[Tensor, "row token"]) -> Float[Tensor, "row vocabulary"]:
        device = self._model.device
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        extra: dict[str, Any] = {"position_ids": positions.to(device)} if self._takes_positions else {}
        out = self._body(
            input_ids=ids.to(device),
            attention_mask=self._mask.to(device),
            past_key_values=self._cache,
            use_cache=True,
            **extra,
        )
        return self._model.logits(out.last_hidden_state[:, -1]).cpu()
