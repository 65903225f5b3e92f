"""What some tens of labelled questions say of a lens: its weight, the temperature, and by how much it is better than without.

    log q' = ((1 - lambda) * log T + lambda * log q) / temperature

Lambda and temperature are those of the highest likelihood under a prior that is what the lens does without labels: five labels
move it little, a hundred decide. It never counts questions where it should count what is independent: twenty questions of two
articles are two.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.lens.keep_answers import ENOUGH_TO_TELL, answer_worth, check_answers
from coral_lens.lens.trace import Adaptation, AnswerCheck
from coral_lens.metrics.scores import Score, iter_weights
from coral_lens.ragged import Options

LARGEST_LAMBDA = 1.5
"""More than 1 is more of the lens than it says itself: on a task that it knows better than its own."""
TEMPERATURES = (0.2, 5.0)
"""The lowest and the highest temperature."""
PRIOR_OF_FEW, PRIOR_OF_ENOUGH = (0.2, 0.15), (0.3, 0.4)
"""Standard deviations of the priors of lambda and of the logarithm of the temperature: few labels may move both little."""
SAME = 6
"""Scores that are the same to so many decimals are the same: two fits of one thing differ in the ninth, always to one side."""
FOLDS = 10
N_BOOT = 2000


class Labelled(NamedTuple):
    """What the base by temperature and the lens say of labelled questions, as logarithms."""

    base: Float[np.ndarray, " row"]
    lens: Float[np.ndarray, " row"]
    options: Options
    y: Float[np.ndarray, " row"]
    """1 for the right option, or the shares of a soft answer."""
    groups: tuple[str, ...] = ()
    """What the questions belong to that are not independent, see `groups_of`; empty if all are."""

    def take(self, mask: Bool[np.ndarray, " question"]) -> Labelled:
        """Return some of the questions."""
        rows = self.options.rows(mask)
        groups = tuple(compress(self.groups, mask))
        return Labelled(self.base[rows], self.lens[rows], self.options.take(mask), self.y[rows], groups)

    @property
    def units(self) -> Int[np.ndarray, " question"]:
        """The number of the group of each question, or its own where each stands by itself.

        Questions that are all of one group can only be told apart one by one; they still count as one (`n_units`).
        """
        alone = np.arange(len(self.options))
        return np.unique(np.asarray(self.groups), return_inverse=True)[1] if len(set(self.groups)) > 1 else alone

    @property
    def n_units(self) -> int:
        """How many of them are independent: the number of groups."""
        return len(set(self.groups)) if self.groups else len(self.options)

    def probs(self, weight: float, temperature: float) -> Float[np.ndarray, " row"]:
        """Return the probabilities at a weight of the lens and a temperature."""
        return self.options.softmax(((1.0 - weight) * self.base + weight * self.lens) / temperature)

    def brier_of(self, probs: Float[np.ndarray, " row"]) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question at these probabilities."""
        return self.options.sum((probs - self.y) ** 2)

    def brier(self, weight: float, temperature: float) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question at a weight of the lens and a temperature."""
        return self.brier_of(self.probs(weight, temperature))


class Prior(NamedTuple):
    """What holds without labels, and how far labels may move it."""

    weight: float
    """The weight of the lens without labels."""
    n_units: int
    """How many independent questions have labels: of them all, also where a part of them is fitted on (folds)."""
    exits: bool = False
    """Whether the base is an even share for each option: then only weight over temperature counts, and temperature stays 1."""
    least: float = 0.0
    """The weight that is never fallen short of."""
    temperature: float = 1.0
    """The temperature of the mixture without labels; that of the base alone is 1."""

    @property
    def spreads(self) -> tuple[float, float]:
        """The standard deviations of weight and of the logarithm of the temperature."""
        return PRIOR_OF_FEW if self.n_units < ENOUGH_TO_TELL else PRIOR_OF_ENOUGH


class Judged(NamedTuple):
    """What is said of each question by fits on labels of others."""

    alone: Float[np.ndarray, " row"]
    """The probabilities of temperature alone."""
    mixed: Float[np.ndarray, " row"]
    """Those of base and lens."""


# ------------------------------------------------------------------------------------------------------------- the fit


def fit_mixture(data: Labelled, prior: Prior) -> tuple[float, float]:
    """Return weight and temperature of the highest likelihood, drawn to what holds without labels as far as these are few."""
    return likeliest(data, prior, (prior.least, LARGEST_LAMBDA))


def fit_temperature(data: Labelled, prior: Prior) -> float:
    """Return the temperature of the highest likelihood without the lens."""
    return likeliest(data, prior, (0.0, 0.0))[1]


def likeliest(data: Labelled, prior: Prior, weights: tuple[float, float]) -> tuple[float, float]:
    """Return weight, within bounds, and temperature of the highest likelihood under the prior."""
    from scipy.optimize import minimize

    options, apart, shares = data.options, data.lens - data.base, data.options.spread(data.options.sum(data.y))
    doubt = float(np.log(prior.temperature)) if weights[1] > 0.0 and not prior.exits else 0.0
    centre, spreads = np.array([prior.weight, doubt]), np.array(prior.spreads)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        cooled = np.exp(-theta[1])
        scores = (data.base + theta[0] * apart) * cooled
        scores = scores - options.spread(options.max(scores))
        logs = scores - options.spread(np.log(options.sum(np.exp(scores))))
        behind = shares * np.exp(logs) - data.y  # the slope of the loss in each score
        drawn = (theta - centre) / spreads
        slopes = np.array([(behind * apart).sum() * cooled, -(behind * scores).sum()])
        return -float((data.y * logs).sum()) + float((drawn**2).sum()) / 2, slopes + drawn / spreads

    low, high = map(float, np.log(TEMPERATURES)) if not prior.exits else (0.0, 0.0)
    start = np.array([min(max(prior.weight, weights[0]), weights[1]), doubt])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[weights, (low, high)]).x
    return float(found[0]), float(np.exp(found[1]))


# ---------------------------------------------------------------------------------------------------------- what is found


def adaptation_of(data: Labelled, prior: Prior, judged: Judged) -> Adaptation:
    """Return weight and temperature, and by how much that is better than temperature alone."""
    gain = gain_of(data, judged)
    worse = is_worse(data, gain)
    weight, temperature = settle(data, prior, worse=worse)
    found = Adaptation(len(data.options), weight, prior.weight, temperature, gain, worse=worse, exits=prior.exits)
    return replace(found, temperature_before=prior.temperature, few=data.n_units < ENOUGH_TO_TELL)


def is_worse(data: Labelled, gain: Score) -> bool:
    """Whether the labels show that the lens does harm; a few never do: five questions that agree are chance."""
    return gain.high < 0.0 and data.n_units >= ENOUGH_TO_TELL


def settle(data: Labelled, prior: Prior, *, worse: bool) -> tuple[float, float]:
    """Return weight and temperature: the least weight where the labels have shown that the lens is worse."""
    return (prior.least, fit_temperature(data, prior)) if worse else fit_mixture(data, prior)


def judge(data: Labelled, prior: Prior, *, seed: int = 0) -> Judged:
    """Return what is said of each question by labels of others; those of one group are judged together.

    The prior stays that of all labels: folds of twenty-two have no twenty left, and would be held back as if these were few.
    """
    units = data.units
    n = int(units.max()) + 1
    fold = (np.random.default_rng(seed).permutation(n) % min(FOLDS, n))[units]
    alone, mixed = np.empty_like(data.base), np.empty_like(data.base)
    for k in range(fold.max() + 1):
        others, here, rows = data.take(fold != k), data.take(fold == k), data.options.rows(fold == k)
        alone[rows] = here.probs(0.0, fit_temperature(others, prior))
        mixed[rows] = here.probs(*fit_mixture(others, prior))
    return Judged(alone, mixed)


def gain_of(data: Labelled, judged: Judged, *, seed: int = 0) -> Score:
    """Return by how much the Brier score is lower than temperature's alone, with its 95 % interval, which draws whole groups."""
    gains = np.round(data.brier_of(judged.alone) - data.brier_of(judged.mixed), SAME)
    groups = tuple(map(str, data.units))
    resamples = iter_weights(len(gains), n_boot=N_BOOT, seed=seed, groups=groups)
    means = np.concatenate([drawn @ gains / drawn.sum(axis=1) for drawn in resamples])
    return Score(float(gains.mean()), *map(float, np.quantile(means, [0.025, 0.975])))


def check_labels(data: Labelled, judged: Judged, before: bool) -> AnswerCheck:
    """Return whether the adapted lens answers better than the base; where labels cannot tell, what held before them holds.

    Each question is answered by labels of others: weight and temperature flatter the answers that they were fitted on.
    """
    lens, base = (answer_worth(one, data.y, data.options) for one in (judged.mixed, data.base))
    return check_answers(lens, base, before, units=data.units)
