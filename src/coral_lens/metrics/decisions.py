"""Metrics of decisions: the distance from a soft answer, and errors on a scale whose levels have an order."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from coral_lens.metrics.facts import SMALLEST, Facts, Values, Weights, mean_over


def kl(facts: Facts, weights: Weights) -> Values:
    """Kullback-Leibler divergence from the soft answer to the probabilities: the NLL less what nobody could avoid."""
    shares = np.maximum(facts.target, SMALLEST)
    logs = np.log(shares) - np.log(np.maximum(facts.probs, SMALLEST))
    return mean_over(facts.per_question(np.where(facts.target > 0, facts.target * logs, 0.0)), weights)


def ranked_probability(facts: Facts, weights: Weights) -> Values:
    """Ranked probability score of scores (Epstein 1969): squared errors of the cumulated probabilities, over K - 1 levels.

    0 is perfect, 1 is all of it at the wrong end. A score of two levels has half the Brier score of a choice.
    """
    behind = cumulated(facts, facts.probs - facts.target)
    per_question = facts.per_question(behind**2) / (facts.sizes - 1)
    return mean_of_scores(facts, per_question, weights)


def level_error(facts: Facts, weights: Weights) -> Values:
    """Mean absolute error of scores: how many levels the expected level is from that of the answer."""
    per_question = np.abs(facts.per_question(facts.option * (facts.probs - facts.target)))
    return mean_of_scores(facts, per_question, weights)


def cumulated(facts: Facts, values: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return the sum of values over the levels of a question up to each of them."""
    table = np.zeros((len(facts.sizes), int(facts.sizes.max())))
    table[facts.question, facts.option] = values
    return np.cumsum(table, axis=1)[facts.question, facts.option]


def mean_of_scores(facts: Facts, per_question: Float[np.ndarray, " question"], weights: Weights) -> Values:
    """Return the mean over the questions that are scores; nan where a resample has none."""
    drawn = weights * facts.ordered
    total = drawn.sum(axis=1)
    return np.where(total > 0, drawn @ per_question / np.maximum(total, 1.0), np.nan)


def expected_level(probs: Float[np.ndarray, " level"]) -> float:
    """Return the expected level of a score, counted from 0."""
    return float(np.arange(len(probs)) @ probs)
