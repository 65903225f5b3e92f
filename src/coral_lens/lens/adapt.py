"""Adapt a fitted lens to one new task, from some tens of its questions with labels.

    log q' = ((1 - lambda) * log T + lambda * log q) / temperature

Lambda and temperature are those of the highest likelihood under a prior that is what the lens does without labels: five labels
move it little, a hundred decide. Where the labels show that the lens is worse than the base by temperature, lambda is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.data.leaks import question_keys
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import fresh_of
from coral_lens.lens.keep_answers import answer_worth, check_answers
from coral_lens.lens.rules import correct_rows, log_of
from coral_lens.lens.trace import ALL, Adaptation, AnswerCheck, CurvePoint, LearningCurve
from coral_lens.lens.trust import Trust, log_floored
from coral_lens.metrics.scores import Score
from coral_lens.ragged import Options
from coral_lens.records import FAR, Question, Scored, groups_of

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

FEWEST_LABELS = 5
"""Fewer labelled questions than this are refused."""
LARGEST_LAMBDA = 1.5
"""More than 1 is more of the lens than it says itself: on a task that it knows better than its own."""
TEMPERATURES = (0.2, 5.0)
"""The lowest and the highest temperature."""
UNTOLD = 0.5
"""The centre of lambda's prior for a lens that has no trust of its own."""
ENOUGH_TO_TELL = 20
"""Fewer labels than this never rule the lens out by the interval of its gain: five questions that agree are chance."""
PRIOR_OF_FEW, PRIOR_OF_ENOUGH = (0.2, 0.15), (0.3, 0.4)
"""Standard deviations of the priors of lambda and of the logarithm of the temperature: few labels may move both little."""
FOLDS = 10
N_BOOT = 2000
CURVE_SIZES = (5, 10, 20, 30, 50, 100, 200)
CURVE_DRAWS = 20


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
        """The number of the group of each question, or its own where each stands by itself."""
        alone = np.arange(len(self.options))
        return np.unique(np.asarray(self.groups), return_inverse=True)[1] if len(set(self.groups)) > 1 else alone

    def probs(self, weight: float, temperature: float) -> Float[np.ndarray, " row"]:
        """Return the probabilities at a weight of the lens and a temperature."""
        return self.options.softmax(((1.0 - weight) * self.base + weight * self.lens) / temperature)

    def brier(self, weight: float, temperature: float) -> Float[np.ndarray, " question"]:
        """Return the Brier score of each question."""
        probs = self.probs(weight, temperature)
        return self.options.sum((probs - self.y) ** 2)


def adapt(lens: Lens, model: Model, questions: Sequence[Question], *, work_dir: str | Path | None = None) -> Lens:
    """Return the lens for the task of these labelled questions, of which 30 to 100 are enough; the same as `lens.adapt`.

    Questions that it was fitted on are left out. The adapted lens is for this task alone; its field `adaptation` says what was
    found.

        lens = coral_lens.adapt(lens, model, few)
    """
    fresh_of(lens, questions, to="adapt")
    with lens.scored(model, questions, work_dir=Path(work_dir) if work_dir else None) as store:
        return adapt_on(lens, store)


def adapt_on(lens: Lens, store: Scored, *, with_curve: bool = False) -> Lens:
    """Return the lens for the task of the labelled questions of a store, which no evaluation counts any more."""
    fresh = fresh_of(lens, store.questions, to="adapt")
    if fresh.sum() < FEWEST_LABELS:
        raise CoralError(
            f"Adapting needs at least {FEWEST_LABELS} labelled questions that the lens was not fitted on, better 30 to 100. "
            f"Got {int(fresh.sum())}."
        )
    output = lens.read(store)
    table, probs = store.table, output.probs
    data = Labelled(
        log_of(probs["temperature"]),
        log_floored(probs[lens.plain_method]),
        table.options,
        correct_rows(table),
        groups_of(store.questions),
    ).take(fresh)
    found = adaptation_of(data, before_of(lens))
    answered = lens.trust.answers.get(ALL, True) if lens.trust else True
    if not lens.exits and len(data.options) >= ENOUGH_TO_TELL:
        found = replace(found, answers=check_labels(data, found, answered))
        answered = found.answers.used if found.answers else answered
    if with_curve:
        found = replace(found, curve=learning_curve(data, found.before))
    known = lens.trust or Trust(found.weight, FAR, FAR, 1.0)
    trust = replace(
        known,
        elsewhere=found.weight,
        reach=max(known.reach, float(np.quantile(output.shifts[fresh], 0.9))),
        temperature=found.temperature,
        adapted=True,
        everywhere=False,
        answers={} if lens.exits else {ALL: answered},
    )
    used = np.union1d(lens.adapted_on, question_keys(store.questions, version=lens.keys)[fresh])
    return replace(lens, trust=trust, tempering=None, adaptation=found, sets=None, abstention=None, adapted_on=used)


def before_of(lens: Lens) -> float:
    """Return the weight of a lens on a new task without labels."""
    if lens.adaptation:
        return lens.adaptation.before
    return lens.trust.elsewhere if lens.trust else UNTOLD


# ---------------------------------------------------------------------------------------------------------- what is found


def adaptation_of(data: Labelled, before: float) -> Adaptation:
    """Find weight and temperature, and by how much that is better than temperature alone."""
    gain = gain_of(data, before)
    if gain.high < 0.0 and len(data.options) >= ENOUGH_TO_TELL:
        return Adaptation(len(data.options), 0.0, before, fit_mixture(data, 0.0, at_most=0.0)[1], gain)
    weight, temperature = fit_mixture(data, before)
    return Adaptation(len(data.options), weight, before, temperature, gain)


def check_labels(data: Labelled, found: Adaptation, before: bool) -> AnswerCheck:
    """Return whether the adapted lens answers better than the base; where labels cannot tell, what held before them holds."""
    probs = data.probs(found.weight, found.temperature)
    lens, base = (answer_worth(one, data.y, data.options) for one in (probs, data.base))
    return check_answers(lens, base, before)


def fit_mixture(data: Labelled, before: float, *, at_most: float = LARGEST_LAMBDA) -> tuple[float, float]:
    """Return weight and temperature of the highest likelihood, drawn to what holds without labels as far as these are few."""
    from scipy.optimize import minimize

    of_lambda, of_temperature = PRIOR_OF_FEW if len(data.options) < ENOUGH_TO_TELL else PRIOR_OF_ENOUGH

    def loss(theta: np.ndarray) -> float:
        nll = -float((data.y * log_of(data.probs(theta[0], float(np.exp(theta[1]))))).sum())
        drawn = ((theta[0] - before) / of_lambda) ** 2 + (theta[1] / of_temperature) ** 2
        return nll + drawn / 2

    low, high = map(float, np.log(TEMPERATURES))
    start = np.array([min(before, at_most), 0.0])
    found = minimize(loss, start, method="L-BFGS-B", bounds=[(0.0, at_most), (low, high)]).x
    return float(found[0]), float(np.exp(found[1]))


def gain_of(data: Labelled, before: float, *, seed: int = 0) -> Score:
    """Return by how much the Brier score is lower than temperature's alone, with its 95 % interval.

    Both are fitted on labels of other questions than the one that is judged; those of one group are judged together, and drawn
    together for the interval.
    """
    rng, units = np.random.default_rng(seed), data.units
    n = int(units.max()) + 1
    fold = (rng.permutation(n) % min(FOLDS, n))[units]
    gains = np.empty(len(units))
    for k in range(fold.max() + 1):
        others, judged = data.take(fold != k), data.take(fold == k)
        alone = judged.brier(0.0, fit_mixture(others, 0.0, at_most=0.0)[1])
        gains[fold == k] = alone - judged.brier(*fit_mixture(others, before))
    drawn = rng.integers(0, n, (N_BOOT, n))
    means = np.bincount(units, gains)[drawn].sum(axis=1) / np.bincount(units)[drawn].sum(axis=1)
    return Score(float(gains.mean()), *map(float, np.quantile(means, [0.025, 0.975])))


def learning_curve(data: Labelled, before: float, *, seed: int = 0) -> LearningCurve:
    """Return the Brier score on the other questions after so many labels, and after how many more gain little.

    Each point is the mean of some draws; it is the first within one standard error of the best that is enough.
    """
    rng, n = np.random.default_rng(seed), len(data.options)
    sizes = [0, *(size for size in CURVE_SIZES if size <= n // 2)]
    scores: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    for _ in range(CURVE_DRAWS):
        order = rng.permutation(n)
        rest = data.take(np.isin(np.arange(n), order[sizes[-1] :]))
        for size in sizes:
            drawn = data.take(np.isin(np.arange(n), order[:size]))
            scores[size].append(rest.brier(*(fit_mixture(drawn, before) if size else (before, 1.0))))
    means = {size: float(np.mean(draws)) for size, draws in scores.items()}
    best = min(sizes, key=lambda size: means[size])
    error = float(np.std(np.concatenate(scores[best])) / np.sqrt(n))
    points = tuple(CurvePoint(size, {"brier": means[size]}) for size in sizes)
    return LearningCurve(points, next(size for size in sizes if means[size] <= means[best] + error))
