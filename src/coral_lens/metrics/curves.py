"""Curves of confidence for the figures: reliability by bin, and risk against coverage. Never plots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from coral_lens.metrics.facts import facts_of, most_sure_first
from coral_lens.metrics.scores import equal_mass_bins, equal_width_bins
from coral_lens.records import Predictions


@dataclass(frozen=True, slots=True)
class Reliability:
    """A reliability diagram: one entry per bin that holds a question; empty bins have no accuracy and are left out."""

    low: Float[np.ndarray, " bin"]
    """Lower edge of the bin; with adaptive bins the smallest confidence in it."""
    high: Float[np.ndarray, " bin"]
    """Upper edge of the bin; with adaptive bins the largest confidence in it."""
    confidence: Float[np.ndarray, " bin"]
    accuracy: Float[np.ndarray, " bin"]
    count: Int[np.ndarray, " bin"]


def reliability(predictions: Predictions, *, n_bins: int = 25, adaptive: bool = False) -> Reliability:
    """Return mean confidence and accuracy by bin: the very bins of `ece`, or of `ece_adaptive`."""
    facts = facts_of(predictions, n_bins=n_bins)
    sure, right = facts.confidence, facts.right
    number = (equal_mass_bins if adaptive else equal_width_bins)(sure, n_bins=n_bins)
    used, bins, count = np.unique(number, return_inverse=True, return_counts=True)
    low, high = used / n_bins, (used + 1) / n_bins
    if adaptive:
        order = np.argsort(sure)
        ends = np.cumsum(count)
        low, high = sure[order][ends - count], sure[order][ends - 1]
    return Reliability(low, high, np.bincount(bins, sure) / count, np.bincount(bins, right) / count, count)


@dataclass(frozen=True, slots=True)
class RiskCoverage:
    """The error rate among the k surest questions, for k = 1 to all of them. `risk.mean()` is the AURC."""

    coverage: Float[np.ndarray, " question"]
    risk: Float[np.ndarray, " question"]
    threshold: Float[np.ndarray, " question"]
    """The confidence of the k-th question."""


def risk_coverage(predictions: Predictions) -> RiskCoverage:
    """Return the curve; questions of equal confidence come in random order, of which this is the expectation."""
    facts = facts_of(predictions)
    threshold = -np.sort(-facts.confidence)
    everything, wrong = most_sure_first(facts, np.ones((1, len(predictions))))
    sizes = everything[0].astype(np.int64)
    errors, k = np.cumsum(np.repeat(wrong[0] / sizes, sizes)), np.arange(1, len(predictions) + 1)
    return RiskCoverage(k / len(predictions), errors / k, threshold)
