"""Setting, layer, gamma and kind are chosen on validation questions, and a recipe fitted again is the lens that was chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.planted import COLUMN, LAYERS, WIDTH, PlantedStore, brier, data_of

from coral_lens.errors import CoralError
from coral_lens.lens.choose import (
    GAMMAS,
    SHRINKAGES,
    Asked,
    averaged,
    choose,
    cost_of,
    fit_parts,
    inputs_of,
    moved,
    try_layers,
)
from coral_lens.lens.fit import fit_store
from coral_lens.lens.probes.listwise import tilt
from coral_lens.lens.probes.registry import AUTO, KINDS
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.rules import steer
from coral_lens.lens.settings import FitSettings
from coral_lens.ragged import Options

ASKED = Asked(layers=LAYERS)
CLOSED = ("ridge", "listwise", "ensemble")


def test_moved_is_the_rule_that_the_lens_applies() -> None:
    rng = np.random.default_rng(0)
    options = Options.of_sizes([3, 4])
    p, scores = options.softmax(rng.normal(size=7)), rng.normal(size=7)
    assert (
        moved("residual", p, np.log(p), scores, options, 1.5).tobytes()
        == steer(p, scores, options, gamma=1.5).tobytes()
    )
    ours = moved("listwise", p, 0.7 * np.log(p), scores, options, 0.5)
    assert ours == pytest.approx(tilt(p, scores, options, base_weight=0.7, gamma=0.5))


@pytest.mark.parametrize("name", ["ridge", "listwise"])
def test_the_layer_and_column_with_the_signal_are_chosen(name: str) -> None:
    data = data_of(PlantedStore(150, signal={1: 2.0}))
    chosen, singles = choose(data, name, ASKED)
    assert chosen.recipe.layers == (1,)
    assert [c.recipe.layers for c in singles] == [(layer,) for layer in LAYERS]
    assert chosen.parts is not None
    assert isinstance(chosen.parts.probe, LinearProbe)
    assert np.abs(chosen.parts.probe.weight).argmax() == COLUMN
    assert cost_of(chosen, "brier") == min(cost_of(c, "brier") for c in singles)


@pytest.mark.parametrize("name", CLOSED)
def test_a_recipe_fitted_again_on_the_training_questions_is_the_lens_that_was_chosen(name: str) -> None:
    data = data_of(PlantedStore(100, signal={1: 2.0}))
    chosen, _ = choose(data, name, ASKED)
    held_out = data.rounds[0]
    again = fit_parts(data, chosen.recipe, ~held_out, held_out)
    z = again.standardiser(data.features(chosen.recipe.layers, chosen.recipe.inputs))
    rows = data.table.options.rows(held_out)
    # the listwise path starts each fit from the one before, so the minimum is the same but not its last digits
    assert again.probe.predict(z)[rows] == pytest.approx(chosen.scores[rows], abs=2e-2)
    assert (again.base_weight * np.log(data.p))[rows] == pytest.approx(chosen.base[rows], abs=2e-2)


# ---------------------------------------------------------------------------------------------------------- ensemble


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    """One linear probe of the layers side by side gives the mean of the scores that the members give alone."""
    data = data_of(PlantedStore(100, signal={0: 1.0, 1: 2.0}))
    chosen, singles = choose(data, "ensemble", ASKED)
    assert chosen.recipe.layers == LAYERS
    assert chosen.scores == pytest.approx(np.mean([c.scores for c in singles], axis=0))
    assert chosen.base == pytest.approx(np.mean([c.base for c in singles], axis=0))
    parts = chosen.parts
    assert parts is not None
    side_by_side = parts.probe.predict(parts.standardiser(data.features(LAYERS, ("centred",))))
    alone = [
        c.parts.probe.predict(c.parts.standardiser(data.features(c.recipe.layers, ("centred",))))
        for c in singles
        if c.parts is not None
    ]
    assert side_by_side == pytest.approx(np.mean(alone, axis=0), abs=1e-5)
    assert averaged([c.parts for c in singles if c.parts is not None]).base_weight == parts.base_weight


def test_an_ensemble_takes_its_best_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "ensemble", replace(KINDS["ensemble"], average=2))
    data = data_of(PlantedStore(150, signal={0: 2.0, 2: 2.0}))
    chosen, singles = choose(data, "ensemble", ASKED)
    assert chosen.recipe.layers == (0, 2)
    assert len(chosen.recipe.settings) == 2
    assert len(singles) == 3


def test_an_ensemble_of_layers_that_each_know_something_beats_each_of_them() -> None:
    store = PlantedStore(120, signal={0: 1.5, 1: 1.5, 2: 1.5})
    fresh = PlantedStore(300, signal={0: 1.5, 1: 1.5, 2: 1.5}, seed=8)
    one, all_ = (fit_store(store, FitSettings(lens=kind, temper=False)) for kind in ("listwise", "ensemble"))
    assert brier(fresh, all_.apply(fresh)["listwise"]) < brier(fresh, one.apply(fresh)["listwise"])


@pytest.mark.parametrize("wrong", [{"inputs": ("rank",)}, {"top_layers": 2}])
def test_an_ensemble_refuses_what_it_cannot_average(wrong: dict) -> None:
    with pytest.raises(CoralError, match="ensemble averages probes of single layers"):
        FitSettings(lens="ensemble", **wrong)


# ------------------------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("name", ["ridge", "listwise"])
def test_top_layers_are_read_side_by_side_in_their_order(name: str) -> None:
    store = PlantedStore(150, signal={0: 1.5, 2: 2.0})
    data = data_of(store)
    chosen, _ = choose(data, name, replace(ASKED, top_layers=2))
    assert chosen.recipe.layers == (0, 2)
    assert isinstance(chosen.parts.probe, LinearProbe)  # type: ignore[union-attr]
    weight = np.abs(chosen.parts.probe.weight)  # type: ignore[union-attr]
    assert len(weight) == 2 * WIDTH
    assert set(np.argsort(weight)[-2:]) == {COLUMN, WIDTH + COLUMN}
    alone = try_layers(data, name, (0, 2), ASKED)
    assert alone.scores.tobytes() == chosen.scores.tobytes()


def test_a_lens_of_two_layers_applies_them_side_by_side() -> None:
    store = PlantedStore(100, signal={0: 1.5, 2: 2.0})
    lens = fit_store(store, FitSettings(lens="listwise", top_layers=2, temper=False))
    assert lens.layers == (0, 2)
    assert lens.name.startswith("listwise lens, layers 0, 2,")
    data = data_of(store)
    chosen, _ = choose(data, "listwise", replace(ASKED, top_layers=2))
    rows = store.table.options.rows(data.rounds[0])
    expected = chosen.probs(data, chosen.best("brier")["gamma"])[rows]
    assert lens.apply(store)["listwise"][rows] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", CLOSED)
def test_states_that_are_no_numbers_are_refused_by_name(name: str) -> None:
    store = PlantedStore(40)
    store.states[2][5] = np.nan
    with pytest.raises(CoralError, match="layer 2 are not all finite"):
        fit_store(store, FitSettings(lens=name))
    assert 2 not in fit_store(store, FitSettings(lens=name, layers=(0, 1), temper=False)).layers


# ------------------------------------------------------------------------------------------------------------- gamma


def test_gamma_zero_is_kept_where_a_probe_is_useless() -> None:
    """The signal turns around between training and validation: every strength harms."""
    store = PlantedStore(150, signal={1: 3.0})
    data = data_of(store)
    store.states[1][store.table.options.rows(data.rounds[0]), COLUMN] *= -1
    for name, grid in (("ridge", GAMMAS), ("listwise", SHRINKAGES)):
        chosen, _ = choose(data, name, replace(ASKED, layers=(1,)))
        assert [point["gamma"] for point in chosen.gammas] == list(grid)
        assert chosen.best("brier")["gamma"] == 0.0
    lens = fit_store(store, FitSettings(lens="ridge", layers=(1,)))
    assert lens.apply(store)["coral"].tobytes() == lens.apply(store)["base"].tobytes()


def test_of_equal_gammas_the_smallest_is_taken() -> None:
    data = data_of(PlantedStore(40, signal={1: 2.0}))
    chosen, _ = choose(data, "ridge", replace(ASKED, layers=(1,)))
    flat = replace(chosen, gammas=[{"gamma": g, "brier": 0.5, "accuracy": 0.5} for g in (1.0, 0.25, 2.0)])
    assert flat.best("brier")["gamma"] == 0.25
    assert flat.best("accuracy")["gamma"] == 0.25


def test_a_score_where_more_is_better_is_maximised() -> None:
    data = data_of(PlantedStore(120, signal={1: 2.0}))
    chosen, singles = choose(data, "listwise", replace(ASKED, criterion="accuracy"))
    assert chosen.best("accuracy")["accuracy"] == max(p["accuracy"] for c in singles for p in c.gammas)
    assert cost_of(chosen, "accuracy") < 0


# ------------------------------------------------------------------------------------------------------------- folds


@pytest.mark.parametrize("name", CLOSED)
def test_with_folds_every_question_is_predicted_by_a_fit_that_did_not_see_it(name: str) -> None:
    """The reference: each fold's recipe fitted by hand on the other folds."""
    data = data_of(PlantedStore(60, signal={1: 2.0}), FitSettings(folds=3))
    chosen, _ = choose(data, name, replace(ASKED, layers=(0, 1)))
    assert data.covered.all()
    assert chosen.parts is None
    features = data.features(chosen.recipe.layers, chosen.recipe.inputs)
    for mask in data.rounds:
        parts = fit_parts(data, chosen.recipe, ~mask, mask)
        rows = data.table.options.rows(mask)
        expected = parts.probe.predict(parts.standardiser(features[rows]))
        assert chosen.scores[rows] == pytest.approx(expected, abs=2e-2)


def test_the_answers_of_a_fold_do_not_change_what_is_predicted_there() -> None:
    store = PlantedStore(60, signal={1: 2.0})
    data = data_of(store, FitSettings(folds=3))
    mask = data.rounds[1]
    rows = data.table.options.rows(mask)
    r = np.where(rows, np.random.default_rng(0).normal(size=len(rows)), data.r)
    answers = np.where(mask, 0, data.table.answers)
    other = replace(data, r=r, table=replace(data.table, answers=answers))
    for name in ("ridge", "listwise"):
        kind = replace(KINDS[name], settings=KINDS[name].settings[2:3], across=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KINDS, name, kind)
            first, second = (try_layers(d, name, (1,), ASKED) for d in (data, other))
        assert first.scores[rows].tobytes() == second.scores[rows].tobytes()
        assert first.scores[~rows].tobytes() != second.scores[~rows].tobytes()


def test_a_lens_of_closed_form_chosen_by_folds_is_fitted_on_everything() -> None:
    store = PlantedStore(60, signal={1: 2.0})
    lens = fit_store(store, FitSettings(lens="ridge", layers=(1,), folds=3))
    assert (lens.training["n_train"], lens.training["n_validation"]) == (60, 60)
    mean = store.layer(1).mean(axis=0, dtype=np.float64)
    assert lens.standardiser.mean == pytest.approx(mean, abs=1e-5)
    single = fit_store(store, FitSettings(lens="ridge", layers=(1,)))
    assert (single.training["n_train"], single.training["n_validation"]) == (48, 12)
    assert single.standardiser.mean != pytest.approx(mean, abs=1e-5)


# -------------------------------------------------------------------------------------------------------------- kinds


def test_auto_takes_the_kind_with_the_best_cross_validated_score() -> None:
    store = PlantedStore(60, signal={0: 1.5, 1: 1.5, 2: 1.5})
    lens = fit_store(store, FitSettings(lens="auto", folds=3, temper=False))
    kinds = lens.trace["kinds"]
    assert tuple(kinds) == AUTO
    assert kinds[lens.kind]["brier"] == min(k["brier"] for k in kinds.values())
    assert lens.kind == "ensemble"  # every layer knows something, so the mean of all knows most
    assert lens.training["n_validation"] == 60


def test_auto_with_ranks_lets_the_ensemble_go_without_them() -> None:
    """Members with ranks of their own cannot be put side by side."""
    store = PlantedStore(60, signal={0: 1.5, 1: 1.5, 2: 1.5})
    lens = fit_store(store, FitSettings(lens="auto", folds=2, inputs=("rank",), temper=False))
    assert lens.kind == "ensemble"
    assert lens.inputs == ("centred",)
    assert np.isfinite(lens.apply(store)[lens.method]).all()


@pytest.mark.parametrize(
    ("name", "asked", "recorded"),
    [
        ("ridge", (), ()),
        ("ridge", ("rank",), ("rank",)),
        ("ridge", ("centred", "rank"), ("centred", "rank")),
        ("listwise", (), ("centred",)),
        ("listwise", ("rank", "centred"), ("centred", "rank")),
    ],
)
def test_inputs_are_recorded_and_used_again(name: str, asked: tuple[str, ...], recorded: tuple[str, ...]) -> None:
    store = PlantedStore(60, signal={1: 2.0})
    assert inputs_of(KINDS[name], Asked(inputs=asked)) == recorded
    lens = fit_store(store, FitSettings(lens=name, layers=(1,), inputs=asked, temper=False))
    assert lens.inputs == recorded
    assert lens.record()["inputs"] == list(recorded)
    assert lens.training["settings"]["inputs"] == asked
    assert len(lens.standardiser.mean) == WIDTH + 6 * ("rank" in recorded)
    data = data_of(store)
    chosen, _ = choose(data, name, Asked(inputs=asked, layers=(1,)))
    rows = store.table.options.rows(data.rounds[0])
    expected = chosen.probs(data, chosen.best("brier")["gamma"])[rows]
    assert lens.apply(store)[lens.method][rows] == pytest.approx(expected, abs=1e-6)


def test_ranks_help_where_the_base_is_reliably_wrong_at_its_first_choice() -> None:
    """The answer is always the second most probable option: only the rank says so."""
    store = PlantedStore(120)
    logprobs, options = store.table.logprobs, store.table.options
    answers = np.array([np.argsort(-logprobs[a:b])[1] for a, b in pairwise(options.edges)])
    store.table = replace(store.table, answers=answers)
    store.questions = [replace(q, answer=int(a)) for q, a in zip(store.questions, answers, strict=True)]
    plain, ranked = (
        fit_store(store, FitSettings(lens="ridge", layers=(0,), inputs=inputs)) for inputs in ((), ("rank",))
    )
    scores = [one.trace["validation"]["coral"]["accuracy"]["value"] for one in (plain, ranked)]
    assert scores[1] > 0.95 > scores[0]
