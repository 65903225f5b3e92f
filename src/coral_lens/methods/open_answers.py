"""What is known to do with an open question without a lens: the rows beside it in every table.

    frequency           the most frequent candidate, by its share (self-consistency)
    log-probability     the candidate of the highest mean log-probability of a token, by that
    P(True)             the most frequent candidate, by what the model says when it is asked whether it is right
    semantic entropy    the most frequent candidate, by the entropy of the merged candidates

Each is an answer and a number that rises with how sure it is. The number becomes a confidence by one temperature and one bias
(Platt), fitted on the training questions, as far as it is no confidence by itself: only the share and P(True) are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.data.settings import Style
from coral_lens.data.wording import as_statements
from coral_lens.engine.extract import score_questions
from coral_lens.engine.planned import Extraction
from coral_lens.lens.open_answers import right_of
from coral_lens.lens.open_part import chosen_options
from coral_lens.lens.rules import base_probs
from coral_lens.lens.weighing import merged_entropy
from coral_lens.metrics.answered import answered
from coral_lens.records import OptionTable, Predictions, Question, Scored
from coral_lens.storage.progress import Progress

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class SureAnswers:
    """One answer to each open question, and how sure it is."""

    method: str
    chosen: Int[np.ndarray, " question"]
    """Which candidate."""
    sure: Float[np.ndarray, " question"]
    """Rises with how sure the answer is; a confidence, or any number."""
    right: Bool[np.ndarray, " question"]
    is_confidence: bool = False
    """Whether `sure` is a probability as it stands."""


def most_frequent(table: OptionTable) -> Int[np.ndarray, " question"]:
    """Return the most frequent candidate of each question; the first written among equals."""
    assert table.counts is not None, "only of options that the model wrote"
    return chosen_options(table.counts.astype(np.float64), table.options, is_open=True)


def shares(table: OptionTable) -> Float[np.ndarray, " row"]:
    """Return the share of each option among all that was written."""
    assert table.counts is not None, "only of options that the model wrote"
    return table.counts / table.options.spread(table.options.sum(table.counts))


def by_frequency(store: Scored) -> SureAnswers:
    """Answer with the most frequent candidate: self-consistency."""
    table = store.table
    chosen = most_frequent(table)
    sure = shares(table)[table.options.row(chosen)]
    return SureAnswers("frequency", chosen, sure, right_of(store, chosen), is_confidence=True)


def by_logprob(store: Scored) -> SureAnswers:
    """Answer with the candidate of the highest mean log-probability."""
    table = store.table
    means = table.logprobs / table.n_tokens
    chosen = chosen_options(np.exp(means), table.options, is_open=True)
    return SureAnswers("log-probability", chosen, means[table.options.row(chosen)], right_of(store, chosen))


def by_entropy(store: Scored) -> SureAnswers:
    """Answer with the most frequent candidate; the more the merged candidates disagree, the less sure."""
    chosen = most_frequent(store.table)
    return SureAnswers("semantic entropy", chosen, -merged_entropy(store.table), right_of(store, chosen))


def by_p_true(
    model: Model, store: Scored, *, folder: Path | None = None, progress: Progress | None = None
) -> SureAnswers:
    """Answer with the most frequent candidate; the model is asked whether it is right, and yes against no says how sure.

    It is shown what else it wrote, as the method was proposed.
    """
    chosen = most_frequent(store.table)
    asked = [statement_of(q, int(j)) for q, j in zip(store.questions, chosen, strict=True)]
    with score_questions(
        model, asked, Extraction(layers=(), style=Style()), folder=folder, progress=progress
    ) as judged:
        yes = dict(zip((q.id for q in judged.questions), base_probs(judged.table, "sum")[1::2], strict=True))
    sure = np.array([yes.get(q.id, 0.5) for q in asked])
    return SureAnswers("P(True)", chosen, sure, right_of(store, chosen), is_confidence=True)


def statement_of(question: Question, candidate: int) -> Question:
    """Return the yes-no question whether a candidate is right, after all that was written."""
    shown = Question(
        question.id,
        question.group,
        with_ideas(question),
        (question.options[candidate], "another"),
        passage=question.passage,
    )
    return as_statements(shown)[0]


def with_ideas(question: Question) -> str:
    """Return a question's text with all candidates below it."""
    return "\n".join([question.text.strip(), "Possible answers:", *(f"- {text}" for text in question.options[:-1])])


# ----------------------------------------------------------------------------------------------------------- confidence


@dataclass(frozen=True)
class Platt:
    """A number that says how sure, made a confidence: sigmoid(slope * number + bias)."""

    slope: float
    bias: float
    is_logit: bool = False
    """Whether the number is a probability, of which the log-odds are taken first."""

    def __call__(self, sure: Float[np.ndarray, " question"]) -> Float[np.ndarray, " question"]:
        """Return confidences."""
        return 1.0 / (1.0 + np.exp(-(self.slope * self.feature(sure) + self.bias)))

    def feature(self, sure: Float[np.ndarray, " question"]) -> Float[np.ndarray, " question"]:
        """Return what the slope multiplies."""
        p = np.clip(sure, 1e-3, 1 - 1e-3)
        return np.log(p / (1 - p)) if self.is_logit else sure


def fit_platt(answers: SureAnswers) -> Platt:
    """Fit temperature and bias on labelled answers by cross-entropy; the slope is never negative, so that no order turns."""
    from scipy.optimize import minimize

    plain = Platt(1.0, 0.0, answers.is_confidence)
    x, y = plain.feature(answers.sure), answers.right.astype(np.float64)
    scale = max(float(x.std()), 1e-6)

    def loss(theta: np.ndarray) -> float:
        logits = theta[0] * x / scale + theta[1]
        return float((np.logaddexp(0.0, logits) - y * logits).mean() + 1e-4 * theta[0] ** 2)

    slope, bias = minimize(loss, np.array([1.0, 0.0]), bounds=[(0.0, None), (None, None)], method="L-BFGS-B").x
    return Platt(float(slope) / scale, float(bias), answers.is_confidence)


def predictions_of_answers(answers: SureAnswers, store: Scored, platt: Platt | None = None) -> Predictions:
    """Return answers as Predictions of whether they are right; without a map, a number that is no confidence is ranked."""
    sure = answers.sure
    if platt:
        sure = platt(sure)
    elif not answers.is_confidence:
        sure = np.exp(np.minimum(sure, 0.0))
    name = f"{answers.method} + temperature" if platt else answers.method
    return answered(name, [q.id for q in store.questions], sure, answers.right, task=store.questions[0].task)


def answers_of_lens(name: str, probs: Float[np.ndarray, " row"], store: Scored) -> SureAnswers:
    """Return the answers that probabilities of candidates give, such as a lens's: the likeliest candidate, by its own."""
    options = store.table.options
    chosen = chosen_options(probs, options, is_open=True)
    return SureAnswers(name, chosen, probs[options.row(chosen)], right_of(store, chosen), is_confidence=True)


SIMPLE: Sequence[Callable[[Scored], SureAnswers]] = (by_frequency, by_logprob, by_entropy)
"""Baselines that need no more than what is scored anyway."""
