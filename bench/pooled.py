"""Answers of several draws (of labels, or of training questions) to the same test questions: as one, and each by itself.

Accuracy, Brier score and NLL are means over questions, and may be taken over all draws at once. The ECE may not: errors of
opposite sign in two draws cancel in a pool, so that a pool of five is better calibrated than any of the five.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.metrics.comparisons import Difference, Resampled, resampled
from coral_lens.metrics.scores import facts_of, iter_weights, metric_named, score
from coral_lens.records import Predictions

N_BOOT = 2000


@dataclass(frozen=True, slots=True)
class Pooled(Predictions):
    """The answers of several draws as one, of which each question's are a group."""

    sizes: tuple[int, ...] = ()
    """How many questions each draw has, in the order of the draws."""

    def parts(self) -> Iterator[slice]:
        """Yield which questions belong to each draw."""
        ends = np.cumsum((0, *self.sizes)).tolist()
        yield from map(slice, ends[:-1], ends[1:])


def together(draws: Sequence[Predictions]) -> Pooled:
    """Return the answers of several draws as one; those to one question are a group, of which the interval knows."""
    first, sizes = draws[0], np.concatenate([np.diff(d.offsets) for d in draws])
    return Pooled(
        method=first.method,
        model=first.model,
        task=first.task,
        split=first.split,
        ids=tuple(f"{i}: {name}" for i, d in enumerate(draws) for name in d.ids),
        answers=np.concatenate([d.answers for d in draws]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        probs=np.concatenate([d.probs for d in draws]),
        groups=tuple(group for d in draws for group in (d.groups or d.ids)),
        targets=all_rows([(d, d.targets, d.options.one_hot(d.answers)) for d in draws]),
        ordered=all_rows([(d, d.ordered, np.zeros(len(d), dtype=bool)) for d in draws]),
        sizes=tuple(map(len, draws)),
    )


def all_rows(parts: Sequence[tuple[Predictions, np.ndarray | None, np.ndarray]]) -> np.ndarray | None:
    """Return what some draws say of their rows, in place of nothing what that means; None where no draw says anything."""
    if all(said is None for _, said, _ in parts):
        return None
    return np.concatenate([meant if said is None else said for _, said, meant in parts])


# ------------------------------------------------------------------------------------------------------------- the scores


def is_pooled(found: Predictions, metric: str) -> bool:
    """Whether a metric of these answers is a mean over draws."""
    return isinstance(found, Pooled) and metric_named(metric).kind != "mean"


def score_of(found: Predictions, metric: str) -> float:
    """Return the value of a metric; where it is no mean over questions, the mean over the draws."""
    if not is_pooled(found, metric):
        return score(found, metric)
    assert isinstance(found, Pooled)
    return float(np.mean([score(found.take(np.arange(len(found))[part]), metric) for part in found.parts()]))


def resampled_in(
    methods: Mapping[str, Predictions], metrics: Sequence[str], *, seed: int = 0
) -> dict[str, dict[str, Resampled]]:
    """Return by method and metric its value and its bootstrap; a resample draws the same questions in every draw."""
    first = next(iter(methods.values()))
    whole = [m for m in metrics if not is_pooled(first, m)]
    found = resampled(methods, whole, n_boot=N_BOOT, seed=seed) if whole else {name: {} for name in methods}
    for metric in (m for m in metrics if m not in whole):
        for name, one in methods.items():
            assert isinstance(one, Pooled)
            assert one.ids == first.ids
            found[name][metric] = Resampled(score_of(one, metric), mean_draws(one, metric, seed=seed))
    return found


def mean_draws(found: Pooled, metric: str, *, seed: int) -> np.ndarray:
    """Return the mean of a metric over the draws, on each resample of the questions."""
    compute, parts = metric_named(metric).compute, list(found.parts())
    facts = [facts_of(found.take(np.arange(len(found))[part])) for part in parts]
    drawn = iter_weights(len(found), n_boot=N_BOOT, seed=seed, groups=found.groups)
    return np.concatenate(
        [
            np.mean([compute(one, weights[:, part]) for one, part in zip(facts, parts, strict=True)], axis=0)
            for weights in drawn
        ]
    )


def difference_in(found: Predictions, control: Predictions, metric: str) -> Difference:
    """Return a paired difference in a metric, of pools over their draws."""
    both = resampled_in({"a": found, "b": control}, [metric])
    return both["a"][metric].minus(both["b"][metric], kind=metric_named(metric).kind)
