"""Controls show a lens other states and nothing else: the same questions, base probabilities and fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import make_model
from support.questions import toy_questions

from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model, untrained_copy
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods import controls
from coral_lens.methods.controls import base_only, other_states, random_states, text_states, untrained_states
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.registry import METHODS, read_method
from coral_lens.methods.text_states import fit_vectors
from coral_lens.records import Question

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sets(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[QuestionSet, QuestionSet]:
    root = tmp_path_factory.mktemp("sets")
    asked = {"train": tuple(toy_questions(60, seed=1)), "test": tuple(toy_questions(10, seed=2))}
    found = [
        QuestionSet(name, extract(tiny, q, root / name, extraction=Extraction((0, 1, 2))), lambda q=q: q)  # type: ignore[misc]
        for name, q in asked.items()
    ]
    return found[0], found[1]


@pytest.fixture
def context(tiny: Model, sets: tuple[QuestionSet, QuestionSet], tmp_path: Path) -> FitContext:
    return FitContext(lambda: tiny, sets[0], FitSettings(seed=5), tmp_path)


def read(kind: str, **options: Any) -> FitSettings:
    return read_method(MethodEntry.model_validate({"kind": kind, **options}))


@pytest.mark.parametrize(
    ("kind", "lens"),
    [
        ("control-random", "ridge"),
        ("control-untrained", "listwise"),
        ("control-base", "ensemble"),
        ("control-base", "mlp"),
        ("control-text", "listwise"),
    ],
)
def test_every_control_takes_any_lens_and_is_the_same_again(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet], kind: str, lens: str
) -> None:
    quick = {"hidden": (8,), "epochs": 2, "weight_decay": (1.0,)} if lens == "mlp" else {}
    settings = read(kind, lens=lens, **quick)
    first = METHODS[kind].fit(context, settings)(sets[1])
    again = METHODS[kind].fit(replace(context, folder=context.folder / "again"), settings)(sets[1])
    assert "" in first
    assert {k: p.probs.tolist() for k, p in first.items()} == {k: p.probs.tolist() for k, p in again.items()}


def test_random_states_have_the_shape_of_the_real_ones_and_depend_on_seed_layer_and_questions(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet]
) -> None:
    train, test = (random_states(context)(some) for some in sets)
    assert train.layers == sets[0].states.layers
    found = train.layer(1)
    assert (found.shape, found.dtype) == (sets[0].states.layer(1).shape, np.float32)
    assert abs(float(found.mean())) < 0.05
    assert abs(float(found.std()) - 1) < 0.05
    assert np.array_equal(found, train.layer(1))
    other = random_states(replace(context, common=replace(context.common, seed=6)))(sets[0])
    for unlike in (train.layer(2), other.layer(1)):
        assert abs(np.corrcoef(found.ravel(), unlike.ravel())[0, 1]) < 0.1
    assert not np.array_equal(found[: len(test.layer(1))], test.layer(1))
    assert train.table is sets[0].states.table


def test_an_untrained_copy_is_the_same_architecture_with_new_weights(tiny: Model) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (untrained_copy(tiny, seed=s) for s in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers move"
    assert first.fingerprint == again.fingerprint
    assert len({m.fingerprint["weights"] for m in (tiny, first, other)}) == 3
    shapes = [{n: p.shape for n, p in m.hf.named_parameters()} for m in (tiny, first)]
    assert shapes[0] == shapes[1]


def test_untrained_states_are_those_of_the_copy_beside_the_models_own_scores(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet], tiny: Model, tmp_path: Path
) -> None:
    found = untrained_states(context)(sets[1])
    by_hand = extract(
        untrained_copy(tiny, seed=5), sets[1].prompted(), tmp_path / "by hand", extraction=Extraction(layers=(0, 1, 2))
    )
    assert np.array_equal(found.layer(2), by_hand.layer(2))
    assert not np.allclose(found.layer(2), sets[1].states.layer(2))
    assert np.array_equal(found.table.logprobs, sets[1].states.table.logprobs)


def test_base_probabilities_alone_are_their_logarithm_and_ranks(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet]
) -> None:
    found, table = base_only(context)(sets[1]), sets[1].states.table
    p = base_probs(table, context.common.base)
    rows = found.layer(found.layers[0])
    assert np.allclose(rows[:, 0], np.log(p), atol=1e-5)
    for start, end in zip(table.offsets[:-1], table.offsets[1:], strict=True):
        assert rows[start:end, 1].argmin() == p[start:end].argmax()
        assert sorted(rows[start:end, 1]) == pytest.approx(np.linspace(0, 1, end - start))


def test_words_alone_are_the_words_of_question_and_option(sets: tuple[QuestionSet, QuestionSet]) -> None:
    asked = [
        Question("1", "1", "Where does a fish swim?", ("fish in water", "sand"), 0),
        Question("2", "2", "Question: What is dry?\nA. sand\nB. water\nAnswer:", ("A", "B"), 0),
    ]
    vectors = fit_vectors([*asked, *sets[0].states.questions], seed=0)
    rows = vectors.states(asked)
    half = rows.shape[1] // 2
    np.testing.assert_allclose(rows[1, :half], rows[2, :half], atol=1e-6)  # sand, as an option and as listed under A
    own = [row[:half] / np.linalg.norm(row[:half]) for row in rows]
    assert own[0] @ own[3] > own[0] @ own[1]  # both are of water
    assert rows[0, half:].sum() > rows[1, half:].sum() + 0.1  # the question names the fish
    again = fit_vectors([*asked, *sets[0].states.questions], seed=0).states(asked)
    np.testing.assert_allclose(rows, again, atol=1e-6)


def test_words_are_learned_from_training_questions_alone(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet]
) -> None:
    found = text_states(context)(sets[1])
    by_hand = fit_vectors(sets[0].states.questions, seed=5).states(sets[1].states.questions)
    np.testing.assert_allclose(found.layer(0), by_hand, atol=1e-6)
    assert found.table is sets[1].states.table


def test_the_states_of_another_model_stand_beside_the_models_own_scores(
    context: FitContext, sets: tuple[QuestionSet, QuestionSet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = make_model("gpt2", seed=4)
    monkeypatch.setattr(controls, "load_model", lambda name: {"another": other}[name])
    found = other_states(context, "another")(sets[1])
    by_hand = extract(other, sets[1].prompted(), tmp_path / "by hand", extraction=Extraction(all_layers(other)))
    assert found.layers == all_layers(other)
    assert np.array_equal(found.layer(2), by_hand.layer(2))
    assert found.table is sets[1].states.table
    settings = read("control-other", lens="ridge", model="another")
    assert settings.record()["model"] == "another"
    assert set(METHODS["control-other"].fit(context, settings)(sets[1])) == {""}
    monkeypatch.setattr(controls, "load_model", lambda _: context.model())
    with pytest.raises(CoralError, match="is the model itself"):
        other_states(context, "the same")(sets[1])
    with pytest.raises(CoralError, match="model"):
        read("control-other", model="")


def test_a_control_takes_the_options_of_its_lens_and_no_others() -> None:
    settings = read("control-base", lens="ridge", then_temperature=True)
    assert (settings.lens, settings.then_temperature) == ("ridge", True)
    with pytest.raises(CoralError, match=r"no option 'lenz'. Did you mean 'lens'\?"):
        read("control-base", lenz="ridge")
    with pytest.raises(CoralError, match="Unknown lens 'rigde'"):
        read("control-base", lens="rigde")
