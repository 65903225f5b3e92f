"""A lens that would answer worse than the model itself does not answer: its confidence is used, the answers stay the model's.

Held-out questions of its own tasks say whether it would. The probabilities are then the nearest ones to the lens's whose largest
is that of the model's own answer: where lens and model disagree, the options that the lens prefers are drawn together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.lens.trace import ALL, AnswerCheck
from coral_lens.ragged import Options

AHEAD = 1e-6
"""By so much the kept answer is ahead of options that are as probable: an answer is the largest probability."""
ENOUGH_TO_TELL = 20
"""Fewer independent questions than this decide nothing: questions of one article are one, and five that agree are chance."""


def check_answers(
    lens: Float[np.ndarray, " question"],
    base: Float[np.ndarray, " question"],
    before: bool | None = None,
    units: np.ndarray | None = None,
) -> AnswerCheck:
    """Compare what the answers of lens and model are worth, question by question: 1 where right, or the share of a soft answer.

    The lens answers where it is better by more than a standard error, and does not where it is worse by more. In between the
    questions cannot tell, nor can fewer than `ENOUGH_TO_TELL` of them: then what was decided `before`, from more questions,
    holds; without that, the model's own answers do. Questions of one of the `units` are not independent; None: all are.
    """
    units = np.arange(len(lens)) if units is None else units
    gains = lens - base
    gain, error = float(gains.mean()), error_of_mean(gains, units)
    undecided = len(np.unique(units)) < ENOUGH_TO_TELL or abs(gain) <= error
    used = bool(before) if undecided else gain > 0.0
    return AnswerCheck(len(gains), float(base.mean()), float(lens.mean()), error, used=used)


def error_of_mean(values: Float[np.ndarray, " question"], units: np.ndarray) -> float:
    """Return the standard error of a mean over questions, of which those of one unit come together."""
    of_units = np.bincount(np.unique(units, return_inverse=True)[1], values - values.mean())
    return float(np.sqrt((of_units**2).sum()) / len(values))


def check_tasks(
    lens: Float[np.ndarray, " question"],
    base: Float[np.ndarray, " question"],
    tasks: np.ndarray,
    units: np.ndarray | None = None,
) -> dict[str, AnswerCheck]:
    """Return the check on all questions, and that on each task where there are several; one of few questions says as all do."""
    units = np.arange(len(lens)) if units is None else units
    checks = {ALL: check_answers(lens, base, units=units)}
    names = sorted(set(tasks.tolist()))
    for name in names if len(names) > 1 else ():
        here = tasks == name
        checks[name] = check_answers(lens[here], base[here], checks[ALL].used, units[here])
    return checks


def answer_worth(
    probs: Float[np.ndarray, " row"], y: Float[np.ndarray, " row"], options: Options
) -> Float[np.ndarray, " question"]:
    """Return what the most probable option of each question is worth: 1 if it is right, or its share of a soft answer."""
    return y[options.row(options.top(probs))]


def answers_of(checks: Mapping[str, AnswerCheck]) -> dict[str, bool]:
    """Return by task whether the lens answers; the empty name is any other task."""
    return {name: check.used for name, check in checks.items()}


def keep_answers(
    q: Float[np.ndarray, " row"],
    answers: Int[np.ndarray, " question"],
    kept: Bool[np.ndarray, " question"],
    options: Options,
) -> Float[np.ndarray, " row"]:
    """Return q with the given answers on top of the marked questions: there, the nearest probabilities that have them so."""
    out, rows = q.copy(), options.row(answers)
    for i in map(int, np.flatnonzero(kept & (options.top(q) != answers))):
        mine, here = rows[i], options.of(i)
        values = np.sort(np.delete(q[here], mine - here.start))[::-1]
        pooled, n = q[mine], 1
        for value in values:
            if value <= pooled / n:
                break
            pooled, n = pooled + value, n + 1
        level = pooled / n
        out[here] = np.minimum(q[here], level)
        out[mine] = level + AHEAD
        out[here] /= out[here].sum()
    return out
