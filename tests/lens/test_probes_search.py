"""Successive halving finds what was planted, wastes nothing, and a killed search ends with the same bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from coral_lens.errors import CoralError
from coral_lens.lens.probes import mlp
from coral_lens.lens.probes import search as search_module
from coral_lens.lens.probes._search_state import in_turns
from coral_lens.lens.probes.grid import GRID, PAPER_GRID, grid_of
from coral_lens.lens.probes.mlp import HIDDEN, LayerData, MlpSettings, MlpTraining, fit_mlp
from coral_lens.lens.probes.registry import mlp_settings, setting_of
from coral_lens.lens.probes.search import BUDGETS, SearchBudget, SearchOutcome, planned_epochs, search_mlp
from coral_lens.lens.probes.standardise import r_squared
from coral_lens.lens.settings import NetworkSearch
from coral_lens.storage.resumable import locked_file

PLANTED = 5
LAYERS = (3, 5, 4, 1)
SMALL = MlpSettings(hidden=(16,), batch_size=32, max_epochs=12, patience=4, dropout=0.1)
SETTINGS = (
    replace(SMALL, weight_decay=1.0, learning_rate=1e-2),
    replace(SMALL, weight_decay=200.0, learning_rate=1e-2),  # decays to nothing
    replace(SMALL, output_penalty=50.0, learning_rate=1e-2),
    replace(SMALL, learning_rate=1e-7),
)
pytestmark = pytest.mark.usefixtures("two_threads")
BUDGET = SearchBudget(rungs=(1, 3), keep=0.25, finalists=2)


def layer_data(layer: int, *, width: int = 8) -> LayerData:
    """States that tell the residuals at the planted layer, and only a little elsewhere."""
    rng = np.random.default_rng(layer)
    z = rng.normal(size=(200, width)).astype(np.float32)
    signal = np.tanh(z[:, 0] + z[:, 1] * z[:, 2])
    r = 0.5 * signal * (1.0 if layer == PLANTED else 0.1) + 0.1 * rng.normal(size=200)
    return LayerData(z[:140], r[:140], z[140:], r[140:])


def search(*, journal: Path | None = None, budget: SearchBudget = BUDGET, seed: int = 0) -> SearchOutcome:
    return search_mlp(layer_data, LAYERS, SETTINGS, seed=seed, budget=budget, journal=journal)


@cache
def whole() -> SearchOutcome:
    """What a search finds that nothing disturbs."""
    return search()


def same_bytes(a: SearchOutcome, b: SearchOutcome) -> bool:
    same = a.trials == b.trials and tuple(a.layers) == tuple(b.layers)
    return same and all(
        trial == b.layers[layer][0] and torch.equal(t, b.layers[layer][1].tensors()[name])
        for layer, (trial, probe) in a.layers.items()
        for name, t in probe.tensors().items()
    )


def count_epochs(monkeypatch: pytest.MonkeyPatch, *, killed_after: int | None = None) -> list[int]:
    """Note the steps of the optimiser before each epoch, and break off when so many have been trained."""
    steps: list[int] = []
    real = mlp.train_epoch

    def counting(network: object, optimiser: torch.optim.Optimizer, *rest: object) -> None:
        if killed_after is not None and len(steps) >= killed_after:
            raise KeyboardInterrupt
        state = list(optimiser.state.values())
        steps.append(int(state[0]["step"]) if state else 0)
        real(network, optimiser, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mlp, "train_epoch", counting)
    return steps


def test_the_planted_layer_and_setting_are_found() -> None:
    found = whole()
    assert (found.best.layer, found.best.settings) == (PLANTED, SETTINGS[0])
    assert found.best.r2 > 0.5
    data = layer_data(PLANTED)
    assert r_squared(data.r_val, found.probe.predict(data.z_val)) == pytest.approx(found.best.r2, abs=1e-12)


def test_the_report_has_every_trial_once_and_the_best_first() -> None:
    found = whole()
    assert {(t.layer, t.settings) for t in found.trials} == {(layer, s) for layer in LAYERS for s in SETTINGS}
    assert len(found.trials) == 16
    assert found.trials[0] == found.best
    finalists = [t for t in found.trials if t.finished]
    assert finalists == list(found.trials[: len(finalists)])
    assert {t.epochs for t in found.trials[len(finalists) :]} == {1, 3}


def test_every_layer_has_the_best_of_its_own_trials_with_its_probe() -> None:
    found = whole()
    assert tuple(found.layers) == LAYERS
    for layer, (trial, probe) in found.layers.items():
        own = [t for t in found.trials if t.layer == layer]
        assert trial == max(own, key=lambda t: t.r2)
        assert trial.epochs >= 3, "the best of a layer goes on after the first rung"
        data = layer_data(layer)
        assert r_squared(data.r_val, probe.predict(data.z_val)) == pytest.approx(trial.r2, abs=1e-12)


def test_the_strongest_decay_is_trained_to_its_end_at_the_best_layers_however_far_behind() -> None:
    found = whole()
    strong = {t.layer: t for t in found.trials if t.settings == SETTINGS[1]}
    ended = [layer for layer, t in strong.items() if t.finished]
    assert len(ended) == 3  # six in ten of four layers
    assert PLANTED in ended
    assert strong[PLANTED].r2 < found.best.r2 - 0.3
    assert [t.epochs for layer, t in strong.items() if layer not in ended] == [3], "it went on up to the last rung"


def test_a_decay_that_starts_slowly_and_wins_in_the_end_is_found() -> None:
    """Planted curves: strong decays stand still for ten epochs and then pass all others."""
    weak, strong = (replace(SMALL, weight_decay=d, learning_rate=1e-2, max_epochs=30) for d in (0.1, 45.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "MlpTraining", SlowStarter)
        found = search_mlp(layer_data, LAYERS, (weak, strong), seed=0, budget=BUDGET)
    assert found.best.settings == strong
    assert found.best.r2 == 0.9


class SlowStarter(MlpTraining):
    """What is reached after so many epochs is set, not trained."""

    def advance(self, data: LayerData, epochs: int, on_epoch: Callable[[], None] | None = None) -> None:
        self.epochs = min(epochs, self.settings.max_epochs)
        late = self.settings.weight_decay > 1 and self.epochs > 10
        self.r2 = 0.9 if late else 0.1 if self.settings.weight_decay > 1 else 0.3


def test_the_chosen_probe_is_the_one_that_a_single_fit_gives_to_the_bit() -> None:
    found = whole()
    torch.set_num_threads(1)
    data = layer_data(PLANTED)
    alone = fit_mlp(data, found.best.settings, seed=0)
    assert all(torch.equal(t, found.probe.tensors()[name]) for name, t in alone.tensors().items())


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_threads() -> None:
    torch.set_num_threads(1)
    assert same_bytes(search(), whole())
    assert not same_bytes(search(seed=1), whole())


def test_threads_are_given_back() -> None:
    search()
    assert torch.get_num_threads() == 2


def test_survivors_continue_rather_than_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count_epochs(monkeypatch)
    found = search()
    assert len(steps) == sum(t.epochs for t in found.trials)
    assert steps.count(0) == 16, "each began once"


def test_survivors_that_find_no_room_are_trained_again_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = whole()
    steps = count_epochs(monkeypatch)
    cramped = search(budget=replace(BUDGET, memory=0))
    went_on, finalists = (sum(t.epochs > 1 for t in roomy.trials), sum(t.finished for t in roomy.trials))
    assert steps.count(0) == 16 + went_on + finalists
    assert same_bytes(roomy, cramped)


def test_only_as_many_trials_are_kept_as_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MlpTraining(8, SMALL, seed=0).n_bytes
    steps = count_epochs(monkeypatch)
    found = search(budget=replace(BUDGET, memory=3 * one))
    went_on, finalists = (sum(t.epochs > 1 for t in found.trials), sum(t.finished for t in found.trials))
    assert steps.count(0) == 16 + (went_on - 3) + (finalists - 3), "three found room after each rung"


@pytest.mark.parametrize("killed_after", [1, 9, 20, 30])
def test_a_killed_search_goes_on_and_ends_with_the_same_bytes(
    killed_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "search.jsonl"
    with monkeypatch.context() as killing:
        count_epochs(killing, killed_after=killed_after)
        with pytest.raises(KeyboardInterrupt):
            search(journal=journal)
    written = journal.read_bytes()
    assert written.count(b"\n") - 1 >= killed_after // 4 - 2
    assert same_bytes(search(journal=journal), whole())
    assert journal.read_bytes().startswith(written)
    trials = whole().trials
    went_on, finalists = sum(t.epochs > 1 for t in trials), sum(t.finished for t in trials)
    assert journal.read_bytes().count(b"\n") - 1 == 16 + went_on + finalists, "no rung of a trial was trained twice"


def test_a_finished_search_is_read_from_its_journal_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = search(journal=tmp_path / "search.jsonl")
    steps = count_epochs(monkeypatch)
    assert same_bytes(search(journal=tmp_path / "search.jsonl"), first)
    assert not steps


def test_a_cut_line_and_a_lost_probe_are_made_again(tmp_path: Path) -> None:
    journal = tmp_path / "search.jsonl"
    first = search(journal=journal)
    written = journal.read_bytes()
    journal.write_bytes(written[:-5])
    probes = list(tmp_path.glob("search.*.safetensors"))
    assert len(probes) == len(LAYERS)
    for probe in probes:
        probe.write_bytes(b"rubbish")
    assert same_bytes(search(journal=journal), first)
    assert journal.read_bytes().count(b"\n") == written.count(b"\n")
    for probe in probes:
        probe.unlink()
    assert same_bytes(search(journal=journal), first)


def test_a_second_process_may_not_write_to_the_same_journal(tmp_path: Path) -> None:
    with locked_file(tmp_path / "search.jsonl"), pytest.raises(CoralError, match="is being written by another process"):
        search(journal=tmp_path / "search.jsonl")
    assert not (tmp_path / "search.jsonl").exists()


def test_the_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    search(journal=tmp_path / "search.jsonl")
    with pytest.raises(CoralError, match=r"journal of another search.*Delete it or name another file"):
        search(journal=tmp_path / "search.jsonl", seed=1)


def test_progress_comes_to_the_planned_epochs_also_after_a_resume(tmp_path: Path) -> None:
    # 16 trials x 1 epoch; then at most 4 survivors, 4 that are best of a layer and 4 of the strongest decay x 2 more; then at
    # most 3 finalists of those 12 and 3 of the strongest decay x 9 more
    assert planned_epochs(len(LAYERS), SETTINGS, BUDGET) == 16 + 24 + 54
    for _ in range(2):
        told: list[int] = []
        search_mlp(
            layer_data, LAYERS, SETTINGS, seed=0, budget=BUDGET, journal=tmp_path / "s.jsonl", progress=told.append
        )
        assert sum(told) == 94


def test_each_layer_is_loaded_once_a_rung() -> None:
    loaded: list[int] = []

    def loading(layer: int) -> LayerData:
        loaded.append(layer)
        return layer_data(layer)

    search_mlp(loading, LAYERS, SETTINGS, seed=0, budget=BUDGET)
    assert loaded[:4] == list(LAYERS)
    assert max(Counter(loaded).values()) <= 3


def test_layers_may_differ_in_width() -> None:
    def of_width(layer: int) -> LayerData:
        return layer_data(layer, width=8 if layer == PLANTED else 5)

    found = search_mlp(of_width, LAYERS, SETTINGS[:1], seed=0, budget=BUDGET)
    assert found.best.layer == PLANTED
    assert found.probe.network[0].weight.shape == (16, 8)


def test_a_slow_learning_rate_is_not_dropped_for_being_behind_after_an_epoch() -> None:
    fast, slow = (replace(SMALL, learning_rate=rate, max_epochs=6) for rate in (1e-2, 1e-5))
    found = search_mlp(layer_data, LAYERS, (fast, slow), seed=0, budget=BUDGET)
    past_the_first = [t.settings for t in found.trials if t.epochs > 1]
    assert past_the_first.count(slow) == 1
    assert found.best.settings == fast


def test_turns_take_the_best_of_each_group_first() -> None:
    assert in_turns([10, 11, 20, 12, 21, 30], lambda n: float(n // 10)) == [10, 20, 30, 11, 21, 12]
    assert in_turns([3, 1, 2], lambda n: 0.0) == [3, 1, 2]


def test_without_rungs_every_trial_is_trained_to_its_end() -> None:
    assert BUDGETS["grid"].rungs == ()
    found = search(budget=BUDGETS["grid"])
    assert all(t.finished and t.epochs >= 4 for t in found.trials)
    assert found.best.r2 == max(t.r2 for t in found.trials)


def test_the_grids_are_the_authors_and_a_smaller_one() -> None:
    assert len(GRID) == len(set(GRID)) == 24
    assert {g.weight_decay for g in PAPER_GRID} == {0.0, 0.1, 1.0, 5.0, 10.0, 25.0, 30.0, 45.0}
    assert {g.output_penalty for g in PAPER_GRID} == {0.0, 0.01, 0.1, 0.25, 0.5}
    assert {g.patience for g in PAPER_GRID} == {30}
    assert len(PAPER_GRID) == len(set(PAPER_GRID)) == 80
    assert {g.hidden for g in (*GRID, *PAPER_GRID)} == {HIDDEN}


def test_a_grid_takes_the_values_that_were_asked_for_and_keeps_the_others() -> None:
    asked = NetworkSearch(weight_decay=(3.0,), learning_rate=(0.1, 0.2), dropout=0.5, epochs=7)
    points = grid_of(asked, (4, 2))
    assert [(g.weight_decay, g.output_penalty, g.learning_rate) for g in points] == [
        (3.0, penalty, rate) for penalty in (0.0, 0.1, 0.5) for rate in (0.1, 0.2)
    ]
    assert {(g.dropout, g.hidden, g.max_epochs, g.patience) for g in points} == {(0.5, (4, 2), 7, 10)}
    assert grid_of(replace(asked, learning_rate=(0.1, 0.2, 0.1)), (4, 2)) == points, "each point once"
    paper = grid_of(replace(asked, grid="paper"))
    assert len(paper) == 10
    assert {(g.hidden, g.patience) for g in paper} == {(HIDDEN, 30)}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: search_mlp(layer_data, (), SETTINGS, seed=0), r"needs layers, each once.*Got \[\] and 4 setting"),
        (lambda: search_mlp(layer_data, (1, 1), SETTINGS, seed=0), r"each once"),
        (lambda: search_mlp(layer_data, LAYERS, (), seed=0), r"0 setting"),
        (lambda: SearchBudget(rungs=(3, 1)), r"rising numbers of epochs.*Got \(3, 1\)"),
        (lambda: SearchBudget(keep=0.0), r"share of 0 to 1"),
    ],
)
def test_nonsense_is_refused_with_what_was_found(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(CoralError, match=sentence):
        call()


EVERY = replace(BUDGET, every_layer=True)


def test_the_best_of_every_layer_is_trained_to_its_end_where_layers_are_shown() -> None:
    """A network of three epochs once stood beside finished ones in the figure of layers."""
    assert not all(trial.finished for trial, _ in whole().layers.values())
    found = search(budget=EVERY)
    assert found.best == whole().best
    torch.set_num_threads(1)
    for layer, (trial, probe) in found.layers.items():
        assert trial.finished
        assert trial.r2 == max(t.r2 for t in found.trials if t.layer == layer and t.finished)
        alone = fit_mlp(layer_data(layer), trial.settings, seed=0)
        assert all(torch.equal(t, probe.tensors()[name]) for name, t in alone.tensors().items())


@pytest.mark.parametrize("left", [1, 5, 12])
def test_a_search_that_is_killed_while_it_finishes_layers_goes_on_there(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, told = search(budget=EVERY), list[int]()
    with monkeypatch.context() as counting:
        steps = count_epochs(counting)
        search(budget=EVERY)
    with monkeypatch.context() as killing:
        count_epochs(killing, killed_after=len(steps) - left)
        with pytest.raises(KeyboardInterrupt):
            search(budget=EVERY, journal=tmp_path / "search.jsonl")
    written = (tmp_path / "search.jsonl").read_bytes()
    found = search_mlp(
        layer_data,
        LAYERS,
        SETTINGS,
        seed=0,
        budget=EVERY,
        journal=tmp_path / "search.jsonl",
        progress=told.append,
    )
    assert same_bytes(found, undisturbed)
    assert (tmp_path / "search.jsonl").read_bytes().startswith(written)
    assert sum(told) == planned_epochs(len(LAYERS), SETTINGS, EVERY) == 94 + len(LAYERS) * 12
    again = count_epochs(monkeypatch)
    assert same_bytes(search(budget=EVERY, journal=tmp_path / "search.jsonl"), undisturbed)
    assert not again


WILD = replace(SMALL, weight_decay=1e30, learning_rate=1e30)


@pytest.mark.parametrize("budget", [BUDGET, BUDGETS["grid"]])
def test_a_setting_that_diverges_at_once_ends_no_search(
    budget: SearchBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wild(journal: Path | None = None) -> SearchOutcome:
        return search_mlp(layer_data, LAYERS, (*SETTINGS[:2], WILD), seed=0, budget=budget, journal=journal)

    found = wild()
    assert (found.best.layer, found.best.settings) == (PLANTED, SETTINGS[0])
    assert [(t.epochs, t.r2) for t in found.trials if t.settings == WILD] == [(1, -np.inf)] * len(LAYERS)
    assert same_bytes(wild(tmp_path / "search.jsonl"), found)
    steps = count_epochs(monkeypatch)
    assert same_bytes(wild(tmp_path / "search.jsonl"), found)
    assert not steps, "what diverged is not tried again"


def test_a_search_in_which_everything_diverges_says_so_at_its_first_layer_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CoralError, match=r"diverged in its first epoch, at learning rates from 1e\+30.*smaller"):
            search_mlp(layer_data, LAYERS, (WILD,), seed=0, budget=BUDGET, journal=tmp_path / "search.jsonl")
    assert (tmp_path / "search.jsonl").read_bytes().count(b"\n") <= 1 + 2


def test_equal_residuals_are_refused() -> None:
    def flat(layer: int) -> LayerData:
        data = layer_data(layer)
        return replace(data, r_val=np.zeros_like(data.r_val))

    with pytest.raises(CoralError, match="60 residuals of the validation rows at layer 3 are all equal"):
        search_mlp(flat, LAYERS, SETTINGS, seed=0)


@pytest.mark.parametrize("point", [GRID[5], PAPER_GRID[7], MlpSettings(hidden=(), dropout=0.0, max_epochs=3)])
def test_a_setting_on_record_is_refitted_with_all_that_was_searched_with(point: MlpSettings) -> None:
    record = json.loads(json.dumps(setting_of(point)))
    assert mlp_settings(record) == point
    assert set(record) >= {"weight_decay", "output_penalty", "learning_rate", "hidden"}
