"""What a lens makes of scored questions: the probabilities of each method, the shifts, and the answers. It runs no model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer, answer_of
from coral_lens.lens.home import home_tasks
from coral_lens.lens.rules import apply_temperature, base_probs
from coral_lens.metrics.conformal import abstains, prediction_sets
from coral_lens.ragged import Options
from coral_lens.records import Scored
from coral_lens.storage.arrays import side_by_side

if TYPE_CHECKING:
    from coral_lens.lens.artefact import Lens


class LensOutput(NamedTuple):
    """What a lens makes of the questions of a store."""

    probs: dict[str, Float[np.ndarray, " row"]]
    """The option probabilities of each method: base, temperature, the plain lens, and the tempered one."""
    shifts: Float[np.ndarray, " question"]
    """How far each question lies from the training questions."""
    weights: Float[np.ndarray, " question"] | None
    """The weight of the lens in each answer (see `trust`); None where it has no trust of its own."""
    fallback: Float[np.ndarray, " row"]
    """What a lens with a trust is mixed with: the base by temperature, even shares where it exits before there is a base."""
    home: Bool[np.ndarray, " question"]
    """Which questions are at home (see `home`)."""
    kept: Bool[np.ndarray, " question"]
    """Of which questions the answer stays the base's, whatever the lens prefers."""


def read_store(lens: Lens, store: Scored) -> LensOutput:
    """Return what a lens makes of the questions of a store. Each layer is read once."""
    store = lens.open.states(store) if lens.open else store
    table, options = store.table, store.table.options
    raw, p = base_probs(table, lens.base_rule), lens.base_probs(table)
    first = lens.correction.layer(store, lens.layers[0])
    shifts = lens.shift(first, options)
    states = side_by_side(
        lambda layer: first if layer == lens.layers[0] else lens.correction.layer(store, layer), lens.layers
    )
    plain = lens.steered(p, states, options)
    cooled = apply_temperature(raw, options, temperature=lens.control_temperature)
    # what is weighed was fitted already, and is what it claims to be; it has nothing to gain from a temperature
    fallback = p if lens.exits or lens.open else cooled
    home, kept = lens.is_home(store.questions), np.zeros(len(options), dtype=bool)
    if lens.trust:
        tasks = home_tasks(lens, store.questions, first, home)
        believed = lens.trust.believed(store.questions, shifts, home, tasks)
        kept = kept if believed.keeps is None else believed.keeps
        weights, tempered = (
            believed.weights,
            believed.blend(fallback, plain, options, own_scores(lens, p, states, options)),
        )
    else:
        weights, tempered = None, lens.tempered(p, plain, shifts, options)
    probs = {"base": raw, "temperature": cooled, lens.plain_method: plain, lens.method: tempered}
    for values in (*probs.values(), shifts):
        if not np.isfinite(values).all():
            raise CoralError(
                "The lens gives answers that are not numbers: its own numbers are too large; fit or copy it again."
            )
    return LensOutput(probs, shifts, weights, fallback, home, kept)


def own_scores(
    lens: Lens, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], options: Options
) -> Float[np.ndarray, " row"] | None:
    """Return what the probe that labels of a task have taught says of every option; None where a lens has none."""
    if lens.task_probe is None:
        return None
    return options.centre(replace(lens.correction, probe=lens.task_probe).scores(p, states, options).scores)


def answers_on(lens: Lens, store: Scored) -> list[Answer]:
    """Answer the questions of a store."""
    options, output = store.table.options, read_store(lens, store)
    probs, shifts, weights = output.probs, output.shifts, output.weights
    q = probs[lens.method]
    in_set = prediction_sets(lens.sets, q, options) if lens.sets else None
    unsure = abstains(lens.abstention, options.max(q)) if lens.abstention else None
    base = probs["base"] if not lens.exits else np.zeros(0)
    answers = []
    for i, question in enumerate(store.questions):
        rows = options.of(i)
        answers.append(
            replace(
                answer_of(question, q[rows], base[rows] if len(base) else base, float(shifts[i])),
                options_in_set=None if in_set is None else tuple(map(int, np.flatnonzero(in_set[rows]))),
                abstain=None if unsure is None else bool(unsure[i]),
                trust=None if weights is None else float(weights[i]),
                home=bool(output.home[i]),
                kept=bool(output.kept[i]),
            )
        )
    return answers
