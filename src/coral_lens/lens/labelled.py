"""What some tens of labelled questions say of a lens: its weight, the temperature, and by how much it is better than without.

    log q' = ((1 - lambda) * log T + lambda * log q) / temperature + v . z

Lambda and temperature are those of the highest likelihood under a prior that is what the lens does without labels: five labels
move it little, a hundred decide. From twenty on, a small linear probe v is learned beside them, from the states z that the lens
reads: what is right on this task may lie in directions that its own tasks have not shown. It never counts questions where it
should count what is independent: twenty questions of two articles are two.
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
OWN_SPREAD = 0.5
"""Standard deviation of what a task's own probe says of a typical option, before labels are seen; v is drawn to 0 by it."""
SCALE_SPREAD = 0.3
"""Standard deviation of the logarithm of the scale that labels of others choose: as sure as a mixture with a probe may be."""
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
    z: Float[np.ndarray, "row feature"] | None = None
    """The states that the lens reads, standardised and centred within the question; None where nothing is learned from them."""

    def take(self, mask: Bool[np.ndarray, " question"]) -> Labelled:
        """Return some of the questions."""
        rows = self.options.rows(mask)
        groups = tuple(compress(self.groups, mask))
        z = None if self.z is None else self.z[rows]
        return Labelled(self.base[rows], self.lens[rows], self.options.take(mask), self.y[rows], groups, z)

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

    def scores(self, mixture: Mixture) -> Float[np.ndarray, " row"]:
        """Return what base, lens and the task's own probe say together, as logits."""
        mixed = ((1.0 - mixture.weight) * self.base + mixture.weight * self.lens) / mixture.temperature
        return mixed if mixture.own is None or self.z is None else mixed + self.z @ mixture.own

    def probs(self, mixture: Mixture) -> Float[np.ndarray, " row"]:
        """Return the probabilities of a mixture."""
        return self.options.softmax(self.scores(mixture))

    def brier_of(self, probs: Float[np.ndarray, " row"]) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question at these probabilities."""
        return self.options.sum((probs - self.y) ** 2)

    def brier(self, mixture: Mixture) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question under a mixture."""
        return self.brier_of(self.probs(mixture))

    def log_likelihood(self, scores: Float[np.ndarray, " row"]) -> tuple[float, Float[np.ndarray, " row"]]:
        """Return the log-likelihood of the labels at some logits, and how fast it grows with each of them."""
        options = self.options
        scores = scores - options.spread(options.max(scores))
        logs = scores - options.spread(np.log(options.sum(np.exp(scores))))
        return float((self.y * logs).sum()), self.y - options.spread(options.sum(self.y)) * np.exp(logs)


class Mixture(NamedTuple):
    """How base and lens are mixed on a task, and what is said beside them."""

    weight: float
    """Lambda: the weight of the lens."""
    temperature: float
    """What the mixture is scaled by."""
    own: Float[np.ndarray, " feature"] | None = None
    """v: the weights of the task's own probe; None where there is none."""


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
    def is_enough(self) -> bool:
        """Whether the labels are enough to tell anything for certain."""
        return self.n_units >= ENOUGH_TO_TELL

    @property
    def spreads(self) -> tuple[float, float]:
        """The standard deviations of weight and of the logarithm of the temperature."""
        return PRIOR_OF_ENOUGH if self.is_enough else PRIOR_OF_FEW


class Judged(NamedTuple):
    """What is said of each question by fits on labels of others."""

    alone: Float[np.ndarray, " row"]
    """The probabilities of temperature alone."""
    mixed: Float[np.ndarray, " row"]
    """Those of base and lens, and of a probe of the task's own."""
    scale: float = 1.0
    """What the logits of a mixture are multiplied by, so that it is as sure of questions as it is right on others."""


# ------------------------------------------------------------------------------------------------------------- the fit


def fit_mixture(data: Labelled, prior: Prior) -> Mixture:
    """Return the mixture of the highest likelihood, drawn to what holds without labels as far as these are few.

    Weight and temperature first, then the task's own probe beside them.
    """
    mixture = likeliest(data, prior, (prior.least, LARGEST_LAMBDA))
    return mixture._replace(own=fit_own(data, mixture)) if prior.is_enough else mixture


def fit_temperature(data: Labelled, prior: Prior) -> Mixture:
    """Return the base at the temperature of the highest likelihood, without the lens."""
    return likeliest(data, prior, (0.0, 0.0))


def likeliest(data: Labelled, prior: Prior, weights: tuple[float, float]) -> Mixture:
    """Return weight, within bounds, and temperature of the highest likelihood under the prior."""
    from scipy.optimize import minimize

    apart = data.lens - data.base
    doubt = float(np.log(prior.temperature)) if weights[1] > 0.0 and not prior.exits else 0.0
    centre, spreads = np.array([prior.weight, doubt]), np.array(prior.spreads)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        cooled = np.exp(-theta[1])
        scores = (data.base + theta[0] * apart) * cooled
        likelihood, slope = data.log_likelihood(scores)
        drawn = (theta - centre) / spreads
        slopes = np.array([(slope * apart).sum() * cooled, -(slope * scores).sum()])
        return float((drawn**2).sum()) / 2 - likelihood, drawn / spreads - slopes

    low, high = map(float, np.log(TEMPERATURES)) if not prior.exits else (0.0, 0.0)
    start = np.array([min(max(prior.weight, weights[0]), weights[1]), doubt])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[weights, (low, high)]).x
    return Mixture(float(found[0]), float(np.exp(found[1])))


def fit_own(data: Labelled, mixture: Mixture) -> Float[np.ndarray, " feature"] | None:
    """Return the probe of the highest likelihood beside a mixture, drawn to 0; None where there are no states to learn from."""
    from scipy.optimize import minimize

    size = 0.0 if data.z is None else float(np.sqrt((data.z**2).sum(axis=1).mean()))
    if data.z is None or not size:
        return None
    z, beside = data.z * (OWN_SPREAD / size), data.scores(mixture)

    def loss(v: np.ndarray) -> tuple[float, np.ndarray]:
        likelihood, slope = data.log_likelihood(beside + z @ v)
        return float(v @ v) / 2 - likelihood, v - z.T @ slope

    return minimize(loss, np.zeros(z.shape[1]), jac=True, method="L-BFGS-B").x * (OWN_SPREAD / size)


# ---------------------------------------------------------------------------------------------------------- what is found


def adaptation_of(data: Labelled, prior: Prior, judged: Judged) -> tuple[Adaptation, Mixture]:
    """Return what was found and by how much it is better than temperature alone, and the mixture itself."""
    gain = gain_of(data, judged)
    worse = is_worse(data, gain)
    mixture = settle(data, prior, judged.scale, worse=worse)
    found = Adaptation(
        len(data.options), mixture.weight, prior.weight, mixture.temperature, gain, worse=worse, exits=prior.exits
    )
    few, own = data.n_units < ENOUGH_TO_TELL, mixture.own is not None
    return replace(found, temperature_before=prior.temperature, few=few, own=own), mixture


def is_worse(data: Labelled, gain: Score) -> bool:
    """Whether the labels show that the lens does harm; a few never do: five questions that agree are chance."""
    return gain.high < 0.0 and data.n_units >= ENOUGH_TO_TELL


def settle(data: Labelled, prior: Prior, scale: float, *, worse: bool) -> Mixture:
    """Return the mixture: with the least weight and no more where the labels have shown that it is worse than the base."""
    if worse:
        return fit_temperature(data, prior)._replace(weight=prior.least)
    weight, temperature, own = fit_mixture(data, prior)
    return Mixture(weight, temperature / scale, None if own is None else scale * own)


def judge(data: Labelled, prior: Prior, *, seed: int = 0) -> Judged:
    """Return what is said of each question by labels of others; those of one group are judged together.

    The prior stays that of all labels: folds of twenty-two have no twenty left, and would be held back as if these were few.
    """
    units = data.units
    n = int(units.max()) + 1
    fold = (np.random.default_rng(seed).permutation(n) % min(FOLDS, n))[units]
    alone, scores = np.empty_like(data.base), np.empty_like(data.base)
    for k in range(fold.max() + 1):
        others, here, rows = data.take(fold != k), data.take(fold == k), data.options.rows(fold == k)
        alone[rows] = here.probs(fit_temperature(others, prior))
        scores[rows] = here.scores(fit_mixture(others, prior))
    if data.z is None or not prior.is_enough:
        return Judged(alone, data.options.softmax(scores))
    scales = np.array(
        [fit_scale(data.take(fold != k), scores[data.options.rows(fold != k)]) for k in range(fold.max() + 1)]
    )
    mixed = data.options.softmax(data.options.spread(scales[fold]) * scores)
    return Judged(alone, mixed, fit_scale(data, scores))


def fit_scale(data: Labelled, scores: Float[np.ndarray, " row"]) -> float:
    """Return what logits are multiplied by for the highest likelihood, drawn to 1 as far as questions are few.

    A probe of many weights is too sure of the labels that it was fitted on, so the scores must be of fits on other labels.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_scale: float) -> float:
        likelihood, _ = data.log_likelihood(np.exp(log_scale) * scores)
        return log_scale**2 / (2 * SCALE_SPREAD**2) - likelihood

    low, high = map(float, np.log(TEMPERATURES))
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


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
