"""Calibrators: methods that change the model's probabilities by a few fitted numbers, and read no states.

`base`            the model as it is: the row that papers call few-shot
`temperature`     one temperature for all options; it stands in every table, and so does `base`
`isotonic`        one increasing curve from an option's probability to its chance of being right
`vector-scaling`  a scale and a bias for each place in the list of options

What is fitted is fitted on the validation questions.
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


def fit_temperature_scaling(context: FitContext, _: None) -> Predict:
    """Scale the base probabilities by one temperature, fitted on the validation questions."""
    data = context.data
    temperature = temperature_on(data.p, data.table, data.is_validation)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_temperature(base_probs(table, context.common.base), table.options, temperature=temperature)
        return {"": predictions_of("temperature", test.states, probs)}

    return predict


BASE = Method(no_options, fit_nothing)
TEMPERATURE = Method(no_options, fit_temperature_scaling)


# ---------------------------------------------------------------------------------------------------- isotonic

SLOPE = 1e-6
"""Slope of the line that is added to the curve, which then increases everywhere."""


def fit_curve(p: Float[np.ndarray, " row"], y: Float[np.ndarray, " row"]) -> Any:
    """Return the increasing curve from p to y with the least squared error, straight between its points."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p, y)


def apply_curve(p: Float[np.ndarray, " row"], options: Options, *, curve: Any) -> Float[np.ndarray, " row"]:
    """Return the curve at each probability, renormalised over the options of each question.

    The curve is flat in places, where options tie, and may be 0 for all options of a question. Therefore a millionth of the
    probability is added to it: ties are broken as the model would, and a question whose options all map to 0 keeps the
    model's probabilities.
    """
    return options.normalise(curve.predict(p) + SLOPE * p)


def fit_isotonic(context: FitContext, _: None) -> Predict:
    """Fit one curve on all options of the validation questions, whatever their number; it moves no answer."""
    data = context.data
    rows = data.table.options.rows(data.is_validation)
    curve = fit_curve(data.p[rows], correct_rows(data.table)[rows])

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_curve(base_probs(table, context.common.base), table.options, curve=curve)
        return {"": predictions_of("isotonic", test.states, probs)}

    return predict


ISOTONIC = Method(no_options, fit_isotonic)


# ---------------------------------------------------------------------------------------------- vector scaling

SMALLEST = 1e-12
"""Probabilities are raised to this before their logarithm is taken."""


@dataclass(frozen=True)
class VectorSettings(Settings):
    """How vector scaling is fitted."""

    weight: Annotated[float, Range(0)] = 0.01
    """Weight of the squared distance to the identity (scale 1, bias 0), which is added to the mean NLL."""


@dataclass(frozen=True)
class VectorScaling:
    """softmax(scale * log p + bias), with a scale and a bias for each place in the list of options.

    It needs the same number of options everywhere, because its numbers belong to places. Where letters are scored, it can
    remove a preference for a letter; where texts are scored, places mean nothing and it is temperature scaling with more to
    overfit.
    """

    scale: Float[np.ndarray, " place"]
    bias: Float[np.ndarray, " place"]

    def __call__(self, p: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
        """Return the scaled probabilities."""
        return np.exp(log_softmax(self.scale * np.log(np.maximum(p, SMALLEST)) + self.bias))


def log_softmax(scores: Float[np.ndarray, "question place"]) -> Float[np.ndarray, "question place"]:
    """Return the logarithm of the softmax over places."""
    behind = scores - scores.max(axis=1, keepdims=True)
    return behind - np.log(np.exp(behind).sum(axis=1, keepdims=True))


def fit_vector(
    p: Float[np.ndarray, "question place"], answers: Int[np.ndarray, " question"], *, weight: float
) -> VectorScaling:
    """Return the scales and biases with the lowest mean NLL plus weight times the squared distance to the identity.

    The sum is convex, and strictly so for a positive weight: L-BFGS finds its one minimum.
    """
    from scipy.optimize import minimize

    logs, n = np.log(np.maximum(p, SMALLEST)), p.shape[1]
    y = np.eye(n)[answers]

    def loss(theta: Float[np.ndarray, " both"]) -> tuple[float, Float[np.ndarray, " both"]]:
        scale, bias = theta[:n], theta[n:]
        log_q = log_softmax(scale * logs + bias)
        error = (np.exp(log_q) - y) / len(p)
        distance = np.concatenate([scale - 1.0, bias])
        gradient = np.concatenate([(error * logs).sum(axis=0), error.sum(axis=0)]) + 2 * weight * distance
        return float(-(log_q * y).sum() / len(p) + weight * distance @ distance), gradient

    start = np.concatenate([np.ones(n), np.zeros(n)])
    stops = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    theta = minimize(loss, start, jac=True, method="L-BFGS-B", options=stops).x
    return VectorScaling(theta[:n], theta[n:])


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
    """Fit a scale and a bias for each place on the validation questions."""
    data, n = context.data, len(context.train.states.questions[0].options)
    validation = data.p.reshape(-1, n)[data.is_validation]
    fitted = fit_vector(validation, data.table.answers[data.is_validation], weight=settings.weight)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        p = base_probs(test.states.table, context.common.base)
        return {"": predictions_of("vector-scaling", test.states, fitted(p.reshape(-1, n)).reshape(-1))}

    return predict


VECTOR_SCALING = Method(options_of(VectorSettings), fit_vector_scaling, check=refuse_ragged)
