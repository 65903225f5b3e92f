"""Questions whose answer the lens changed, for better and for worse, and how many there are. Chooses, never formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from coral_lens.records import Predictions
from coral_lens.report.runs import Evaluation

LONGEST = 700
"""Characters of a question that are shown. A longer one is cut in the middle: its beginning and what it asks stay."""


@dataclass(frozen=True, slots=True)
class ShownOption:
    """An option as it is shown."""

    text: str
    base: float
    steered: float
    correct: bool


@dataclass(frozen=True, slots=True)
class Example:
    """One question whose answer changed."""

    id: str
    text: str
    options: tuple[ShownOption, ...]
    before: int
    """Index of the option that the base model prefers."""
    after: int


@dataclass(frozen=True, slots=True)
class AnswerChanges:
    """What steering did to the answers of one task."""

    name: str
    still_right: int
    still_wrong: int
    """Wrong before and after, with the same or with another answer."""
    n_better: int
    n_worse: int
    better: tuple[Example, ...]
    """Where the probability of the correct option grew most."""
    worse: tuple[Example, ...]
    """Where it fell most."""


def answer_changes(evaluation: Evaluation, *, before: str, after: str, n_shown: int = 2) -> AnswerChanges | None:
    """Count the changes and pick the largest of each kind; None where the run lacks one of the methods."""
    if before not in evaluation.predictions or after not in evaluation.predictions:
        return None
    base, steered = evaluation.predictions[before], evaluation.predictions[after]
    was, now = (p.options.top(p.probs) for p in (base, steered))
    was_right, is_right = was == base.answers, now == base.answers
    rows = base.options.row(base.answers)
    gain = steered.probs[rows] - base.probs[rows]
    better, worse = np.flatnonzero(~was_right & is_right), np.flatnonzero(was_right & ~is_right)

    def shown(changed: Int[np.ndarray, " changed"], sign: float) -> tuple[Example, ...]:
        largest = changed[np.argsort(-sign * gain[changed], kind="stable")][:n_shown]
        return tuple(example_of(evaluation, int(i), (base, steered)) for i in largest)

    return AnswerChanges(
        name=evaluation.name,
        still_right=int((was_right & is_right).sum()),
        still_wrong=int((~was_right & ~is_right).sum()),
        n_better=len(better),
        n_worse=len(worse),
        better=shown(better, 1.0),
        worse=shown(worse, -1.0),
    )


def example_of(evaluation: Evaluation, i: int, pair: tuple[Predictions, Predictions]) -> Example:
    """Return question i as it is shown."""
    question = evaluation.questions[i]
    base, steered = (p.probs[p.options.of(i)] for p in pair)
    options = tuple(
        ShownOption(text, float(base[j]), float(steered[j]), j == question.answer)
        for j, text in enumerate(question.options)
    )
    return Example(question.id, shortened(question.text), options, int(base.argmax()), int(steered.argmax()))


def shortened(text: str, *, limit: int = LONGEST) -> str:
    """Return the question without the words that frame it in a prompt, cut in the middle where it is long."""
    text = text.strip().removeprefix("Question:").removesuffix("Answer:").strip()
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3].rstrip()} […] {text[-2 * limit // 3 :].lstrip()}"
