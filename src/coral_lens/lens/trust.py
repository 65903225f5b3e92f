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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.data.leaks import question_keys
from coral_lens.lens.keep_answers import keep_answers
from coral_lens.lens.rules import FLOOR, log_of
from coral_lens.lens.trace import ALL, ELSEWHERE
from coral_lens.ragged import Options
from coral_lens.records import Question

FADE = 1.25
"""From the shift that the trust was learned up to, it fades to nothing until so many times that shift."""
LEAST = 0.1
"""The least weight of a lens that exits early: its answer stays, and is hardly believed."""
UNSURE = frozenset({"unknown", "maybe", "unsure", "not sure", "uncertain", "cannot say", "can't say", "cannot tell",
                    "can't tell", "don't know", "not given", "neither", "both", "not enough information"})  # fmt: skip
"""What stands beside two verdicts as a third."""
FIXED = (
    frozenset({"yes", "no"}) | UNSURE,
    frozenset({"true", "false"}) | UNSURE,
    frozenset({"correct", "incorrect"}) | UNSURE,
    frozenset({"right", "wrong"}) | UNSURE,
    frozenset({"very positive", "positive", "neutral", "negative", "very negative", "mixed"}),
    frozenset({"strongly agree", "agree", "neutral", "neither agree nor disagree", "disagree", "strongly disagree"}),
    frozenset({"entailment", "not entailment", "neutral", "contradiction"}),
    frozenset({"supported", "refuted", "supports", "refutes", "not enough info"}) | UNSURE,
    frozenset({"acceptable", "unacceptable"}),
    frozenset({"none", "very low", "low", "medium", "high", "very high"}),
    frozenset({"always", "often", "sometimes", "rarely", "never"}),
)
"""Words that are options of any question and say nothing of it: what a lens has learned about options cannot tell them apart."""
LEVELS = 5
"""So many numbers in a row from 0 or 1 are levels of a scale; of fewer, one may be the answer to a sum."""
MANY_ALIKE = 10
"""Options that so many questions have in common are classes, however many other questions are asked beside them."""


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
    """By training task, under `ELSEWHERE` for tasks that it was not fitted on, and under the empty name for whatever is not said
    here: whether the answer may be the lens's (see `keep_answers`)."""
    places: tuple[str, ...] = ()
    """The training task at each place of the shift model, where several of them are files (see `domains.file_places`)."""

    def weights(
        self, shift: Float[np.ndarray, " question"], at_home: Bool[np.ndarray, " question"], *, fixed: bool = False
    ) -> Float[np.ndarray, " question"]:
        """Return the weight of the lens in each answer: 1 at home, lambda elsewhere, 0 far beyond what it was learned on.

        `fixed`: the options say nothing of their questions, so that away from home the lens has none.
        """
        elsewhere = 0.0 if fixed and not self.adapted else self.elsewhere
        return np.maximum(np.where(at_home, 1.0, elsewhere) * self.fading(shift, at_home), self.least)

    def fading(
        self, shift: Float[np.ndarray, " question"], at_home: Bool[np.ndarray, " question"]
    ) -> Float[np.ndarray, " question"]:
        """Return how much is left of all trust at each shift: 1 within reach, 0 far beyond it."""
        beyond = np.log(np.maximum(shift, 1e-12) / np.where(at_home, self.home_reach, self.reach)) / np.log(FADE)
        return np.clip(1.0 - beyond, 0.0, 1.0)

    def believed(
        self,
        questions: Sequence[Question],
        shift: Float[np.ndarray, " question"],
        at_home: Bool[np.ndarray, " question"],
        tasks: Sequence[str] | None = None,
    ) -> Believed:
        """Return how far the lens is believed on these questions, which lie so far off and are at home or not.

        `tasks`: the task that each is of at home; by default the one that it names.
        """
        weights = self.weights(shift, at_home)
        if not at_home.all():
            weights = np.where(have_fixed_options(questions), self.weights(shift, at_home, fixed=True), weights)
        scales = [self.scales.get(task, self.pooled) for task in tasks or tasks_named(questions)]
        return Believed(
            weights,
            np.where(at_home, scales, 1.0),
            np.where(at_home, 1.0, self.temperature_at(weights)),
            keeps=~self.answering(questions, at_home, tasks),
            fading=self.fading(shift, at_home),
        )

    def temperature_at(self, weights: Float[np.ndarray, " question"]) -> Float[np.ndarray, " question"]:
        """Return the temperature of the mixture elsewhere: where the lens has no weight the base by temperature is left as it is.

        One that labels have found is that of the task, however far a question lies.
        """
        if self.adapted or self.elsewhere == 0.0:
            return np.full(len(weights), self.temperature)
        return self.temperature ** np.minimum(weights / self.elsewhere, 1.0)

    def answering(
        self,
        questions: Sequence[Question],
        at_home: Bool[np.ndarray, " question"],
        tasks: Sequence[str] | None = None,
    ) -> Bool[np.ndarray, " question"]:
        """Return of which questions the answer may be the lens's; of the others it is the base's. `tasks`: as in `believed`."""
        usually = self.answers.get(ALL, True)
        here = [self.answers.get(task, usually) for task in tasks or tasks_named(questions)]
        return np.where(at_home, here, self.answers.get(ELSEWHERE, usually)).astype(bool)

    def to_json(self) -> dict[str, Any]:
        """Return it as a record; a lens of one file, or of tasks with names, has no places in it."""
        record = asdict(self)
        places = record.pop("places")
        return record | ({"places": list(places)} if places else {})

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Trust:
        """Read what `to_json` wrote, and what older versions wrote, which knew neither answers nor places."""
        return Trust(**{**record, "places": tuple(record.get("places", ()))})


def tasks_named(questions: Sequence[Question]) -> list[str]:
    """Return the task that each question names."""
    return [q.task for q in questions]


def have_fixed_options(questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
    """Return which questions have options that say nothing of them: the strings of most of the others, or such as yes and no.

    Of options that a text lists under letters, what is listed counts, and a question that comes twice is one question. Trap: of
    a question that is asked alone, only the words of `FIXED` and the numbers of a scale are known; that others have the same
    classes cannot be seen.
    """
    sets = [frozenset(map(plain_option, q.wording.listed or q.options)) for q in questions]
    distinct = set(zip(question_keys(questions).tolist(), sets, strict=True))
    counts = Counter(options for _, options in distinct)
    enough = max(2, min(MANY_ALIKE, len(distinct) // 2 + 1))
    return np.array([counts[one] >= enough or is_usual(one) for one in sets], dtype=bool)


def plain_option(option: str) -> str:
    """Return an option without what does not tell it from another: case, underscores and a full stop."""
    return " ".join(option.lower().replace("_", " ").removesuffix(".").split())


def is_usual(options: frozenset[str]) -> bool:
    """Whether options are verdicts or levels that any question may have."""
    if len(options) > 1 and any(options <= words for words in FIXED):
        return True
    numbers = sorted(int(option) for option in options if option.isascii() and option.isdecimal())
    n = len(options)
    return n >= LEVELS and numbers in (list(range(n)), list(range(1, n + 1)))


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
    fading: Float[np.ndarray, " question"] | float = 1.0
    """How much is left, at its shift, of what a probe of the task's own says."""

    def blend(
        self,
        base: Float[np.ndarray, " row"],
        q: Float[np.ndarray, " row"],
        options: Options,
        own: Float[np.ndarray, " row"] | None = None,
    ) -> Float[np.ndarray, " row"]:
        """Return the base's probabilities and the lens's, multiplied in these weights; `own` is added to their logits."""
        lens, scale, inverse = (options.spread(x) for x in (self.weights, self.scales, 1.0 / self.temperature))
        scores = inverse * ((1.0 - lens) * log_of(base) + lens * scale * log_floored(q))
        if own is not None:
            scores = scores + options.spread(np.broadcast_to(self.fading, len(options))) * own
        mixed = options.softmax(scores)
        if self.keeps is None or not self.keeps.any():
            return mixed
        return keep_answers(mixed, options.top(base), self.keeps, options)


def log_floored(q: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return log q; an option that the paper's rule clipped to 0 has not lost for ever."""
    return np.log(np.maximum(q, FLOOR))
