"""A lens that starts from pmi scores options after a neutral context wherever it is used, and `auto` finds the better base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore
from support.questions import toy_questions

from coral_lens.data.splits import split_mask
from coral_lens.engine.extract import score_in_memory
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.harness.scoring import choose_shape, score_requests
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import choose_base_on, fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question
from coral_lens.study.evaluate import evaluate


@pytest.fixture(scope="module")
def lens(tiny: Model) -> Lens:
    return fit(tiny, toy_questions(60), FitSettings(layers=(1,), base="pmi"), bar=False)


def expected(model: Model, questions: list[Question]) -> list[np.ndarray]:
    store = score_in_memory(model, questions, Extraction(layers=(1,), neutral=True))
    return np.split(base_probs(store.table, "pmi"), store.table.options.starts[1:])


def test_its_answers_start_from_what_the_question_adds(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    fresh = toy_questions(8, seed=3, labelled=False)
    lens.save(tmp_path / "lens")
    answers = load_lens(tmp_path / "lens").predict(tiny, fresh)
    for answer, base in zip(answers, expected(tiny, fresh), strict=True):
        assert answer.base_probs == pytest.approx(base.tolist(), abs=1e-5)


def test_a_run_has_that_base_too(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(8, seed=3)
    row = evaluate(lens, tiny, {"test": fresh}, bar=False).evaluations[0].predictions["base"]
    np.testing.assert_allclose(row.probs, np.concatenate(expected(tiny, fresh)), atol=1e-5)


def test_lm_evals_requests_are_scored_after_a_neutral_context(tiny: Model) -> None:
    question = Question("q", "q", "Which?", ("red", "blue and green"))
    asked = "Question: Which?\nAnswer:"
    requests = {((asked, " red"), (asked, " blue and green")): "q"}
    found = score_requests(tiny, requests, choose_shape(tiny), layers=(1,), neutral=True)
    store = score_in_memory(tiny, [question], Extraction(layers=(1,), neutral=True))
    assert found.table.neutral is not None
    np.testing.assert_allclose(found.table.neutral, store.table.neutral, atol=1e-4)


def test_auto_takes_the_best_base_of_the_questions_that_validate() -> None:
    store = PlantedStore(120, signal={1: 1.0})
    frequent = 6.0 * np.random.default_rng(3).normal(size=len(store.table.logprobs))
    store.table = replace(store.table, logprobs=store.table.logprobs + frequent, neutral=frequent)
    lens = fit_store(store, FitSettings(layers=(1,), base="auto"))
    assert lens.base == "pmi"
    assert lens.training.settings["base"] == "auto"
    validates = split_mask(store.questions, fraction=0.2, seed=0)
    likeliest = store.table.options.top(store.table.logprobs)
    store.table = replace(store.table, answers=np.where(validates, likeliest, store.table.answers))
    assert choose_base_on(store, FitSettings(layers=(1,), base="auto")) == "sum"


def test_a_store_without_neutral_scores_and_an_early_exit_are_refused_with_what_to_do() -> None:
    with pytest.raises(CoralError, match="coral extract --neutral"):
        fit_store(PlantedStore(40), FitSettings(layers=(1,), base="pmi"))
    with pytest.raises(CoralError, match="leave out"):
        FitSettings(exit_layer=1, base="pmi")
