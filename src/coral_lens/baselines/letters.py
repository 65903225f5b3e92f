"""Questions whose options are listed in the prompt under letters, which are what is scored: asking them again in another order,
or without content. Worked examples before the question stay as they are. Never scores.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coral_lens.errors import CoralError
from coral_lens.listing import LABEL, Listed, take_apart
from coral_lens.records import UNKNOWN, Question, Style

CONTENT_FREE = "N/A"


def listed(question: Question) -> Listed | None:
    """Return the parts of a task's question, or None where its options are not listed under the letters that are scored."""
    rendered = question.rendered
    assert rendered is not None, "own questions need not be taken apart"
    letters = string.ascii_uppercase[: len(question.options)]
    scored = [c.strip() for c in rendered.continuations]
    if scored != list(letters) or len(set(rendered.contexts)) > 1 or question.text not in rendered.contexts[0]:
        return None
    return take_apart(question.text, len(letters))


def is_listed(question: Question, style: Style) -> bool:
    """Whether the options of a question are listed under letters, and letters are scored."""
    return listed(question) is not None if question.rendered else style.kind == "letters"


def refuse_texts(questions: Sequence[Question], style: Style, _: Any) -> None:
    """Refuse questions whose option texts are scored: they know no preference for a letter."""
    for question in questions:
        if not is_listed(question, style):
            raise CoralError(
                f"Remedies of letter bias need options that are listed in the prompt and scored by letter, but question "
                f"{question.id!r} of {question.task} is not asked so; leave the method out, or use a task such as "
                "commonsense_qa or mmlu, or own questions in the style letters."
            )


def reordered(question: Question, shift: int) -> Question:
    """Return the question with its options moved up by `shift` places: the one that was number j comes to j - shift."""
    n = len(question.options)
    order = [(j + shift) % n for j in range(n)]
    moved = replace(
        question,
        id=f"{question.id} shifted by {shift}",
        answer=question.answer if question.answer == UNKNOWN else order.index(question.answer),
    )
    parts = listed(question) if question.rendered else None
    if parts is None:
        return replace(moved, options=tuple(question.options[i] for i in order))
    return rewritten(moved, replace(parts, texts=tuple(parts.texts[i] for i in order)))


def without_content(question: Question) -> Question:
    """Return the question with N/A in place of its text and of every option."""
    parts = listed(question) if question.rendered else None
    if parts is None:
        nothing = (CONTENT_FREE,) * len(question.options)
        passage = CONTENT_FREE if question.passage else ""
        return replace(question, text=CONTENT_FREE, options=nothing, passage=passage)
    label = found[0] if (found := LABEL.match(parts.stem)) else ""
    texts = (CONTENT_FREE,) * len(parts.texts)
    return rewritten(question, replace(parts, stem=label + CONTENT_FREE, texts=texts))


def rewritten(question: Question, parts: Listed) -> Question:
    """Return a task's question with another text, in its prompt too."""
    assert question.rendered is not None
    text = parts.text()
    # the last occurrence: a worked example may hold the same words
    before, _, after = question.rendered.contexts[0].rpartition(question.text)
    contexts = (before + text + after,) * len(question.options)
    return replace(question, text=text, rendered=replace(question.rendered, contexts=contexts))
