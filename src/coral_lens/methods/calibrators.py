"""The two controls that stand in every table: the model as it is, and its probabilities scaled by one temperature.

Isotonic regression of correctness on the probability of an option, whatever the number of options; moves no answer.

One increasing curve for all options, fitted on the (question, option) rows of the validation questions. It is flat in places, so
that options tie, and may be 0 for all options of a question. Therefore a millionth of the probability is added to it: ties are
broken as the model would, and a question whose options all map to 0 keeps the model's probabilities.

Vector scaling: a scale and a bias for each place in the list of options, softmax(scale * log p + bias).

It needs the same number of options everywhere, because its numbers belong to places. Where letters are scored, it can remove a
preference for a letter; where texts are scored, places mean nothing and it is temperature scaling with more to overfit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int

from coral_lens.data.settings import Style
from coral_lens.errors import CoralError
from coral_lens.lens.rules import apply_temperature, base_probs, correct_rows, temperature_on
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, no_options, options_of
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.storage.settings import Range, Settings


def fit_nothing(context: FitContext, _: None) -> Predict:
    """Leave the model as it is: the row that papers call few-shot."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        return {"": predictions_of("base", test.states, base_probs(test.states.table, context.common.base))}

    return predict


def fit_temperature(context: FitContext, _: None) -> Predict:
    """Scale the base probabilities by one temperature, fitted on the validation questions."""
    data = context.data
    temperature = temperature_on(data.p, data.table, data.covered)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_temperature(base_probs(table, context.common.base), table.options, temperature=temperature)
        return {"": predictions_of("temperature", test.states, probs)}

    return predict


BASE = Method(no_options, fit_nothing)
TEMPERATURE = Method(no_options, fit_temperature)


# ---------------------------------------------------------------------------------------------------- isotonic

SLOPE = 1e-6
"""Of what is added to the curve, so that it increases everywhere."""


def fit_curve(p: Float[np.ndarray, " row"], y: Float[np.ndarray, " row"]) -> Any:
    """Return the increasing curve from p to y with the least squared error, straight between its points."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p, y)


def apply_curve(p: Float[np.ndarray, " row"], options: Options, *, curve: Any) -> Float[np.ndarray, " row"]:
    """Return the curve at each probability, renormalised over the options of each question."""
    return options.normalise(curve.predict(p) + SLOPE * p)


def fit_isotonic(context: FitContext, _: None) -> Predict:
    """Fit the curve on the validation questions."""
    data = context.data
    rows = data.table.options.rows(data.covered)
    curve = fit_curve(data.p[rows], correct_rows(data.table)[rows])

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_curve(base_probs(table, context.common.base), table.options, curve=curve)
        return {"": predictions_of("isotonic", test.states, probs)}

    return predict


ISOTONIC = Method(no_options, fit_isotonic)


# ---------------------------------------------------------------------------------------------------- vector_scaling

SMALLEST = 1e-12
"""Probabilities are raised to this before their logarithm is taken."""


@dataclass(frozen=True)
class VectorSettings(Settings):
    """How vector scaling is fitted."""

    weight: Annotated[float, Range(0)] = 0.01
    """Weight of the squared distance to the identity (scale 1, bias 0), which is added to the mean NLL."""


@dataclass(frozen=True)
class VectorScaling:
    """A scale and a bias for each place."""

    scale: Float[np.ndarray, " place"]
    bias: Float[np.ndarray, " place"]

    def __call__(self, p: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
        """Return the scaled probabilities."""
        return np.exp(log_softmax(self.scale * np.log(np.maximum(p, SMALLEST)) + self.bias))


def log_softmax(scores: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
    """Return the logarithm of the softmax over places."""
    moved = scores - scores.max(axis=1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))


def fit_vector(
    p: Float[np.ndarray, "question place"], answers: Int[np.ndarray, " question"], *, weight: float
) -> VectorScaling:
    """Return the scales and biases with the lowest mean NLL plus weight times the squared distance to the identity.

    The sum is convex, and strictly so for a positive weight: L-BFGS finds its one minimum.
    """
    from scipy.optimize import minimize

    logs, n = np.log(np.maximum(p, SMALLEST)), p.shape[1]
    right = np.eye(n)[answers]

    def cost(x: Float[np.ndarray, " both"]) -> tuple[float, Float[np.ndarray, " both"]]:
        scale, bias = x[:n], x[n:]
        found = log_softmax(scale * logs + bias)
        surplus = (np.exp(found) - right) / len(p)
        away = np.concatenate([scale - 1.0, bias])
        gradient = np.concatenate([(surplus * logs).sum(axis=0), surplus.sum(axis=0)]) + 2 * weight * away
        return float(-(found * right).sum() / len(p) + weight * away @ away), gradient

    start = np.concatenate([np.ones(n), np.zeros(n)])
    tight = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    x = minimize(cost, start, jac=True, method="L-BFGS-B", options=tight).x
    return VectorScaling(x[:n], x[n:])


def refuse_ragged(questions: Sequence[Question], _: Style, __: VectorSettings) -> None:
    """Refuse questions of different numbers of options."""
    first = questions[0]
    other = next((q for q in questions if len(q.options) != len(first.options)), None)
    if other:
        raise CoralError(
            f"Vector scaling needs the same number of options everywhere, but question {first.id!r} has {len(first.options)} and "
            f"{other.id!r} has {len(other.options)}; leave the method out, or use temperature or isotonic."
        )


def fit_vector_scaling(context: FitContext, settings: VectorSettings) -> Predict:
    """Fit on the validation questions."""
    data, n = context.data, len(context.train.states.questions[0].options)
    validation = data.p.reshape(-1, n)[data.covered]
    fitted = fit_vector(validation, data.table.answers[data.covered], weight=settings.weight)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        p = base_probs(test.states.table, context.common.base)
        return {"": predictions_of("vector-scaling", test.states, fitted(p.reshape(-1, n)).reshape(-1))}

    return predict


VECTOR_SCALING = Method(options_of(VectorSettings), fit_vector_scaling, check=refuse_ragged)
