"""Layers and dimensions: what was planted is found where it was planted, and nothing is chosen on what it is scored on."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from support.planted import PlantedStore, one_network

from coral_lens.analysis import dimensions as dimensions_module
from coral_lens.analysis import folds as folds_module
from coral_lens.analysis import network_layers, ridge_layers
from coral_lens.analysis.dimensions import analyse_dimensions, component_path, decompose
from coral_lens.analysis.files import ArrayJournal, csv_of, jsonable, write_analysis
from coral_lens.analysis.folds import (
    Folded,
    FoldedSteering,
    choose_steering,
    combined,
    divide_into_folds,
    fit_steering,
    fold_parts,
    nested_ridge,
    ridge_by_columns,
    ridge_by_rows,
    ridge_bytes,
)
from coral_lens.analysis.layers import Forward, LayerAnalysis, LayerWork, analyse_layers
from coral_lens.analysis.network_layers import NetworkLayers, NetworkProbes
from coral_lens.analysis.scores import r2_scores, scores_of
from coral_lens.analysis.settings import DimensionSettings, LayerPlan
from coral_lens.errors import CoralError
from coral_lens.lens import choose
from coral_lens.lens.probes.grid import grid_of
from coral_lens.lens.probes.mlp import LayerData, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, ridge_of
from coral_lens.lens.probes.standardise import fit_standardiser, r_squared
from coral_lens.lens.rules import GAMMAS, steer
from coral_lens.lens.settings import NetworkSearch
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import measure
from coral_lens.ragged import Options
from coral_lens.report.figures.analysis import write_analysis_pictures


class Deep(PlantedStore):
    """Seven layers, of which layer 3 knows most, 2 and 4 less, and the others nothing."""

    def __init__(self, n: int, *, seed: int = 0) -> None:
        super().__init__(n, signal={1: 2.0}, seed=seed)
        rng = np.random.default_rng(seed + 100)
        knows, shape = self.states[1], self.states[1].shape
        strength = {2: 0.5, 3: 1.0, 4: 0.5}
        noise = {layer: rng.normal(size=shape) for layer in range(7)}
        self.states = {k: (strength.get(k, 0.0) * knows + noise[k] * 0.3).astype(np.float32) for k in noise}
        self.manifest["layers"] = list(range(7))
        self.manifest["model"] = {**self.manifest["model"], "layers": 6}


@pytest.fixture(scope="module")
def deep() -> Deep:
    return Deep(150)


@pytest.fixture(scope="module")
def analysed(deep: Deep) -> LayerAnalysis:
    return analyse_layers(deep, divide_into_folds(deep))


def plain_ridge(x: np.ndarray, r: np.ndarray, train: np.ndarray, penalty: float) -> np.ndarray:
    """Standardise and fit by scikit-learn, then predict every row."""
    by = fit_standardiser(x[train])
    return Ridge(alpha=penalty).fit(by(x[train]), r[train]).predict(by(x))


# -------------------------------------------------------------------------------------------------------------- folds


def test_every_prediction_is_that_of_a_plain_ridge_which_has_seen_neither_the_row_nor_the_fold_held_out(
    deep: Deep,
) -> None:
    data, x = divide_into_folds(deep), deep.layer(3)
    found = nested_ridge(x, data)
    for i in (0, 7, 14):
        for k in range(data.n_folds):
            rows = data.row_fold == k
            plain = plain_ridge(x, data.r, ~rows, PENALTIES[i])
            assert found.outer[i][rows] == pytest.approx(plain[rows], abs=1e-5)
            for j in set(range(data.n_folds)) - {k}:
                others = data.row_fold == j
                plain = plain_ridge(x, data.r, ~rows & ~others, PENALTIES[i])
                assert found.inner[k][i][others] == pytest.approx(plain[others], abs=1e-5)


def test_where_columns_are_more_than_rows_products_of_rows_predict_the_same() -> None:
    store = PlantedStore(30)
    data, rng = divide_into_folds(store), np.random.default_rng(3)
    x = rng.normal(size=(len(data.r), 130), loc=2.0).astype(np.float32)
    x[:, 5] = 7.0  # constant
    assert len(x) < x.shape[1]
    members = [np.flatnonzero(data.row_fold == k) for k in range(data.n_folds)]
    rows, columns = (way(x, data, members) for way in (ridge_by_rows, ridge_by_columns))
    for left_out in ((0,), (1, 4)):
        for ours, theirs in zip(rows(left_out), columns(left_out), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    plain = plain_ridge(x, data.r, data.row_fold != 2, PENALTIES[4])[members[2]]
    assert nested_ridge(x, data, [2]).outer[4][members[2]] == pytest.approx(plain, abs=1e-5)


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_fitted(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers of a 7B model: 11 matrices of 20,480 columns squared; of 1,000 rows, 4 of these squared."""
    assert ridge_bytes(40_000, 20_480, 5) == 11 * 8 * 20_480**2
    assert ridge_bytes(1000, 20_480, 5) == 4 * 8 * 1000**2
    monkeypatch.setattr(folds_module.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 4096}[name])
    monkeypatch.setattr(ridge_layers, "fit_steering", None)
    with pytest.raises(CoralError, match=r"Ridge on 8 columns of \d+ rows needs .* give fewer questions with --limit"):
        analyse_layers(deep, divide_into_folds(deep))


def test_layers_side_by_side_that_do_not_fit_are_left_out_and_the_single_ones_stay(
    deep: Deep, analysed: LayerAnalysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 matrices of 32 columns squared fit into 22 pages of 4,096 bytes, those of 40 columns do not."""
    monkeypatch.setattr(folds_module.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 22, "SC_PAGE_SIZE": 4096}[name])
    found = analyse_layers(deep, divide_into_folds(deep))
    assert [row.n_layers for row in found.top] == [3, 4]
    assert "5 layers are not read side by side: Ridge on 40 columns" in found.left_out
    assert found.rows == analysed.rows
    assert analysed.left_out == ""
    without = analyse_layers(deep, divide_into_folds(deep), LayerPlan(side_by_side=False))
    assert (without.top, without.left_out) == ((), "")
    assert without.rows == analysed.rows


def test_what_is_chosen_for_a_fold_does_not_change_with_its_answers(deep: Deep) -> None:
    """Turn the residuals of one fold round: its own penalty, strength, cost and predictions stay, to the bit."""
    data, x = divide_into_folds(deep), deep.layer(2)
    turned = data.r.copy()
    turned[data.row_fold == 1] *= -1.0
    before, after = fit_steering(x, data), fit_steering(x, replace(data, r=turned))
    assert before.gamma[1] == after.gamma[1]
    assert before.cost[1] == pytest.approx(after.cost[1], abs=1e-12)
    rows = data.row_fold == 1
    assert before.r_hat[rows] == pytest.approx(after.r_hat[rows], abs=1e-9)
    assert not np.allclose(before.r_hat[~rows], after.r_hat[~rows])


def test_a_group_is_never_divided_and_too_few_questions_for_the_folds_are_refused(deep: Deep) -> None:
    data = divide_into_folds(deep)
    assert sorted(set(data.fold.tolist())) == [0, 1, 2, 3, 4]
    few = PlantedStore(30)
    few.questions = [replace(q, group=f"article {i % 4}") for i, q in enumerate(few.questions)]
    with pytest.raises(CoralError, match="5 folds need at least 5 groups of questions"):
        divide_into_folds(few)
    with pytest.raises(CoralError, match="at least 20 labelled questions"):
        divide_into_folds(PlantedStore(10))
    with pytest.raises(CoralError, match="at least 3 folds"):
        divide_into_folds(deep, n_folds=2)


def test_a_constant_column_changes_nothing(deep: Deep) -> None:
    data, x = divide_into_folds(deep), deep.layer(3)
    constant = np.concatenate([x, np.full((len(x), 1), 7.0, dtype=np.float32)], axis=1)
    assert fit_steering(constant, data).r_hat == pytest.approx(fit_steering(x, data).r_hat, abs=1e-6)
    path, explained = component_path(constant, data, most=9, standardise=True)
    assert np.isfinite(path).all()
    assert explained[-1] == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_the_evaluation_and_r2_has_its_estimate_inside(deep: Deep) -> None:
    data = divide_into_folds(deep)
    predictions = data.predictions("base", data.p)
    ours, theirs = scores_of(predictions), measure(predictions, n_boot=500).scores
    assert ours == {name: theirs[name] for name in ours}
    r_hat = np.stack([data.r * 0.5, np.zeros_like(data.r)])
    half, none = r2_scores(data.r, r_hat, data.table.options)
    assert half.value == pytest.approx(r_squared(data.r, r_hat[0]))
    assert half.low <= half.value <= half.high
    assert none.value == pytest.approx(r_squared(data.r, r_hat[1]))


def test_questions_of_one_article_are_drawn_together(deep: Deep) -> None:
    """Every question twice says no more than once: by article the interval stays, by question it would shrink."""
    data = divide_into_folds(deep)
    r_hat = (0.5 * data.r + 0.1)[None]
    (once,) = r2_scores(data.r, r_hat, data.table.options)
    sizes = data.table.options.sizes
    options = Options.of_sizes(np.tile(sizes, 2))
    r, twice = np.tile(data.r, 2), np.tile(r_hat, 2)
    (by_article,) = r2_scores(r, twice, options, [f"{i % len(sizes):04}" for i in range(2 * len(sizes))])
    assert (by_article.low, by_article.high) == pytest.approx((once.low, once.high))
    (by_question,) = r2_scores(r, twice, options)
    assert by_question.high - by_question.low < 0.9 * (once.high - once.low)
    articles = [replace(q, group=f"article {i // 2}") for i, q in enumerate(deep.questions)]
    assert replace(data, questions=articles).groups[:3] == ("article 0", "article 0", "article 1")
    assert data.groups == ()


# ------------------------------------------------------------------------------------------------------------- layers


def test_the_layer_that_knows_is_the_best_and_the_others_know_nothing(analysed: LayerAnalysis) -> None:
    r2 = [row.r2 for row in analysed.rows]
    assert max(range(7), key=lambda i: r2[i].value) == 3
    assert all(r2[i].low > 0 for i in (2, 3, 4))
    assert all(r2[i].value < 0.02 for i in (0, 1, 5, 6))
    assert analysed.single_layers == [3] * 5
    assert analysed.rows[3].chosen["accuracy"].low > analysed.base["accuracy"].high
    assert analysed.single == analysed.rows[3].chosen


def test_leaving_before_the_layer_that_knows_loses_everything_and_later_layers_lose_nothing(
    analysed: LayerAnalysis,
) -> None:
    accuracy = [row.exit_best["accuracy"].value for row in analysed.rows]
    assert accuracy[1] < analysed.rows[3].exit_best["accuracy"].low
    assert accuracy[3:] == [accuracy[3]] * 4
    assert analysed.rows[3].exit_here == analysed.rows[3].exit_best
    assert [row.share for row in analysed.rows] == pytest.approx([layer / 6 for layer in range(7)])


def test_a_forward_pass_is_counted_by_hand() -> None:
    """Ten blocks of 3 and a head of 10 are 40: five blocks are 15 of them, and embeddings cost nothing."""
    assert [Forward(block=3, head=10, n_blocks=10).share(layer) for layer in (0, 5, 10)] == [0.0, 15 / 40, 30 / 40]


def test_side_by_side_layers_hold_the_best_one_and_are_compared_with_it(analysed: LayerAnalysis) -> None:
    assert [row.n_layers for row in analysed.top] == [3, 4, 5]
    assert analysed.top[0].layers == [[2, 3, 4]] * 5
    for row in analysed.top:
        behind = row.behind_single["brier"]
        assert behind.value == pytest.approx(row.scores["brier"].value - analysed.single["brier"].value)


def test_each_fold_takes_what_was_chosen_for_it(deep: Deep) -> None:
    data = divide_into_folds(deep)
    both = [fit_steering(deep.layer(layer), data) for layer in (2, 3)]
    mixed = combined(both, dict(enumerate([0, 1, 0, 1, 1])), data)
    for k, i in enumerate([0, 1, 0, 1, 1]):
        rows = data.row_fold == k
        assert (mixed.r_hat[rows] == both[i].r_hat[rows]).all()
        assert mixed.gamma[k] == both[i].gamma[k]


def test_a_store_with_one_layer_says_how_to_make_one_with_all() -> None:
    store = PlantedStore(30)
    store.manifest["layers"] = [1]
    with pytest.raises(
        CoralError, match=r"holds layer 1 only.*`coral extract TASK --out NEW_FOLDER`, without --layers"
    ):
        analyse_layers(store, divide_into_folds(store))


def killed_after(n: int, real: Any) -> Any:
    """Return a function that works so many times, and is then interrupted."""
    calls = iter([real] * n)

    def called(*arguments: Any, **named: Any) -> Any:
        for work in calls:
            return work(*arguments, **named)
        raise KeyboardInterrupt

    return called


@pytest.mark.parametrize("n", [3, 15])
def test_a_killed_analysis_of_layers_goes_on_and_ends_the_same(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second layer, and between the layers side by side."""
    store = Deep(60)
    data, work = divide_into_folds(store), LayerWork(tmp_path)
    undisturbed = analyse_layers(store, data)
    with monkeypatch.context() as patch:
        patch.setattr(ridge_layers, "choose_steering", killed_after(n - 14, choose_steering))
        patch.setattr(ridge_layers, "fit_steering", killed_after(n, fit_steering))
        with pytest.raises(KeyboardInterrupt):
            analyse_layers(store, data, work=work)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == n
    files[0].write_bytes(files[0].read_bytes()[:-9] + b"x" * 9)
    fitted: list[int] = []
    monkeypatch.setattr(ridge_layers, "fit_steering", lambda *a: (fitted.append(1), fit_steering(*a))[1])
    assert analyse_layers(store, data, work=work) == undisturbed
    assert len(fitted) in (max(0, 14 - n) + 1, max(0, 14 - n)), "the damaged file may be of layers side by side"
    assert analyse_layers(store, replace(data, r=-data.r), work=work) != undisturbed


# ------------------------------------------------------------------------------------------------ strengths and networks


def test_the_curve_at_gamma_1_is_the_papers_equation_at_gamma_1(deep: Deep, analysed: LayerAnalysis) -> None:
    """p' = max(p + r~, 0), renormalised: worked out here with the out-of-fold residuals of each layer."""
    data = divide_into_folds(deep)
    for row in analysed.rows:
        r_hat = fit_steering(deep.layer(row.layer), data).r_hat
        moved = np.maximum(data.p + data.table.options.centre(r_hat), 0.0)
        probs = moved / data.table.options.spread(data.table.options.sum(moved))
        assert row.at_one["brier"].value == pytest.approx(data.brier(probs).mean(), abs=1e-12)
    assert any(row.at_one["brier"].value != row.chosen["brier"].value for row in analysed.rows)


def test_a_change_by_steering_has_the_interval_of_the_paired_change(deep: Deep, analysed: LayerAnalysis) -> None:
    """Narrower than that of the steered accuracy, because both are asked the same questions, and about the difference."""
    row = analysed.rows[3]
    for gain, steered in ((row.at_one_gain, row.at_one), (analysed.single_gain, analysed.single)):
        change = gain["accuracy"]
        assert change.value == pytest.approx(steered["accuracy"].value - analysed.base["accuracy"].value)
        assert change.low < change.value < change.high
    data = divide_into_folds(deep)
    ours = data.predictions("", steer(data.p, fit_steering(deep.layer(3), data).r_hat, data.table.options, gamma=1.0))
    expected = paired_difference(ours, data.predictions("", data.p), "brier", n_boot=500)
    assert row.at_one_gain["brier"] == expected


def test_every_strength_of_the_best_layer_stands_against_gamma_1(deep: Deep, analysed: LayerAnalysis) -> None:
    by_gamma = {row.gamma: row for row in analysed.gammas}
    assert list(by_gamma) == list(GAMMAS)
    assert by_gamma[0.0].scores["brier"].value == pytest.approx(analysed.base["brier"].value)
    assert by_gamma[1.0].over_one["brier"].value == 0.0
    for row in analysed.gammas:
        behind = row.scores["brier"].value - by_gamma[1.0].scores["brier"].value
        assert row.over_one["brier"].value == pytest.approx(behind)


NETWORKS = LayerPlan(lens="mlp", layers=(1, 3), tested_folds=2, network=one_network(learning_rate=(1e-2,), epochs=15))


def test_networks_are_trained_chosen_and_tested_on_separate_questions(deep: Deep) -> None:
    """The reference: for each tested fold a plain search on the rest, a quarter of which chooses."""
    data = divide_into_folds(deep)
    found = analyse_layers(deep, data, NETWORKS)
    assert (found.lens, found.n_tested) == ("mlp", int((data.fold < 2).sum()))
    assert [row.layer for row in found.rows] == [1, 3]
    assert found.single_layers == [3, 3]
    assert found.rows[1].chosen["accuracy"].value > found.base["accuracy"].value + 0.1
    assert found.rows[0].exit_best is None
    folds = replace(data, tested=(0, 1))
    r_hat, gamma = np.zeros(len(data.r)), np.zeros(data.n_folds)
    for k in (0, 1):
        train, choose, test = fold_parts(data, k, share=0.25)
        assert not (train & choose).any()
        assert not ((train | choose) & test).any()
        assert choose.sum() / len(choose) == pytest.approx(0.2, abs=0.02)
        rows = [data.table.options.rows(mask) for mask in (train, choose, test)]
        by = fit_standardiser(deep.layer(3)[rows[0]])
        z, z_val, z_test = (by(deep.layer(3)[r]) for r in rows)
        (point,) = grid_of(NETWORKS.network, NETWORKS.network.hidden)
        probe = fit_mlp(LayerData(z, data.r[rows[0]], z_val, data.r[rows[1]]), point, seed=0)
        r_hat[rows[2]] = probe.predict(z_test)
        brier = [
            data.table.options.take(choose)
            .sum(
                (
                    steer(data.p[rows[1]], probe.predict(z_val), data.table.options.take(choose), gamma=g)
                    - data.y[rows[1]]
                )
                ** 2
            )
            .mean()
            for g in GAMMAS
        ]
        gamma[k] = GAMMAS[int(np.argmin(brier))]
    expected = FoldedSteering(r_hat, gamma, gamma)
    assert found.rows[1].gamma == gamma[:2].mean()
    scores = scores_of(folds.predictions("", expected.probs(folds)))
    assert found.rows[1].chosen["brier"].value == pytest.approx(scores["brier"].value, abs=1e-9)


def test_the_networks_of_a_layer_figure_are_all_trained_to_their_end(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = choose.search_mlp, list[Any]()
    monkeypatch.setattr(choose, "search_mlp", lambda *a, **k: (found.append(real(*a, **k)), found[-1])[1])
    network = replace(NETWORKS.network, weight_decay=(1.0, 5.0, 10.0), learning_rate=(1e-2, 1e-3))
    analyse_layers(deep, divide_into_folds(deep), replace(NETWORKS, layers=(1, 2, 3), tested_folds=1, network=network))
    assert any(not trial.finished for trial in found[0].trials), "most are dropped early"
    assert all(trial.finished for outcome in found for trial, _ in outcome.layers.values())


def test_networks_read_layers_side_by_side_and_a_killed_analysis_goes_on(
    deep: Deep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(NETWORKS, layers=(1, 2, 3), tested_folds=1, network=replace(NETWORKS.network, epochs=4))
    data, work = divide_into_folds(deep), LayerWork(tmp_path)
    undisturbed = analyse_layers(deep, data, plan)
    assert [row.layers for row in undisturbed.top] == [[[1, 2, 3]]]
    real = network_layers.search_networks
    with monkeypatch.context() as patch:
        patch.setattr(network_layers, "search_networks", killed_after(1, real))
        with pytest.raises(KeyboardInterrupt):
            analyse_layers(deep, data, plan, work=work)
    searched: list[Any] = []
    monkeypatch.setattr(network_layers, "search_networks", lambda *a: (searched.append(a[2]), real(*a))[1])
    assert analyse_layers(deep, data, plan, work=work) == undisturbed
    assert searched == [[(1, 2, 3)]]


def test_the_answers_of_the_tested_fold_change_nothing_that_is_predicted_there(deep: Deep) -> None:
    data = divide_into_folds(deep)
    rows = data.row_fold == 0
    other = replace(data, r=np.where(rows, -data.r, data.r))
    probes = NetworkProbes(NETWORKS.settings((3,), seed=0))
    one, two = (
        NetworkLayers(deep, replace(d, tested=(0,)), probes, ArrayJournal(None, None)).by_layer((3,))[0][0]
        for d in (data, other)
    )
    assert one.r_hat[rows].tobytes() == two.r_hat[rows].tobytes()
    assert one.gamma[0] == two.gamma[0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"tested_folds": 1}, "Ridge has a closed form"),
        ({"network": NetworkSearch(grid="paper")}, "take --lens mlp"),
    ],
)
def test_ridge_refuses_what_is_of_networks(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CoralError, match=sentence):
        LayerPlan(**wrong)


def test_layers_that_the_store_does_not_hold_are_refused(deep: Deep) -> None:
    with pytest.raises(CoralError, match="does not hold layer 9; it has 0, 1, 2, 3, 4, 5, 6"):
        analyse_layers(deep, divide_into_folds(deep), LayerPlan(layers=(1, 9)))


# --------------------------------------------------------------------------------------------------------- dimensions


def rank_three(n: int, *, width: int = 40) -> tuple[Folded, np.ndarray]:
    """States whose three largest directions, mixed by a rotation, hold all that predicts the residual."""
    store = PlantedStore(n)
    data = divide_into_folds(store)
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(len(data.r), width)) * np.r_[9.0, 8.0, 7.0, np.linspace(2.0, 0.5, width - 3)]
    r = scores[:, :3] @ np.array([0.03, -0.03, 0.04]) + rng.normal(size=len(data.r)) * 0.2
    turn, _ = np.linalg.qr(rng.normal(size=(width, width)))
    return replace(data, r=r), (scores @ turn).astype(np.float32)


class Given(PlantedStore):
    """A store whose every layer is the given states."""

    def __init__(self, n: int, states: np.ndarray, layers: Sequence[int]) -> None:
        super().__init__(n)
        self.states = dict.fromkeys(layers, states)
        self.manifest["layers"] = list(layers)


def test_a_signal_of_rank_three_saturates_at_three_components(tmp_path: Path) -> None:
    data, states = rank_three(300)
    found = analyse_dimensions(Given(300, states, range(7)), data, DimensionSettings(most=20))
    assert [g.layers for g in found.groups] == ["0 to 4", "5 to 6"]
    curve = [row.r2.value for row in found.rows[:20]]
    assert curve[0] < curve[1] < curve[2]
    assert curve[2] > 0.5
    assert max(abs(c - curve[2]) for c in curve[3:]) < 0.02
    for group in found.groups:
        assert group.saturates_at == 3
        assert group.last_half.low <= 0
    names = write_analysis_pictures(write_analysis("dimensions", found, tmp_path), tmp_path)
    assert names == ["dimensions"]
    assert (tmp_path / "dimensions.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_analysis_of_dimensions_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, states = rank_three(60, width=12)
    store = Given(60, states, range(7))
    undisturbed = analyse_dimensions(store, data, DimensionSettings(most=6))
    with monkeypatch.context() as patch:
        patch.setattr(dimensions_module, "component_path", killed_after(5, component_path))
        with pytest.raises(KeyboardInterrupt):
            analyse_dimensions(store, data, DimensionSettings(most=6), work=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    with monkeypatch.context() as patch:
        patch.setattr(dimensions_module, "component_path", killed_after(2, component_path))
        assert analyse_dimensions(store, data, DimensionSettings(most=6), work=tmp_path) == undisturbed
    assert len(analyse_dimensions(store, data, DimensionSettings(most=5), work=tmp_path).rows) == 2 * 5
    assert len(list(tmp_path.glob("*.safetensors"))) == 14, "another number of components is another analysis"


def test_every_number_of_components_is_what_scikit_learn_gives_at_the_same_penalty() -> None:
    data, states = rank_three(60, width=12)
    path, explained = component_path(states, data, most=12, standardise=False)
    shares = []
    for k in range(data.n_folds):
        rows = data.row_fold == k
        ridge = ridge_of(states, data.r, PENALTIES)
        moments = ridge.moments(np.flatnonzero(~rows))
        others = data.r[~rows]
        basis = decompose(ridge, moments, np.ones(12), most=12, variance=float(((others - others.mean()) ** 2).sum()))
        for n in (1, 3, 12):
            pca = PCA(n, svd_solver="full").fit(states[~rows].astype(np.float64))
            z = pca.transform(states.astype(np.float64))
            plain = Ridge(alpha=PENALTIES[basis.penalty[n - 1]]).fit(z[~rows], others)
            assert path[n - 1][rows] == pytest.approx(plain.predict(z[rows]), abs=1e-6)
        shares.append(np.cumsum(PCA(12, svd_solver="full").fit(states[~rows]).explained_variance_ratio_))
    assert explained == pytest.approx(np.mean(shares, axis=0), abs=1e-5)


def test_components_of_a_fold_do_not_change_with_its_own_residuals() -> None:
    data, states = rank_three(60, width=12)
    turned = data.r.copy()
    turned[data.row_fold == 2] *= -1.0
    before, _ = component_path(states, data, most=12, standardise=True)
    after, _ = component_path(states, replace(data, r=turned), most=12, standardise=True)
    rows = data.row_fold == 2
    assert before[:, rows] == pytest.approx(after[:, rows], abs=1e-9)


# -------------------------------------------------------------------------------------------------------------- files


def test_an_analysis_is_written_as_json_csv_and_pictures(analysed: LayerAnalysis, tmp_path: Path) -> None:
    record = write_analysis("layers", analysed, tmp_path)
    assert write_analysis_pictures(record, tmp_path) == ["layers", "layers-exit", "layers-gamma"]
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "layers-exit.json", "layers-exit.png", "layers-exit.svg", "layers-gamma.json", "layers-gamma.png",
        "layers-gamma.svg", "layers.csv", "layers.json", "layers.png", "layers.svg"
    ]  # fmt: skip
    found = json.loads((tmp_path / "layers.json").read_text())
    assert {name: found[name] for name in record} == record
    assert "R² is highest at layer 3" in found["caption"]
    rows = list(csv.DictReader((tmp_path / "layers.csv").read_text().splitlines()))
    assert [int(row["layer"]) for row in rows] == list(range(7))
    assert float(rows[3]["chosen.ece_low"]) == analysed.rows[3].chosen["ece"].low
    assert (tmp_path / "layers.svg").read_text().startswith("<svg")


def test_a_row_becomes_columns_by_hand() -> None:
    rows = [{"layer": 1, "r2": {"value": 0.5, "low": 0.4, "high": 0.6}, "at": {"gamma": 2, "folds": [1, 2]}}]
    assert csv_of(rows) == "layer,r2,r2_low,r2_high,at.gamma,at.folds\n1,0.5,0.4,0.6,2,1 2\n"


@given(st.floats(), st.integers())
def test_whatever_is_not_a_number_becomes_nothing(value: float, whole: int) -> None:
    found = jsonable({"a": (value, np.float64(value)), 3: np.array([whole % 100])})
    wanted = value if np.isfinite(value) else None
    assert found == {"a": [wanted, wanted], "3": [whole % 100]}
