"""Labelled questions in folds, and ridge probes whose penalty and gamma are chosen without the fold that they are scored on.

Every question is a test question once. For each fold the penalty, the strength and whatever else is chosen are chosen on
the other folds, where each question is predicted by a probe that saw neither its own fold nor the one held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.choosing import GAMMAS
from coral_lens.errors import CoralError
from coral_lens.fitting import check_questions
from coral_lens.joined import Scored
from coral_lens.probes import r_squared
from coral_lens.records import OptionTable, Predictions, Question, groups_of, offsets_of
from coral_lens.ridge import PENALTIES, Moments, RidgeRows, column_scale, ridge_of, sum_moments
from coral_lens.samples import fold_masks
from coral_lens.scratch import chunks
from coral_lens.splits import rows_of
from coral_lens.steering import BaseRule, base_probs, correct_rows, residuals, steer

N_FOLDS = 5


@dataclass(frozen=True)
class Folded:
    """Questions with base probabilities and residuals, divided into folds by whole groups."""

    questions: Sequence[Question]
    table: OptionTable
    p: Float[np.ndarray, " row"]
    r: Float[np.ndarray, " row"]
    fold: Int[np.ndarray, " question"]

    @cached_property
    def row_fold(self) -> Int[np.ndarray, " row"]:
        """The fold of each option."""
        return np.repeat(self.fold, np.diff(self.table.offsets))

    @cached_property
    def y(self) -> Float[np.ndarray, " row"]:
        """1 for the correct option of each question."""
        return correct_rows(self.table)

    @property
    def n_folds(self) -> int:
        return int(self.fold.max()) + 1

    def blind(self) -> Folded:
        """Return the same questions as if the model had not scored their options: all equally probable."""
        sizes = np.diff(self.table.offsets)
        p = np.repeat(1.0 / sizes, sizes)
        return replace(self, p=p, r=residuals(self.table, p))

    def brier(self, probs: Float[np.ndarray, " row"]) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question."""
        return np.add.reduceat((probs - self.y) ** 2, self.table.offsets[:-1])

    def predictions(
        self, method: str, probs: Float[np.ndarray, " row"], mask: Bool[np.ndarray, " question"] | None = None
    ) -> Predictions:
        """Return probabilities of all rows as predictions of the marked questions, by default of all."""
        mask = np.ones(len(self.fold), dtype=bool) if mask is None else mask
        return Predictions(
            method=method,
            model="",
            task=self.questions[0].task,
            split=self.questions[0].split,
            ids=tuple(map(str, np.flatnonzero(mask))),
            answers=self.table.answers[mask],
            offsets=offsets_of(np.diff(self.table.offsets)[mask].tolist()),
            probs=probs[rows_of(self.table.offsets, mask)],
            groups=groups_of([q for q, kept in zip(self.questions, mask, strict=True) if kept]),
        )


def folded(store: Scored, *, base: BaseRule = "token", n_folds: int = N_FOLDS, seed: int = 0) -> Folded:
    """Divide the questions of a store; a group is never divided, and every fold must have one."""
    if n_folds < 3:
        raise CoralError(f"Choosing without the fold that is scored needs at least 3 folds. Got {n_folds} instead.")
    check_questions(store.questions)
    fold = np.argmax(fold_masks(store.questions, n_folds, seed=seed), axis=0)
    p = base_probs(store.table, base)
    return Folded(store.questions, store.table, p, residuals(store.table, p), fold)


# ---------------------------------------------------------------------------------------------------------- predicting


@dataclass(frozen=True)
class Nested:
    """What ridge predicts of every row at every penalty, from fits that have not seen it."""

    outer: Float[np.ndarray, "penalty row"]
    """From all folds but the row's own."""
    inner: Float[np.ndarray, "fold penalty row"]
    """With another fold held out as well: what penalty and gamma for that fold are chosen by. 0 on the fold itself."""


def nested_ridge(x: Float[np.ndarray, "row width"], data: Folded, wanted: Sequence[int] | None = None) -> Nested:
    """Predict by ridge probes of all folds but one and of all folds but two; moments are taken once and subtracted.

    `wanted` are the folds to be scored, by default all. Each fit standardises anew with the statistics of its own rows.
    """
    wanted = range(data.n_folds) if wanted is None else wanted
    ridge = ridge_of(x, data.r, PENALTIES)
    members = [np.flatnonzero(data.row_fold == k) for k in range(data.n_folds)]
    parts = [ridge.moments(index) for index in members]
    everything = sum_moments(parts)
    outer = np.zeros((len(PENALTIES), len(x)))
    inner = np.zeros((data.n_folds, len(PENALTIES), len(x)))
    for k in wanted:
        fit = solved(ridge, everything - parts[k], everything)
        outer[:, members[k]] = applied(x, members[k], fit)
    for k, j in combinations(range(data.n_folds), 2):
        if k not in wanted and j not in wanted:
            continue
        fit = solved(ridge, everything - parts[k] - parts[j], everything)
        inner[k][:, members[j]] = applied(x, members[j], fit)
        inner[j][:, members[k]] = applied(x, members[k], fit)
    return Nested(outer, inner)


Weights = tuple[Float[np.ndarray, "width penalty"], Float[np.ndarray, " penalty"]]


def solved(ridge: RidgeRows, moments: Moments, everything: Moments) -> Weights:
    """Return weights and biases at every penalty, on columns standardised by the moments they are fitted on."""
    return ridge.solve(moments, PENALTIES, column_scale(moments, everything, ridge.z_mean))


def applied(
    x: Float[np.ndarray, "row width"], index: Int[np.ndarray, " some"], fit: Weights
) -> Float[np.ndarray, "penalty some"]:
    """Return what a fit predicts of some rows, read in chunks."""
    weights, biases = fit
    parts = [x[index[rows]].astype(np.float64) @ weights + biases for rows in chunks(len(index), x.shape[1])]
    return np.concatenate(parts).T


# ------------------------------------------------------------------------------------------------------------ choosing


@dataclass(frozen=True)
class Steering:
    """Residuals predicted out of fold at the chosen penalty, with the strength chosen for each fold."""

    r_hat: Float[np.ndarray, " row"]
    gamma: Float[np.ndarray, " fold"]
    cost: Float[np.ndarray, " fold"]
    """The Brier score at that strength on the other folds: what a layer is chosen by."""

    def probs(self, data: Folded, gamma: float | None = None) -> Float[np.ndarray, " row"]:
        """Return the steered probabilities, at the chosen strengths or at one for all."""
        if gamma is not None:
            return steer(data.p, self.r_hat, data.table.offsets, gamma=gamma)
        return steer(data.p, self.gamma[data.row_fold] * self.r_hat, data.table.offsets, gamma=1.0)


def choose_steering(nested: Nested, data: Folded, wanted: Sequence[int] | None = None) -> Steering:
    """Choose for each fold the penalty by R2 and then gamma by Brier score, both on the other folds only."""
    r_hat = np.zeros(len(data.r))
    gamma, cost = np.zeros(data.n_folds), np.full(data.n_folds, np.inf)
    for k in range(data.n_folds) if wanted is None else wanted:
        others = data.row_fold != k
        best = int(np.argmax([r_squared(data.r[others], one[others]) for one in nested.inner[k]]))
        r_hat[~others] = nested.outer[best][~others]
        tried = [
            data.brier(steer(data.p, nested.inner[k][best], data.table.offsets, gamma=g))[data.fold != k].mean()
            for g in GAMMAS
        ]
        gamma[k], cost[k] = GAMMAS[int(np.argmin(tried))], min(tried)
    return Steering(r_hat, gamma, cost)


def steering_of(x: Float[np.ndarray, "row width"], data: Folded) -> Steering:
    """Fit, choose and predict out of fold from these states."""
    return choose_steering(nested_ridge(x, data), data)


def combined(steerings: Sequence[Steering], which: Sequence[int], data: Folded) -> Steering:
    """Return for each fold what the steering chosen for it says."""
    r_hat = np.zeros(len(data.r))
    for k, i in enumerate(which):
        rows = data.row_fold == k
        r_hat[rows] = steerings[i].r_hat[rows]
    gamma, cost = (
        np.array([getattr(steerings[i], name)[k] for k, i in enumerate(which)]) for name in ("gamma", "cost")
    )
    return Steering(r_hat, gamma, cost)
