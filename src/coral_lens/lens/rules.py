"""Base probabilities, residuals and the paper's correction, over questions with any number of options. Only arithmetic.

Temperature scaling of the base probabilities: one number, which moves confidence and never the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from coral_lens.lens.settings import BaseRule
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, OptionTable

Rule = Literal["residual", "listwise"]
"""How a probe's output moves probabilities: `residual`, the paper's p + gamma * r_hat, clipped; `listwise`, beyond the
paper: softmax(base_weight * log p + gamma * score)."""

BASE_SCORES: dict[str, Callable[[OptionTable], Float[np.ndarray, " row"]]] = {
    "sum": lambda t: t.logprobs,
    "token": lambda t: t.logprobs / t.n_tokens,
    "char": lambda t: t.logprobs / t.n_chars,
}
"""The score whose softmax is the base probability: lm-eval's acc, the mean per token, lm-eval's acc_norm."""


def base_probs(table: OptionTable, rule: BaseRule) -> Float[np.ndarray, " row"]:
    """Return the unsteered model's distribution over the options of each question."""
    return table.options.softmax(BASE_SCORES[rule](table))


def correct_rows(table: OptionTable) -> Float[np.ndarray, " row"]:
    """Return y: 1 for the correct option of each question and 0 for the others. Every question must have an answer."""
    assert (table.answers != UNKNOWN).all(), "an unlabelled question has no y"
    y = np.zeros(len(table.logprobs))
    y[table.options.starts + table.answers] = 1.0
    return y


def residuals(table: OptionTable, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return r = y - p, what the probe learns to predict (the paper's Eq. 1)."""
    return correct_rows(table) - p


def steer(
    p: Float[np.ndarray, " row"], r_hat: Float[np.ndarray, " row"], options: Options, *, gamma: float
) -> Float[np.ndarray, " row"]:
    """Return p' = max(p + gamma * (r_hat - mean r_hat), 0), renormalised per question (the paper's Eq. 4)."""
    if gamma == 0.0:
        return p
    # centred residuals sum to 0 over a question, so clipping leaves a total of at least 1: safe to divide
    return options.normalise(np.maximum(p + gamma * options.centre(r_hat), 0.0))


# ---------------------------------------------------------------------------------------------------- temperature

BOUNDS = (0.02, 50.0)


def apply_temperature(
    p: Float[np.ndarray, " row"], options: Options, *, temperature: float
) -> Float[np.ndarray, " row"]:
    """Return softmax(log p / T) over the options of each question."""
    return options.softmax(np.log(np.maximum(p, 1e-300)) / temperature)


def fit_temperature(p: Float[np.ndarray, " row"], options: Options, answers: Int[np.ndarray, " question"]) -> float:
    """Return the temperature with the lowest NLL. The NLL is convex in 1 / T, so a bounded search finds it."""
    from scipy.optimize import minimize_scalar

    logs = np.log(np.maximum(p, 1e-300))
    # relative to the right option: the NLL is then a log-sum-exp, exact where a probability would underflow
    behind = logs - options.spread(logs[options.starts + answers])

    def nll(inverse: float) -> float:
        return float(np.logaddexp.reduceat(inverse * behind, options.starts).mean())

    low, high = (1.0 / b for b in reversed(BOUNDS))
    return float(1.0 / minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-6}).x)
