"""What a lens answers, for people and for tables: the row that a question came from, and beside it what the lens says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float

from coral_lens.errors import need
from coral_lens.metrics.decisions import expected_level
from coral_lens.metrics.display import Shown, Table, cell
from coral_lens.records import Question
from coral_lens.storage.files import write_atomic
from coral_lens.storage.rows import first_columns, writer_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Answer(Shown):
    """One answered question, for people: the chosen option and what the model thought before and after steering."""

    id: str
    answer: int
    """Index of the chosen option."""
    option: str
    confidence: float
    """Steered probability of the chosen option."""
    probs: tuple[float, ...]
    base_probs: tuple[float, ...]
    """Before steering; empty where the lens exits before the model has said anything."""
    shift: float
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    options_in_set: tuple[int, ...] | None = None
    """The prediction set at the stated coverage, if the lens was calibrated for one."""
    abstain: bool | None = None
    """Whether the answer is too uncertain for the stated risk, if the lens was calibrated for one."""
    p_true: float | None = None
    """Of a yes-no question: how likely the statement is true."""
    expected_level: float | None = None
    """Of a score: the mean level, counted from 0."""
    right: tuple[int, ...] | None = None
    """Where each option was asked about by itself: those that are more likely right than wrong; `probs` are of each alone."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on, less on others, 0 where the answer is the base's.
    None for a lens that is believed everywhere, such as the paper's."""
    home: bool = True
    """Whether its task is one that the lens was fitted on, by its name, or was said to be."""
    kept: bool = False
    """Whether the answer stays the model's own, whatever the lens prefers: it was not found to answer better."""

    def __repr__(self) -> str:
        unsure = ", abstains" if self.abstain else ""
        return f"<{self.id}: {cell(self.option)} ({self.confidence:.0%} sure, shift {self.shift:.1f}{unsure})>"

    def table(self) -> Table:
        """Return what the model thought of each option before and after steering."""
        chosen = [i == self.answer for i in range(len(self.probs))]
        columns: dict[str, Sequence[Any]] = {"option": range(len(chosen)), "chosen": chosen}
        columns |= ({"before": self.base_probs} if self.base_probs else {}) | {"after": self.probs}
        if self.options_in_set is not None:
            columns["in set"] = [i in self.options_in_set for i in columns["option"]]
        return Table(repr(self)[1:-1], tuple(columns), tuple(zip(*columns.values(), strict=True)))


def answer_of(
    question: Question, steered: Float[np.ndarray, " option"], base: Float[np.ndarray, " known"], shift: float
) -> Answer:
    """Return the answer that probabilities give to a question; of the base's there may be none."""
    best = int(steered.argmax())
    return Answer(
        question.id,
        best,
        question.options[best],
        float(steered[best]),
        tuple(map(float, steered)),
        tuple(map(float, base)),
        shift,
        p_true=float(steered[1]) if question.kind == "yes-no" else None,
        expected_level=expected_level(steered) if question.kind == "score" else None,
    )


def by_question(answers: Sequence[Answer], questions: Sequence[Question]) -> list[Answer]:
    """Return one answer for each question whose options were asked about one by one (`wording.as_statements`).

    Its probabilities are those of each option to be right, which need not sum to 1. A question of which an option could not be
    asked is left out.
    """
    known, joined = {answer.id: answer for answer in answers}, []
    for question in questions:
        if question.kind == "yes-no":
            joined += [known[question.id]] if question.id in known else []
            continue
        parts = [known[name] for j in range(len(question.options)) if (name := f"{question.id}#{j}") in known]
        if len(parts) == len(question.options):
            joined.append(joined_answer(question, parts))
    return joined


def joined_answer(question: Question, parts: Sequence[Answer]) -> Answer:
    """Return the answer to a question from those to each of its options.

    What was promised of single statements, sets and abstention, does not hold for the question, so it is left out.
    """
    true, base = (
        np.array([probs[1] for probs in of if probs])
        for of in zip(*((p.probs, p.base_probs) for p in parts), strict=True)
    )
    answer = answer_of(question, true, base, max(part.shift for part in parts))
    return replace(
        answer,
        trust=parts[answer.answer].trust,
        home=parts[answer.answer].home,
        kept=parts[answer.answer].kept,
        right=tuple(map(int, np.flatnonzero(true >= 0.5))),
        expected_level=None,
    )


OURS = ("id", "answer", "option", "confidence", "probs", "base_probs", "options_in_set", "abstain", "shift", "trust")
"""The columns of every answer, in their order."""
OF_KINDS = ("p_true", "expected_level", "right")
"""Columns that only answers to questions of some kinds have."""
RENAMED = "input_{}"
"""What a column of the input is called that has the name of one of ours."""


@runtime_checkable
class Asked(Protocol):
    """A question that came from a row of a table, or from none."""

    @property
    def id(self) -> str:
        """Its own."""

    @property
    def columns(self) -> dict[str, Any]:
        """The row; empty where it comes from none."""


@runtime_checkable
class Identified(Protocol):
    """An answer: a dataclass that knows its question."""

    @property
    def id(self) -> str:
        """That of its question."""


Given = TypeVar("Given", bound=Identified)


class Answers(list[Given]):
    """Answers with the rows that their questions came from: `to_frame()`, or `save("answers.csv")`."""

    always: ClassVar[tuple[str, ...]] = OURS
    """The columns of every answer, in their order."""
    sometimes: ClassVar[tuple[str, ...]] = OF_KINDS
    """Columns that only some answers have."""

    def __init__(self, answers: Sequence[Given], questions: Sequence[Asked] = ()) -> None:
        super().__init__(answers)
        self._questions = {question.id: question for question in questions}

    def rows(self) -> list[dict[str, Any]]:
        """Return for each answer the columns of its input, then our own."""
        return [self.row(answer) for answer in self]

    def row(self, answer: Given) -> dict[str, Any]:
        """Return the columns of the input, then those of an answer."""
        question = self._questions.get(answer.id)
        given: Mapping[str, Any] = question.columns if question else {}
        values = asdict(answer)  # type: ignore[call-overload]
        ours = (*self.always, *self.sometimes)
        row = {name if name == "id" or name not in ours else RENAMED.format(name): v for name, v in given.items()}
        row |= {name: values[name] for name in self.always}
        return row | {name: values[name] for name in self.sometimes if values[name] is not None}

    def to_frame(self) -> pd.DataFrame:
        """Return the answers as a pandas frame: the columns of the input, then answer, confidence and all else."""
        need("frames", by="to_frame()")
        import pandas as pd

        return pd.DataFrame(self.rows())

    def save(self, path: str | Path) -> None:
        """Write the answers as JSON lines, CSV or parquet, by the ending of the file."""
        target = Path(path)
        write_atomic(target, writer_of(target)(self.rows()))


def holds_answers(path: Path) -> bool:
    """Return whether a file is what `coral predict` wrote."""
    return {"id", "answer", "option", "confidence", "probs", "base_probs"} <= first_columns(path)
