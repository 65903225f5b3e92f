"""What an extraction will take, reckoned without a model: tokens, hours, bytes, shards and money.

Tokens are reckoned from characters, operations from tokens and from the shape of the model, time from how fast a device
multiplies when it has nothing else to do. Of a case that is only described, everything may be said by hand. It is an order of
magnitude, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from coral_lens.errors import CoralError, nearest
from coral_lens.records import Question
from coral_lens.storage.settings import Count, Range, Settings, docs_of, refuse_wrong

if TYPE_CHECKING:
    from coral_lens.engine.loading import Outline

CHARACTERS = 4.0
"""Characters of a token, about."""
EFFICIENCY = 0.6
"""Of a matrix product's speed, what whole passes and trainings reach."""
BLOCK = 12
"""Weights of a block, about, in units of its width squared: four matrices of attention, and two of four times the width."""
VOCABULARY = 32_000
"""Tokens that a model knows, where nobody says how many."""
ROW_FACTS = 4 * 8 + 2
"""Bytes of an option beside its states: its score and its lengths, and its share of the number of its question."""
DIGEST_BYTES = 80
"""Of a line of the journal for each tensor."""
OTHER_TENSORS = 5
"""Tensors of a shard beside one for each layer."""
PROMPT_BYTES = 1500
"""Memory of the process that plans, for each question, about (`python bench/memory.py` measures it)."""


@dataclass(frozen=True)
class Case(Settings):
    """An extraction, described."""

    questions: Count = 1_000_000
    """Questions."""
    options: Annotated[float, Range(1)] = 4.0
    """Options of a question."""
    tokens: Annotated[float, Range(1)] = 150.0
    """Tokens of a question with all its options, what all questions begin with counted once for all."""
    layers: Count = 32
    """Blocks of the model."""
    width: Count = 4096
    """Width of its states."""
    block: Annotated[float, Range(above=0)] | None = None
    """Weights of a block; by default 12 times the squared width."""
    context: Annotated[float, Range(0)] = 150.0
    """Tokens that a token looks back at, on average; worked examples count."""
    scored: Annotated[float, Range(0)] = 12.0
    """Tokens of a question's options, which the vocabulary head scores."""
    head: Annotated[float, Range(above=0)] | None = None
    """Weights of the vocabulary head; by default 32,000 times the width."""
    kept: Count | None = None
    """Layers that are kept; by default all, and the embeddings."""
    places: Count = 1
    """Places of an option at which states are read, as `--read` names them."""
    devices: Count = 1
    """GPUs, or processes, that compute at once."""
    speed: Annotated[float, Range(above=0)] = 1.0
    """Operations that each really does in a second, in units of 10**12."""
    price: Annotated[float, Range(0)] = 0.0
    """Of a device for an hour."""


@dataclass(frozen=True)
class Reckoned:
    """What a case takes."""

    case: Case
    n_tokens: float
    device_hours: float
    n_bytes: int
    """Of the store."""
    n_shards: int
    journal_bytes: int
    memory: int
    """Of the process that plans, for prompts."""

    @property
    def hours(self) -> float:
        """By the clock, if every device is always busy."""
        return self.device_hours / self.case.devices

    @property
    def price(self) -> float:
        """Of all devices."""
        return self.device_hours * self.case.price

    @property
    def price_per_million(self) -> float:
        """For each million questions."""
        return self.price * 1e6 / self.case.questions

    @property
    def bytes_per_second(self) -> float:
        """That all devices together write to the shared disk."""
        return self.n_bytes / (self.hours * 3600)

    @property
    def shards_per_second(self) -> float:
        """That all devices together finish."""
        return self.n_shards / (self.hours * 3600)


def reckon(case: Case, *, shard_bytes: int, bare_row_bytes: int) -> Reckoned:
    """Reckon what a case takes; shards are cut as `extract` cuts them."""
    kept = case.layers + 1 if case.kept is None else case.kept
    rows = case.questions * case.options
    n_tokens = case.questions * case.tokens
    states = 2 * case.width * kept * case.places
    n_shards = max(1, round(rows * max(states, 0 if states else bare_row_bytes) / shard_bytes))
    return Reckoned(
        case,
        n_tokens=n_tokens,
        device_hours=operations(case) / (case.speed * 1e12) / 3600,
        n_bytes=round(rows * (states + ROW_FACTS)),
        n_shards=n_shards,
        journal_bytes=n_shards * DIGEST_BYTES * (kept * case.places + OTHER_TENSORS),
        memory=case.questions * PROMPT_BYTES,
    )


def operations(case: Case) -> float:
    """Return the multiplications and additions of a case: products with weights, attention, and the vocabulary head."""
    weights = 2 * (case.block or BLOCK * case.width**2)
    attention = 4 * case.width * case.context
    head = 2 * (case.head or VOCABULARY * case.width)
    return case.questions * (case.tokens * case.layers * (weights + attention) + case.scored * head)


# ----------------------------------------------------------------------------------------------------- describing

WHOLE = ("questions", "layers", "width", "kept", "places", "devices")
"""Facts that are counted."""


def described(texts: Sequence[str], known: Case) -> Case:
    """Return a case in which what `key=value` says replaces what is known."""
    values = dict(map(read_fact, texts))
    refuse_wrong(Case, values)
    return replace(known, **values)


def read_fact(text: str) -> tuple[str, Any]:
    """Return the key and number of `questions=1000000`."""
    key, equals, value = (part.strip() for part in text.partition("="))
    facts = docs_of(Case)
    if not equals or key not in facts:
        raise CoralError(
            f"--case must look like questions=1000000, with one of {', '.join(facts)}. Got {text!r} instead."
            f"{nearest(key, facts)}"
        )
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        raise CoralError(f"--case {key} must be a number. Got {value!r} instead.") from None
    if key in WHOLE and number != number // 1:  # neither is what is no number, or infinite
        raise CoralError(f"--case {key} must be a whole number. Got {value!r} instead.")
    return key, int(number) if key in WHOLE else number


def known_case(
    questions: Sequence[Question], outline: Outline | None, *, kept: int | None, device: str, places: int = 1
) -> Case:
    """Return the case of questions and a model that are at hand, on this machine; what is not is as in the defaults."""
    case = Case(speed=EFFICIENCY * machine_speed(device) / 1e12, kept=kept, places=places)
    if questions:
        n = len(questions)
        options = [option for q in questions for option in q.options]
        context = sum(map(len, map(context_of, questions))) / CHARACTERS / n
        scored = sum(map(len, options)) / CHARACTERS / n
        tokens = max(1.0, tokens_of(questions) / n)
        case = replace(case, questions=n, options=len(options) / n, tokens=tokens, context=context, scored=scored)
    if outline:
        block, head = float(outline.block_parameters), float(outline.head_parameters)
        case = replace(case, layers=outline.n_layers, width=outline.width, block=block, head=head)
    return case


def context_of(question: Question) -> str:
    """Return what stands before the options of a question, about."""
    return question.rendered.contexts[0] if question.rendered else f"{question.passage}{question.text}"


def tokens_of(questions: Sequence[Question]) -> float:
    """Return the tokens of questions, about; each prefix that all of a task share is counted once."""
    by_task: dict[str | None, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    total = 0
    for mine in by_task.values():
        contexts = [context_of(q) for q in mine]
        shared = shared_beginning(contexts) if len(contexts) > 1 else 0
        total += shared + sum(len(context) - shared for context in contexts)
        total += sum(len(option) for q in mine for option in q.options)
    return total / CHARACTERS


def shared_beginning(texts: Sequence[str]) -> int:
    """Return how many characters all texts begin with: of the first and the last in order, which differ most."""
    first, last = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def machine_speed(device: str, *, seconds: float = 0.3) -> float:
    """Return the operations a second of matrix products on a device, as if it had nothing else to do.

    On a CPU one thread multiplies and is timed by the processor's clock, which stands still while others have the core; that
    times the threads is the machine. By the clock on the wall a busy machine would seem many times slower than it is: several
    threads wait for each other.
    """
    on_cpu, n_threads = torch.device(device).type == "cpu", torch.get_num_threads()
    clock = time.thread_time if on_cpu else time.perf_counter
    a = torch.rand(1024, 1024, device=device)
    try:
        if on_cpu:
            torch.set_num_threads(1)
        (a @ a).sum().item()
        n, start = 0, clock()
        while not n or clock() - start < seconds:
            (a @ a).sum().item()
            n += 1
        return n * 2 * 1024**3 / (clock() - start) * (n_threads if on_cpu else 1)
    finally:
        torch.set_num_threads(n_threads)
