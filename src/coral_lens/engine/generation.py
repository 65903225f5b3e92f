"""Let the model write: batched answers to prompts, greedy or sampled, for baselines that read what a model says.

Every (prompt, sample) has a random stream of its own, seeded by its text and number: an answer does not depend on the other
prompts or on the batch (but for rounding). Chat templates are the caller's business, and the tokenizer is left
as it is: padding is done here, before what prompts do not share, under an attention mask.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.engine._kernels import fused
from coral_lens.engine.in_use import in_use
from coral_lens.engine.prompts import encode, prefix_token
from coral_lens.engine.settings import GenerationSettings
from coral_lens.engine.trees import common_length
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


CACHE_BYTES = 2**32
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
    random: torch.Generator
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
            Draft(prompt, ids[prompt], stream(texts[prompt], sample, settings.seed))
            for prompt in batch
            for sample in range(settings.n_samples)
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


def stream(text: str, sample: int, seed: int) -> torch.Generator:
    """Return the random numbers of one sample of one prompt; a prompt that occurs twice gets the same ones."""
    key = hashlib.sha256(f"{seed}\n{sample}\n{text}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big", signed=True))


# ------------------------------------------------------------------------------------------------------------ writing


@torch.inference_mode()
def write(model: Model, drafts: Sequence[Draft], settings: GenerationSettings, stop: Sequence[str]) -> None:
    """Write drafts to their end; those of one prompt come one after the other and share the reading of it."""
    ends = end_tokens(model)
    prompts = [draft.ids for draft in drafts[:: settings.n_samples]]
    reading = Reading(model, prompts, room=settings.max_new_tokens)
    logits = reading.first(settings.n_samples)
    open_drafts = list(drafts)
    for step in range(settings.max_new_tokens):
        chosen = [choose(row, draft, settings.temperature) for row, draft in zip(logits, open_drafts, strict=True)]
        for draft, token in zip(open_drafts, chosen, strict=True):
            extend(draft, token, model, ends, stop)
        going = [i for i, draft in enumerate(open_drafts) if not draft.finished]
        if not going or step == settings.max_new_tokens - 1:
            return
        open_drafts = [open_drafts[i] for i in going]
        logits = reading.next(going, [draft.tokens[-1] for draft in open_drafts])


def end_tokens(model: Model) -> set[int]:
    """Return the tokens that end an answer: those of the model's generation settings and the tokenizer's own."""
    known = getattr(model.hf.generation_config, "eos_token_id", None)
    listed = known if isinstance(known, list) else [known]
    return {int(token) for token in (*listed, model.tokenizer.eos_token_id) if token is not None}


def choose(logits: Float[Tensor, " vocabulary"], draft: Draft, temperature: float) -> int:
    """Return the next token: the most probable one, or one drawn from the draft's own random numbers."""
    if temperature == 0:
        return int(logits.argmax())
    # a race of exponential clocks: unlike a draw from the cumulative sum, rounding of the logits hardly ever changes who wins
    clocks = torch.empty_like(logits).exponential_(generator=draft.random)
    return int((logits / temperature - clocks.log()).argmax())


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

    def first(self, n_samples: int) -> Float[Tensor, "answer vocabulary"]:
        """Read the prompts once and return the logits of the first token of each sample of each prompt."""
        if self._shared:
            self._step(torch.tensor([self._shared]))
            self._cache.batch_repeat_interleave(len(self._rest))
        width = max(map(len, self._rest))
        ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in self._rest])
        padded = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in self._rest])
        self._mask = torch.cat([self._mask.expand(len(ids), -1), padded], dim=1)
        logits = self._step(ids)
        self._cache.batch_repeat_interleave(n_samples)
        self._mask = self._mask.repeat_interleave(n_samples, dim=0)
        return logits.repeat_interleave(n_samples, dim=0)

    def next(self, going: list[int], tokens: list[int]) -> Float[Tensor, "answer vocabulary"]:
        """Drop the answers that are not in `going`, read one more token of the others, and return their next logits."""
        if len(going) < len(self._mask):
            self._cache.batch_select_indices(torch.tensor(going))
            self._mask = self._mask[going]
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        return self._step(torch.tensor(tokens)[:, None])

    def _step(self, ids: Int[Tensor, "answer token"]) -> Float[Tensor, "answer vocabulary"]:
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
