"""What is known of questions once a model has scored them, and what every method ends in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.ragged import Options
from coral_lens.records.questions import Question, groups_of, ordered_of

FAR = 1.5
"""The shift from which a question counts as far: of held-out questions of the training tasks, nine in ten are nearer."""


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
    targets: Float[np.ndarray, " row"] | None = None
    """The share of each option where answers are soft or several are right; None: all of it is on the answer."""
    neutral: Float[np.ndarray, " row"] | None = None
    """Summed log-probability of the option's tokens after a context that says nothing of the question, if it was scored."""
    counts: Int[np.ndarray, " row"] | None = None
    """How often the model wrote each option, where the options of all questions are its own; None where they were given."""

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
    targets: Float[np.ndarray, " row"] | None = None
    """The share of each option where answers are soft or several are right; None: all of it is on the answer."""
    ordered: Bool[np.ndarray, " question"] | None = None
    """Which questions are scores, whose options are levels in their order; None: no question is."""

    def __post_init__(self) -> None:
        assert self.targets is None or len(self.targets) == len(self.probs), "a target for each row, or none"
        assert self.ordered is None or len(self.ordered) == len(self.ids), "one mark per question, or none"
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
        rows = self.options.rows_of(numbers)
        return replace(
            self,
            ids=tuple(self.ids[i] for i in numbers),
            answers=self.answers[numbers],
            offsets=self.options.take(numbers).edges,
            probs=self.probs[rows],
            groups=tuple(self.groups[i] for i in numbers) if self.groups else (),
            targets=None if self.targets is None else self.targets[rows],
            ordered=None if self.ordered is None else self.ordered[numbers],
        )

    def renamed(self, method: str) -> Predictions:
        """Return the same predictions under another method name."""
        return replace(self, method=method)


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

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states, read at the options' own tokens or at another place (`engine.settings`)."""


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
        targets=table.targets,
        ordered=ordered_of(questions),
    )
