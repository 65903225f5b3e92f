"""The record of a fit comes back from its JSON as it was, and its JSON has the keys that lenses have always had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.planted import PlantedStore

from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import (
    Choice,
    CurvePoint,
    GammaPoint,
    LayerTrial,
    LearningCurve,
    SimulatedShift,
    Trace,
    Training,
)
from coral_lens.metrics.scores import Score

HALF, FULL = GammaPoint(0.5, {"brier": 0.6, "nll": 1.1}), GammaPoint(1.0, {"brier": 0.5, "nll": 1.0})
TRACE = Trace(
    criterion="brier",
    rule="listwise",
    chosen=Choice((1,), 0.25, 1.0, ({"weight_decay": 0.3},)),
    layers=(LayerTrial(1, 0.25, {"weight_decay": 0.3}, FULL, FULL),),
    gammas=(HALF, FULL),
    kinds={"listwise": FULL},
    as_good=(1,),
    validation={"base": {"brier": Score(0.7, 0.65, 0.75)}},
)
TRAINING = Training({"arc:train": 8}, {"arc:train": "CC BY-SA 4.0"}, 6, 2, {"seed": 0}, "s", "q", {"torch": "2"})


def test_the_json_of_a_trace_worked_by_hand() -> None:
    full = {"gamma": 1.0, "brier": 0.5, "nll": 1.0}
    assert TRACE.to_json() == {
        "criterion": "brier",
        "rule": "listwise",
        "chosen": {"layers": [1], "r2": 0.25, "gamma": 1.0, "settings": [{"weight_decay": 0.3}]},
        "layers": [{"layer": 1, "r2": 0.25, "weight_decay": 0.3, "best": full, "at_one": full}],
        "gammas": [{"gamma": 0.5, "brier": 0.6, "nll": 1.1}, full],
        "kinds": {"listwise": full},
        "as_good": [1],
        "validation": {"base": {"brier": {"value": 0.7, "low": 0.65, "high": 0.75}}},
    }


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"simulated": (SimulatedShift("held out", 12, 1.1), SimulatedShift("without arc", 30, 2.5))},
        {"learning_curve": LearningCurve((CurvePoint(4, {"brier": 0.6}), CurvePoint(8, {"brier": 0.5})), 8)},
    ],
)
def test_a_trace_comes_back_from_its_json_and_leaves_out_what_there_is_nothing_of(extra: dict) -> None:
    trace = replace(TRACE, **extra)
    record = json.loads(json.dumps(trace.to_json()))
    assert {"simulated", "learning_curve"} & set(record) == set(extra)
    assert Trace.from_json(record) == trace


def test_what_a_lens_was_fitted_on_comes_back_and_names_overrides_only_where_there_are_some() -> None:
    record = TRAINING.to_json()
    assert list(record) == ["tasks", "terms", "n_train", "n_validation", "settings", "store", "questions", "versions"]
    assert Training.from_json(record) == TRAINING
    overridden = replace(TRAINING, overrides=("used on another",))
    assert overridden.to_json() == record | {"overrides": ["used on another"]}
    assert Training.from_json(json.loads(json.dumps(overridden.to_json()))) == overridden


def test_a_lens_of_before_there_were_terms_is_read() -> None:
    record = TRAINING.to_json()
    del record["terms"]
    assert Training.from_json(record) == replace(TRAINING, terms={})


@pytest.mark.parametrize("lens", ["ridge", "ensemble"])
def test_the_trace_of_a_real_fit_comes_back(lens: str) -> None:
    fitted = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(lens=lens, learning_curve=True))
    assert Trace.from_json(json.loads(json.dumps(fitted.trace.to_json()))) == fitted.trace
