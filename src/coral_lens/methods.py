"""The table of methods that a study may name. Each is fitted on a training mixture and then turns test sets into Predictions.

A new method is one more row: a function that reads its options from the study, and one that fits it. Fitting sees training
questions only; test sets come later, to the function that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from coral_lens.baselines.temperature import apply_temperature
from coral_lens.errors import CoralError, nearest
from coral_lens.fitting import FitSettings, load_or_fit, temperature_on, training_data
from coral_lens.joined import Scored, predictions_of
from coral_lens.kinds import KINDS
from coral_lens.progress import Bar, silent
from coral_lens.records import Predictions, Question
from coral_lens.steering import base_probs

if TYPE_CHECKING:
    from coral_lens.models import Model
    from coral_lens.study import MethodEntry


@dataclass(frozen=True)
class QuestionSet:
    """Questions that the model has scored, unsteered."""

    name: str
    states: Scored
    """Scores and pooled states, with the questions in order, but without their prompts."""
    asked: Callable[[], tuple[Question, ...]]
    """Gives the same questions in the same order with their prompts, for a method that runs the model again."""


@dataclass(frozen=True)
class Job:
    """What a method is fitted with."""

    model: Callable[[], Model]
    """Gives the model, which is loaded only if a method needs it."""
    train: QuestionSet
    """Training and validation questions; `common` says how they are divided."""
    common: FitSettings
    """What the methods of a study share: base, style, layers, share of validation questions, seed."""
    folder: Path
    """Of this method alone: what it keeps there is found again by an interrupted study."""
    bar: Bar = silent


Predict = Callable[[QuestionSet], dict[str, Predictions]]
"""Gives the Predictions of a test set. The key is added to the method's name: empty, or a variant such as ` tempered`."""


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    read: Callable[[MethodEntry], Any]
    """Makes settings of what the study says, before any model is loaded, and refuses what it does not know."""
    fit: Callable[[Job, Any], Predict]


# ------------------------------------------------------------------------------------------------------- controls


def no_options(entry: MethodEntry) -> None:
    """Refuse any option."""
    refuse_unknown(entry, ())


def fit_nothing(job: Job, _: None) -> Predict:
    """Leave the model as it is: the row that papers call few-shot."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        return {"": predictions_of("base", test.states, base_probs(test.states.table, job.common.base))}

    return predict


def fit_temperature(job: Job, _: None) -> Predict:
    """Scale the base probabilities by one temperature, fitted on the validation questions."""
    data, _unscaled = training_data(job.train.states, job.common)
    temperature = temperature_on(data.p, data.table.offsets, data.table.answers, data.covered)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        table = test.states.table
        probs = apply_temperature(base_probs(table, job.common.base), table.offsets, temperature=temperature)
        return {"": predictions_of("temperature", test.states, probs)}

    return predict


# --------------------------------------------------------------------------------------------------------- lenses

OF_THE_STUDY = ("lens", "base", "style", "layers", "validation", "seed", "learning_curve")
"""Settings of a fit that a method of a study does not choose."""


def read_lens(entry: MethodEntry) -> FitSettings:
    """Return the settings of a lens."""
    refuse_unknown(entry, [f.name for f in fields(FitSettings) if f.name not in OF_THE_STUDY])
    try:
        return TypeAdapter(FitSettings).validate_python({"lens": entry.kind, **entry.options})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CoralError(f"Method {entry.row!r}: {first['loc'][0]} cannot be used: {first['msg']}.") from None


def fit_lens(job: Job, settings: FitSettings) -> Predict:
    """Fit a lens, or load it if it was fitted before."""
    shared = {name: getattr(job.common, name) for name in ("base", "style", "layers", "validation", "seed")}
    lens = load_or_fit(
        job.train.states,
        replace(settings, **shared),
        job.folder / "lens",
        journal=job.folder / "search.jsonl",
        bar=job.bar,
    )

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        found = lens.predictions_on(test.states)
        rows = {"": found[lens.plain_method]}
        return rows | {" tempered": found[lens.method]} if lens.tempering else rows

    return predict


# ------------------------------------------------------------------------------------------------------ the table

CONTROLS = ("base", "temperature")
"""Every table has these two, asked for or not."""
ZERO_SHOT = "0-shot"
"""A row of tests with shots; it starts from other prompts than all methods, so that it is none."""

METHODS: dict[str, Method] = {
    "base": Method(no_options, fit_nothing),
    "temperature": Method(no_options, fit_temperature),
    **{kind: Method(read_lens, fit_lens) for kind in (*KINDS, "auto")},
}


def read_method(entry: MethodEntry) -> Any:
    """Return the settings of a study's method, or refuse it in one sentence."""
    if entry.kind not in METHODS:
        raise CoralError(
            f"There is no method of kind {entry.kind!r}.{nearest(entry.kind, METHODS)} Known: {', '.join(METHODS)}."
        )
    taken = entry.row == ZERO_SHOT or entry.row.endswith(" tempered")
    if taken or (entry.row in CONTROLS and entry.kind != entry.row):
        raise CoralError(f"A method of kind {entry.kind!r} cannot be called {entry.row!r}: another row has that name.")
    return METHODS[entry.kind].read(entry)


def refuse_unknown(entry: MethodEntry, known: Sequence[str]) -> None:
    """Refuse an option that a method does not have."""
    for key in entry.options:
        if key not in known:
            raise CoralError(
                f"Method {entry.row!r}: there is no option {key!r}.{nearest(key, known)} "
                f"Known: {', '.join(['kind', 'name', *known])}."
            )
