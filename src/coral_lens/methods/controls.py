"""Controls: the same lens on states that know nothing. They say how much of a gain the activations deserve.

`control-random`     normal random numbers of the same shape, under the seed
`control-untrained`  the states of a copy of the model whose weights are initialised anew, under the seed
`control-base`       no states: the logarithm of the base probability and the option's rank by it

The base probabilities that the lens corrects are the model's own in all three, and the fit is that of every lens: only the states
that it is shown are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from coral_lens.engine.extract import Extraction
from coral_lens.engine.model import untrained_copy
from coral_lens.lens.features import rank_features
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, refuse_unknown
from coral_lens.methods.lens import LENS_OPTIONS, fit_lens, lens_settings
from coral_lens.records import OptionTable, Predictions, Question, Scored

if TYPE_CHECKING:
    from coral_lens.methods.entry import MethodEntry


Disguise = Callable[[QuestionSet], Scored]
"""Gives scored questions with other states in place of their own."""


@dataclass(frozen=True)
class OtherStates:
    """Scored questions, with other states in place of their own."""

    scored: Scored
    layers: tuple[int, ...]
    layer: Callable[[int], Float[np.ndarray, "row width"]]
    about: dict[str, Any]
    """What the states are, for the lens's record."""

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
BASE_ONLY = Method(read_control, lambda context, settings: fit_disguised(context, settings, base_only))
