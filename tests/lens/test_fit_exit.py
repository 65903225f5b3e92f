"""Early exit: a lens that starts from no base probabilities and reads nothing above a layer, and a pass that ends there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.planted import PlantedStore, brier
from support.questions import toy_questions

from coral_lens.engine.extract import score_questions
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit, fit_store, load_or_fit
from coral_lens.lens.folder import load_lens
from coral_lens.lens.publish import card
from coral_lens.lens.settings import FitSettings
from coral_lens.study.evaluate import evaluate

SIGNAL = {1: 2.0, 2: 2.0}


@pytest.fixture(scope="module")
def lens(tiny: Model) -> Lens:
    return fit(tiny, toy_questions(60), FitSettings(exit_layer=1), bar=False)


# -------------------------------------------------------------------------------------------------------------- the pass


def ran(model: Model) -> tuple[list[int], list[object]]:
    """The blocks that run from now on, and hooks to remove."""
    seen: list[int] = []
    handles = [b.register_forward_hook(lambda *_, i=i: seen.append(i + 1)) for i, b in enumerate(model.blocks)]
    handles.append(model.norm.register_forward_hook(lambda *_: seen.append(-1)))
    return seen, list(handles)


def test_no_block_above_the_exit_runs_nor_the_norm_and_no_hook_stays(tiny: Model) -> None:
    hooks = [len(b._forward_hooks) for b in tiny.blocks]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the twins of several threads have blocks of their own
    seen, handles = ran(tiny)
    try:
        with score_questions(
            tiny, toy_questions(6), Extraction(layers=(1,), packing="tree", token_budget=256, exits=True)
        ) as store:
            assert set(store.table.logprobs.tolist()) == {0.0}
    finally:
        torch.set_num_threads(threads)
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]
    assert set(seen) == {1}
    assert [len(b._forward_hooks) for b in tiny.blocks] == hooks


@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_the_states_are_those_of_the_whole_pass(tiny: Model, packing: str) -> None:
    asked = Extraction(layers=(0, 1), packing=packing)  # type: ignore[arg-type]
    questions = toy_questions(8)
    with (
        score_questions(tiny, questions, asked) as whole,
        score_questions(tiny, questions, replace(asked, exits=True)) as short,
    ):
        for layer in (0, 1):
            np.testing.assert_array_equal(short.layer(layer), whole.layer(layer))
        assert whole.manifest != short.manifest, "a store with scores is not one without"


# -------------------------------------------------------------------------------------------------------------- the lens


def test_it_reads_nothing_above_its_layer_and_nothing_of_the_base() -> None:
    lens = fit_store(PlantedStore(120, signal=SIGNAL), FitSettings(exit_layer=1))
    assert lens.exits
    assert max(lens.layers) <= 1
    one, other = (PlantedStore(40, signal=SIGNAL, seed=3) for _ in range(2))
    other.table = replace(other.table, logprobs=np.zeros_like(other.table.logprobs))
    assert lens.apply(one)[lens.method].tobytes() == lens.apply(other)[lens.method].tobytes()
    assert brier(one, lens.apply(one)[lens.method]) < brier(one, lens.apply(one)["temperature"])


def test_far_from_home_its_answer_stays_and_is_hardly_believed() -> None:
    lens = fit_store(PlantedStore(120, signal=SIGNAL), FitSettings(exit_layer=1))
    away = PlantedStore(40, signal=SIGNAL, seed=3)
    away.states[1] += 50.0
    found, options = lens.apply(away), away.table.options
    assert (options.top(found[lens.method]) == options.top(found[lens.plain_method])).all()
    assert (options.max(found[lens.method]) < options.max(found[lens.plain_method])).all()


def test_auto_takes_the_lowest_layer_that_is_as_good_as_the_best() -> None:
    lens = fit_store(PlantedStore(200, signal=SIGNAL), FitSettings(exit="auto"))
    assert lens.layers == (1,)
    assert lens.exits
    late = fit_store(PlantedStore(200, signal={2: 2.5}), FitSettings(exit="auto"))
    assert late.layers == (2,)


def test_answers_are_those_of_the_whole_pass_and_say_nothing_of_the_base(lens: Lens, tiny: Model) -> None:
    questions = toy_questions(6, seed=4)
    with score_questions(tiny, questions, Extraction(layers=lens.layers)) as whole:
        expected = lens.apply(whole)[lens.method]
        options = whole.table.options
    for i, answer in enumerate(lens.predict(tiny, questions)):
        np.testing.assert_allclose(answer.probs, expected[options.of(i)], atol=1e-6)
        assert answer.base_probs == ()
        assert "before" not in answer.table().columns


def test_it_is_measured_beside_the_model_as_it_is(lens: Lens, tiny: Model) -> None:
    run = evaluate(lens, tiny, toy_questions(20, seed=5), bar=False)
    base = run.evaluations[0].predictions["base"].probs
    assert len(set(np.round(base, 6).tolist())) > 10, "the controls are scored to the end"


def test_it_is_saved_and_read_and_its_card_says_what_it_saves_and_loses(
    lens: Lens, tiny: Model, tmp_path: Path
) -> None:
    lens.save(tmp_path / "lens")
    assert load_lens(tmp_path / "lens").exits
    assert lens.name.endswith(f"exits after layer {max(lens.layers)}")
    last, whole = max(lens.layers), len(tiny.blocks)
    assert f"the blocks up to layer {last} ({last} of {whole}, {last / whole:.0%}) and no vocabulary head" in card(lens)
    found = {m: {k: f"{100 * v.value:.1f}" for k, v in scores.items()} for m, scores in lens.trace.validation.items()}
    mine, base, cooled = (found[m] for m in (lens.method, "base", "temperature"))
    assert f"its accuracy is {mine['accuracy']} %, the whole model's {base['accuracy']} %" in card(lens)
    assert f"its Brier score {mine['brier']}, the whole model's by temperature {cooled['brier']}" in card(lens)
    assert base != cooled, "the whole model was asked when it was fitted"
    assert "It becomes less sure there by itself" in card(lens)


def test_a_lens_with_a_chosen_exit_is_not_fitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, settings = PlantedStore(80, signal=SIGNAL), FitSettings(exit="auto")
    first = load_or_fit(store, settings, tmp_path / "lens")
    monkeypatch.setattr("coral_lens.lens.fit.fit_store", None)
    assert load_or_fit(store, settings, tmp_path / "lens").layers == first.layers


def test_settings_that_contradict_an_exit_are_refused() -> None:
    with pytest.raises(CoralError, match="leave out scale_base"):
        FitSettings(exit_layer=3, scale_base=True)
    with pytest.raises(CoralError, match="not both"):
        FitSettings(exit_layer=3, exit="auto")
    with pytest.raises(CoralError, match="at or below the exit layer 1"):
        fit_store(PlantedStore(60), FitSettings(exit_layer=1, layers=(2,)))
