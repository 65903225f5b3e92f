"""Answers of which only a confidence is known, and whether they are right, as Predictions. Never computes a score."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.ragged import Options
from coral_lens.records import Predictions

LEAST_SURE = 1e-3
"""A confidence below this counts as this: the answer would need a thousand others to be the likeliest."""


def distribution_of(confidence: float) -> Float[np.ndarray, " option"]:
    """Return a distribution over an answer and others that are each less likely: enough of them for the answer to be the top.

    So a confidence alone goes the way of all probabilities; accuracy, ECE and all else that looks at the answer alone is then
    right, and scores of the whole distribution mean nothing.
    """
    sure = max(confidence, LEAST_SURE)
    n_others = 1 if sure > 0.5 else ceil((1.0 - sure) / sure + 1e-9) + 1
    return np.array([sure, *[(1.0 - sure) / n_others] * n_others])


def answered(
    method: str,
    ids: Sequence[str],
    confidence: Float[np.ndarray, " question"],
    right: Bool[np.ndarray, " question"],
    *,
    task: str = "",
) -> Predictions:
    """Return answers as Predictions in which option 0 is a right answer and option 1 a wrong one.

    Methods that answer one question differently can so be compared question by question: of each it is known whether it is
    right, and how sure it is.
    """
    parts = [distribution_of(float(sure)) for sure in confidence]
    for part, is_right in zip(parts, right, strict=True):
        if not is_right:
            part[:2] = part[1], part[0]
    return Predictions(
        method=method,
        model="",
        task=task,
        split="",
        ids=tuple(ids),
        answers=np.zeros(len(parts), dtype=np.int64),
        offsets=Options.of_sizes([len(part) for part in parts]).edges,
        probs=np.concatenate(parts) if parts else np.zeros(0),
    )
