"""What a lens answers to open questions: the likeliest candidate, how sure it is, and what else the model wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coral_lens.lens.answers import Answers
from coral_lens.lens.open_part import chosen_options
from coral_lens.metrics.conformal import abstains
from coral_lens.metrics.display import Shown, Table, cell
from coral_lens.records import UNKNOWN, Question, Scored
from coral_lens.storage.rows import first_columns

if TYPE_CHECKING:
    from coral_lens.lens.artefact import Lens


@dataclass(frozen=True, repr=False)
class OpenAnswer(Shown):
    """One answered open question."""

    id: str
    answer: str
    """The likeliest candidate, as the model wrote it most often."""
    confidence: float
    """The probability that it is right."""
    abstain: bool | None
    """Whether it is too uncertain for the stated risk, if the lens was calibrated for one."""
    p_none: float
    """The probability that no candidate is right."""
    candidates: tuple[str, ...]
    """All that the model wrote, equal answers merged, the most frequent first."""
    probs: tuple[float, ...]
    """Of each candidate; with `p_none` they sum to 1."""
    counts: tuple[int, ...]
    """How often the model wrote each."""
    n_written: int
    """How many answers it wrote, those too that are no candidate."""
    shift: float
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on, less on others."""
    right: bool | None = None
    """Whether the answer is a known one, where these were given."""
    home: bool = True
    """Whether its task was said to be the lens's own."""

    def __repr__(self) -> str:
        unsure = ", abstains" if self.abstain else ""
        return f"<{self.id}: {cell(self.answer)} ({self.confidence:.0%} sure, shift {self.shift:.1f}{unsure})>"

    def table(self) -> Table:
        """Return how often the model wrote each candidate, and how likely each is right."""
        rows = [*zip(self.candidates, self.counts, self.probs, strict=True)]
        rows += [("(none of these)", self.n_written - sum(self.counts), self.p_none)]
        return Table(repr(self)[1:-1], ("candidate", "written", "probability"), tuple(rows))


class OpenAnswers(Answers[OpenAnswer]):
    """Answers to open questions: `to_frame()`, or `save("answers.csv")`."""

    always = ("id", "answer", "confidence", "abstain", "p_none", "candidates", "probs", "counts", "n_written", "shift",
              "trust")  # fmt: skip
    sometimes = ("right",)


def open_answers(lens: Lens, store: Scored) -> list[OpenAnswer]:
    """Answer the open questions of a store."""
    options, output = store.table.options, lens.read(store)
    q, shifts, weights = output.probs[lens.method], output.shifts, output.weights
    chosen = chosen_options(q, options, is_open=True)
    sure = q[options.row(chosen)]
    unsure = abstains(lens.abstention, sure).tolist() if lens.abstention else [None] * len(sure)
    answers = []
    for i, question in enumerate(store.questions):
        *own, p_none = map(float, q[options.of(i)])
        answers.append(
            OpenAnswer(
                question.id,
                question.options[chosen[i]],
                float(sure[i]),
                unsure[i],
                p_none,
                question.options[:-1],
                tuple(own),
                question.counts[:-1],
                sum(question.counts),
                float(shifts[i]),
                None if weights is None else float(weights[i]),
                is_right(question, int(chosen[i])),
                bool(output.home[i]),
            )
        )
    return answers


def is_right(question: Question, option: int) -> bool | None:
    """Return whether a candidate is a known answer; None where none is known."""
    return None if question.answer == UNKNOWN else option in (question.right or (question.answer,))


def right_of(store: Scored, chosen: np.ndarray) -> np.ndarray:
    """Return of labelled open questions whether the chosen candidate of each is right."""
    return np.array([bool(is_right(q, int(j))) for q, j in zip(store.questions, chosen, strict=True)], dtype=bool)


def holds_open_answers(path: Path) -> bool:
    """Return whether a file is what `coral ask` wrote."""
    return {"id", "answer", "confidence", "p_none", "candidates"} <= first_columns(path)
