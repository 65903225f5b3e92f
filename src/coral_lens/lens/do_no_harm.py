"""Do no harm, learned: lenses that were fitted without a part of the training mixture predict that part.

What they say there teaches how far a lens is to be believed on a task that it was not fitted on; what the lens says of held-out
questions of its own tasks, how its confidence is to be scaled there. Test tasks are never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.data.own_files import is_file_task
from coral_lens.errors import CoralError
from coral_lens.lens.choose import Candidate, fit_recipe, predict_all, predict_rounds
from coral_lens.lens.domains import CLUSTER, FEWEST_IN_PART, domains_of
from coral_lens.lens.keep_answers import answer_worth, answers_of, check_answers, check_tasks
from coral_lens.lens.probes.registry import LENSES
from coral_lens.lens.rules import apply_temperature, correct_rows, temperature_on
from coral_lens.lens.shift import ShiftModel, fit_shift, question_places
from coral_lens.lens.trace import ALL, ELSEWHERE, AnswerCheck, SimulatedShift
from coral_lens.lens.training_data import TrainingData, fold_masks
from coral_lens.lens.trust import FADE, Believed, Trust, log_floored
from coral_lens.ragged import Options
from coral_lens.records import FAR

Questions = Bool[np.ndarray, " question"]
LAMBDAS = tuple(k / 10 for k in range(11))
"""The weights on tasks that were not trained on, of which one is chosen."""
TEMPERATURES = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0)
"""The temperatures of the mixture there, of which one is chosen: a lens that may be wrong is better doubted than left out."""
USELESS = 0.5
"""Weight of tasks on which the lens is useless, beside 1 for a task as it is: of three new tasks, it is useless on one."""
ONE_TASK = 0.5
"""The largest weight elsewhere of a lens of one task: its clusters are left out in turn, and tell nothing of another task."""
SCALE_PRIOR = 0.5
"""Standard deviation of the logarithm of a task's scale around the scale of all."""
SCALES = (0.1, 10.0)
"""The smallest and the largest scale of a task."""
HOME_FOLDS = 5
"""Folds whose predictions choose the scales, where the choice of the lens itself was by one split."""


class Simulated(NamedTuple):
    """What a lens and the base by temperature say of a part that neither was fitted on, its answers and its shifts."""

    base: Float[np.ndarray, " row"]
    lens: Float[np.ndarray, " row"]
    shuffled: Float[np.ndarray, " row"]
    """The lens again, what its probe says of each option being said of another one of the question."""
    options: Options
    y: Float[np.ndarray, " row"]
    """1 for the right option, or the shares of a soft answer."""
    shifts: Float[np.ndarray, " question"]
    groups: tuple[str, ...] = ()
    """What the questions belong to that are not independent; empty if all are."""

    def mixed(self, weight: float, temperature: float, lens: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        """Return what base and lens say together at a weight and a temperature."""
        ones = np.ones(len(self.options))
        return Believed(weight * ones, ones, temperature * ones).blend(self.base, lens, self.options)


@dataclass(frozen=True)
class PlacedQuestions:
    """The training questions, with their places in the model's states and the parts of the mixture they belong to."""

    data: TrainingData
    places: Float[np.ndarray, "question width"]
    """The mean state of each question's options (`shift.question_places`)."""
    domains: np.ndarray
    """The part of the training mixture that each question belongs to (`domains.domains_of`)."""

    def shift(self, train: Questions, held_out: Questions) -> ShiftModel:
        """Fit the shift model on some questions; others say what is typical."""
        return fit_shift(
            self.places, self.domains.tolist(), train=np.flatnonzero(train), held_out=np.flatnonzero(held_out)
        )

    def can_spare(self, name: str) -> bool:
        """Whether enough questions are left to fit a lens and to choose its stop when a part is left out."""
        others, held_out = self.domains != name, self.data.rounds[0]
        return int((others & ~held_out).sum()) >= FEWEST_IN_PART and bool((others & held_out).any())


class DoNoHarm(NamedTuple):
    """What keeps a lens from doing harm, and what that was learned from."""

    shift: ShiftModel
    trust: Trust | None = None
    simulated: tuple[SimulatedShift, ...] = ()
    answers: Mapping[str, AnswerCheck] = {}
    """Whether it answers better than the model itself."""


def fit_do_no_harm(data: TrainingData, chosen: Candidate, gamma: float, *, temper: bool, seed: int) -> DoNoHarm:
    """Fit the shift model and, if the lens is to be tempered, its trust; also say what was simulated and found."""
    places = question_places(data.layer(chosen.recipe.layers[0]), data.options)
    mixture = PlacedQuestions(data, places, np.array(domains_of(data.questions, places, seed=seed)))
    held_out = data.rounds[0]
    shift = mixture.shift(~held_out, held_out)
    if not temper:
        return DoNoHarm(shift)
    names = [name for name in sorted(set(mixture.domains)) if mixture.can_spare(name)]
    parts = [simulate_without(mixture, chosen, gamma, name, seed=seed) for name in names]
    folded, at_home = predict_home(data, chosen, seed=seed)
    pooled, scales = fit_scales(folded, at_home, gamma)
    checks = check_home(folded, at_home.probs(gamma))
    home_reach = max(FAR, float(shift.of(places, np.flatnonzero(held_out)).max()))
    elsewhere, temperature, reach = fit_elsewhere(names, parts)
    if parts and not are_clusters(names):
        checks[ELSEWHERE] = check_elsewhere(parts, elsewhere, temperature, before=checks[ALL].used)
    trust = Trust(elsewhere, reach, home_reach, pooled, scales, temperature=temperature, answers=answers_of(checks))
    record = (
        SimulatedShift(f"without {name}", len(part.options), float(np.median(part.shifts)))
        for name, part in zip(names, parts, strict=True)
    )
    return DoNoHarm(shift, trust, tuple(record), checks)


# ------------------------------------------------------------------------------------------------------------- elsewhere


def simulate_without(mixture: PlacedQuestions, chosen: Candidate, gamma: float, name: str, *, seed: int) -> Simulated:
    """Return what a lens and a temperature that were fitted without a part of the mixture say of that part.

    Layer, setting and strength are those of the whole mixture: only what is fitted has not seen the part.
    """
    data, recipe = mixture.data, chosen.recipe
    others, held_out = mixture.domains != name, data.rounds[0]
    predicted = predict_all(data, fit_recipe(data, recipe, others & ~held_out, others & held_out))
    cooled = apply_temperature(data.p, data.options, temperature=temperature_on(data.p, data.table, others))
    shifts = mixture.shift(others & ~held_out, others & held_out).of(mixture.places)
    rows, part = data.options.rows(~others), data.options.take(~others)
    mistaken = replace(predicted, scores=shuffled_within(predicted.scores, data.options, seed=seed))
    lens, useless = (recipe.rule.correct(said, gamma)[rows] for said in (predicted, mistaken))
    groups = tuple(q.group for q, other in zip(data.questions, others, strict=True) if not other)
    return Simulated(cooled[rows], lens, useless, part, correct_rows(data.table)[rows], shifts[~others], groups)


def shuffled_within(scores: Float[np.ndarray, " row"], options: Options, *, seed: int) -> Float[np.ndarray, " row"]:
    """Return the scores of each question in another order, drawn at random."""
    return scores[np.lexsort((np.random.default_rng(seed).random(options.n_rows), options.question))]


def fit_elsewhere(names: Sequence[str], parts: Sequence[Simulated]) -> tuple[float, float, float]:
    """Return weight and temperature on other tasks, and the shift up to which nine in ten questions of the furthest part lie.

    Clusters are of one task and tell less: the weight is bounded, and has gone where a question is far.
    """
    if are_clusters(names) or not parts:
        return *choose_mixture(parts, at_most=ONE_TASK), FAR / FADE
    at_most = ONE_TASK if are_alike(names, parts) else 1.0
    return *choose_mixture(parts, at_most=at_most), max(FAR, *(float(np.quantile(part.shifts, 0.9)) for part in parts))


def are_clusters(names: Sequence[str]) -> bool:
    """Whether the parts are of one task."""
    return any(name.startswith(CLUSTER) for name in names)


def are_alike(names: Sequence[str], parts: Sequence[Simulated]) -> bool:
    """Whether the parts are files that do not lie apart: two halves of one set tell of another task as little as clusters do."""
    return all(map(is_file_task, names)) and all(np.median(part.shifts) < FAR for part in parts)


def check_elsewhere(parts: Sequence[Simulated], weight: float, temperature: float, *, before: bool) -> AnswerCheck:
    """Return whether the mixture answers tasks that were left out better than the base does; if that cannot be told, `before`."""
    worth = [
        [answer_worth(probs, part.y, part.options) for probs in (part.mixed(weight, temperature, part.lens), part.base)]
        for part in parts
    ]
    mixed, base = (np.concatenate(each) for each in zip(*worth, strict=True))
    units = [
        f"{i} {group}" for i, part in enumerate(parts) for group in part.groups or map(str, range(len(part.options)))
    ]
    return check_answers(mixed, base, before, np.array(units))


def choose_mixture(parts: Sequence[Simulated], *, at_most: float = 1.0) -> tuple[float, float]:
    """Return weight and temperature with the lowest mean Brier score over the parts and their useless twins.

    A part has two twins, with the same questions. In the one, labels are drawn at random: neither lens nor base knows anything.
    In the other the lens's own evidence is shuffled: the base knows what it knows, and the lens is as sure as ever. Among equal
    settings the one that leaves the base most is taken; without parts the base alone.
    """
    settings = [(0.0, 1.0), *((w, t) for w in LAMBDAS if 0.0 < w <= at_most for t in TEMPERATURES)]

    def loss(setting: tuple[float, float]) -> float:
        # over an even base many settings are the same: rounding must not choose among them
        return round(sum(loss_at(*setting, part) for part in parts), 9)

    return min(settings, key=loss)


def loss_at(weight: float, temperature: float, part: Simulated) -> float:
    """Return the Brier score of a part at a weight and a temperature, and those of its twins by their own weight.

    Over labels drawn at random the score of a question is the sum of its squared probabilities, but for a constant.
    """
    options = part.options
    probs, mistaken = (part.mixed(weight, temperature, lens) for lens in (part.lens, part.shuffled))
    squares, others = options.sum(probs**2), options.sum(mistaken**2)
    brier = squares - 2.0 * options.sum(part.y * probs)
    without_labels, without_evidence = squares - 2.0 / options.sizes, others - 2.0 * options.sum(part.y * mistaken)
    return float(brier.mean() + USELESS * (without_labels.mean() + without_evidence.mean()) / 2)


# --------------------------------------------------------------------------------------------------------------- at home


def predict_home(data: TrainingData, chosen: Candidate, *, seed: int) -> tuple[TrainingData, Candidate]:
    """Return the lens with predictions of every training question by a fit that did not see it.

    Networks, which are slow, and mixtures of too few groups keep the validation questions that chose them.
    """
    if len(data.rounds) > 1 or LENSES[chosen.recipe.kind].network:
        return data, chosen
    try:
        folded = replace(data, rounds=fold_masks(data.questions, HOME_FOLDS, seed=seed))
    except CoralError:
        return data, chosen
    return folded, predict_rounds(folded, chosen.recipe, "brier")


def check_home(data: TrainingData, lens: Float[np.ndarray, " row"]) -> dict[str, AnswerCheck]:
    """Return whether the lens answers held-out questions better than the base does, of all tasks and of each."""
    y, held_out = correct_rows(data.table), data.is_validation
    found, own = (answer_worth(probs, y, data.options)[held_out] for probs in (lens, data.p))
    tasks, groups = (
        np.array([of(q) for q in data.questions])[held_out] for of in (lambda q: q.task, lambda q: q.group)
    )
    return check_tasks(found, own, tasks, groups)


def fit_scales(data: TrainingData, chosen: Candidate, gamma: float) -> tuple[float, dict[str, float]]:
    """Return the scale of all held-out questions, and that of each task: of an easy one more than of a hard one."""
    logs = log_floored(chosen.probs(gamma))
    tasks = np.array([q.task for q in data.questions])
    behind = logs - data.options.spread(data.options.sum(correct_rows(data.table) * logs))

    def scale_on(mask: Questions, centre: float | None = None) -> float:
        rows, options = data.options.rows(mask), data.options.take(mask)
        return fit_scale(behind[rows], options, centre)

    pooled = scale_on(data.is_validation)
    names = sorted(set(tasks[data.is_validation].tolist()))
    return pooled, {name: scale_on(data.is_validation & (tasks == name), pooled) for name in names}


def fit_scale(behind: Float[np.ndarray, " row"], options: Options, centre: float | None) -> float:
    """Return the scale of log-probabilities with the lowest NLL; a centre draws it to itself as far as questions are few.

    `behind`: how far each option's log-probability is above that of the right one.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_scale: float) -> float:
        nll = float(np.logaddexp.reduceat(np.exp(log_scale) * behind, options.starts).sum())
        return nll + (0.0 if centre is None else (log_scale - float(np.log(centre))) ** 2 / (2 * SCALE_PRIOR**2))

    low, high = map(float, np.log(SCALES))
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))
