"""Where the options of a question stand listed in its prompt, in characters and in tokens. Never runs the model.

Tasks such as CommonsenseQA and MMLU list their options under letters and score the letters. What a model makes of an option's
text is then to be found in the list, and is computed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coral_lens.engine.prompts import render, shift_space, tokenizer_calls
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered, take_apart

if TYPE_CHECKING:
    from coral_lens.data.settings import Style
    from coral_lens.engine.model import Model

Span = tuple[int, int]
"""From where, and up to where."""


def listed_in(context: str, rendered: Rendered, last: str = "") -> tuple[Span, ...]:
    """Return the characters of each option's text in a context that ends in a list of them; nothing where it lists none.

    The letters of the list must be what is scored. `last` is the text of the last option where it is known: whatever follows the
    list, such as the end of a chat's turn, is then no part of it.
    """
    wording = take_apart(context, rendered.choices)
    spans, at = [], len(wording.label) + len(wording.stem)
    for text in wording.listed:
        start = at + len("\nA") + len(wording.mark)
        at = start + len(text)
        spans.append((start, at))
    if spans:
        start, stop = spans[-1]
        text = context[start:stop]
        spans[-1] = (start, start + len(last if last and text.startswith(last) else text.partition("\n")[0]))
    return tuple(spans) if all(start < stop for start, stop in spans) else ()


def context_of(rendered: Rendered) -> str:
    """Return what all options come after; nothing where each has a context of its own."""
    return shift_space(rendered.contexts[0], "")[0] if len(set(rendered.contexts)) == 1 else ""


def lists_options(question: Question, style: Style, model: Model) -> bool:
    """Return whether the prompt of a question lists its options under the letters that are scored."""
    try:
        rendered = render(question, style, model)
    except CoralError:  # it is left out by name when it is asked
        return False
    return bool(listed_in(context_of(rendered), rendered))


def last_listed(question: Question) -> str:
    """Return the text of a question's last option."""
    return (question.wording.listed or question.options)[-1].strip()


def find_listings(
    last: Sequence[str], rendered: Sequence[Rendered], prompts: Sequence[Prompt], model: Model
) -> tuple[list[Prompt], dict[str, str]]:
    """Return the prompts with the tokens of their listed options, if they list any, and why others cannot be read.

    `last` are the texts of the last options, as far as they are known.
    """
    contexts = [context_of(r) for r in rendered]
    listed = [
        listed_in(context, r, text) if context else ()
        for text, context, r in zip(last, contexts, rendered, strict=True)
    ]
    tokens = encode_places([context for context, spans in zip(contexts, listed, strict=True) if spans], model)
    found, left_out = [], {}
    for prompt, context, spans in zip(prompts, contexts, listed, strict=True):
        try:
            found.append(replace(prompt, listed=token_spans(prompt, tokens[context], spans)) if spans else prompt)
        except CoralError as error:
            left_out[prompt.id] = str(error)
    return found, left_out


def encode_places(texts: Sequence[str], model: Model) -> dict[str, list[Span]]:
    """Return which characters each token of a text is of; the tokens are those that `prompts.encode` makes."""
    if texts and not getattr(model.tokenizer, "is_fast", False):
        raise CoralError(
            f"The tokenizer of {model.name!r} does not say which characters its tokens are of, so that listed options cannot be "
            "found; leave the read-out `listed` out."
        )
    places: dict[str, list[Span]] = {}
    for batch, extra in tokenizer_calls(list(dict.fromkeys(texts)), model):
        encoded = model.tokenizer(
            batch, return_attention_mask=False, verbose=False, return_offsets_mapping=True, **extra
        )
        places.update(zip(batch, encoded["offset_mapping"], strict=True))
    return places


def token_spans(prompt: Prompt, places: Sequence[Span], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the tokens of each option's text in its own context, which may have been cut on the left."""
    found = []
    for context, (start, stop) in zip(prompt.contexts, spans, strict=True):
        cut = len(places) - len(context)
        tokens = [i for i, (low, high) in enumerate(places) if low < stop and start < high and low < high]
        if not tokens or tokens[0] < cut:
            raise CoralError(
                f"Question {prompt.id!r}: its listed options do not fit into the {len(context)} tokens that are read of it."
            )
        found.append((tokens[0] - cut, tokens[-1] + 1 - cut))
    return tuple(found)
