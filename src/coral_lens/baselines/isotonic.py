"""Isotonic regression of correctness on the probability of an option, whatever the number of options; moves no answer.

One increasing curve for all options, fitted on the (question, option) rows of the validation questions. It is flat in places, so
that options tie, and may be 0 for all options of a question. Therefore a millionth of the probability is added to it: ties are
broken as the model would, and a question whose options all map to 0 keeps the model's probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from coral_lens.jobs import Job, Method, Predict, QuestionSet, no_options
from coral_lens.joined import predictions_of
from coral_lens.records import Predictions
from coral_lens.splits import rows_of
from coral_lens.steering import base_probs, correct_rows

SLOPE = 1e-6
"""Of what is added to the curve, so that it increases everywhere."""


def fit_curve(p: Float[np.ndarray, " row"], y: Float[np.ndarray, " row"]) -> Any:
    """Return the increasing curve from p to y with the least squared error, straight between its points."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p, y)


def apply_curve(
    p: Float[np.ndarray, " row"], offsets: Int[np.ndarray, " edge"], *, curve: Any
) -> Float[np.ndarray, " row"]:
    """Return the curve at each probability, renormalised over the options of each question."""
    moved = curve.predict(p) + SLOPE * p
    return moved / np.repeat(np.add.reduceat(moved, offsets[:-1]), np.diff(offsets))


def fit_isotonic(job: Job, _: None) -> Predict:
    """Fit the curve on the validation questions."""
    data = job.data
    rows = rows_of(data.table.offsets, data.covered)
    curve = fit_curve(data.p[rows], correct_rows(data.table)[rows])

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_curve(base_probs(table, job.common.base), table.offsets, curve=curve)
        return {"": predictions_of("isotonic", test.states, probs)}

    return predict


ISOTONIC = Method(no_options, fit_isotonic)
