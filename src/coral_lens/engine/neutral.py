"""Prompts that say nothing of their question: what an option is worth before anybody has asked. Never runs the model.

The log-probability of an option after such a prompt is subtracted by the base rule `pmi`: an option is then not likelier because
its words are frequent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coral_lens.engine.prompts import encode_pairs, fit_length
from coral_lens.records import Prompt, Rendered

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

CUE = re.compile(r"(?:\A|\n)([^\n]{1,40}:)\s*\Z")
"""A last line that asks for an answer, such as `Answer:`."""


def neutral_context(rendered: Rendered, model: Model) -> str:
    """Return what is left of a context without its question: the last line where it is a cue such as `Answer:`, else nothing.

    In a chat, a turn of the user that says `Answer:`.
    """
    if rendered.chat:
        return model.chat_template([{"role": "user", "content": "Answer:"}])
    cue = CUE.search(rendered.contexts[0])
    return cue[1] if cue else ""


def neutral_prompts(names: Sequence[str], rendered: Sequence[Rendered], model: Model) -> list[Prompt]:
    """Return for each question, by its name, the prompt of its options after a neutral context."""
    neutral = [
        Rendered((neutral_context(r, model),) * len(r.choices), r.continuations, r.choices, r.chat) for r in rendered
    ]
    pairs = encode_pairs(neutral, model)
    return [fit_length(name, of_one, model.max_length) for name, of_one in zip(names, pairs, strict=True)]
