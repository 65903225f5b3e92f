"""A method gets training questions divided, the model, and a folder in which what it has done is found again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.questions import toy_questions

from coral_lens.data.splits import split_mask
from coral_lens.engine import extract as store_module
from coral_lens.engine import planned as planned_module
from coral_lens.engine import shard_work
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.edits import AddDirection
from coral_lens.engine.extract import extract
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet, options_of

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTIONS = tuple(toy_questions(40))


@pytest.fixture(scope="module")
def states(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return extract(tiny, QUESTIONS, tmp_path_factory.mktemp("states"), extraction=Extraction(layers=(1, 2)))


@pytest.fixture
def context(tiny: Model, states: ActivationStore, tmp_path: Path) -> FitContext:
    train = QuestionSet("toy", states, lambda: QUESTIONS)
    return FitContext(lambda: tiny, train, FitSettings(seed=3), tmp_path)


def test_validation_questions_are_those_that_a_lens_would_be_chosen_on(context: FitContext) -> None:
    mask = split_mask(QUESTIONS, fraction=context.common.validation, seed=3)
    assert context.validation().tolist() == np.flatnonzero(mask).tolist()
    few = context.validation(3)
    assert len(few) == 3
    assert set(few) < set(context.validation())
    assert few.tolist() == context.validation(3).tolist()


def test_the_model_scores_the_same_questions_the_same_again(context: FitContext, states: ActivationStore) -> None:
    again = context.score(QUESTIONS, "again")
    assert np.array_equal(again.table.logprobs, states.table.logprobs)
    assert again.layers == ()


def shifted(alpha: float) -> Edited:
    edit = AddDirection({Site("residual", 1): torch.ones(32)}, alpha)
    return Edited((edit,), {"direction": "ones", "layer": 1, "alpha": alpha})


def test_an_edit_of_strength_zero_is_the_unedited_run_and_another_is_not(
    context: FitContext, states: ActivationStore
) -> None:
    nothing, something = (context.score(QUESTIONS, "shifted", edited=shifted(a)) for a in (0.0, 1.0))
    assert np.array_equal(nothing.table.logprobs, states.table.logprobs)
    assert not np.allclose(something.table.logprobs, states.table.logprobs)
    assert nothing.folder != something.folder


def test_scores_that_were_made_before_are_not_made_again(context: FitContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_module, "BARE_ROW_BYTES", store_module.SHARD_BYTES // 30)
    monkeypatch.setattr(planned_module, "choose_budget", lambda *_: 512)
    whole = context.score(QUESTIONS, "whole").table.logprobs
    usual, calls = shard_work.gather_shard, []

    def deadly(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return usual(*arguments, **more)

    monkeypatch.setattr(shard_work, "gather_shard", deadly)
    with pytest.raises(KeyboardInterrupt):
        context.score(QUESTIONS, "killed")
    first = len(calls)
    resumed = context.score(QUESTIONS, "killed")
    assert np.array_equal(resumed.table.logprobs, whole)
    n_shards = len(list(resumed.folder.glob("shard-*")))
    assert n_shards > 3
    assert len(calls) - first == n_shards - 2, "the two finished shards are kept"
    context.score(QUESTIONS, "killed")
    assert len(calls) - first == n_shards - 2


def test_a_store_of_edited_scores_is_not_taken_for_another(tiny: Model, tmp_path: Path) -> None:
    extract(tiny, QUESTIONS[:4], tmp_path, extraction=Extraction((), edited=shifted(1.0)))
    for other in (None, shifted(2.0)):
        with pytest.raises(CoralError, match="something else: edited is"):
            extract(tiny, QUESTIONS[:4], tmp_path, extraction=Extraction((), edited=other))


def test_a_question_that_cannot_be_asked_that_way_is_named(context: FitContext) -> None:
    long = replace(QUESTIONS[3], options=("yes", "no" * 300), answer=0)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(CoralError, match="'3' cannot be scored as 'odd'"):
        context.score([*QUESTIONS[:3], long], "odd")


@dataclass(frozen=True)
class Dials:
    questions: int = 40
    temperatures: tuple[float, ...] = (0.5,)


def test_options_are_read_into_a_dataclass_and_what_does_not_fit_is_one_sentence() -> None:
    read = options_of(Dials)
    entry = MethodEntry.model_validate({"kind": "dials", "questions": 3, "temperatures": (0.5, 1.0)})
    assert read(entry) == Dials(3, (0.5, 1.0))
    with pytest.raises(CoralError, match=r"no option 'question'. Did you mean 'questions'\?"):
        read(MethodEntry.model_validate({"kind": "dials", "question": 3}))
    with pytest.raises(CoralError, match=r"Method 'mine': questions cannot be used: Input should be a valid integer"):
        read(MethodEntry.model_validate({"kind": "dials", "name": "mine", "questions": "many"}))
