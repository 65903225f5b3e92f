"""Smooth ECE (Błasiok and Nakkiran, 2023): the gap between confidence and accuracy, smoothed instead of binned.

The residuals right - confidence are spread over [0, 1] by a Gaussian that is reflected at both ends, and the absolute value of
what is there is integrated. The width of the Gaussian is the one that equals the result: nothing is left to choose, and no edge
of a bin decides.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from coral_lens.metrics.facts import Facts, Values, Weights

CELLS = 1024
"""Points of the grid on [0, 1]."""
STEPS = 12
"""Halvings by which the width is found: to a four-thousandth."""
NARROWEST = 1e-3


def smooth_ece(facts: Facts, weights: Weights) -> Values:
    """Return the smooth ECE of each resample."""
    from scipy.fft import dct, idct

    waves = dct(on_grid(facts, weights), type=2, axis=1)
    # a reflected Gaussian damps the cosine of k half waves by exp(-(pi k width)^2 / 2)
    powers = -0.5 * (np.pi * np.arange(CELLS)) ** 2
    total = weights.sum(axis=1)

    def smoothed(widths: Float[np.ndarray, " boot"]) -> Values:
        spread = idct(waves * np.exp(powers * widths[:, None] ** 2), type=2, axis=1)
        gaps: Values = np.abs(spread).sum(axis=1) / total
        return gaps

    low, high = np.full(len(weights), NARROWEST), np.ones(len(weights))
    for _ in range(STEPS):
        middle = (low + high) / 2
        wider = smoothed(middle) > middle  # the gap falls with the width, so they meet once
        low, high = np.where(wider, middle, low), np.where(wider, high, middle)
    return smoothed(high)


def on_grid(facts: Facts, weights: Weights) -> Float[np.ndarray, "boot cell"]:
    """Return the residuals on the points of the grid, each divided between the two that it lies between."""
    from scipy.sparse import csr_array

    place = np.clip(facts.confidence * CELLS - 0.5, 0.0, CELLS - 1.0)
    left = np.minimum(place.astype(np.int64), CELLS - 2)
    share, question = place - left, np.arange(len(place))
    values = np.concatenate([(1 - share) * (facts.hit - facts.confidence), share * (facts.hit - facts.confidence)])
    cells, owners = np.concatenate([left, left + 1]), np.concatenate([question, question])
    table = csr_array((values, (cells, owners)), shape=(CELLS, len(place)))
    sums: Float[np.ndarray, "boot cell"] = (table @ weights.T).T
    return sums
