"""How many labelled questions would have been enough: the chosen lens, fitted again on fewer of its training questions."""

from __future__ import annotations

import numpy as np

from coral_lens.lens.choose import SHOWN, Candidate, fit_recipe, predict_all
from coral_lens.lens.rules import correct_rows
from coral_lens.lens.trace import CurvePoint, LearningCurve
from coral_lens.lens.training_data import TrainingData

SIZES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the training questions."""


def learning_curve(data: TrainingData, chosen: Candidate, gamma: float, *, seed: int) -> LearningCurve:
    """Return the validation scores at five sizes, and the smallest size that is as good as all by one standard error.

    Layer, setting and gamma stay as they were chosen with all questions, so small sizes look a little better than they are.
    """
    held_out = data.rounds[0]
    train = np.flatnonzero(~held_out)
    order = np.random.default_rng(seed).permutation(train)
    points, losses = [], []
    for share in SIZES:
        n = max(2, round(share * len(train)))
        fitted_on = np.zeros(len(held_out), dtype=bool)
        fitted_on[order[:n]] = True
        correction = fit_recipe(data, chosen.recipe, fitted_on, held_out)
        probs = chosen.recipe.rule.correct(predict_all(data, correction), gamma)
        points.append(CurvePoint(n, data.scores(probs, SHOWN, held_out)))
        losses.append(brier_by_question(data, probs, held_out))
    return LearningCurve(tuple(points), points[first_as_good(losses)].questions)


def brier_by_question(data: TrainingData, probs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the Brier score of each marked question."""
    errors = (probs - correct_rows(data.table)) ** 2
    return data.options.take(mask).sum(errors[data.options.rows(mask)])


def first_as_good(losses: list[np.ndarray]) -> int:
    """Return the first whose mean is not behind the last one's by more than a standard error of the paired difference."""
    behind = [loss - losses[-1] for loss in losses]
    return next(i for i, d in enumerate(behind) if d.mean() <= d.std() / np.sqrt(len(d)))
