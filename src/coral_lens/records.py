"""The types that travel along the line: Question, Prompt, OptionTable, Predictions. They hold data and never compute scores."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.ragged import Options

UNKNOWN = -1
"""The answer of a question that has no label: it can be predicted, but not learned from or scored."""
UNNAMED = "questions"
"""The task of a question that names none, such as one of a user's file: two such need not be of one kind."""
FAR = 1.5
"""The shift from which a question counts as far: of held-out questions of the training tasks, nine in ten are nearer."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The exact strings that are tokenised: what lm-eval would send as requests, one per option."""

    contexts: tuple[str, ...]
    """One context per option. All equal, but for tasks such as Winogrande that put the option into the context."""
    continuations: tuple[str, ...]
    """The scored string of each option, with its leading delimiter."""
    choices: tuple[str, ...]
    """The scored string as lm-eval counts its length (`acc_norm`): without the delimiter."""
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Wording:
    """A question's text taken apart: what is asked, the options that it lists under letters, and what a template puts around."""

    label: str
    """What stands before the question, such as `Question: `; mostly nothing in a file."""
    stem: str
    """What is asked."""
    listed: tuple[str, ...]
    """The options as they are listed, without their letters; empty where the text lists none."""
    mark: str
    """What follows a letter of the list: `. ` or `) `."""
    ending: str
    """What comes last, from its line break on, such as that of `Answer:`."""

    @property
    def text(self) -> str:
        """The whole text, put together again."""
        return self.label + self.body + self.ending

    @property
    def body(self) -> str:
        """The stem and the list."""
        lines = [
            f"{letter}{self.mark}{text}" for letter, text in zip(string.ascii_uppercase, self.listed, strict=False)
        ]
        return "\n".join([self.stem, *lines])

    @property
    def bare(self) -> str:
        """The text without its label and without a cue for an answer."""
        return CUE.sub("", self.body + self.ending)


LABEL = re.compile(r"(?:Question|Q):\s*")
CUE = re.compile(r"\n\s*(?:Answer|A)\s*:\s*\Z")


def take_apart(text: str, options: Sequence[str]) -> Wording:
    """Return the parts of a question's text; a list is looked for where the options are its letters."""
    cue = match[0] if (match := CUE.search(text)) else ""
    body = text.removesuffix(cue)
    stem, mark, listed = listed_parts(body, options) or (body, "", ())
    label = match[0] if (match := LABEL.match(stem)) else ""
    if listed and not cue:  # the last line may ask for an answer in other words
        last, newline, line = listed[-1].rpartition("\n")
        listed, cue = (*listed[:-1], last if newline else line), newline and newline + line
    return Wording(label, stem.removeprefix(label), listed, mark, cue)


def listed_parts(text: str, options: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return stem, mark and listed options of a text that ends in a list under the letters that are its options."""
    letters = string.ascii_uppercase[: len(options)]
    if [option.strip() for option in options] != list(letters):
        return None
    lines = [rf"\n{letter}(?P=mark)(.*?)" for letter in letters[1:]]
    # the stem is as long as possible: a question may quote a list of its own
    match = re.fullmatch(rf"(.*)\n{letters[0]}(?P<mark>[.)]\s+)(.*?){''.join(lines)}", text, re.DOTALL)
    if match is None:
        return None
    stem, mark, *listed = match.groups()
    return stem, mark, tuple(listed)


@dataclass(frozen=True)
class Question:
    """One multiple-choice question, from a benchmark task or from a user's file."""

    id: str
    group: str
    """The unit that must not be split between training and test: an article, or the question itself."""
    text: str
    """What is asked, for people and for the prompt styles."""
    options: tuple[str, ...]
    answer: int = UNKNOWN
    """Index of the correct option, or UNKNOWN."""
    passage: str = ""
    """Text to read before the question; empty if there is none."""
    task: str = UNNAMED
    version: str = ""
    split: str = ""
    rendered: Rendered | None = None
    """Set where the task brings its own template; otherwise the prompt is made from text and options by a Style."""

    @cached_property
    def wording(self) -> Wording:
        """Its text taken apart, once."""
        return take_apart(self.text, self.options)

    def __post_init__(self) -> None:
        where = f"Question {self.id!r}"
        if len(self.options) < 2:
            found = f"{len(self.options)} option(s)" if self.options else "no options"
            raise CoralError(f"{where} has {found}; a multiple-choice question needs at least two.")
        for j, option in enumerate(self.options):
            if not option.strip():
                raise CoralError(f"{where} has an empty option (number {j + 1}); give it a text or remove it.")
        if not (self.answer == UNKNOWN or 0 <= self.answer < len(self.options)):
            raise CoralError(
                f"{where} has answer {self.answer}, but its options are numbered 0 to {len(self.options) - 1}."
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as token ids: for each option its context and its own tokens.

    Contexts of one question are nearly always the same tuple; they differ where a prompt is cut on the left to fit the
    model (the cut depends on the option's length) and where the task puts the option into the context.
    """

    id: str
    contexts: tuple[tuple[int, ...], ...]
    options: tuple[tuple[int, ...], ...]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Ragged scores, one row per (question, option); question i owns rows offsets[i] to offsets[i + 1], see `options`."""

    logprobs: Float[np.ndarray, " row"]
    """Summed log-probability of the option's tokens given the context."""
    n_tokens: Int[np.ndarray, " row"]
    n_chars: Int[np.ndarray, " row"]
    n_bytes: Int[np.ndarray, " row"]
    offsets: Int[np.ndarray, " edge"]
    answers: Int[np.ndarray, " question"]
    """Index of the correct option within its question, or UNKNOWN."""

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def options(self) -> Options:
        """The options of each question, side by side."""
        return Options(self.offsets)


@dataclass(frozen=True, slots=True)
class Predictions:
    """What every method ends in: one distribution over the options of each question."""

    method: str
    model: str
    task: str
    split: str
    ids: tuple[str, ...]
    answers: Int[np.ndarray, " question"]
    offsets: Int[np.ndarray, " edge"]
    probs: Float[np.ndarray, " row"]
    groups: tuple[str, ...] = ()
    """What the questions belong to that are not independent (RACE's articles), see `groups_of`; empty if all are."""

    def __post_init__(self) -> None:
        assert len(self.groups) in (0, len(self.ids)), "one group per question, or none"
        assert self.offsets[0] == 0, "offsets must start at 0"
        assert self.offsets[-1] == len(self.probs), "offsets must end at the number of rows"
        assert len(self.offsets) == len(self.answers) + 1 == len(self.ids) + 1, "one answer and one id per question"
        assert np.isfinite(self.probs).all(), "probabilities must be finite"
        assert np.allclose(self.options.sum(self.probs), 1.0, atol=1e-6), (
            "probabilities must sum to 1 over each question"
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def options(self) -> Options:
        """The options of each question, side by side."""
        return Options(self.offsets)

    def take(self, questions: Bool[np.ndarray, " question"] | Int[np.ndarray, " chosen"]) -> Predictions:
        """Return the predictions of some questions alone, by a mask or by numbers in the order asked for."""
        numbers = np.flatnonzero(questions) if questions.dtype == np.bool_ else questions
        return replace(
            self,
            ids=tuple(self.ids[i] for i in numbers),
            answers=self.answers[numbers],
            offsets=self.options.take(numbers).edges,
            probs=self.probs[self.options.rows_of(numbers)],
            groups=tuple(self.groups[i] for i in numbers) if self.groups else (),
        )

    def renamed(self, method: str) -> Predictions:
        """Return the same predictions under another method name."""
        return replace(self, method=method)


TASKS_OF_FAMILY = 3
"""So many tasks of one family (`mmlu_anatomy`, `mmlu_virology`, ...) or more are taken together, in analyses and reports."""


def task_family(task: str) -> str:
    """Return the family of a task: the first word of its name."""
    return task.split("_")[0]


def groups_of(questions: Sequence[Question]) -> tuple[str, ...]:
    """Return the group of each question, or nothing where each stands by itself."""
    groups = tuple(q.group for q in questions)
    return groups if len(set(groups)) < len(groups) else ()


@runtime_checkable
class Scored(Protocol):
    """Questions that a model has scored, with their states: a store, or several joined."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Model, digest of the questions, and whatever else says where the states come from."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that can be read."""

    @property
    def questions(self) -> Sequence[Question]:
        """The questions in order."""

    @property
    def table(self) -> OptionTable:
        """Their scores."""

    def layer(self, layer: int) -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states."""


def predictions_of(method: str, scored: Scored, probs: Float[np.ndarray, " row"]) -> Predictions:
    """Return probabilities of the options of scored questions as Predictions."""
    questions, table = scored.questions, scored.table
    return Predictions(
        method=method,
        model=scored.manifest["model"]["name"],
        task=questions[0].task,
        split=questions[0].split,
        ids=tuple(q.id for q in questions),
        answers=table.answers,
        offsets=table.offsets,
        probs=probs,
        groups=groups_of(questions),
    )
