"""Labelled questions in folds, and ridge probes whose penalty and gamma are chosen without the fold that they are scored on.

Every question is a test question once. For each fold the penalty, the strength and whatever else is chosen are chosen on
the other folds, where each question is predicted by a probe that saw neither its own fold nor the one held out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.data.splits import split_mask
from coral_lens.errors import CoralError
from coral_lens.lens.fit import check_questions
from coral_lens.lens.probes.ridge import PENALTIES, column_scale, ridge_of, solve_shifted, sum_moments
from coral_lens.lens.probes.standardise import fit_standardiser, r_squared, refuse_residuals
from coral_lens.lens.rules import GAMMAS, base_probs, correct_rows, residuals, steer
from coral_lens.lens.settings import BaseRule
from coral_lens.lens.training_data import fold_masks
from coral_lens.records import OptionTable, Predictions, Question, Scored, groups_of
from coral_lens.storage.arrays import allocate, row_chunks
from coral_lens.storage.files import digest, digest_bytes

N_FOLDS = 5


@dataclass(frozen=True)
class Folded:
    """Questions with base probabilities and residuals, divided into folds by whole groups."""

    questions: Sequence[Question]
    table: OptionTable
    p: Float[np.ndarray, " row"]
    r: Float[np.ndarray, " row"]
    fold: Int[np.ndarray, " question"]
    tested: tuple[int, ...] = ()
    """The folds that are scored; all of them where none is named."""
    base_rule: BaseRule = "token"
    """The score whose softmax the base probabilities are."""
    seed: int = 0
    """Seed of the division."""

    @property
    def scored_folds(self) -> tuple[int, ...]:
        """The folds that are scored."""
        return self.tested or tuple(range(self.n_folds))

    @cached_property
    def scored(self) -> Bool[np.ndarray, " question"]:
        """Which questions are scored."""
        return np.isin(self.fold, self.scored_folds)

    @cached_property
    def row_fold(self) -> Int[np.ndarray, " row"]:
        """The fold of each option."""
        return self.table.options.spread(self.fold)

    @cached_property
    def y(self) -> Float[np.ndarray, " row"]:
        """1 for the correct option of each question."""
        return correct_rows(self.table)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """What resamples draw as a whole; empty where every question stands by itself."""
        return groups_of(self.questions)

    @property
    def n_folds(self) -> int:
        return int(self.fold.max()) + 1

    def blind(self) -> Folded:
        """Return the same questions as if the model had not scored their options: all equally probable."""
        p = self.table.options.spread(1.0 / self.table.options.sizes)
        return replace(self, p=p, r=residuals(self.table, p))

    def brier(self, probs: Float[np.ndarray, " row"]) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question."""
        return self.table.options.sum((probs - self.y) ** 2)

    def predictions(
        self, method: str, probs: Float[np.ndarray, " row"], mask: Bool[np.ndarray, " question"] | None = None
    ) -> Predictions:
        """Return probabilities of all rows as predictions of the marked questions, by default of all that are scored."""
        mask = self.scored if mask is None else mask
        return Predictions(
            method=method,
            model="",
            task=self.questions[0].task,
            split=self.questions[0].split,
            ids=tuple(map(str, np.flatnonzero(mask))),
            answers=self.table.answers[mask],
            offsets=self.table.options.take(mask).edges,
            probs=probs[self.table.options.rows(mask)],
            groups=groups_of([q for q, kept in zip(self.questions, mask, strict=True) if kept]),
        )


def divide_into_folds(store: Scored, *, base: BaseRule = "token", n_folds: int = N_FOLDS, seed: int = 0) -> Folded:
    """Divide the questions of a store; a group is never divided, and every fold must have one."""
    if n_folds < 3:
        raise CoralError(f"Choosing without the fold that is scored needs at least 3 folds. Got {n_folds} instead.")
    check_questions(store.questions)
    fold = np.argmax(fold_masks(store.questions, n_folds, seed=seed), axis=0)
    p = base_probs(store.table, base)
    return Folded(store.questions, store.table, p, residuals(store.table, p), fold, base_rule=base, seed=seed)


def fold_parts(
    data: Folded, k: int, *, share: float
) -> tuple[Bool[np.ndarray, " question"], Bool[np.ndarray, " question"], Bool[np.ndarray, " question"]]:
    """Return which questions train, which are held back (a share by whole groups) and which are predicted without fold k."""
    others = np.flatnonzero(data.fold != k).tolist()
    back = np.zeros(len(data.fold), dtype=bool)
    back[others] = split_mask([data.questions[i] for i in others], fraction=share, seed=k)
    return (data.fold != k) & ~back, back, data.fold == k


def identity_of(store: Scored, data: Folded) -> list[str]:
    """Return what every number of an analysis depends on: the states, the residuals and the folds."""
    return [digest(store.manifest), digest_bytes(data.r.tobytes() + data.fold.tobytes())]


def described(store: Scored) -> dict[str, Any]:
    """Return the first fields of every analysis of one store: its model, its tasks and its number of questions."""
    return {
        "model": store.manifest["model"]["name"],
        "task": " ".join(sorted({q.task for q in store.questions})),
        "n_questions": len(store.questions),
    }


# ---------------------------------------------------------------------------------------------------------- predicting


@dataclass(frozen=True)
class Nested:
    """What ridge predicts of every row at every penalty, from fits that have not seen it."""

    outer: Float[np.ndarray, "penalty row"]
    """From all folds but the row's own."""
    inner: Float[np.ndarray, "fold penalty row"]
    """With another fold held out as well: what penalty and gamma for that fold are chosen by. 0 on the fold itself."""


Predict = Callable[[tuple[int, ...]], list[Float[np.ndarray, "penalty _"]]]
"""Returns what a fit of all other folds predicts, at every penalty, of the rows of each fold that is left out."""


def nested_ridge(x: Float[np.ndarray, "row width"], data: Folded, wanted: Sequence[int] | None = None) -> Nested:
    """Predict by ridge probes of all folds but one and of all folds but two.

    `wanted` are the folds to be scored, by default all. Each fit standardises anew with the statistics of its own rows.
    """
    wanted = range(data.n_folds) if wanted is None else wanted
    members = [np.flatnonzero(data.row_fold == k) for k in range(data.n_folds)]
    predict = (ridge_by_rows if len(x) < x.shape[1] else ridge_by_columns)(x, data, members)
    outer = np.zeros((len(PENALTIES), len(x)))
    inner = np.zeros((data.n_folds, len(PENALTIES), len(x)))
    for k in wanted:
        (outer[:, members[k]],) = predict((k,))
    for k, j in combinations(range(data.n_folds), 2):
        if k in wanted or j in wanted:
            inner[j][:, members[k]], inner[k][:, members[j]] = predict((k, j))
    return Nested(outer, inner)


Members = Sequence[Int[np.ndarray, " _"]]
"""The rows of each fold."""
Weights = tuple[Float[np.ndarray, "width penalty"], Float[np.ndarray, " penalty"]]


def ridge_by_columns(x: Float[np.ndarray, "row width"], data: Folded, members: Members) -> Predict:
    """Fit from products of columns: moments are taken once, and those of the folds left out are subtracted."""
    ridge = ridge_of(x, data.r, PENALTIES)
    parts = [ridge.moments(index) for index in members]
    everything = sum_moments(parts)

    def predict(left_out: tuple[int, ...]) -> list[Float[np.ndarray, "penalty _"]]:
        rest = everything
        for k in left_out:
            rest = rest - parts[k]
        fit = ridge.solve(rest, PENALTIES, column_scale(rest, everything, ridge.z_mean))
        return [predicted_rows(x, members[k], fit) for k in left_out]

    return predict


def ridge_by_rows(x: Float[np.ndarray, "row width"], data: Folded, members: Members) -> Predict:
    """Fit from products of rows, where these are fewer: the same predictions, w = Z'(ZZ' + penalty)^-1 r, without w."""
    refuse_residuals(data.r)

    def predict(left_out: tuple[int, ...]) -> list[Float[np.ndarray, "penalty _"]]:
        train = np.flatnonzero(~np.isin(data.row_fold, left_out))
        z = fit_standardiser(x, train)(x, out=allocate(*x.shape))
        products = np.zeros((len(x), len(train)))
        for columns in row_chunks(x.shape[1], len(x)):
            part = z[:, columns].astype(np.float64)
            part -= part[train].mean(axis=0)
            products += part @ part[train].T
        mean = data.r[train].mean()
        dual = solve_shifted(products[train], data.r[train] - mean, PENALTIES)
        return [(products[members[k]] @ dual).T + mean for k in left_out]

    return predict


def ridge_bytes(rows: int, width: int, n_folds: int) -> int:
    """Return the memory of products while ridge is fitted; the states themselves may be mapped from a file."""
    return 8 * (4 * rows**2 if rows < width else (n_folds + 6) * width**2)


def too_wide(rows: int, width: int, n_folds: int) -> str:
    """Say that this machine has not enough memory for ridge on so many columns; nothing if it has."""
    needed, available = ridge_bytes(rows, width, n_folds), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= available:
        return ""
    return (
        f"Ridge on {width:,} columns of {rows:,} rows needs {needed / 2**30:.0f} GiB of memory, and this machine has "
        f"{available / 2**30:.0f}"
    )


def refuse_too_wide(rows: int, width: int, n_folds: int) -> None:
    """Refuse what this machine has not enough memory for, before anything is fitted."""
    if reason := too_wide(rows, width, n_folds):
        raise CoralError(
            f"{reason}; give fewer questions with --limit: with fewer rows than columns it needs 32 bytes times rows squared."
        )


def predicted_rows(
    x: Float[np.ndarray, "row width"], index: Int[np.ndarray, " chosen"], fit: Weights
) -> Float[np.ndarray, "penalty chosen"]:
    """Return what a fit predicts of these rows, read in chunks."""
    weights, biases = fit
    parts = [x[index[rows]].astype(np.float64) @ weights + biases for rows in row_chunks(len(index), x.shape[1])]
    return np.concatenate(parts).T


# ------------------------------------------------------------------------------------------------------------ choosing


@dataclass(frozen=True)
class FoldedSteering:
    """Residuals predicted out of fold at the chosen penalty, with the strength chosen for each fold."""

    r_hat: Float[np.ndarray, " row"]
    gamma: Float[np.ndarray, " fold"]
    cost: Float[np.ndarray, " fold"]
    """The Brier score at that strength on the other folds: what a layer is chosen by."""

    def probs(self, data: Folded, gamma: float | None = None) -> Float[np.ndarray, " row"]:
        """Return the steered probabilities, at the chosen strengths or at one for all."""
        if gamma is not None:
            return steer(data.p, self.r_hat, data.table.options, gamma=gamma)
        return steer(data.p, self.gamma[data.row_fold] * self.r_hat, data.table.options, gamma=1.0)


def choose_steering(nested: Nested, data: Folded, wanted: Sequence[int] | None = None) -> FoldedSteering:
    """Choose for each fold the penalty by R2 and then gamma by Brier score, both on the other folds only."""
    chosen = np.zeros(len(data.r))
    gamma, cost = np.zeros(data.n_folds), np.full(data.n_folds, np.inf)
    for k in range(data.n_folds) if wanted is None else wanted:
        others = data.row_fold != k
        best = int(np.argmax([r_squared(data.r[others], r_hat[others]) for r_hat in nested.inner[k]]))
        chosen[~others] = nested.outer[best][~others]
        tried = [
            data.brier(steer(data.p, nested.inner[k][best], data.table.options, gamma=g))[data.fold != k].mean()
            for g in GAMMAS
        ]
        gamma[k], cost[k] = GAMMAS[int(np.argmin(tried))], min(tried)
    return FoldedSteering(chosen, gamma, cost)


def fit_steering(x: Float[np.ndarray, "row width"], data: Folded) -> FoldedSteering:
    """Fit, choose and predict out of fold from these states."""
    return choose_steering(nested_ridge(x, data), data)


def combined(steerings: Sequence[FoldedSteering], choice: Mapping[int, int], data: Folded) -> FoldedSteering:
    """Return for each fold what the steering chosen for it says; `choice` has its place among all."""
    r_hat, gamma = np.zeros(len(data.r)), np.zeros(data.n_folds)
    cost = np.full(data.n_folds, np.inf)
    for k, i in choice.items():
        rows = data.row_fold == k
        r_hat[rows], gamma[k], cost[k] = steerings[i].r_hat[rows], steerings[i].gamma[k], steerings[i].cost[k]
    return FoldedSteering(r_hat, gamma, cost)
