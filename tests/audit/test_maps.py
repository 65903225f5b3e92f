"""Maps find what was done to probabilities, promises hold as often as they say, and a file of maps is read back or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression
from support.audits import drawn

from coral_lens.audit.maps import STARTS, SystemMaps, fit_curve, fit_maps, load_maps, save_maps
from coral_lens.audit.settings import AuditSettings
from coral_lens.errors import CoralError
from coral_lens.metrics.conformal import fit_abstention, prediction_sets
from coral_lens.metrics.facts import facts_of
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import Predictions

RUNS = 150


def said(n: int, *, sharpness: float = 1.0, seed: int = 0) -> Predictions:
    probs, answers = drawn(n, sharpness=sharpness, seed=seed)
    offsets = Options.of_sizes([probs.shape[1]] * n).edges
    return Predictions("m", "", "t", "", tuple(map(str, range(n))), answers, offsets, probs.reshape(-1))


def fitted(settings: AuditSettings | None = None, *, sharpness: float = 2.0, n: int = 3000) -> SystemMaps:
    settings = settings or AuditSettings(precision=0.9)
    return fit_maps(said(n, sharpness=sharpness), said(n, sharpness=sharpness, seed=1), settings, top_only=False)


def test_the_temperature_is_the_power_by_which_probabilities_were_sharpened() -> None:
    assert fitted(sharpness=2.0).temperature == pytest.approx(2.0, abs=0.1)
    assert fitted(sharpness=1.0).temperature == pytest.approx(1.0, abs=0.05)


def test_the_curve_is_scikit_learns() -> None:
    p, y = said(400).probs, facts_of(said(400)).target
    at = np.linspace(0, 1, 101)
    expected = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p, y).predict(at)
    curve = fit_curve(p, y)
    assert np.interp(at, curve.x, curve.y) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["temperature", "isotonic"])
def test_a_map_makes_others_calibrated_and_changes_no_answer(name: str) -> None:
    maps, new = fitted(), said(4000, sharpness=2.0, seed=2)
    mapped = maps.mapped(name, new.probs, new.options)  # type: ignore[arg-type]
    better = Predictions("m", "", "t", "", new.ids, new.answers, new.offsets, mapped)
    assert score(new, "smooth_ece") > 0.1
    assert score(better, "smooth_ece") < 0.03
    assert (new.options.top(mapped) == new.options.top(new.probs)).all()


def test_no_map_changes_nothing() -> None:
    new = said(10)
    assert fitted(AuditSettings(map="none")).mapped("none", new.probs, new.options) is new.probs


def test_sets_hold_the_answer_as_often_as_asked() -> None:
    maps, new = fitted(), said(4000, sharpness=2.0, seed=3)
    assert maps.sets is not None
    mapped = maps.mapped(maps.used, new.probs, new.options)
    inside = prediction_sets(maps.sets, mapped, new.options)[new.options.row(new.answers)]
    assert inside.mean() == pytest.approx(0.9, abs=0.025)


def test_the_stated_precision_is_broken_no_more_often_than_stated() -> None:
    """Of the thresholds for 70 %, each on 300 questions of its own, at most a tenth may be too low; with more starts too."""
    truth = facts_of(said(20_000, seed=9))
    broken = found = 0
    for seed in range(RUNS):
        drawn = np.random.default_rng(seed).integers(20_000, size=300)
        rule = fit_abstention(truth.confidence[drawn], truth.right[drawn] == 1, risk=0.3, delta=0.1, starts=STARTS)
        if rule.threshold is not None:
            found += 1
            broken += truth.right[truth.confidence > rule.threshold].mean() < 0.7
    assert found > RUNS / 3
    assert broken / RUNS <= 0.1 + 3 * np.sqrt(0.09 / RUNS)


def test_more_starts_find_a_threshold_where_only_few_answers_are_sure() -> None:
    confidence = np.linspace(0, 1, 2000, endpoint=False)
    right = (np.arange(2000) % 2 == 0) | (confidence >= 0.92)  # the surest 160 are right, of the others every second
    assert fit_abstention(confidence, right, risk=0.1).threshold is None
    rule = fit_abstention(confidence, right, risk=0.1, starts=STARTS)
    assert rule.threshold is not None
    assert 0.85 < rule.threshold < 0.92


def test_starts_that_come_to_the_same_cost_nothing() -> None:
    confidence, right = np.linspace(0.5, 1, 22), np.ones(22, bool)
    assert fit_abstention(confidence, right, risk=0.1, starts=STARTS) == fit_abstention(confidence, right, risk=0.1)


def test_a_file_of_maps_is_read_back(tmp_path: Path) -> None:
    maps = {"mine": fitted(), "other": fitted(AuditSettings(map="isotonic"), n=400)}
    save_maps(tmp_path / "maps.json", maps)
    assert load_maps(tmp_path / "maps.json") == maps
    assert load_maps(str(tmp_path / "maps.json")) == maps
    assert load_maps(tmp_path) == maps, "the folder of an audit holds them"


def test_a_changed_file_of_maps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "maps.json"
    save_maps(path, {"mine": fitted(n=400)})
    record = json.loads(path.read_text())
    record["systems"]["mine"]["temperature"] = 3.0
    path.write_text(json.dumps(record))
    with pytest.raises(CoralError, match="run the audit again"):
        load_maps(path)
    path.write_text("{}")
    with pytest.raises(CoralError, match=r"maps\.json"):
        load_maps(path)


@pytest.mark.parametrize(
    "change", [{"temperature": 0}, {"used": "vector"}, {"isotonic": {"x": [1, 0], "y": [0, 1]}}, {"sets": {"kind": 1}}]
)
def test_numbers_that_no_audit_fits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, CoralError)):
        SystemMaps.from_json(fitted(n=400).to_json() | change)
