"""From Question to Prompt: the exact strings, then the exact token ids, that lm-eval would send. Never runs the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coral_lens.data.settings import Style
from coral_lens.data.wording import BETWEEN, put_into_words
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


TOKENIZER_BATCH = 4096
"""Texts that the tokenizer is given at once."""
QUESTIONS_AT_A_TIME = 128
"""Questions whose strings are in memory at once."""


def render(question: Question, style: Style, model: Model | None) -> Rendered:
    """Return the strings to score: the task's own where it brings a template, else made by the style.

    What a question is in words says `data.wording`; here its worked examples and the system prompt come before it. Only a chat
    template needs the model.
    """
    if question.rendered is not None:
        return question.rendered
    turn = put_into_words(question, style)
    shots = [(put_into_words(shot, style), shot.answer) for shot in question.shots]
    if style.chat:
        assert model is not None, "a chat template is a model's"
        messages = [{"role": "system", "content": style.system}] if style.system else []
        for shot, answer in shots:
            messages += [
                {"role": "user", "content": shot.asked},
                {"role": "assistant", "content": shot.choices[answer].strip()},
            ]
        context = model.chat_template([*messages, {"role": "user", "content": turn.asked}])
    else:
        before = [style.system] if style.system else []
        context = BETWEEN.join([*before, *(shot.answered(answer) for shot, answer in shots), turn.asked])
    # as lm-eval does it: in a chat the delimiter is dropped, because the template ends the user's turn
    delimiter = "" if style.chat else turn.delimiter
    choices = tuple(choice.strip() for choice in turn.choices) if style.template else turn.choices
    scored = choices if style.chat else turn.choices
    return Rendered((context,) * len(scored), tuple(delimiter + c for c in scored), choices, chat=style.chat)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Questions that can be asked, with their strings and token ids, and why others cannot."""

    questions: tuple[Question, ...]
    rendered: tuple[Rendered, ...]
    prompts: tuple[Prompt, ...]
    left_out: dict[str, str]
    """By question id, the reason in one sentence."""


def prepare(questions: Sequence[Question], style: Style, model: Model, *, listed: bool = False) -> Prepared:
    """Render and tokenise questions; one that cannot be asked is left out by name, and does not stop the others.

    Where none is left, that is an error. `listed`: prompts also say where they list their options.
    """
    prepared = prepare_any(questions, style, model, listed=listed)
    if not prepared.questions:
        reason = next(iter(prepared.left_out.values()), "check the file, the split and the limit.")
        raise CoralError(f"There are no questions to score: {reason}")
    return prepared


def prepare_any(questions: Sequence[Question], style: Style, model: Model, *, listed: bool = False) -> Prepared:
    """Render and tokenise questions as `prepare` does; where none can be asked, none is left."""
    asked: list[tuple[Question, Rendered]] = []
    left_out: dict[str, str] = {}
    for question in questions:
        try:
            asked.append((question, render(question, style, model)))
        except CoralError as error:
            left_out[question.id] = str(error)
    kept: list[tuple[Question, Rendered, Prompt]] = []
    for (question, rendered), pairs in zip(asked, encode_pairs([r for _, r in asked], model), strict=True):
        try:
            kept.append((question, rendered, fit_length(question.id, pairs, model.max_length)))
        except CoralError as error:
            left_out[question.id] = str(error)
    prepared = Prepared(tuple(k[0] for k in kept), tuple(k[1] for k in kept), tuple(k[2] for k in kept), left_out)
    return with_listings(prepared, model) if listed else prepared


def with_listings(prepared: Prepared, model: Model) -> Prepared:
    """Return the same with the places of listed options; a question whose list does not fit is left out."""
    from coral_lens.engine.listings import find_listings, last_listed

    last = [last_listed(question) for question in prepared.questions]
    found, left_out = find_listings(last, prepared.rendered, prepared.prompts, model)
    kept = [i for i, q in enumerate(prepared.questions) if q.id not in left_out]
    questions, rendered = tuple(prepared.questions[i] for i in kept), tuple(prepared.rendered[i] for i in kept)
    return Prepared(questions, rendered, tuple(found), prepared.left_out | left_out)


def tokenize(questions: Sequence[Question], rendered: Sequence[Rendered], model: Model) -> list[Prompt]:
    """Return the token ids of each question; one that cannot be asked is an error."""
    encoded = encode_pairs(rendered, model)
    return [fit_length(q.id, pairs, model.max_length) for q, pairs in zip(questions, encoded, strict=True)]


Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


def encode_pairs(rendered: Sequence[Rendered], model: Model) -> Iterator[Pairs]:
    """Yield the context and option ids of each question, as lm-eval's HFLM encodes (context, continuation) pairs.

    lm-eval moves the context's trailing white space to the continuation, encodes the context and the whole string, and
    takes what the whole has beyond the context's length. Questions are encoded some at a time, because the strings of all
    options are several times as long as what is kept of them; among those, every distinct string is encoded once.
    """
    for start in range(0, len(rendered), QUESTIONS_AT_A_TIME):
        yield from encode_chunk(rendered[start : start + QUESTIONS_AT_A_TIME], model)


def encode_chunk(rendered: Sequence[Rendered], model: Model) -> Iterator[Pairs]:
    """Yield the context and option ids of each question; the ids of all their strings are held at once."""
    pairs = [[shift_space(c, o) for c, o in zip(r.contexts, r.continuations, strict=True)] for r in rendered]
    texts = dict.fromkeys(t for row in pairs for c, o in row for t in ((c, c + o) if c else ()))
    ids = encode(list(texts), model)
    bare = dict.fromkeys(o for row in pairs for c, o in row if not c)
    bare_ids = encode(list(bare), model, special=False)
    for row in pairs:
        yield [(ids[c], ids[c + o][len(ids[c]) :]) if c else after_prefix(bare_ids[o], model) for c, o in row]


def shift_space(context: str, continuation: str) -> tuple[str, str]:
    """Move the context's trailing white space to the front of the continuation."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def encode(texts: list[str], model: Model, *, special: bool | None = None) -> dict[str, tuple[int, ...]]:
    """Encode texts in batches, with the tokenizer's default special tokens unless the text already begins with BOS."""
    ids_of: dict[str, tuple[int, ...]] = {}
    seen: dict[int, int] = {}
    for batch, extra in tokenizer_calls(texts, model, special=special):
        encoded = model.tokenizer(batch, return_attention_mask=False, verbose=False, **extra)["input_ids"]
        # one object for each number that occurs, however often it does: a tuple then takes a fifth of the memory
        ids_of.update((text, tuple(map(seen.setdefault, ids, ids))) for text, ids in zip(batch, encoded, strict=True))
    return ids_of


def tokenizer_calls(
    texts: list[str], model: Model, *, special: bool | None = None
) -> Iterator[tuple[list[str], dict[str, bool]]]:
    """Yield the texts that the tokenizer is given at once, and how they are encoded."""
    bos = str(model.tokenizer.decode([prefix_token(model)]))
    for marked in (False, True):
        alike = [t for t in texts if (special is None and t.startswith(bos)) == marked]
        extra = {"add_special_tokens": False} if marked or special is False else {}
        for start in range(0, len(alike), TOKENIZER_BATCH):
            yield alike[start : start + TOKENIZER_BATCH], extra


def prefix_token(model: Model) -> int:
    """Return the token that stands for an empty context: BOS, or EOS where there is none."""
    tokenizer = model.tokenizer
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise CoralError(f"The tokenizer of {model.name!r} has neither a BOS nor an EOS token.")
    return int(token)


def after_prefix(ids: tuple[int, ...], model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give an empty context its stand-in token, unless the continuation already begins with it."""
    prefix = prefix_token(model)
    return (ids[:1], ids[1:]) if ids and ids[0] == prefix else ((prefix,), ids)


def fit_length(name: str, pairs: Pairs, limit: int) -> Prompt:
    """Cut on the left what exceeds the model's length, exactly as lm-eval does: limit + 1 tokens stay, the last unread."""
    contexts, options = [], []
    for number, (context, option) in enumerate(pairs, start=1):
        if not option:
            raise CoralError(f"Question {name!r}: option {number} has no tokens of its own; change its text.")
        if len(option) > limit:
            raise CoralError(
                f"Question {name!r}: option {number} has {len(option)} tokens, but the model reads {limit} at most."
            )
        room = limit + 1 - len(option)
        contexts.append(context if len(context) <= room else context[-room:])
        options.append(option)
    truncated = any(len(c) < len(pair[0]) for c, pair in zip(contexts, pairs, strict=True))
    shared = contexts[0] if all(c == contexts[0] for c in contexts) else None
    return Prompt(name, tuple(shared or c for c in contexts), tuple(options), truncated)
