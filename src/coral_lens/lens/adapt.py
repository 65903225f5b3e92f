"""Adapt a fitted lens to one new task, from some tens of its questions with labels.

What labels say of weight and temperature is in `labelled`, what fewer or more of them would give in `label_curve`; here a lens is
read, and made one for that task. Labels of a task that it was fitted on make it forget that: it is then no longer at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.data.leaks import question_keys
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import fresh_of
from coral_lens.lens.features import build_inputs
from coral_lens.lens.keep_answers import ENOUGH_TO_TELL
from coral_lens.lens.label_curve import learning_curve, refuse_short_curve
from coral_lens.lens.labelled import LARGEST_LAMBDA, Labelled, Prior, adaptation_of, check_labels, judge
from coral_lens.lens.output import LensOutput
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.rules import correct_rows, log_of
from coral_lens.lens.trace import ALL
from coral_lens.lens.trust import LEAST, Trust, log_floored
from coral_lens.records import FAR, Question, Scored, groups_of

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

FEWEST_LABELS = 5
"""Fewer labelled questions than this are refused."""
UNTOLD = 0.5
"""The centre of lambda's prior for a lens that has no trust of its own."""


def adapt(lens: Lens, model: Model, questions: Sequence[Question], *, work_dir: str | Path | None = None) -> Lens:
    """Return the lens adapted to the task of these labelled questions; 30 to 100 are enough. The same as `lens.adapt`.

    Questions that the lens was fitted on are left out. The adapted lens is for this task alone; its field `adaptation` says
    what was found.

        lens = coral_lens.adapt(lens, model, few)
    """
    fresh_of(lens, questions, to="adapt")
    with lens.scored(model, questions, work_dir=Path(work_dir) if work_dir else None) as store:
        return adapt_on(lens, store)


def adapt_on(lens: Lens, store: Scored, *, with_curve: bool = False) -> Lens:
    """Return the lens for the task of the labelled questions of a store, which no evaluation counts any more."""
    fresh = fresh_of(lens, store.questions, to="adapt")
    refuse_few(int(fresh.sum()), with_curve=with_curve)
    output = lens.read(store)
    known = lens.trust or Trust(UNTOLD, FAR, FAR, 1.0, least=LEAST if lens.exits else 0.0)
    near = nearness(known, output.shifts)
    if len({store.questions[i].group for i in np.flatnonzero(fresh).tolist()}) >= ENOUGH_TO_TELL:
        # enough labels tell of what lies as far as they do; a few tell nothing, and it would be believed by the prior alone
        known, near = (
            replace(known, reach=max(known.reach, float(np.quantile(output.shifts[fresh], 0.9)))),
            np.ones(len(near)),
        )
    data = labelled_of(lens, store, output, near).take(fresh)
    weight = before_of(lens, output, near, fresh)
    prior = Prior(weight, data.n_units, lens.exits, known.least, temperature_before(lens, weight))
    judged = judge(data, prior)
    found, mixture = adaptation_of(data, prior, judged)
    answered = answers_before(lens, store.questions, fresh)
    if not lens.exits and data.n_units >= ENOUGH_TO_TELL:
        check = check_labels(data, judged, answered)
        found, answered = replace(found, answers=check), check.used
    if with_curve:
        found = replace(found, curve=learning_curve(data, prior))
    trust = replace(
        known,
        elsewhere=found.weight,
        temperature=found.temperature,
        adapted=True,
        everywhere=False,
        answers={} if lens.exits else {ALL: answered},
    )
    used = np.union1d(lens.adapted_on, question_keys(store.questions, version=lens.keys)[fresh])
    return replace(
        lens,
        trust=trust,
        tempering=None,
        adaptation=found,
        task_probe=None if mixture.own is None else LinearProbe(mixture.own, 0.0),
        sets=None,
        abstention=None,
        adapted_on=used,
    )


def refuse_few(n_labels: int, *, with_curve: bool) -> None:
    """Refuse fewer labels than can teach anything, before a model reads them."""
    if n_labels < FEWEST_LABELS:
        raise CoralError(
            f"Adapting needs at least {FEWEST_LABELS} labelled questions that the lens was not fitted on, better 30 to 100. "
            f"Got {n_labels}."
        )
    if with_curve:
        refuse_short_curve(n_labels)


# --------------------------------------------------------------------------------------------------- what the lens says


def labelled_of(lens: Lens, store: Scored, output: LensOutput, near: Float[np.ndarray, " question"]) -> Labelled:
    """Return what labels are fitted on: the very two that answers mix, the lens faded where it fades, and the states it reads."""
    options = store.table.options
    base, own = log_of(output.fallback), log_floored(output.probs[lens.plain_method])
    faded = base + options.spread(near) * (own - base)
    z = inputs_of(lens, store)
    return Labelled(base, faded, options, correct_rows(store.table), groups_of(store.questions), z)


def inputs_of(lens: Lens, store: Scored) -> Float[np.ndarray, "row feature"] | None:
    """Return the inputs of a lens's probe, standardised and centred; None for candidates, whose states have another scale."""
    if lens.open:
        return None
    correction, options = lens.correction, store.table.options
    features = build_inputs(correction.states(store), lens.base_probs(store.table), options, correction.inputs)
    return options.centre(correction.standardiser(features).astype(np.float64))


def nearness(trust: Trust, shifts: Float[np.ndarray, " question"]) -> Float[np.ndarray, " question"]:
    """Return by how much the lens fades with the shift: 1 within reach, 0 far beyond it."""
    whole = replace(trust, elsewhere=1.0, least=0.0)
    return whole.weights(shifts, np.zeros(len(shifts), dtype=bool))


def before_of(
    lens: Lens, output: LensOutput, near: Float[np.ndarray, " question"], fresh: Bool[np.ndarray, " question"]
) -> float:  # fmt: skip
    """Return the weight that a lens has on these questions without labels, as one within its reach.

    Not lambda: where options are fixed, or all lies too far, a lens has no weight whatever its lambda is.
    """
    if lens.adaptation:
        return lens.adaptation.before
    if output.weights is None:
        return UNTOLD
    weight, faded = float(np.median(output.weights[fresh])), float(np.median(near[fresh]))
    return min(weight / faded, LARGEST_LAMBDA) if faded > 0.0 and weight > 0.0 else weight


def temperature_before(lens: Lens, weight: float) -> float:
    """Return the temperature of the mixture without labels, where the lens has this weight: where it has none, there is none."""
    if lens.adaptation:
        return lens.adaptation.temperature_before
    return lens.trust.temperature if lens.trust and weight > 0.0 else 1.0


def answers_before(lens: Lens, questions: Sequence[Question], fresh: Bool[np.ndarray, " question"]) -> bool:
    """Return whether the answers to most of these questions are the lens's without labels."""
    if lens.trust is None:
        return True
    return bool(np.mean(lens.trust.answering(questions, lens.is_home(questions))[fresh]) > 0.5)
