"""Joined stores read like one store of the kept questions, and refuse what does not belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def stores(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[ActivationStore, ActivationStore]:
    root: Path = tmp_path_factory.mktemp("stores")
    extraction = Extraction(layers=LAYERS)
    questions = toy_questions(30)
    others = [replace(q, id=f"other {q.id}", task="other", text=f"{q.text} Really?") for q in questions]
    return extract(tiny, questions, root / "a", extraction=extraction), extract(
        tiny, others, root / "b", extraction=extraction
    )


def joined(stores: tuple[ActivationStore, ActivationStore]) -> JoinedStore:
    first, second = stores
    keep = np.arange(len(second.questions)) % 3 == 0
    return JoinedStore([Subset(first, np.ones(len(first.questions), dtype=bool)), Subset(second, keep)])


def test_questions_and_rows_come_part_by_part(stores: tuple[ActivationStore, ActivationStore]) -> None:
    both, (first, second) = joined(stores), stores
    assert [q.id for q in both.questions] == [q.id for q in first.questions] + [q.id for q in second.questions[::3]]
    for i, question in enumerate(both.questions):
        source = first if question.task != "other" else second
        j = [q.id for q in source.questions].index(question.id)
        rows = slice(*both.table.offsets[i : i + 2])
        there = slice(*source.table.offsets[j : j + 2])
        assert np.array_equal(both.table.logprobs[rows], source.table.logprobs[there])
        assert np.array_equal(both.layer(2)[rows], source.layer(2)[there])
        assert both.table.answers[i] == question.answer


def test_a_lens_is_fitted_on_it_as_on_any_store(stores: tuple[ActivationStore, ActivationStore]) -> None:
    lens = fit_store(joined(stores), FitSettings(lens="ridge"))
    assert lens.training.n_train + lens.training.n_validation == 40


def test_another_choice_of_questions_is_another_digest(stores: tuple[ActivationStore, ActivationStore]) -> None:
    first, second = stores
    everything = [np.ones(len(s.questions), dtype=bool) for s in stores]
    whole = JoinedStore([Subset(first, everything[0]), Subset(second, everything[1])])
    assert whole.manifest["questions"] != joined(stores).manifest["questions"]


def test_states_of_another_style_are_refused(
    stores: tuple[ActivationStore, ActivationStore], tiny: Model, tmp_path: Path
) -> None:
    letters = extract(tiny, toy_questions(5), tmp_path, extraction=Extraction(layers=LAYERS, style=Style("letters")))
    with pytest.raises(CoralError, match="prompt styles differ"):
        JoinedStore([Subset(s, np.ones(len(s.questions), dtype=bool)) for s in (stores[0], letters)])


def test_states_of_another_model_are_refused(stores: tuple[ActivationStore, ActivationStore]) -> None:
    first, second = stores
    stranger = ActivationStore(second.folder)
    stranger.manifest = {**second.manifest, "model": {**second.manifest["model"], "weights": "0" * 64}}
    with pytest.raises(CoralError, match=r"different models: weights \w+ against"):
        JoinedStore([Subset(s, np.ones(len(s.questions), dtype=bool)) for s in (first, stranger)])
