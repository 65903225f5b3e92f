"""Predictions are made once, belong to everything that they depend on, and their cost is the method's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.autoencoders import make_sae
from support.questions import toy_questions

from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.corrsteer import CORRSTEER, CorrSteerSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, no_options
from coral_lens.records import Predictions, predictions_of
from coral_lens.study import costs
from coral_lens.study import predictions as predicting
from coral_lens.study.costs import Cost, read_steps
from coral_lens.study.predictions import method_predictions

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN, TEST = tuple(toy_questions(30, seed=1)), tuple(toy_questions(4, seed=2))


@pytest.fixture(scope="module")
def sets(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[QuestionSet, QuestionSet]:
    """Training and test questions."""
    root, extraction = tmp_path_factory.mktemp("sets"), Extraction(layers=(1,))
    train = QuestionSet("train", extract(tiny, TRAIN, root / "train", extraction=extraction), lambda: TRAIN)
    return train, QuestionSet("test", extract(tiny, TEST, root / "test", extraction=extraction), lambda: TEST)


def uniform(context: FitContext, _: None) -> Predict:
    """Knows nothing, and has the model loaded."""
    context.model()

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        offsets = test.states.table.offsets
        return {"": predictions_of("uniform", test.states, np.repeat(1 / np.diff(offsets), np.diff(offsets)))}

    return predict


def test_predictions_are_made_again_when_a_file_behind_a_setting_has_another_content(
    tiny: Model, sets: tuple[QuestionSet, QuestionSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, fitted = ["old"], list[str]()

    def fit(context: FitContext, settings: None) -> Predict:
        fitted.append(content[0])
        return uniform(context, settings)

    monkeypatch.setitem(predicting.METHODS, "uniform", Method(no_options, fit, depends=lambda _: list(content)))
    context = FitContext(lambda: tiny, sets[0], FitSettings(), tmp_path)
    for content[0] in ("old", "old", "new", "new"):
        method_predictions(context, MethodEntry(kind="uniform"), None, [sets[1]])
    assert fitted == ["old", "new"]


def test_corrsteer_depends_on_what_its_autoencoder_computes(tmp_path: Path) -> None:
    settings, sae = CorrSteerSettings(str(tmp_path / "sae")), make_sae(1)
    sae.save(tmp_path / "sae")
    first = CORRSTEER.depends(settings)
    assert CORRSTEER.depends(settings) == first
    replace(sae, b_enc=sae.b_enc + 1).save(tmp_path / "sae")
    assert CORRSTEER.depends(settings) != first


def test_loading_the_model_is_no_cost_of_the_method_that_comes_first(
    tiny: Model, sets: tuple[QuestionSet, QuestionSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def load() -> Model:
        clock[0] += 100.0
        return tiny

    def fit(context: FitContext, settings: None) -> Predict:
        clock[0] += 3.0
        predict = uniform(context, settings)

        def slowly(test: QuestionSet) -> dict[str, Predictions]:
            clock[0] += 5.0
            context.model()
            return predict(test)

        return slowly

    monkeypatch.setattr(costs, "now", lambda: (clock[0], 2 * clock[0]))
    monkeypatch.setitem(predicting.METHODS, "uniform", Method(no_options, fit))
    method_predictions(FitContext(load, sets[0], FitSettings(), tmp_path), MethodEntry(kind="uniform"), None, [sets[1]])
    assert read_steps(tmp_path / "cost.json") == {"training": Cost(30, 3.0, 6.0), "test": Cost(4, 5.0, 10.0)}


@pytest.mark.parametrize("with_digest", [True, False])
def test_kept_predictions_that_are_damaged_are_made_again(
    tiny: Model,
    sets: tuple[QuestionSet, QuestionSet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_digest: bool,
) -> None:
    fitted: list[int] = []

    def fit(context: FitContext, settings: None) -> Predict:
        fitted.append(1)
        return uniform(context, settings)

    monkeypatch.setitem(predicting.METHODS, "uniform", Method(no_options, fit))
    context = FitContext(lambda: tiny, sets[0], FitSettings(), tmp_path)

    def predicted() -> Predictions:
        return method_predictions(context, MethodEntry(kind="uniform"), None, [sets[1]])["test"]["uniform"]

    first, (path,) = predicted(), tmp_path.glob("predictions/*.json")
    whole = path.read_bytes()
    record = json.loads(whole)
    record["rows"][""] = [0.9, *record["rows"][""][1:]]
    if not with_digest:
        del record["digest"]  # as an earlier version wrote it: the probabilities no longer add up
    path.write_text(json.dumps(record))
    assert predicted().probs.tobytes() == first.probs.tobytes()
    assert len(fitted) == 2
    assert path.read_bytes() == whole
    predicted()
    assert len(fitted) == 2


@pytest.mark.parametrize("lost", ["notes.json", "lens/lens.json"])
def test_a_method_that_lost_what_reports_tell_of_is_fitted_again(
    tiny: Model,
    sets: tuple[QuestionSet, QuestionSet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    fitted: list[int] = []

    def fit(context: FitContext, settings: None) -> Predict:
        fitted.append(1)
        context.note("chosen", {"setting": 1})
        (context.folder / "lens").mkdir(exist_ok=True)
        (context.folder / "lens" / "lens.json").write_bytes(b"{}")
        return uniform(context, settings)

    monkeypatch.setitem(predicting.METHODS, "uniform", Method(no_options, fit))
    context = FitContext(lambda: tiny, sets[0], FitSettings(), tmp_path)
    for n_fits in (1, 1, 2, 2):
        if n_fits == 2 and len(fitted) == 1:
            (tmp_path / lost).unlink()
        method_predictions(context, MethodEntry(kind="uniform"), None, [sets[1]])
        assert len(fitted) == n_fits
    assert (tmp_path / lost).exists()
