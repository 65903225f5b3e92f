"""What is wrong among the answers that are given when only the surest are."""

from __future__ import annotations

import numpy as np

from coral_lens.metrics.facts import Facts, Values, Weights, most_sure_first

HALF = 0.5


def risk_at_half(facts: Facts, weights: Weights) -> Values:
    """Return the error rate among the surer half of the questions.

    Questions of one confidence come in random order, and this is the mean over it: the part of them that is answered is as often
    wrong as all of them.
    """
    everything, wrong = most_sure_first(facts, weights)
    ends = np.cumsum(everything, axis=1)
    half = HALF * ends[:, -1:]
    taken = np.clip(half - (ends - everything), 0.0, everything)
    risks: Values = (wrong / np.maximum(everything, 1e-300) * taken).sum(axis=1) / half[:, 0]
    return risks
