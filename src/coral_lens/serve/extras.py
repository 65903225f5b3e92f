"""What only a lens knows, under the one key `coral` that the answers of other formats have beside their own."""

from __future__ import annotations

from coral_lens.lens.answers import Answer
from coral_lens.serve.content import Given
from coral_lens.serve.lenses import ServedLens
from coral_lens.serve.queue import Outcome
from coral_lens.serve.service import away_note


class CoralExtras(Given):
    """What a lens says beyond a format; clients that do not know the key pass over it."""

    lens: str
    digest: str
    """Of the lens."""
    confidence: float | None = None
    """Probability of the chosen option, whatever the format calls confidence."""
    base_probabilities: list[float] | None = None
    """The model's own, in the order of the options."""
    shift: float | None = None
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on, 0 where the answer is the base's."""
    home: bool | None = None
    """Whether the question is of a task that the lens was fitted on: no request names one, so the server is told (`--home`)."""
    kept: bool | None = None
    """Whether the answer stays the model's own, because the lens was not found to answer better; its confidence is used."""
    note: str | None = None
    """What nobody has checked, where the lens is away from home."""
    set: list[int] | None = None
    """Places of the options in the prediction set, if the lens was calibrated for one."""
    abstain: bool | None = None
    """Whether the answer is too uncertain for the stated risk, if the lens was calibrated for one."""
    reason: str | None = None
    """Why there is no answer."""


def extras_of(lens: ServedLens, outcome: Outcome) -> CoralExtras:
    """Return what a lens says beyond a format."""
    if not isinstance(outcome, Answer):
        return CoralExtras(lens=lens.name, digest=lens.digest, reason=outcome.reason)
    return CoralExtras(
        lens=lens.name,
        digest=lens.digest,
        confidence=outcome.confidence,
        base_probabilities=list(outcome.base_probs),
        shift=outcome.shift,
        trust=outcome.trust,
        home=outcome.home,
        kept=outcome.kept,
        note=away_note(lens, [outcome]),
        set=None if outcome.options_in_set is None else list(outcome.options_in_set),
        abstain=outcome.abstain,
    )


def expected_level(answer: Answer) -> float:
    """Return the expected place of an answer on a scale, whose levels count from 0."""
    return float(sum(level * p for level, p in enumerate(answer.probs)))
