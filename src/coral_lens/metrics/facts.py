"""What metrics need to know of predictions: facts about each question, and how often a resample draws it. Never a score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.records import Predictions

SMALLEST = 1e-12
"""NLL clips probabilities here: an option that steering clipped to 0 costs 27.6 and not infinity."""
Weights = Float[np.ndarray, "boot question"]
"""How often each resample holds each question: whole numbers. A row sums to the number of questions, or to about that
where groups of different sizes are drawn."""
Values = Float[np.ndarray, " boot"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the metrics need to know about each question of a set of predictions."""

    probs: Float[np.ndarray, " row"]
    target: Float[np.ndarray, " row"]
    """1.0 for the answer and 0.0 for the others; of a soft answer, the share of each option."""
    question: Int[np.ndarray, " row"]
    """The question that owns the row."""
    option: Int[np.ndarray, " row"]
    """The row's number within its question: the class, for cwECE."""
    sizes: Int[np.ndarray, " question"]
    confidence: Float[np.ndarray, " question"]
    """The largest probability."""
    right: Float[np.ndarray, " question"]
    """1.0 where the most probable option is the answer; of equally probable options the first counts. Of a soft answer the
    likeliest options are right, and all that are right where there are several."""
    hit: Float[np.ndarray, " question"]
    """The target of the most probable option: how often it would be right. As `right`, unless answers are soft."""
    ordered: Bool[np.ndarray, " question"]
    """Which questions are scores."""
    n_bins: int

    def per_question(self, values: Float[np.ndarray, " row"]) -> Float[np.ndarray, " question"]:
        """Sum over the options of each question."""
        return np.bincount(self.question, values, minlength=len(self.sizes))


def facts_of(predictions: Predictions, *, n_bins: int = 25) -> Facts:
    """Return the facts, or refuse predictions that cannot be scored: none at all, or without answers."""
    where = f"{predictions.method!r} on {predictions.task} {predictions.split}".rstrip()
    if n_bins < 1:
        raise CoralError(f"n_bins must be at least 1. Got {n_bins} instead.")
    if not len(predictions):
        raise CoralError(f"The predictions of {where} hold no question, so there is nothing to score; check the split.")
    unknown = np.flatnonzero(predictions.answers < 0)
    if len(unknown):
        raise CoralError(
            f"{len(unknown)} of {len(predictions)} questions predicted by {where} have no answer to score against "
            f"(first: {predictions.ids[unknown[0]]!r}); give them an answer or leave them out."
        )
    options, sizes = predictions.options, predictions.options.sizes
    assert sizes.min() > 0, "a question without options"
    assert (predictions.answers < sizes).all(), "an answer beyond the options of its question"
    probs = predictions.probs.astype(np.float64)
    target = options.one_hot(predictions.answers) if predictions.targets is None else predictions.targets
    hit = target[options.row(options.top(probs))]
    right = (hit == options.max(target)).astype(np.float64)
    ordered = np.zeros(len(sizes), dtype=bool) if predictions.ordered is None else predictions.ordered
    return Facts(
        probs, target, options.question, options.option, sizes, options.max(probs), right, hit, ordered, n_bins
    )


def mean_over(per_question: Float[np.ndarray, " question"], weights: Weights) -> Values:
    """Return the mean over questions of each resample."""
    means: Values = weights @ per_question / weights.sum(axis=1)
    return means


def most_sure_first(
    facts: Facts, weights: Weights
) -> tuple[Float[np.ndarray, "boot group"], Float[np.ndarray, "boot group"]]:
    """Return the weights of all and of the wrong questions per distinct confidence, in falling order."""
    order = np.argsort(-facts.confidence)
    starts = np.flatnonzero(np.diff(facts.confidence[order], prepend=np.inf))
    ordered = weights[:, order]
    wrong = ordered * (1 - facts.right[order])
    return np.add.reduceat(ordered, starts, axis=1), np.add.reduceat(wrong, starts, axis=1)
