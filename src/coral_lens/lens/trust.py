"""Two trusts: how far a lens is believed on a task that it was fitted on, and on any other.

    at home     log q' = scale of the task * log q
    elsewhere   log q' = ((1 - lambda) * log T + lambda * log q) / tau

with q the lens's probabilities and T the base's, scaled by one temperature: what is left when nothing is known of the lens.
tau makes the mixture less sure of itself: where a lens may be wrong, to doubt it costs less than to leave it out.
Home is a matter of names: a task that it was fitted on, or one that the user says is of the same kind. That a question lies
near the training questions grants nothing (a task on which a lens knows nothing can lie nearer than a typical training
question), but one that lies beyond all that the trust was learned on is answered by T, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.lens.keep_answers import keep_answers
from coral_lens.lens.rules import FLOOR, log_of
from coral_lens.lens.trace import ALL
from coral_lens.ragged import Options
from coral_lens.records import Question

FADE = 1.25
"""From the shift that the trust was learned up to, it fades to nothing until so many times that shift."""
LEAST = 0.1
"""The least weight of a lens that exits early: its answer stays, and is hardly believed."""
FIXED = frozenset({frozenset({"yes", "no"}), frozenset({"true", "false"}), frozenset({"correct", "incorrect"})})
"""Options that say nothing of their question: what a lens has learned about options does not tell them apart."""


@dataclass(frozen=True)
class Trust:
    """How far a lens is believed, at home and elsewhere."""

    elsewhere: float
    """Lambda: the weight of the lens on a task that it was not fitted on; the rest is the base by temperature."""
    reach: float
    """The shift up to which that was learned, from tasks that were left out."""
    home_reach: float
    """The largest shift of held-out questions of its own tasks: beyond it, a question is not at home whatever it is called."""
    pooled: float
    """The scale at home of questions whose task has no name."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """By training task: what its log-probabilities are multiplied by at home."""
    everywhere: bool = False
    """Whether the user said that all questions are of the kind that the lens was fitted on."""
    least: float = 0.0
    """The weight that is never fallen short of: more than 0 for a lens that exits early, which has nothing to fall back on."""
    temperature: float = 1.0
    """Away from home, the mixture of base and lens is scaled by this temperature, which fades to 1 as the lens does."""
    adapted: bool = False
    """Whether weight and temperature were learned from labels of one task: the lens is then for that task alone."""
    answers: Mapping[str, bool] = field(default_factory=dict)
    """By training task, and under the empty name for any other: whether the answer may be the lens's (see `keep_answers`)."""

    def weights(
        self, shift: Float[np.ndarray, " question"], at_home: Bool[np.ndarray, " question"], *, fixed: bool = False
    ) -> Float[np.ndarray, " question"]:
        """Return the weight of the lens in each answer: 1 at home, lambda elsewhere, 0 far beyond what it was learned on.

        `fixed`: the options say nothing of their questions, so that away from home the lens has none.
        """
        beyond = np.log(np.maximum(shift, 1e-12) / np.where(at_home, self.home_reach, self.reach)) / np.log(FADE)
        elsewhere = 0.0 if fixed and not self.adapted else self.elsewhere
        return np.maximum(np.where(at_home, 1.0, elsewhere) * np.clip(1.0 - beyond, 0.0, 1.0), self.least)

    def believed(
        self,
        questions: Sequence[Question],
        shift: Float[np.ndarray, " question"],
        at_home: Bool[np.ndarray, " question"],
    ) -> Believed:
        """Return how far the lens is believed on these questions, which lie so far off and are at home or not."""
        weights = self.weights(shift, at_home, fixed=has_fixed_options(questions))
        scales = [self.scales.get(q.task, self.pooled) for q in questions]
        return Believed(
            weights,
            np.where(at_home, scales, 1.0),
            np.where(at_home, 1.0, self.temperature_at(weights)),
            keeps=~self.answering(questions, at_home),
        )

    def temperature_at(self, weights: Float[np.ndarray, " question"]) -> Float[np.ndarray, " question"]:
        """Return the temperature of the mixture elsewhere: where the lens has no weight the base by temperature is left as it is.

        One that labels have found is that of the task, however far a question lies.
        """
        if self.adapted or self.elsewhere == 0.0:
            return np.full(len(weights), self.temperature)
        return self.temperature ** np.minimum(weights / self.elsewhere, 1.0)

    def answering(
        self, questions: Sequence[Question], at_home: Bool[np.ndarray, " question"]
    ) -> Bool[np.ndarray, " question"]:
        """Return of which questions the answer may be the lens's; of the others it is the base's."""
        usually = self.answers.get(ALL, True)
        here = [self.answers.get(q.task, usually) for q in questions]
        return np.where(at_home, here, usually).astype(bool)


def has_fixed_options(questions: Sequence[Question]) -> bool:
    """Whether the options are the same strings in every question, or such as yes and no.

    Of options that a text lists under letters, what is listed counts.
    """
    sets = {frozenset(option.strip().lower() for option in q.wording.listed or q.options) for q in questions}
    return len(sets) == 1 and (len(questions) > 1 or sets <= FIXED)


@dataclass(frozen=True)
class Believed:
    """How far the lens is believed, question by question."""

    weights: Float[np.ndarray, " question"]
    """Of the lens; the rest is the base by temperature."""
    scales: Float[np.ndarray, " question"]
    """What the lens's log-probabilities are multiplied by."""
    temperature: Float[np.ndarray, " question"]
    """What the mixture of both is scaled by."""
    keeps: Bool[np.ndarray, " question"] | None = None
    """Where the base's answer is kept whatever the lens prefers; None: nowhere."""

    def blend(
        self, base: Float[np.ndarray, " row"], q: Float[np.ndarray, " row"], options: Options
    ) -> Float[np.ndarray, " row"]:
        """Return the base's probabilities and the lens's, multiplied in these weights."""
        lens, scale, inverse = (options.spread(x) for x in (self.weights, self.scales, 1.0 / self.temperature))
        mixed = options.softmax(inverse * ((1.0 - lens) * log_of(base) + lens * scale * log_floored(q)))
        if self.keeps is None or not self.keeps.any():
            return mixed
        return keep_answers(mixed, options.top(base), self.keeps, options)


def log_floored(q: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return log q; an option that the paper's rule clipped to 0 has not lost for ever."""
    return np.log(np.maximum(q, FLOOR))
