"""Fitting finds a planted signal, leaves the model alone where there is none, and learns nothing from validation."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.planted import PlantedStore, one_network, own_options
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens import choose as choosing
from coral_lens.lens.artefact import Lens
from coral_lens.lens.choose import Recipe, choose_candidate, predict_rounds
from coral_lens.lens.fit import check_questions, fit, fit_store, training_data
from coral_lens.lens.probes import mlp, ridge
from coral_lens.lens.probes import search as search_module
from coral_lens.lens.probes.listwise import DECAYS
from coral_lens.lens.probes.mlp import MlpSettings
from coral_lens.lens.probes.registry import AUTO, LENSES
from coral_lens.lens.probes.search import SearchBudget
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.lens.rules import FLOOR, GAMMAS, SHRINKAGES, apply_temperature, base_probs
from coral_lens.lens.settings import HIDDEN, SEARCHED, FitSettings, NetworkSearch
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, OptionTable, Predictions, Question

WIDTH, LAYERS, SIGNAL = 10, (0, 1, 2, 3), 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Planted(ActivationStore):
    """A store in memory: base scores are noise, and one layer knows the answers as well as `strength` says."""

    def __init__(self, n: int, *, strength: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 6, n)
        options = Options.of_sizes(sizes)
        rows = options.n_rows
        answers = rng.integers(0, sizes)
        self.folder, self.name = Path("in memory"), "in memory"
        self.questions = [
            Question(str(i), str(i), f"Planted {seed}/{i}?", own_options(i, size), int(answer))
            for i, (size, answer) in enumerate(zip(sizes, answers, strict=True))
        ]
        ones = np.ones(rows, dtype=np.int64)
        self.table = OptionTable(rng.normal(size=rows), ones, ones, ones, options.edges, answers)
        y = np.zeros(rows)
        y[options.row(answers)] = 1.0
        self.states = {layer: rng.normal(size=(rows, WIDTH)).astype(np.float32) for layer in LAYERS}
        self.states[SIGNAL][:, 4] += (strength * y).astype(np.float32)
        model = {"name": "planted", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}
        self.manifest: dict[str, Any] = {"model": model, "layers": list(LAYERS), "questions": "q" * 64, "seed": seed}

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        return self.states[layer]


@pytest.fixture(scope="module", params=["ridge", "listwise"])
def planted(request: pytest.FixtureRequest) -> Lens:
    """The paper's rule, and the one beyond it."""
    return fit_store(Planted(300, strength=2.0), FitSettings(lens=request.param))


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of eight units that are trained for three epochs, so that they take no time."""
    one = {"weight_decay": 1.0, "hidden": (8,), "max_epochs": 3}
    monkeypatch.setitem(LENSES, "listwise-mlp", replace(LENSES["listwise-mlp"], settings=(one,)))


def of_networks(lens: str, **other: Any) -> dict[str, Any]:
    """The settings of one small network, where a lens has one that is searched."""
    shape = {} if lens == "mlp" else {"hidden": ()}
    return {"network": one_network(**shape, **other)} if lens in SEARCHED else {}


def one_setting(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Leave validation no choice between settings."""
    monkeypatch.setitem(LENSES, kind, replace(LENSES[kind], settings=LENSES[kind].settings[2:3]))


def scores(lens: Lens, store: Planted, metric: str) -> dict[str, float]:
    return {
        method: score(
            Predictions(method, "m", "t", "", tuple(q.id for q in store.questions), store.table.answers,
                        store.table.offsets, probs),
            metric,
        )
        for method, probs in lens.apply(store).items()
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- finding the signal


def test_the_layer_with_the_signal_is_chosen_and_the_probe_points_at_it(planted: Lens) -> None:
    assert planted.layers == (SIGNAL,)
    assert planted.gamma > 0
    assert isinstance(planted.correction.probe, ridge.LinearProbe)
    assert np.abs(planted.correction.probe.weight).argmax() == 4
    r2 = {row.layer: row.r2 for row in planted.trace.layers}
    others = [v for layer, v in r2.items() if layer != SIGNAL]
    assert r2[SIGNAL] > max(others) + 0.2
    if planted.correction.rule == "residual":
        assert r2[SIGNAL] > 0.25 > 0.05 > max(others)


def test_fresh_questions_are_answered_better_and_with_better_probabilities(planted: Lens) -> None:
    fresh = Planted(400, strength=2.0, seed=1)
    accuracy, brier = scores(planted, fresh, "accuracy"), scores(planted, fresh, "brier")
    assert accuracy["temperature"] == accuracy["base"]
    for method in (planted.plain_method, planted.method):
        assert accuracy[method] > accuracy["base"] + 0.2
        assert brier[method] < brier["temperature"] <= brier["base"]


@pytest.mark.parametrize("lens", ["ridge", "listwise", "ensemble"])
@pytest.mark.parametrize("seed", range(4))
def test_where_there_is_no_signal_the_lens_is_never_worse_on_validation_and_does_little(lens: str, seed: int) -> None:
    store = Planted(150, strength=0.0, seed=seed)
    fitted = fit_store(store, FitSettings(lens=lens, seed=seed))
    validation, nothing = fitted.trace.validation, fitted.trace.gammas[0]
    assert validation[fitted.plain_method]["brier"].value <= nothing.scores["brier"]
    assert nothing.scores["brier"] <= validation["base"]["brier"].value
    fresh = scores(fitted, Planted(400, strength=0.0, seed=seed + 100), "brier")
    assert fresh[fitted.plain_method] < fresh["base"] + 0.05
    assert fresh[fitted.method] < fresh["base"] + 0.05


def turned_around() -> Planted:
    """The signal turns around between training and validation."""
    store = Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    store.states[SIGNAL][store.table.options.rows(mask), 4] *= -1
    return store


def test_gamma_zero_is_chosen_where_every_correction_harms() -> None:
    store = turned_around()
    lens = fit_store(store, FitSettings(lens="ridge", layers=(SIGNAL,)))
    assert lens.gamma == 0.0
    p = lens.apply(store)
    assert p["coral"].tobytes() == p["base"].tobytes()


def test_a_listwise_lens_of_gamma_zero_is_a_temperature() -> None:
    store = turned_around()
    lens = fit_store(store, FitSettings(layers=(SIGNAL,)))
    assert lens.gamma == 0.0
    p = lens.apply(store)
    expected = store.table.options.softmax(lens.correction.base_weight * np.log(p["base"]))
    assert p["listwise"] == pytest.approx(expected, abs=1e-12)


def test_the_trace_holds_what_every_layer_and_gamma_scored(planted: Lens) -> None:
    trace, shown = planted.trace, ("accuracy", "ece", "brier", "nll")
    assert trace.rule == planted.correction.rule
    assert [row.layer for row in trace.layers] == list(LAYERS)
    grid = {"residual": GAMMAS, "listwise": SHRINKAGES}[planted.correction.rule]
    assert [point.gamma for point in trace.gammas] == list(grid)
    best = min(trace.gammas, key=lambda point: point.scores["brier"])
    assert best.gamma == planted.gamma == trace.chosen.gamma
    values = {m: {k: v.value for k, v in kept.items()} for m, kept in trace.validation.items()}
    assert tuple(values) == tuple(dict.fromkeys(("base", "temperature", planted.plain_method, planted.method)))
    assert values[planted.plain_method] == {k: best.scores[k] for k in shown}
    if planted.correction.rule == "residual":
        assert values["base"] == {k: trace.gammas[0].scores[k] for k in shown}
    assert trace.chosen.layers == (SIGNAL,)
    (setting,) = trace.chosen.settings
    known = {"residual": ("penalty", ridge.PENALTIES), "listwise": ("weight_decay", DECAYS)}
    name, settings = known[planted.correction.rule]
    assert set(setting) == {name}
    assert setting[name] in settings
    assert trace.kinds == {planted.kind: best}


def test_the_gammas_begin_at_nothing_and_end_at_the_papers_largest() -> None:
    assert (GAMMAS[0], GAMMAS[-1]) == (0.0, 3.0)
    assert (SHRINKAGES[0], SHRINKAGES[-1]) == (0.0, 1.0), "listwise scores have their scale already"


def test_every_validation_score_has_its_interval(planted: Lens) -> None:
    for scores_of in planted.trace.validation.values():
        for name, score_ in scores_of.items():
            assert score_.low < score_.high
            if name != "ece":  # resampling can only add to it
                assert score_.low <= score_.value <= score_.high


def test_the_intervals_of_validation_scores_draw_whole_articles() -> None:
    """Ten articles of thirty questions that stand or fall together say as much as ten questions."""
    store = Planted(300, strength=2.0)
    one = store.questions[0].options
    rows = np.tile(np.arange(len(one)), 300)
    store.questions = [
        replace(q, options=one, answer=i // 30 % len(one), group=f"article {i // 30}")
        for i, q in enumerate(store.questions)
    ]
    store.table = replace(
        store.table,
        **{name: getattr(store.table, name)[rows] for name in ("logprobs", "n_tokens", "n_chars", "n_bytes")},
        answers=np.array([q.answer for q in store.questions]),
        offsets=Options.of_sizes([len(one)] * 300).edges,
    )
    rng = np.random.default_rng(0)
    store.states = {layer: rng.normal(size=(len(rows), WIDTH)).astype(np.float32) for layer in store.states}
    alone = copy(store)
    alone.questions = [replace(q, group=q.id) for q in store.questions]
    widths = []
    for given in (store, alone):
        settings = FitSettings(lens="ridge", layers=(1,), folds=5)
        base = fit_store(given, settings).trace.validation["base"]["brier"]
        widths.append(base.high - base.low)
    assert widths[0] > 3 * widths[1] > 0


def test_the_trace_names_the_layers_that_would_have_done_as_well(planted: Lens) -> None:
    assert planted.trace.as_good == (SIGNAL,)
    store = Planted(300, strength=2.0)
    store.states[0] = store.states[SIGNAL]
    assert fit_store(store, FitSettings(lens=planted.kind)).trace.as_good == (0, SIGNAL)


def test_the_lens_records_what_it_was_fitted_on(planted: Lens) -> None:
    training = planted.training
    assert (training.n_train, training.n_validation) == (240, 60)
    assert training.tasks == {"questions": 300}
    assert training.settings["layers"] == LAYERS
    assert planted.model == {"name": "planted", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}
    assert len(planted.seen) == 300


# --------------------------------------------------------------------------------------------------- no leak, no chance


def changed_validation(store: Planted, mask: np.ndarray) -> Planted:
    """The same training questions; validation questions with other states, scores and answers."""
    other = Planted(len(store.questions), strength=2.0)
    rows = store.table.options.rows(mask)
    rng = np.random.default_rng(99)
    for states in other.states.values():
        states[rows] = 50 + 7 * rng.normal(size=states[rows].shape)
    logprobs = np.where(rows, rng.normal(size=len(rows)), store.table.logprobs)
    answers = np.where(mask, 0, store.table.answers)
    other.table = replace(store.table, logprobs=logprobs, answers=answers)
    other.questions = [replace(q, answer=int(a)) for q, a in zip(store.questions, answers, strict=True)]
    return other


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_validation_questions_change_neither_the_standardiser_nor_the_probe(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    one_setting(monkeypatch, kind)
    store = Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    settings = FitSettings(lens=kind, layers=(SIGNAL,))
    first, second = fit_store(store, settings), fit_store(changed_validation(store, mask), settings)
    for a, b in (
        (first.correction.standardiser, second.correction.standardiser),
        (first.shift.standardiser, second.shift.standardiser),
    ):
        assert a.mean.tobytes() == b.mean.tobytes()
        assert a.scale.tobytes() == b.scale.tobytes()
    assert isinstance(first.correction.probe, ridge.LinearProbe)
    assert isinstance(second.correction.probe, ridge.LinearProbe)
    assert first.correction.probe.weight.tobytes() == second.correction.probe.weight.tobytes()
    assert first.correction.probe.bias == second.correction.probe.bias
    assert first.correction.base_weight == second.correction.base_weight
    assert first.trace.validation != second.trace.validation
    states = store.states[SIGNAL] if kind == "ridge" else store.table.options.centre(store.states[SIGNAL])
    train = states[store.table.options.rows(~mask)]
    assert first.correction.standardiser.mean.tobytes() == fit_standardiser(train).mean.tobytes()


def test_training_questions_do_not_change_the_temperature() -> None:
    store, other = Planted(300, strength=2.0), Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    rows = store.table.options.rows(mask)
    other.table = replace(other.table, logprobs=np.where(rows, other.table.logprobs, -1.0))
    settings = FitSettings(layers=(SIGNAL,))
    assert fit_store(store, settings).control_temperature == fit_store(other, settings).control_temperature


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("lens", [*LENSES, "auto"])
def test_the_same_seed_gives_the_same_lens_to_the_byte(tmp_path: Path, lens: str) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        settings = FitSettings(lens=lens, seed=seed, **of_networks(lens))
        fit_store(Planted(100, strength=2.0), settings).save(tmp_path / name)
    a, b, c = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a["lens.safetensors"] != c["lens.safetensors"]


# ------------------------------------------------------------------------------------------------------------ networks


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[MlpSettings], SearchBudget]]:
    """How many layers and which settings a network was searched among, and how."""
    calls = []
    real = choosing.search_mlp

    def spy(data: Any, layers: Any, grid: Any, **rest: Any) -> Any:
        calls.append((len(layers), list(grid), rest["budget"]))
        return real(data, layers, grid, **rest)

    monkeypatch.setattr(choosing, "search_mlp", spy)
    return calls


GRID = NetworkSearch(
    search="grid", weight_decay=(1.0,), output_penalty=(0.0, 50.0), learning_rate=(1e-2,), hidden=(16, 8), epochs=12
)


def test_the_mlp_tries_its_grid_on_every_layer_and_keeps_the_best_setting(
    searched: list[tuple[int, list[MlpSettings], SearchBudget]],
) -> None:
    lens = fit_store(Planted(300, strength=2.0), FitSettings(lens="mlp", network=GRID))
    ((n_layers, grid, budget),) = searched
    assert n_layers == len(LAYERS)
    assert [(g.weight_decay, g.output_penalty, g.learning_rate, g.hidden, g.max_epochs) for g in grid] == [
        (1.0, penalty, 1e-2, (16, 8), 12) for penalty in (0.0, 50.0)
    ]
    assert budget.rungs == (), "a grid search trains everything to its end"
    assert isinstance(lens.correction.probe, mlp.NetworkProbe)
    assert lens.layers == (SIGNAL,)
    assert lens.trace.chosen.settings == (
        {"weight_decay": 1.0, "output_penalty": 0.0, "learning_rate": 1e-2, "hidden": [16, 8], "max_epochs": 12},
    )
    fresh = scores(lens, Planted(300, strength=2.0, seed=7), "accuracy")
    assert fresh["coral"] > fresh["base"] + 0.15


@pytest.mark.parametrize("search", ["grid", "halving"])
def test_the_layers_of_a_network_are_those_of_its_own_probe(search: str) -> None:
    """Once they were ridge's: the layer with the signal then looked as ridge saw it, and so did every other."""
    store = Planted(300, strength=2.0)
    settings = FitSettings(lens="mlp", network=replace(GRID, search=search))
    data, _ = training_data(store, settings)
    lens = fit_store(store, settings)
    assert lens.trace.own_layers
    assert [trial.layer for trial in lens.trace.layers] == list(LAYERS)
    rows = data.options.rows(data.is_validation)
    for trial in lens.trace.layers:
        recipe = Recipe("mlp", (trial.layer,), (), (trial.setting,), settings.seed)
        alone = predict_rounds(data, recipe, "brier")
        assert trial.r2 == pytest.approx(alone.r2, abs=1e-9), "every network was trained to its end"
        assert trial.best.scores == pytest.approx(alone.best("brier").scores, abs=1e-9)
        assert alone.correction is not None
        assert lens.view is not None
        view = next(c for c in lens.view.corrections if c.layers == (trial.layer,))
        assert view.outputs(store.layer(trial.layer))[rows] == pytest.approx(alone.predicted.scores[rows], abs=2e-3)
    chosen = next(trial for trial in lens.trace.layers if trial.layer == SIGNAL)
    assert chosen.best.scores["brier"] == min(point.scores["brier"] for point in lens.trace.gammas)


def test_a_layer_is_chosen_by_steering_and_by_r2_on_request() -> None:
    """R2 counts every option alike, steering only who leads: the two may disagree, and each is obeyed."""
    data, _ = training_data(Planted(300, strength=2.0), FitSettings())
    settings = FitSettings(lens="mlp", layers=LAYERS, network=GRID)
    _, singles = choose_candidate(data, "mlp", settings)
    better = replace(singles[0], r2=0.99)
    for by, first in (("criterion", SIGNAL), ("r2", 0)):
        ranked = sorted([better, *singles[1:]], key=lambda c: c.layer_cost(replace(settings, layer_by=by)))
        assert ranked[0].recipe.layers == (first,)
    assert FitSettings(lens="mlp").layer_by == "criterion"


def test_layers_by_r2_are_also_a_choice_of_closed_forms() -> None:
    data, _ = training_data(Planted(300, strength=2.0), FitSettings())
    settings = FitSettings(lens="ridge", layers=LAYERS, layer_by="r2")
    chosen, singles = choose_candidate(data, "ridge", settings)
    assert chosen.r2 == max(c.r2 for c in singles)


def test_the_network_that_is_kept_is_trained_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halving may stop the network of the layer that steering prefers: it is still trained as it would be alone."""
    monkeypatch.setitem(
        choosing.BUDGETS, "halving", SearchBudget(rungs=(1, 2), keep=0.01, finalists=1, slow_layers=0.01)
    )
    store, settings = Planted(200, strength=2.0), FitSettings(lens="mlp", network=replace(GRID, search="halving"))
    data, _ = training_data(store, settings)
    lens = fit_store(store, settings)
    recipe = Recipe("mlp", lens.layers, (), lens.trace.chosen.settings, settings.seed)
    alone = predict_rounds(data, recipe, "brier").correction
    assert alone is not None
    assert all(torch.equal(t, lens.correction.probe.tensors()[n]) for n, t in alone.probe.tensors().items())


def test_top_layers_of_a_network_are_those_of_its_own_ranking() -> None:
    store = Planted(300, strength=2.0)
    store.states[0][:, 4] += store.states[SIGNAL][:, 4]
    lens = fit_store(store, FitSettings(lens="mlp", top_layers=2, network=GRID))
    assert lens.layers == (0, SIGNAL)
    assert isinstance(lens.correction.probe, mlp.NetworkProbe)
    assert lens.correction.probe.network[0].in_features == 2 * WIDTH


def test_with_folds_a_network_is_chosen_in_the_first_and_predicts_the_others() -> None:
    store = Planted(150, strength=2.0)
    lens = fit_store(store, FitSettings(lens="mlp", folds=3, network=GRID))
    assert lens.layers == (SIGNAL,)
    assert lens.training.n_validation == 150
    assert SIGNAL in lens.trace.as_good


@pytest.mark.parametrize(("lens", "depth", "hidden"), [("mlp", 1, (1024,)), ("mlp", 2, (1024, 512)), ("linear", 2, ())])
def test_depth_is_the_number_of_hidden_layers_and_a_linear_lens_has_none(
    lens: str, depth: int, hidden: tuple[int, ...]
) -> None:
    network = one_network(hidden=(), epochs=1)
    fitted = fit_store(
        Planted(40, strength=2.0), FitSettings(lens=lens, layers=(SIGNAL,), depth=depth, network=network)
    )
    assert isinstance(fitted.correction.probe, mlp.NetworkProbe)
    assert fitted.correction.probe.hidden == hidden
    assert (fitted.kind, fitted.correction.rule) == (lens, "residual")


def test_searches_of_other_layers_or_depths_in_one_work_folder_do_not_meet(tmp_path: Path) -> None:
    """The search numbers its layers: a journal of the best and another layer once answered for the best and a third."""
    store, journal = Planted(100, strength=2.0), tmp_path / "search.jsonl"
    small = one_network()
    asked = [
        FitSettings(lens="mlp", layers=(0, SIGNAL), network=small),
        FitSettings(lens="mlp", layers=(1, SIGNAL), network=small),
        FitSettings(lens="mlp", layers=(1, SIGNAL), network=replace(small, hidden=(8,))),
        FitSettings(lens="linear", layers=(1, SIGNAL), network=replace(small, hidden=())),
        FitSettings(lens="mlp", layers=(1, SIGNAL), seed=1, network=small),
        FitSettings(lens="mlp", layers=(1, SIGNAL), scale_base=True, network=small),
        FitSettings(lens="mlp", layers=(1, SIGNAL), network=replace(small, search="grid")),
    ]
    for number, settings in enumerate(asked, start=1):
        lens = fit_store(store, settings, journal=journal)
        assert len(list(tmp_path.glob("*.jsonl"))) == number
        alone = fit_store(store, settings)
        assert lens.apply(store)["coral"].tobytes() == alone.apply(store)["coral"].tobytes()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    fit_store(store, asked[0], journal=journal)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, (
        "the same search goes on with its own journal"
    )


def test_searches_of_other_states_or_with_another_torch_in_one_work_folder_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another read-out has other states of the same questions and the same scores, and no file that a user could name."""
    store, other, journal = Planted(100, strength=2.0), Planted(100, strength=2.0), tmp_path / "search.jsonl"
    other.states = {layer: states[::-1].copy() for layer, states in other.states.items()}
    settings = FitSettings(lens="mlp", layers=(1, SIGNAL), network=one_network())
    alone = fit_store(other, settings)
    fit_store(store, settings, journal=journal)
    lens = fit_store(other, settings, journal=journal)
    assert lens.apply(other)["coral"].tobytes() == alone.apply(other)["coral"].tobytes()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    usual = search_module.versions()
    monkeypatch.setattr(search_module, "versions", lambda: usual | {"torch": "99.0"})
    fit_store(store, settings, journal=journal)
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"lens": "ridge", "network": NetworkSearch(search="grid")}, "A ridge lens has no network to search"),
        ({"lens": "listwise", "network": NetworkSearch(weight_decay=(1.0,))}, "take one of mlp, linear"),
        ({"lens": "linear", "network": NetworkSearch(hidden=(8,))}, "do not take a linear lens"),
        ({"lens": "mlp", "depth": 2, "network": NetworkSearch(hidden=(8,))}, "leave depth out"),
    ],
    ids=str,
)
def test_settings_of_networks_are_refused_where_they_would_mean_nothing(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CoralError, match=sentence):
        FitSettings(**wrong)


def test_a_record_says_how_a_network_was_searched_and_leaves_it_out_of_other_lenses() -> None:
    assert "network" not in FitSettings().record()
    assert "layer_by" not in FitSettings().record()
    assert FitSettings(lens="ridge", layer_by="r2").record()["layer_by"] == "r2"
    assert FitSettings(lens="mlp").record()["network"]["search"] == "halving"
    assert FitSettings(lens="mlp").hidden_of("mlp") == HIDDEN


# ------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_a_metric_where_more_is_better_is_maximised(kind: str) -> None:
    lens = fit_store(Planted(300, strength=2.0), FitSettings(lens=kind, criterion="accuracy"))
    assert lens.layers == (SIGNAL,)
    best = max(point.scores["accuracy"] for point in lens.trace.gammas)
    assert lens.trace.validation[lens.plain_method]["accuracy"].value == best
    # of equally good gammas the smallest, which changes the model least
    assert lens.gamma == min(p.gamma for p in lens.trace.gammas if p.scores["accuracy"] == best)


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_a_metric_beyond_those_shown_can_choose_too(kind: str) -> None:
    lens = fit_store(Planted(200, strength=2.0), FitSettings(lens=kind, criterion="aurc"))
    assert all("aurc" in point.scores for point in lens.trace.gammas)


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_a_criterion_that_does_not_exist_on_the_validation_questions_is_refused(kind: str) -> None:
    store = Planted(60, strength=0.0)
    certain = np.full(len(store.table.logprobs), -50.0)
    certain[store.table.options.starts + store.table.answers] = 0.0
    store.table = replace(store.table, logprobs=certain)
    with pytest.raises(CoralError, match="auroc does not exist"):
        fit_store(store, FitSettings(lens=kind, criterion="auroc"))


def test_only_the_layers_asked_for_are_tried() -> None:
    lens = fit_store(Planted(100, strength=2.0), FitSettings(layers=(0, 3)))
    assert [row.layer for row in lens.trace.layers] == [0, 3]
    assert set(lens.layers) < {0, 3}


def test_the_best_layers_are_read_side_by_side_where_several_are_asked_for() -> None:
    store = Planted(300, strength=2.0)
    store.states[0][:, 1] = store.states[SIGNAL][:, 4]
    lens = fit_store(store, FitSettings(lens="ridge", top_layers=2))
    assert lens.layers == (0, SIGNAL)
    assert isinstance(lens.correction.probe, ridge.LinearProbe)
    assert set(np.abs(lens.correction.probe.weight).argsort()[-2:]) == {1, WIDTH + 4}
    assert lens.trace.chosen.layers == (0, SIGNAL)


def test_an_ensemble_averages_its_layers_and_says_which() -> None:
    lens = fit_store(Planted(300, strength=2.0), FitSettings(lens="ensemble"))
    assert lens.layers == LAYERS, "it has five members, and there are four layers"
    assert len(lens.trace.chosen.settings) == len(LAYERS)
    fresh = scores(lens, Planted(300, strength=2.0, seed=7), "accuracy")
    assert fresh[lens.method] > fresh["base"] + 0.1


@pytest.mark.parametrize(
    ("settings", "n", "rounds"),
    [
        (FitSettings(folds=0), 999, 5),
        (FitSettings(folds=0), 1000, 1),
        (FitSettings(folds=0, lens="auto"), 1000, 5),
        (FitSettings(), 999, 1),
        (FitSettings(folds=3), 1000, 3),
    ],
)
def test_few_questions_choose_by_folds_where_that_is_left_to_us(settings: FitSettings, n: int, rounds: int) -> None:
    assert len(training_data(PlantedStore(n), settings)[0].rounds) == rounds


def test_auto_takes_the_kind_with_the_best_cross_validated_score() -> None:
    lens = fit_store(Planted(300, strength=2.0), FitSettings(lens="auto"))
    kinds = lens.trace.kinds
    assert tuple(kinds) == AUTO
    assert lens.kind == min(kinds, key=lambda kind: kinds[kind].scores["brier"])
    assert (lens.training.n_train, lens.training.n_validation) == (300, 300)


# ------------------------------------------------------------------------------------------------- folds, temperatures


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_with_folds_every_question_chooses_and_the_lens_is_fitted_on_all(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    one_setting(monkeypatch, kind)
    store = Planted(200, strength=2.0)
    lens = fit_store(store, FitSettings(lens=kind, folds=4))
    assert (lens.training.n_train, lens.training.n_validation) == (200, 200)
    assert lens.layers == (SIGNAL,)
    states = store.states[SIGNAL] if kind == "ridge" else store.table.options.centre(store.states[SIGNAL])
    assert lens.correction.standardiser.mean.tobytes() == fit_standardiser(states).mean.tobytes()
    assert lens.trace.chosen.settings == LENSES[kind].settings, "the one that there was"


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_folds_judge_a_question_by_a_fit_that_has_not_seen_it(kind: str) -> None:
    """States that are all noise, and far more of them than questions: a fit that had seen a question would know it."""
    store, rng = Planted(60, strength=0.0), np.random.default_rng(4)
    store.states = {layer: rng.normal(size=(len(store.table.logprobs), 400)).astype(np.float32) for layer in LAYERS}
    lens = fit_store(store, FitSettings(lens=kind, folds=5))
    assert max(row.r2 for row in lens.trace.layers) < 0.3
    assert lens.trace.gammas[-1].scores["accuracy"] < 0.6


def test_listwise_lenses_are_tempered_and_the_papers_are_not_unless_asked() -> None:
    store = Planted(150, strength=2.0)
    methods = {
        "listwise": ("base", "temperature", "listwise", "listwise tempered"),
        "ensemble": ("base", "temperature", "listwise", "listwise tempered"),
        "ridge": ("base", "temperature", "coral"),
    }
    for kind, expected in methods.items():
        lens = fit_store(store, FitSettings(lens=kind))
        assert tuple(lens.apply(store)) == tuple(lens.trace.validation) == expected
    untempered = fit_store(store, FitSettings(temper=False))
    assert untempered.tempering is None
    assert tuple(untempered.apply(store)) == ("base", "temperature", "listwise")
    tempered = fit_store(store, FitSettings(lens="ridge", temper=True))
    assert tuple(tempered.apply(store)) == ("base", "temperature", "coral", "coral tempered")


def test_tempering_changes_nothing_else_of_a_lens() -> None:
    store = Planted(150, strength=2.0)
    with_, without = (fit_store(store, FitSettings(temper=temper)) for temper in (True, False))
    assert with_.apply(store)["listwise"].tobytes() == without.apply(store)["listwise"].tobytes()
    assert with_.shifts(store).tobytes() == without.shifts(store).tobytes()


@pytest.mark.parametrize("kind", ["ridge", "listwise"])
def test_a_lens_can_start_from_scaled_probabilities_and_still_shows_the_unscaled_base(kind: str) -> None:
    store = Planted(300, strength=2.0)
    lens = fit_store(store, FitSettings(lens=kind, scale_base=True))
    assert lens.base_temperature > 1.0, "scores of noise are too sure"
    raw = base_probs(store.table, "token")
    assert lens.apply(store)["base"].tobytes() == raw.tobytes()
    p = apply_temperature(raw, store.table.options, temperature=lens.base_temperature)
    assert lens.base_probs(store.table).tobytes() == p.tobytes()
    unweighted = replace(lens.correction, base_weight=1.0)
    nothing = replace(lens, gamma=0.0, correction=unweighted).apply(store)[lens.plain_method]
    assert nothing == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize(("kind", "method"), [("ridge", "coral + temperature"), ("listwise", "listwise + temperature")])
def test_a_temperature_after_the_lens_is_fitted_on_validation_and_takes_the_place_of_tempering(
    kind: str, method: str
) -> None:
    store = Planted(300, strength=2.0)
    plain = fit_store(store, FitSettings(lens=kind, temper=False))
    lens = fit_store(store, FitSettings(lens=kind, then_temperature=True))
    assert lens.tempering is None
    assert tuple(lens.apply(store)) == ("base", "temperature", method)
    q = np.maximum(plain.apply(store)[plain.method], FLOOR)  # what was clipped to 0 is not infinitely unlikely
    expected = apply_temperature(q, store.table.options, temperature=lens.steered_temperature)
    assert lens.apply(store)[method] == pytest.approx(expected, abs=1e-12)
    before, after = (one.trace.validation[one.method]["nll"].value for one in (plain, lens))
    assert after <= before + 1e-3


def test_a_learning_curve_is_kept_where_it_is_asked_for(planted: Lens) -> None:
    assert planted.trace.learning_curve is None
    lens = fit_store(Planted(300, strength=2.0), FitSettings(lens=planted.kind, learning_curve=True))
    curve = lens.trace.learning_curve
    assert curve is not None
    assert [point.questions for point in curve.points] == [24, 48, 96, 168, 240]
    last, chosen = curve.points[-1], lens.trace.validation[lens.plain_method]
    assert last.scores["brier"] == pytest.approx(chosen["brier"].value, abs=1e-3), "all questions: the lens itself"
    assert curve.enough in [point.questions for point in curve.points]


# -------------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("lens", "rigde", "Did you mean 'ridge'"),
        ("lens", "listwise-mpl", "Did you mean 'listwise-mlp'"),
        ("base", "tokens", "Did you mean 'token'"),
        ("criterion", "briar", "Did you mean 'brier'"),
        ("inputs", ("ranks",), "Did you mean 'rank'"),
        ("validation", 0.0, "between 0 and 1"),
        ("validation", 1.0, "between 0 and 1"),
        ("folds", -1, "folds must lie between 0 and 20. Got -1"),
        ("top_layers", 9, "top_layers must lie between 1 and 8. Got 9"),
        ("depth", 5, "depth must lie between 1 and 4. Got 5"),
        ("seed", -1, "seed must lie between 0 and 4294967295. Got -1"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(field: str, value: Any, said: str) -> None:
    settings = FitSettings()
    object.__setattr__(settings, field, value)  # the shapes checked in tests would refuse it before we do
    with pytest.raises(CoralError, match=said):
        settings.__post_init__()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"lens": "ensemble", "inputs": ("rank",)}, "ensemble averages probes of single layers"),
        ({"lens": "ensemble", "top_layers": 2}, "ensemble averages probes of single layers"),
        ({"then_temperature": True, "temper": True}, "has its own temperature"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(CoralError, match=said):
        FitSettings(**wanted)


def test_an_unlabelled_question_is_refused_by_its_id() -> None:
    questions = toy_questions(30)
    questions[17] = replace(questions[17], answer=UNKNOWN)
    with pytest.raises(CoralError, match=r"1 of 30 .* first '17'"):
        check_questions(questions)


def test_too_few_questions_are_refused_before_the_model_runs(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"at least 20 labelled questions.* Got 19"):
        fit(tiny, toy_questions(19), work_dir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_questions_of_one_group_cannot_be_fitted(tiny: Model) -> None:
    with pytest.raises(CoralError, match="cannot be divided"):
        fit(tiny, [replace(q, group="one") for q in toy_questions(20)], FitSettings(layers=(1,)))


# ---------------------------------------------------------------------------------------------------- with a real store


def test_a_fit_with_a_work_folder_reuses_the_states_and_gives_the_same_lens(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(30)
    settings = FitSettings(style=Style("letters"), base="sum")
    without = fit(tiny, questions, settings)
    first = fit(tiny, questions, settings, work_dir=tmp_path / "work")

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was run")

    for body in ("plain_body", "tree_body", "prefill"):
        monkeypatch.setattr(Model, body, refuses)
    second = fit(tiny, questions, settings, work_dir=str(tmp_path / "work"))
    saved = []
    for lens in (without, first, second):
        lens.save(tmp_path / "lens")
        saved.append({p.name: p.read_bytes() for p in (tmp_path / "lens").iterdir()})
    assert saved[0] == saved[1] == saved[2]
    assert first.style == Style("letters")
    assert first.base == "sum"
    assert first.model["weights"] == tiny.fingerprint["weights"]
