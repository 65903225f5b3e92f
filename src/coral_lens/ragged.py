"""Options side by side: what is computed within each question over a flat array of (question, option) rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def centre(states: Float[np.ndarray, "row width"], offsets: Int[np.ndarray, " edge"]) -> Float[np.ndarray, "row width"]:
    """Subtract from each option's state the mean over the options of its question."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    means = np.add.reduceat(states, starts, axis=0) / sizes[:, None].astype(states.dtype)
    return states - np.repeat(means, sizes, axis=0)


def softmax(scores: Float[np.ndarray, " row"], offsets: Int[np.ndarray, " edge"]) -> Float[np.ndarray, " row"]:
    """Return the softmax over the options of each question."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    grown = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), sizes))
    return grown / np.repeat(np.add.reduceat(grown, starts), sizes)
