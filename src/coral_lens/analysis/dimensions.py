"""How many directions the signal needs: ridge on the first k principal components of each layer, k = 1 to 100.

In the basis of its own principal components the training states are uncorrelated, so the ridge weight of a component does not
depend on which others are kept: one decomposition serves every k and every penalty, and predictions are running sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from coral_lens.analysis.files import kept_arrays
from coral_lens.analysis.folds import Folded, described, identity_of
from coral_lens.analysis.scores import r2_draws, scores_from
from coral_lens.analysis.settings import DimensionSettings
from coral_lens.lens.probes.ridge import PENALTIES, Moments, RidgeRows, column_scale, ridge_of, sum_moments
from coral_lens.metrics.scores import Score
from coral_lens.records import Scored
from coral_lens.storage.progress import Bar, silent

GROUP = 5
"""Neighbouring layers whose curves are averaged, as in the paper."""


@dataclass(frozen=True)
class DimensionRow:
    """A group of layers at one number of components."""

    layers: str
    components: int
    r2: Score
    explained: float
    """Share of the states' variance in so many components, mean over layers and folds."""


@dataclass(frozen=True)
class GroupSummary:
    """Where one curve stops rising, and where the variance is."""

    layers: str
    saturates_at: int
    """The fewest components whose R2 is not below the curve's best beyond the 95 % interval of the paired difference."""
    last_half: Score
    """What the second half of the components adds to R2; above 0 means that the curve still rises at its end."""
    for_90: int
    """Components that hold 90 % of the states' variance; the most that were tried plus 1 if these do not."""


@dataclass(frozen=True)
class DimensionAnalysis:
    """R2 against the number of components, by groups of layers."""

    model: str
    task: str
    n_questions: int
    standardised: bool
    """Whether columns were standardised before the decomposition; the paper does not say so."""
    rows: tuple[DimensionRow, ...]
    groups: tuple[GroupSummary, ...]


def analyse_dimensions(
    store: Scored,
    data: Folded,
    settings: DimensionSettings | None = None,
    *,
    work: Path | None = None,
    bar: Bar = silent,
) -> DimensionAnalysis:
    """Analyse all layers of a store, out of fold; components and penalty come from the other folds alone.

    With `work` a killed analysis goes on where it was.
    """
    settings = settings or DimensionSettings()
    rows: list[DimensionRow] = []
    groups: list[GroupSummary] = []
    layers = tuple(layer for layer in store.layers if layer or settings.embedding)
    identity = [*identity_of(store, data), settings.most, settings.standardise]
    with kept_arrays(work, identity) as journal, bar("analysing dimensions", len(layers), "layers") as advance:
        for start in range(0, len(layers), GROUP):
            group = layers[start : start + GROUP]
            curves = []
            for layer in group:
                curves.append(journal.arrays(layer, partial(component_curve, store, layer, data, settings)))
                advance(1)
            first, last = (layer - (not settings.embedding) for layer in (group[0], group[-1]))
            name = f"{first} to {last}" if len(group) > 1 else f"{first}"
            mean, variance = (np.mean([c[part] for c in curves], axis=0) for part in ("draws", "explained"))
            rows += [DimensionRow(name, k + 1, s, float(variance[k])) for k, s in enumerate(scores_from(mean))]
            groups.append(summarise_group(name, mean, variance))
    return DimensionAnalysis(
        **described(store),
        standardised=settings.standardise,
        rows=tuple(rows),
        groups=tuple(groups),
    )


def component_curve(store: Scored, layer: int, data: Folded, settings: DimensionSettings) -> dict[str, np.ndarray]:
    """Return the R2 of one layer at every number of components, in every resample, and the variance that they explain."""
    r_hat, explained = component_path(store.layer(layer), data, most=settings.most, standardise=settings.standardise)
    return {"draws": r2_draws(data.r, r_hat, data.table.options, data.groups), "explained": explained}


def summarise_group(
    name: str, draws: Float[np.ndarray, "boot component"], explained: Float[np.ndarray, " component"]
) -> GroupSummary:
    """Say where a curve stops rising and where the variance is."""
    best = int(np.argmax(draws[0]))
    behind = draws[1:, best, None] - draws[1:]
    saturates = int(np.argmax(np.quantile(behind, 0.025, axis=0) <= 0.0)) + 1
    half = draws.shape[1] // 2
    gain = scores_from((draws[:, -1] - draws[:, max(half - 1, 0)])[:, None])[0]
    enough = np.flatnonzero(explained >= 0.9)
    return GroupSummary(name, saturates, gain, int(enough[0]) + 1 if len(enough) else len(explained) + 1)


# ------------------------------------------------------------------------------------------------------- decomposition


@dataclass(frozen=True)
class Basis:
    """The principal components of some rows, with the ridge weight of each at the best penalty for every number kept."""

    mean: Float[np.ndarray, " width"]
    directions: Float[np.ndarray, "width component"]
    weights: Float[np.ndarray, "penalty component"]
    bias: float
    penalty: Int[np.ndarray, " component"]
    """The place of the penalty with the lowest generalised cross-validation error of the rows that were fitted on."""
    explained: Float[np.ndarray, " component"]
    """Running share of the variance."""

    def path(self, x: Float[np.ndarray, "row width"]) -> Float[np.ndarray, "component row"]:
        """Return what the first k components predict of each row, for every k."""
        scores = ((x - self.mean) @ self.directions).T
        sums = np.empty_like(scores)
        for i in np.unique(self.penalty):
            kept = self.penalty == i
            sums[kept] = np.cumsum(self.weights[i, :, None] * scores, axis=0)[kept]
        return sums + self.bias


def component_path(
    x: Float[np.ndarray, "row width"], data: Folded, *, most: int, standardise: bool
) -> tuple[Float[np.ndarray, "component row"], Float[np.ndarray, " component"]]:
    """Return out-of-fold predictions at every number of components, and the variance that they explain."""
    ridge = ridge_of(x, data.r, PENALTIES)
    members = [np.flatnonzero(data.row_fold == k) for k in range(data.n_folds)]
    parts = [ridge.moments(index) for index in members]
    everything = sum_moments(parts)
    most = min(most, x.shape[1], len(x) - max(len(m) for m in members) - 1)
    r_hat, explained = np.zeros((most, len(x))), np.zeros((data.n_folds, most))
    for k, index in enumerate(members):
        moments = everything - parts[k]
        scale = column_scale(moments, everything, ridge.z_mean) if standardise else np.ones(x.shape[1])
        others = data.r[data.row_fold != k]
        basis = decompose(ridge, moments, scale, most=most, variance=float(((others - others.mean()) ** 2).sum()))
        r_hat[:, index], explained[k] = basis.path(x[index].astype(np.float64)), basis.explained
    return r_hat, explained.mean(axis=0)


def decompose(ridge: RidgeRows, m: Moments, scale: Float[np.ndarray, " width"], *, most: int, variance: float) -> Basis:
    """Decompose the covariance of some rows once; weights at all penalties and the best penalty for each k follow.

    `variance` is the sum of squares of their residuals about the mean. The error of k components at a penalty is that sum less
    what each component takes away, and generalised cross-validation charges it for the degrees of freedom spent.
    """
    from scipy.linalg import eigh

    mean = m.total / m.n
    gram = (m.gram - np.outer(mean, m.total)) / scale / scale[:, None]
    width = len(gram)
    values, vectors = eigh(gram, subset_by_index=(width - most, width - 1))
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    cross = vectors.T @ ((m.cross - m.target * mean) / scale)
    shrunk = values + np.asarray(PENALTIES)[:, None]
    weights = cross / shrunk
    error = variance - np.cumsum(2 * weights * cross - weights**2 * values, axis=1)
    freedom = 1.0 + np.cumsum(values / shrunk, axis=1)
    return Basis(
        mean=mean + ridge.z_mean,
        directions=vectors / scale[:, None],
        weights=weights,
        bias=m.target / m.n + ridge.r_mean,
        penalty=np.argmin(error / (1.0 - freedom / m.n) ** 2, axis=0),
        explained=np.cumsum(values) / max(float(np.trace(gram)), 1e-300),
    )
