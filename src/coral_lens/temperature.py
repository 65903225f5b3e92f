"""Temperature scaling of the base probabilities: one number, which moves confidence and never the answer."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from coral_lens.steering import softmax

BOUNDS = (0.02, 50.0)


def apply_temperature(
    p: Float[np.ndarray, " row"], offsets: Int[np.ndarray, " edge"], *, temperature: float
) -> Float[np.ndarray, " row"]:
    """Return softmax(log p / T) over the options of each question."""
    return softmax(np.log(np.maximum(p, 1e-300)) / temperature, offsets)


def fit_temperature(
    p: Float[np.ndarray, " row"], offsets: Int[np.ndarray, " edge"], answers: Int[np.ndarray, " question"]
) -> float:
    """Return the temperature with the lowest NLL. The NLL is convex in 1 / T, so a bounded search finds it."""
    from scipy.optimize import minimize_scalar

    starts = offsets[:-1]
    logs = np.log(np.maximum(p, 1e-300))
    # relative to the right option: the NLL is then a log-sum-exp, exact where a probability would underflow
    behind = logs - np.repeat(logs[starts + answers], np.diff(offsets))

    def nll(inverse: float) -> float:
        return float(np.logaddexp.reduceat(inverse * behind, starts).mean())

    low, high = (1.0 / b for b in reversed(BOUNDS))
    return float(1.0 / minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-6}).x)
