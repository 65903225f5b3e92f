"""From open questions to questions with options: the model writes candidates, equal ones are merged, known answers label them.

    OpenQuestion -> prompts -> texts -> candidates and their counts -> Question with the option `none of these` at its end

What comes out goes the way of every question. A text that is empty, or that did not end within the limit, is no candidate; it
still counts among what was written. A question without a candidate is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.data.same_answer import answer_key
from coral_lens.data.settings import Style
from coral_lens.engine.generation import Generated, generate_answers
from coral_lens.engine.planned import warn_of
from coral_lens.engine.prompts import render
from coral_lens.engine.settings import Sampling
from coral_lens.engine.texts import kept_answers
from coral_lens.errors import CoralError
from coral_lens.records import NONE, UNKNOWN, Question
from coral_lens.storage.progress import Progress

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

STOP = ("\n",)
"""An answer ends with its line."""
EXAMPLES = (
    ("Which planet is known as the Red Planet?", "Mars"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci"),
    ("In which year did the Titanic sink?", "1912"),
    ("What is the largest ocean on Earth?", "Pacific Ocean"),
)
"""Worked examples: they show what an answer looks like, and are no test of anything."""


class SilentError(CoralError):
    """The model wrote no candidate to any question."""


@dataclass(frozen=True)
class Candidates:
    """What the model wrote to one question, equal answers merged, the most frequent first."""

    texts: tuple[str, ...]
    """Each as it was written most often."""
    counts: tuple[int, ...]
    n_silent: int
    """Answers that say nothing."""
    n_cut: int
    """Answers that did not end within the limit."""


def merge(answers: Sequence[Generated]) -> Candidates:
    """Merge equal answers; among equally frequent candidates, and spellings of one, the first written comes first."""
    spellings: dict[str, Counter[str]] = {}
    n_silent = n_cut = 0
    for answer in answers:
        text = answer.text.strip()
        key = answer_key(text)
        if not answer.finished:
            n_cut += 1
        elif not key:
            n_silent += 1
        else:
            spellings.setdefault(key, Counter())[text] += 1
    # the sort is stable, and most_common keeps the order of first sight among equals
    merged = sorted(spellings.values(), key=lambda written: -written.total())
    texts = tuple(written.most_common(1)[0][0] for written in merged)
    return Candidates(texts, tuple(written.total() for written in merged), n_silent, n_cut)


@dataclass(frozen=True)
class Written:
    """Open questions as questions with options."""

    questions: tuple[Question, ...]
    left_out: dict[str, str]
    """By question id, why it has no candidate."""


def write_candidates(
    model: Model,
    questions: Sequence[OpenQuestion],
    sampling: Sampling,
    *,
    style: Style | None = None,
    place: Path | None = None,
    progress: Progress | None = None,
) -> Written:
    """Have the model write candidates for open questions; questions that get none are left out with a warning.

    With a `place` the texts are kept there, and an interrupted run goes on.
    """
    style = style or Style()
    refuse_style(style)
    prompts = open_prompts(model, questions, sampling, style)
    settings = sampling.generation()
    if place is None:
        answers = generate_answers(model, prompts, settings=settings, stop=STOP, progress=progress)
    else:
        answers = kept_answers(model, prompts, place, settings=settings, stop=STOP, progress=progress)
    written: list[Question] = []
    left_out: dict[str, str] = {}
    for question, texts in zip(questions, answers, strict=True):
        candidates = merge(texts)
        if candidates.texts:
            counts = (*candidates.counts, candidates.n_silent + candidates.n_cut)
            written.append(as_choice(question, candidates.texts, counts, sampling))
        else:
            left_out[question.id] = why_none(question, candidates, sampling)
    if not written:
        raise SilentError(next(iter(left_out.values()), "There are no questions to ask: check the file and the limit."))
    if left_out:
        warn_of(list(left_out.values()))
    return Written(tuple(written), left_out)


def open_prompts(model: Model, questions: Sequence[OpenQuestion], sampling: Sampling, style: Style) -> tuple[str, ...]:
    """Return what the model goes on writing from, for each open question."""
    return tuple(render(as_choice(q, ("?",), (0, 0), sampling), style, model).contexts[0] for q in questions)


def refuse_style(style: Style) -> None:
    """Refuse styles that show options: an open question has none to be shown."""
    if style.kind != "text" or style.template:
        what = "a template of your own" if style.template else f"the style {style.kind!r}"
        raise CoralError(
            f"Open questions are asked in the style 'text', and not in {what}: there are no options to be shown before the "
            "model has written them."
        )


def as_choice(
    question: OpenQuestion, candidates: Sequence[str], counts: tuple[int, ...], sampling: Sampling
) -> Question:
    """Return the choice between candidates and none of them, labelled by the known answers."""
    right = labels(question, candidates)
    n = sampling.examples
    return Question(
        question.id,
        question.group or question.id,
        question.text,
        (*candidates, NONE),
        right[0] if len(right) == 1 else UNKNOWN,
        passage=question.passage,
        task=question.task,
        version=f"{n} fixed shots" if n else "",
        right=right if len(right) > 1 else (),
        counts=counts,
        shots=worked_examples(n),
    )


def labels(question: OpenQuestion, candidates: Sequence[str]) -> tuple[int, ...]:
    """Return which options are right: the candidates that are known answers, else none of them; nothing where none is known."""
    if not question.answers:
        return ()
    known = {answer_key(answer) for answer in question.answers}
    return tuple(j for j, text in enumerate(candidates) if answer_key(text) in known) or (len(candidates),)


def worked_examples(n: int) -> tuple[Question, ...]:
    """Return the first n worked examples."""
    return tuple(Question(q, q, q, (answer, NONE), 0) for q, answer in EXAMPLES[:n])


def why_none(question: OpenQuestion, candidates: Candidates, sampling: Sampling) -> str:
    """Say why a question has no candidate."""
    n = sampling.candidates
    if candidates.n_cut > candidates.n_silent:
        return (
            f"Question {question.id!r}: none of {n} answers ended within {sampling.max_tokens} tokens; raise --max-tokens, or "
            "take a model that stops."
        )
    return (
        f"Question {question.id!r}: the model wrote nothing in {n} answers; ask in other words, or take another model."
    )
