"""Controls: the same lens on states that know nothing, or on those of somebody else. They say how much of a gain the model's own
activations deserve.

`control-random`     normal random numbers of the same shape, under the seed
`control-untrained`  the states of a copy of the model whose weights are initialised anew, under the seed
`control-base`       no states: the logarithm of the base probability and the option's rank by it
`control-text`       no model: TF-IDF of question and option
`control-other`      the states of another model

The base probabilities that the lens corrects are the model's own in all of them, and the fit is that of every lens: only the
states that it is shown are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from jaxtyping import Float

from coral_lens.engine.loading import load_model
from coral_lens.engine.model import untrained_copy
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.errors import CoralError
from coral_lens.lens.features import rank_features
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, refuse_unknown, validated
from coral_lens.methods.lens import LENS_OPTIONS, fit_lens, lens_settings
from coral_lens.methods.text_states import fit_vectors
from coral_lens.records import OptionTable, Predictions, Question, Scored
from coral_lens.storage.settings import NotEmpty

if TYPE_CHECKING:
    from coral_lens.methods.entry import MethodEntry


Disguise = Callable[[QuestionSet], Scored]
"""Gives scored questions with other states in place of their own."""


@dataclass(frozen=True)
class OtherStates:
    """Scored questions, with other states in place of their own."""

    scored: Scored
    layers: tuple[int, ...]
    states: Callable[[int], Float[np.ndarray, "row width"]]
    about: dict[str, Any]
    """What the states are, for the lens's record."""

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return the other states, wherever they would have been read."""
        return self.states(layer)

    @property
    def manifest(self) -> dict[str, Any]:
        return {**self.scored.manifest, "states": self.about}

    @property
    def questions(self) -> Sequence[Question]:
        return self.scored.questions

    @property
    def table(self) -> OptionTable:
        return self.scored.table


def random_states(context: FitContext) -> Disguise:
    """Put normal random numbers in place of states."""

    def disguise(questions: QuestionSet) -> Scored:
        scored, seed = questions.states, context.common.seed
        layers = context.common.layers or scored.layers
        shape = scored.layer(layers[0]).shape
        of_questions = int(scored.manifest["questions"][:15], 16)  # other questions, other numbers

        def layer(number: int) -> Float[np.ndarray, "row width"]:
            rng = np.random.default_rng([seed, number, of_questions])
            return rng.standard_normal(shape, dtype=np.float32)

        return OtherStates(scored, layers, layer, {"random": seed})

    return disguise


def untrained_states(context: FitContext) -> Disguise:
    """Put the states of an untrained copy of the model in place of its own; questions are asked in the same way."""
    copies: list[Any] = []

    def disguise(questions: QuestionSet) -> Scored:
        if not copies:
            copies.append(untrained_copy(context.model(), seed=context.common.seed))
        layers = context.common.layers or questions.states.layers
        extraction = Extraction(layers, context.common.style)
        store = context.extract(copies[0], questions.prompted(), "untrained", extraction=extraction)
        return OtherStates(questions.states, layers, store.layer, {"untrained": store.manifest["model"]["weights"]})

    return disguise


def base_only(context: FitContext) -> Disguise:
    """Show the lens nothing but what the base probabilities say."""

    def disguise(questions: QuestionSet) -> Scored:
        table = questions.states.table
        p = base_probs(table, context.common.base)
        states = np.column_stack([np.log(np.maximum(p, 1e-12)), rank_features(p, table.options)]).astype(np.float32)
        return OtherStates(questions.states, (0,), lambda _: states, {"base": context.common.base})

    return disguise


def text_states(context: FitContext) -> Disguise:
    """Show the lens nothing but the words of question and option, as training texts have taught them to be counted."""
    vectors = fit_vectors(context.train.states.questions, seed=context.common.seed)

    def disguise(questions: QuestionSet) -> Scored:
        states = vectors.states(questions.states.questions)
        return OtherStates(questions.states, (0,), lambda _: states, {"text": states.shape[1]})

    return disguise


@dataclass(frozen=True)
class OtherModel(FitSettings):
    """The lens that is put to the test, and the model whose states it is shown."""

    model: Annotated[str, NotEmpty()] = "smollm2"
    """A hub id, a local folder, a .gguf file, or `smollm2`."""


def other_states(context: FitContext, name: str) -> Disguise:
    """Put the states of another model in place of the model's own; it is asked the same questions in the same words."""
    opened: list[Any] = []

    def disguise(questions: QuestionSet) -> Scored:
        if not opened:
            opened.append(load_model(name))
            if opened[0].fingerprint["weights"] == questions.states.manifest["model"]["weights"]:
                raise CoralError(f"control-other: {name!r} is the model itself; give another one as `model`.")
        extraction = Extraction(all_layers(opened[0]), context.common.style)
        store = context.extract(opened[0], questions.prompted(), "other", extraction=extraction)
        layers = extraction.layers
        return OtherStates(questions.states, layers, store.layer, {"other": store.manifest["model"]["weights"]})

    return disguise


def read_other(entry: MethodEntry) -> OtherModel:
    """Return the settings of the lens and the name of the other model."""
    refuse_unknown(entry, ("lens", "model", *LENS_OPTIONS))
    options = {key: value for key, value in entry.options.items() if key != "model"}
    settings = lens_settings(entry, options)
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return validated(OtherModel, entry, values | {k: v for k, v in entry.options.items() if k == "model"})


def fit_other(context: FitContext, settings: OtherModel) -> Predict:
    """Fit a lens on the states of another model."""
    return fit_disguised(context, settings, lambda inner: other_states(inner, settings.model))


def read_control(entry: MethodEntry) -> FitSettings:
    """Return the settings of the lens that is put to the test, `lens` among them."""
    refuse_unknown(entry, ("lens", *LENS_OPTIONS))
    return lens_settings(entry, entry.options)


def fit_disguised(context: FitContext, settings: FitSettings, disguise_of: Callable[[FitContext], Disguise]) -> Predict:
    """Fit a lens on other states than the questions' own, and show it such states of test questions too."""
    disguise = disguise_of(context)

    def disguised(questions: QuestionSet) -> QuestionSet:
        return replace(questions, states=disguise(questions))

    # the disguise knows which layers there are
    common = replace(context.common, layers=None)
    predict = fit_lens(replace(context, train=disguised(context.train), common=common), settings)

    def predict_disguised(test: QuestionSet) -> dict[str, Predictions]:
        return predict(disguised(test))

    return predict_disguised


RANDOM = Method(read_control, lambda context, settings: fit_disguised(context, settings, random_states))
UNTRAINED = Method(read_control, lambda context, settings: fit_disguised(context, settings, untrained_states))
TEXT = Method(read_control, lambda context, settings: fit_disguised(context, settings, text_states))
OTHER = Method(read_other, fit_other)
BASE_ONLY = Method(read_control, lambda context, settings: fit_disguised(context, settings, base_only))
