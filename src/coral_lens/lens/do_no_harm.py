"""Do no harm, learned: lenses that were fitted without a part of the training mixture predict that part.

What they say there, beside what the lens says of held-out questions of the whole mixture, teaches how much a correction is
worth at what distance. Test tasks are never used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.lens.choose import Candidate, fit_recipe, predict_all
from coral_lens.lens.rules import ProbeScores
from coral_lens.lens.shift import ShiftModel, fit_shift, question_places
from coral_lens.lens.tempering import FEWEST_IN_PART, Evidence, Tempering, domains_of, evidence_of, fit_tempering
from coral_lens.lens.trace import SimulatedShift
from coral_lens.lens.training_data import TrainingData

Questions = Bool[np.ndarray, " question"]


class Simulated(NamedTuple):
    """What a lens says of questions that it was not fitted on, their answers and their shifts."""

    evidence: Evidence
    answers: np.ndarray
    shifts: np.ndarray


@dataclass(frozen=True)
class PlacedQuestions:
    """The training questions, with their places in the model's states and the parts of the mixture they belong to."""

    data: TrainingData
    places: Float[np.ndarray, "question width"]
    """The mean state of each question's options (`shift.question_places`)."""
    domains: np.ndarray
    """The part of the training mixture that each question belongs to (`tempering.domains_of`)."""

    def shift(self, train: Questions, held_out: Questions) -> ShiftModel:
        """Fit the shift model on some questions; others say what is typical."""
        return fit_shift(
            self.places, self.domains.tolist(), train=np.flatnonzero(train), held_out=np.flatnonzero(held_out)
        )

    def can_spare(self, name: str) -> bool:
        """Whether enough questions are left to fit a lens and to choose its stop when a part is left out."""
        others, held_out = self.domains != name, self.data.rounds[0]
        return int((others & ~held_out).sum()) >= FEWEST_IN_PART and bool((others & held_out).any())


def fit_do_no_harm(
    data: TrainingData, chosen: Candidate, gamma: float, *, temper: bool, seed: int
) -> tuple[ShiftModel, Tempering | None, tuple[SimulatedShift, ...]]:
    """Fit the shift model and, if the lens is to be tempered, the tempering; also say what was simulated."""
    places = question_places(data.layer(chosen.recipe.layers[0]), data.options)
    mixture = PlacedQuestions(data, places, np.array(domains_of(data.questions, places, seed=seed)))
    held_out = data.rounds[0]
    shift = mixture.shift(~held_out, held_out)
    if not temper:
        return shift, None, ()
    names = [name for name in sorted(set(mixture.domains)) if mixture.can_spare(name)]
    inside = simulate_held_out(mixture, chosen, gamma)
    outside = [simulate_without(mixture, chosen, gamma, name) for name in names]
    # both halves weigh the same, however many questions each has: the lens must serve near and far questions
    balance = sum(len(s.answers) for s in outside) / len(inside.answers) if outside else 1.0
    tempering = fit_tempering([(*inside[:2], balance), *((*s[:2], 1.0) for s in outside)])
    shown = zip(["held out", *(f"without {n}" for n in names)], [inside, *outside], strict=True)
    record = tuple(SimulatedShift(name, len(s.answers), float(np.median(s.shifts))) for name, s in shown)
    return shift, tempering, record


def simulate_held_out(mixture: PlacedQuestions, chosen: Candidate, gamma: float) -> Simulated:
    """Return what the lens says of validation questions: no shift beyond that between questions of one kind."""
    data = mixture.data
    shifts = np.ones(len(data.questions))
    for mask in data.rounds:
        model = mixture.shift(~mask, mask)
        shifts[mask] = model.of(mixture.places, np.flatnonzero(mask))
    return simulated(data, chosen.predicted, chosen.probs(gamma), shifts, data.is_validation)


def simulate_without(mixture: PlacedQuestions, chosen: Candidate, gamma: float, name: str) -> Simulated:
    """Return what a lens that was fitted without a part of the mixture says of that part."""
    data, recipe = mixture.data, chosen.recipe
    others, held_out = mixture.domains != name, data.rounds[0]
    predicted = predict_all(data, fit_recipe(data, recipe, others & ~held_out, others & held_out))
    shifts = mixture.shift(others & ~held_out, others & held_out).of(mixture.places)
    return simulated(data, predicted, recipe.rule.correct(predicted, gamma), shifts, ~others)


def simulated(
    data: TrainingData,
    predicted: ProbeScores,
    probs: Float[np.ndarray, " row"],
    shifts: Float[np.ndarray, " question"],
    mask: Questions,
) -> Simulated:
    """Return the evidence on the marked questions."""
    rows = data.options.rows(mask)
    evidence = evidence_of(predicted.base[rows], probs[rows], shifts[mask], data.options.take(mask))
    if data.table.targets is not None:
        evidence = replace(evidence, targets=data.table.targets[rows])
    return Simulated(evidence, data.table.answers[mask], shifts[mask])
