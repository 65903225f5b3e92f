"""What a lens answers is what its equation says, from each layer read once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.planted import PlantedStore
from support.questions import toy_questions

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import base_probs, steer, tilt
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.shift import ShiftModel


def test_answers_are_the_steered_probabilities_of_the_equation(lens: Lens, tiny: Model, fresh: ActivationStore) -> None:
    questions = toy_questions(12, seed=5)
    untempered = replace(lens, trust=None).predict(tiny, questions)
    answers = lens.predict(tiny, questions)
    table = fresh.table
    p = base_probs(table, lens.base)
    states = fresh.layer(lens.layers[0])
    by, probe = lens.correction.standardiser, lens.correction.probe
    if lens.correction.rule == "residual":
        z = (states - by.mean) / by.scale
        steered = steer(p, probe.predict(z), table.options, gamma=lens.gamma)
    else:
        z = (table.options.centre(states) - by.mean) / by.scale
        steered = tilt(lens.correction.base_weight * np.log(p), probe.predict(z), table.options, gamma=lens.gamma)
    shifts, last = lens.shift(states, table.options), lens.apply(fresh)[lens.method]
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        rows = table.options.of(i)
        # alone in the store or with another layer, rows are packed alike and differ by rounding at most
        np.testing.assert_allclose(untempered[i].probs, steered[rows], atol=1e-6)
        np.testing.assert_allclose(answer.probs, last[rows], atol=1e-6)
        np.testing.assert_allclose(answer.base_probs, p[rows], atol=1e-6)
        assert answer.shift == pytest.approx(shifts[i], rel=1e-4)
        assert answer.id == question.id
        assert answer.answer == int(np.argmax(answer.probs))
        assert answer.option == question.options[answer.answer]
        assert answer.confidence == max(answer.probs)
        assert (answer.options_in_set, answer.abstain) == (None, None), "it was not calibrated for them"


@pytest.mark.parametrize("kind", ["ridge", "listwise", "ensemble"])
def test_each_layer_is_read_once_and_the_shift_computed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = fit_store(PlantedStore(60, signal={0: 1.0, 1: 2.0}), FitSettings(lens=kind, temper=kind != "ridge"))
    store = PlantedStore(20, signal={0: 1.0, 1: 2.0}, seed=3)
    layers: list[int] = []
    shifts: list[int] = []
    layer, distances = PlantedStore.layer, ShiftModel.distances
    monkeypatch.setattr(PlantedStore, "layer", lambda self, n: layers.append(n) or layer(self, n))
    monkeypatch.setattr(ShiftModel, "distances", lambda self, at, of=None: shifts.append(1) or distances(self, at, of))
    for call in (lens.answers, lens.apply, lens.predictions_on):
        layers.clear()
        shifts.clear()
        call(store)
        assert sorted(layers) == sorted(lens.layers), call
        assert len(shifts) == 1, call
    assert len(lens.layers) == (3 if kind == "ensemble" else 1)
