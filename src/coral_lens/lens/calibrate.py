"""Calibrate a fitted lens for prediction sets and abstention, on labelled questions that it has never seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from coral_lens.data.answers import ELSEWHERE
from coral_lens.data.leaks import question_keys
from coral_lens.data.wording import asked_as
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.open_part import chosen_options
from coral_lens.lens.rules import correct_rows
from coral_lens.lens.settings import Guarantees
from coral_lens.metrics.conformal import fit_abstention, fit_conformal
from coral_lens.records import UNKNOWN, Question, Scored

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


def fresh_of(lens: Lens, questions: Sequence[Question], *, to: str = "calibrate") -> Bool[np.ndarray, " question"]:
    """Return which questions the lens was not fitted on; refuse questions that nothing can be promised or learned from.

    Questions that calibrated it before may do so again: a new promise takes the place of the old one. Those that adapted it may
    adapt it again, together with others, and never calibrate it: their labels have made its probabilities.
    """
    if to == "calibrate":
        refuse_joined(lens, questions)
    questions = asked_as(questions, lens.style)
    unlabelled = [q.id for q in questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"Question {unlabelled[0]!r} has no answer; `coral {to}` needs the right option of each. {ELSEWHERE}"
        )
    if not questions:
        raise CoralError(f"There are no questions to {to} the lens on: check the file, the split and the limit.")
    adapted_on = lens.adapted_on if to == "calibrate" else lens.adapted_on[:0]
    fresh = ~np.isin(question_keys(questions, version=lens.keys), np.concatenate([lens.seen, adapted_on]))
    if not fresh.any():
        learned = "fitted on or adapted by" if len(adapted_on) else "fitted on"
        raise CoralError(
            f"The lens was {learned} all of these questions, so they cannot say how good it is on others; {to} it on "
            "questions that it has not seen."
        )
    return fresh


def refuse_joined(lens: Lens, questions: Sequence[Question]) -> None:
    """Refuse questions whose options a lens judges one by one: what is promised of statements does not hold for questions."""
    if lens.style.kind == "p-true" and any(q.kind != "yes-no" for q in questions):
        raise CoralError(
            "This lens judges the options of a question one by one (--style p-true), and what is promised of single "
            "statements does not hold for whole questions; calibrate it on questions of the kind yes-no, or fit a lens "
            "without --style p-true."
        )


def calibrate(
    lens: Lens,
    model: Model,
    questions: Sequence[Question],
    guarantees: Guarantees,
    *,
    work_dir: str | Path | None = None,
) -> Lens:
    """Return the lens with prediction sets of a stated coverage, a rule for when to abstain, or both.

    The questions must be labelled, and the lens must never have seen them; those that it has seen are left out. With
    `work_dir` their scores are kept there, and an interrupted calibration can go on.

        lens = coral_lens.calibrate(lens, model, held_out, coral_lens.Guarantees(coverage=0.9, risk=0.2))
    """
    fresh_of(lens, questions)
    with lens.scored(model, questions, work_dir=Path(work_dir) if work_dir else None) as store:
        return calibrate_on(lens, store, guarantees)[0]


def calibrate_on(lens: Lens, store: Scored, guarantees: Guarantees) -> tuple[Lens, int]:
    """Return the lens with its sets and abstention, and how many questions were left out because it had seen them.

    The questions that calibrate it are remembered: no evaluation counts them.
    """
    table, questions = store.table, store.questions
    fresh = fresh_of(lens, questions)
    options = table.options.take(fresh)
    p, answers = lens.apply(store)[lens.method][table.options.rows(fresh)], table.answers[fresh]
    sets, abstention = lens.sets, lens.abstention
    if guarantees.coverage is not None:
        sets = fit_conformal(p, options, answers, coverage=guarantees.coverage, kind=guarantees.kind)
    if guarantees.risk is not None:
        y = correct_rows(table)[table.options.rows(fresh)]
        chosen = options.row(chosen_options(p, options, is_open=lens.open is not None))
        right = y[chosen] == options.max(y)
        abstention = fit_abstention(p[chosen], right, risk=guarantees.risk, delta=guarantees.delta)
    calibrated_on = np.union1d(lens.calibrated_on, question_keys(questions, version=lens.keys)[fresh])
    return replace(lens, sets=sets, abstention=abstention, calibrated_on=calibrated_on), int((~fresh).sum())
