"""Setting, layer, gamma and kind are chosen on validation questions, and a recipe fitted again is the lens that was chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.planted import COLUMN, LAYERS, WIDTH, PlantedStore, brier, data_of

from coral_lens.errors import CoralError
from coral_lens.lens.choose import choose_candidate, fit_recipe, inputs_of, predict_all, try_layers
from coral_lens.lens.fit import fit_store
from coral_lens.lens.probes.registry import AUTO, LENSES
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.rules import GAMMAS, SHRINKAGES
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import GammaPoint

SETTINGS = FitSettings(layers=LAYERS)
CLOSED = ("ridge", "listwise", "ensemble")


@pytest.mark.parametrize("name", ["ridge", "listwise"])
def test_the_layer_and_column_with_the_signal_are_chosen(name: str) -> None:
    data = data_of(PlantedStore(150, signal={1: 2.0}))
    chosen, singles = choose_candidate(data, name, SETTINGS)
    assert chosen.recipe.layers == (1,)
    assert [c.recipe.layers for c in singles] == [(layer,) for layer in LAYERS]
    assert chosen.correction is not None
    assert isinstance(chosen.correction.probe, LinearProbe)
    assert np.abs(chosen.correction.probe.weight).argmax() == COLUMN
    assert chosen.cost("brier") == min(c.cost("brier") for c in singles)


@pytest.mark.parametrize("name", CLOSED)
def test_a_recipe_fitted_again_on_the_training_questions_is_the_lens_that_was_chosen(name: str) -> None:
    data = data_of(PlantedStore(100, signal={1: 2.0}))
    chosen, _ = choose_candidate(data, name, SETTINGS)
    held_out = data.rounds[0]
    again = predict_all(data, fit_recipe(data, chosen.recipe, ~held_out, held_out))
    rows = data.table.options.rows(held_out)
    # the listwise path starts each fit from the one before, so the minimum is the same but not its last digits
    assert again.scores[rows] == pytest.approx(chosen.predicted.scores[rows], abs=2e-2)
    assert again.base[rows] == pytest.approx(chosen.predicted.base[rows], abs=2e-2)


# ---------------------------------------------------------------------------------------------------------- ensemble


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    """One linear probe of the layers side by side gives the mean of the scores that the members give alone."""
    data = data_of(PlantedStore(100, signal={0: 1.0, 1: 2.0}))
    chosen, singles = choose_candidate(data, "ensemble", SETTINGS)
    assert chosen.recipe.layers == LAYERS
    assert chosen.predicted.scores == pytest.approx(np.mean([c.predicted.scores for c in singles], axis=0))
    assert chosen.predicted.base == pytest.approx(np.mean([c.predicted.base for c in singles], axis=0))
    assert chosen.correction is not None
    side_by_side = predict_all(data, chosen.correction)
    alone = [predict_all(data, c.correction) for c in singles if c.correction is not None]
    assert len(alone) == len(LAYERS)
    assert side_by_side.scores == pytest.approx(np.mean([one.scores for one in alone], axis=0), abs=1e-5)
    assert side_by_side.base == pytest.approx(np.mean([one.base for one in alone], axis=0))


def test_an_ensemble_takes_its_best_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LENSES, "ensemble", replace(LENSES["ensemble"], average=2))
    data = data_of(PlantedStore(150, signal={0: 2.0, 2: 2.0}))
    chosen, singles = choose_candidate(data, "ensemble", SETTINGS)
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
    chosen, _ = choose_candidate(data, name, replace(SETTINGS, top_layers=2))
    assert chosen.recipe.layers == (0, 2)
    assert isinstance(chosen.correction.probe, LinearProbe)  # type: ignore[union-attr]
    weight = np.abs(chosen.correction.probe.weight)  # type: ignore[union-attr]
    assert len(weight) == 2 * WIDTH
    assert set(np.argsort(weight)[-2:]) == {COLUMN, WIDTH + COLUMN}
    alone = try_layers(data, name, (0, 2), SETTINGS)
    assert alone.predicted.scores.tobytes() == chosen.predicted.scores.tobytes()


def test_a_lens_of_two_layers_applies_them_side_by_side() -> None:
    store = PlantedStore(100, signal={0: 1.5, 2: 2.0})
    lens = fit_store(store, FitSettings(lens="listwise", top_layers=2, temper=False))
    assert lens.layers == (0, 2)
    assert lens.name.startswith("listwise lens, layers 0, 2,")
    data = data_of(store)
    chosen, _ = choose_candidate(data, "listwise", replace(SETTINGS, top_layers=2))
    rows = store.table.options.rows(data.rounds[0])
    expected = chosen.probs(chosen.best("brier").gamma)[rows]
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
        chosen, _ = choose_candidate(data, name, replace(SETTINGS, layers=(1,)))
        assert [point.gamma for point in chosen.gammas] == list(grid)
        assert chosen.best("brier").gamma == 0.0
    lens = fit_store(store, FitSettings(lens="ridge", layers=(1,)))
    assert lens.apply(store)["coral"].tobytes() == lens.apply(store)["base"].tobytes()


def test_of_equal_gammas_the_smallest_is_taken() -> None:
    data = data_of(PlantedStore(40, signal={1: 2.0}))
    chosen, _ = choose_candidate(data, "ridge", replace(SETTINGS, layers=(1,)))
    flat = replace(chosen, gammas=tuple(GammaPoint(g, {"brier": 0.5, "accuracy": 0.5}) for g in (1.0, 0.25, 2.0)))
    assert flat.best("brier").gamma == 0.25
    assert flat.best("accuracy").gamma == 0.25


def test_a_score_where_more_is_better_is_maximised() -> None:
    data = data_of(PlantedStore(120, signal={1: 2.0}))
    chosen, singles = choose_candidate(data, "listwise", replace(SETTINGS, criterion="accuracy"))
    assert chosen.best("accuracy").scores["accuracy"] == max(p.scores["accuracy"] for c in singles for p in c.gammas)
    assert chosen.cost("accuracy") < 0


# ------------------------------------------------------------------------------------------------------------- folds


@pytest.mark.parametrize("name", CLOSED)
def test_with_folds_every_question_is_predicted_by_a_fit_that_did_not_see_it(name: str) -> None:
    """The reference: each fold's recipe fitted by hand on the other folds."""
    data = data_of(PlantedStore(60, signal={1: 2.0}), FitSettings(folds=3))
    chosen, _ = choose_candidate(data, name, replace(SETTINGS, layers=(0, 1)))
    assert data.is_validation.all()
    assert chosen.correction is None
    for mask in data.rounds:
        expected = predict_all(data, fit_recipe(data, chosen.recipe, ~mask, mask))
        rows = data.table.options.rows(mask)
        assert chosen.predicted.scores[rows] == pytest.approx(expected.scores[rows], abs=2e-2)


def test_the_answers_of_a_fold_do_not_change_what_is_predicted_there() -> None:
    store = PlantedStore(60, signal={1: 2.0})
    data = data_of(store, FitSettings(folds=3))
    mask = data.rounds[1]
    rows = data.table.options.rows(mask)
    r = np.where(rows, np.random.default_rng(0).normal(size=len(rows)), data.r)
    answers = np.where(mask, 0, data.table.answers)
    other = replace(data, r=r, table=replace(data.table, answers=answers))
    for name in ("ridge", "listwise"):
        kind = replace(LENSES[name], settings=LENSES[name].settings[2:3], fit_folds=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(LENSES, name, kind)
            first, second = (try_layers(d, name, (1,), SETTINGS).predicted for d in (data, other))
        assert first.scores[rows].tobytes() == second.scores[rows].tobytes()
        assert first.scores[~rows].tobytes() != second.scores[~rows].tobytes()


def test_a_lens_of_closed_form_chosen_by_folds_is_fitted_on_everything() -> None:
    store = PlantedStore(60, signal={1: 2.0})
    lens = fit_store(store, FitSettings(lens="ridge", layers=(1,), folds=3))
    assert (lens.training.n_train, lens.training.n_validation) == (60, 60)
    mean = store.layer(1).mean(axis=0, dtype=np.float64)
    assert lens.correction.standardiser.mean == pytest.approx(mean, abs=1e-5)
    single = fit_store(store, FitSettings(lens="ridge", layers=(1,)))
    assert (single.training.n_train, single.training.n_validation) == (48, 12)
    assert single.correction.standardiser.mean != pytest.approx(mean, abs=1e-5)


# -------------------------------------------------------------------------------------------------------------- kinds


def test_auto_takes_the_kind_with_the_best_cross_validated_score() -> None:
    store = PlantedStore(60, signal={0: 1.5, 1: 1.5, 2: 1.5})
    lens = fit_store(store, FitSettings(lens="auto", folds=3, temper=False))
    kinds = lens.trace.kinds
    assert tuple(kinds) == AUTO
    assert kinds[lens.kind].scores["brier"] == min(k.scores["brier"] for k in kinds.values())
    assert lens.kind == "ensemble"  # every layer knows something, so the mean of all knows most
    assert lens.training.n_validation == 60


def test_auto_with_ranks_lets_the_ensemble_go_without_them() -> None:
    """Members with ranks of their own cannot be put side by side."""
    store = PlantedStore(60, signal={0: 1.5, 1: 1.5, 2: 1.5})
    lens = fit_store(store, FitSettings(lens="auto", folds=2, inputs=("rank",), temper=False))
    assert lens.kind == "ensemble"
    assert lens.correction.inputs == ("centred",)
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
    assert inputs_of(LENSES[name], FitSettings(inputs=asked)) == recorded
    lens = fit_store(store, FitSettings(lens=name, layers=(1,), inputs=asked, temper=False))
    assert lens.correction.inputs == recorded
    assert lens.record()["inputs"] == list(recorded)
    assert lens.training.settings["inputs"] == asked
    assert len(lens.correction.standardiser.mean) == WIDTH + 6 * ("rank" in recorded)
    data = data_of(store)
    chosen, _ = choose_candidate(data, name, FitSettings(inputs=asked, layers=(1,)))
    rows = store.table.options.rows(data.rounds[0])
    expected = chosen.probs(chosen.best("brier").gamma)[rows]
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
    scores = [one.trace.validation["coral"]["accuracy"].value for one in (plain, ranked)]
    assert scores[1] > 0.95 > scores[0]
