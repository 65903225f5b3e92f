"""A lens as a method of a study: its options, and the fit that every kind of lens goes through."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from coral_lens.lens.fit import load_or_fit
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, refuse_unknown, validated
from coral_lens.records import Predictions

if TYPE_CHECKING:
    from coral_lens.methods.entry import MethodEntry


OF_THE_STUDY = ("lens", "base", "style", "layers", "validation", "stratified", "seed", "learning_curve")
"""Settings of a fit that a method of a study does not choose."""
NETWORK_OPTIONS = tuple(f.name for f in fields(NetworkSearch))
"""Settings of a network, which a study writes beside the others."""
LENS_OPTIONS = (*(f.name for f in fields(FitSettings) if f.name not in (*OF_THE_STUDY, "network")), *NETWORK_OPTIONS)


def read_lens(entry: MethodEntry) -> FitSettings:
    """Return the settings of a lens."""
    refuse_unknown(entry, LENS_OPTIONS)
    return lens_settings(entry, {"lens": entry.kind, **entry.options})


def lens_settings(entry: MethodEntry, options: dict[str, Any]) -> FitSettings:
    """Return the settings that options describe, those of a network among them."""
    network = {name: value for name, value in options.items() if name in NETWORK_OPTIONS}
    others = {name: value for name, value in options.items() if name not in NETWORK_OPTIONS}
    return validated(FitSettings, entry, others | {"network": validated(NetworkSearch, entry, network)})


def fit_lens(context: FitContext, settings: FitSettings) -> Predict:
    """Fit a lens, or load it if it was fitted before."""
    shared = {
        name: getattr(context.common, name) for name in ("base", "style", "layers", "validation", "stratified", "seed")
    }
    lens = load_or_fit(
        context.train.states,
        replace(settings, **shared),
        context.folder / "lens",
        bar=context.bar,
        device=context.device,
    )

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        predictions = lens.predictions_on(test.states)
        rows = {"": predictions[lens.plain_method]}
        return rows | {" tempered": predictions[lens.method]} if lens.tempers else rows

    return predict


LENS = Method(read_lens, fit_lens)
