"""The listwise network: its loss is plain cross-entropy, its best state is kept, and it finds what no line can."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.planted import PlantedStore, data_of

from coral_lens.lens.choose import choose_candidate
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.probes.listwise import (
    ListwiseMlpSettings,
    fit_listwise_mlp,
    fit_listwise_path,
    loss,
    rows_of_sample,
)
from coral_lens.lens.probes.mlp import build_mlp
from coral_lens.lens.probes.registry import LENSES
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.training_data import Sample
from coral_lens.ragged import Options

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ListwiseMlpSettings(hidden=(16,), max_epochs=25, learning_rate=1e-2, weight_decay=0.1, dropout=0.0)


def sample(n: int, seed: int, *, width: int = 4) -> Sample:
    """The answer is the option whose first two neurons have the same sign, as their product says: no line tells that."""
    rng = np.random.default_rng(seed)
    options = Options.of_sizes(rng.integers(2, 6, n).tolist())
    z = rng.normal(size=(options.n_rows, width)).astype(np.float32)
    p = options.softmax(rng.normal(size=options.n_rows))
    truth = options.softmax(np.log(p) / 2 + 4 * np.tanh(2 * z[:, 0] * z[:, 1]).astype(np.float64))
    answers = np.array([rng.choice(b - a, p=truth[a:b]) for a, b in pairwise(options.edges)])
    y = np.zeros(len(p))
    y[options.starts + answers] = 1.0
    return Sample(z, p, y - p, options, answers)


def plain_loss(logits: np.ndarray, options: Options, answers: np.ndarray) -> float:
    """Question by question."""
    found = []
    for (a, b), answer in zip(pairwise(options.edges), answers, strict=True):
        found.append(np.log(np.exp(logits[a:b]).sum()) - logits[a + answer])
    return float(np.mean(found))


def cross_entropy(s: Sample, f: np.ndarray, base_weight: float, scale: float) -> float:
    return plain_loss(base_weight * np.log(s.p) + scale * f, s.options, s.answers)


# --------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_cross_entropy_of_the_plain_formula() -> None:
    s = sample(30, 0)
    network = build_mlp(4, (8,), dropout=0.0).eval()
    logs = torch.tensor([-0.7, 0.4])
    with torch.no_grad():
        f = network(torch.from_numpy(s.z))[:, 0].double().numpy()
        ours = float(loss(network, logs, rows_of_sample(s, np.arange(30))))
    assert ours == pytest.approx(cross_entropy(s, f, np.exp(-0.7), np.exp(0.4)), rel=1e-5)


def test_the_loss_of_certain_and_impossible_options_is_finite() -> None:
    options = Options.of_sizes([2])
    s = Sample(np.zeros((2, 4), np.float32), np.array([1.0, 0.0]), np.array([-1.0, 1.0]), options, np.array([1]))
    network = build_mlp(4, (8,), dropout=0.0).eval()
    with torch.no_grad():
        value = float(loss(network, torch.zeros(2), rows_of_sample(s, np.arange(1))))
    assert value == pytest.approx(-np.log(1e-30), rel=1e-5)


def test_its_gradient_is_that_of_finite_differences() -> None:
    """Of the base's weight, of the scale, and of the last bias and weights of the network."""
    s = sample(20, 1)
    rows = rows_of_sample(s, np.arange(20))
    network = build_mlp(4, (6,), dropout=0.0).eval()
    logs = torch.tensor([-0.5, 0.3], requires_grad=True)
    loss(network, logs, rows).backward()
    with torch.no_grad():
        f = network(torch.from_numpy(s.z))[:, 0].double().numpy()
        hidden = network[:-2](torch.from_numpy(s.z)).double().numpy()
    step = 1e-5

    def at(a: float, c: float, f: np.ndarray = f) -> float:
        return cross_entropy(s, f, np.exp(a), np.exp(c))

    assert logs.grad is not None
    expected = [
        (at(-0.5 + step, 0.3) - at(-0.5 - step, 0.3)) / (2 * step),
        (at(-0.5, 0.3 + step) - at(-0.5, 0.3 - step)) / (2 * step),
    ]
    assert logs.grad.tolist() == pytest.approx(expected, abs=1e-4)
    last = network[-2]
    weight, bias = last.weight.detach().double().numpy()[0], float(last.bias.detach())
    for k in range(6):
        up, down = (np.tanh(hidden @ (weight + d * np.eye(6)[k]) + bias) for d in (step, -step))
        slope = (at(-0.5, 0.3, up) - at(-0.5, 0.3, down)) / (2 * step)
        assert float(last.weight.grad[0, k]) == pytest.approx(slope, abs=1e-4)


def test_rows_come_in_the_order_asked_for_with_the_right_option_marked() -> None:
    s = sample(10, 2)
    rows = rows_of_sample(s, np.array([7, 2]))
    sizes = s.options.sizes
    first, second = s.options.of(7), s.options.of(2)
    assert rows.z.numpy().tolist() == np.concatenate([s.z[first], s.z[second]]).tolist()
    assert rows.question.tolist() == [0] * sizes[7] + [1] * sizes[2]
    assert np.flatnonzero(rows.y.numpy()).tolist() == [s.answers[7], sizes[7] + s.answers[2]]
    assert rows.n_questions == 2


# ---------------------------------------------------------------------------------------------------------- the fit


def validation_loss(s: Sample, settings: ListwiseMlpSettings, train: Sample) -> float:
    found = fit_listwise_mlp(train, s, settings, seed=0)
    return cross_entropy(s, found.probe.predict(s.z), found.base_weight, found.scale)


def test_the_state_with_the_best_validation_loss_is_kept() -> None:
    """The same run stopped after each epoch: what is kept is never worse than any earlier epoch, though the last one is."""
    train, validation = sample(40, 3), sample(60, 4)
    base = {"hidden": (32,), "learning_rate": 3e-2, "weight_decay": 0.0, "dropout": 0.0, "patience": 99}
    kept = [validation_loss(validation, ListwiseMlpSettings(max_epochs=n, **base), train) for n in range(1, 16)]  # type: ignore[arg-type]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(kept))
    assert kept[-1] == kept[-2]  # overfitted by then: an early epoch is the one that is kept


def test_a_fit_stops_after_its_patience() -> None:
    train, validation = sample(40, 3), sample(60, 4)
    base = {"hidden": (32,), "learning_rate": 3e-2, "weight_decay": 0.0, "dropout": 0.0}
    epochs = []
    for patience in (2, 99):
        calls = 0

        class Counted(Sample):
            """Training rows that count how often a mini-batch is made of them."""

            def __getattribute__(self, name: str):
                nonlocal calls
                calls += name == "z"
                return super().__getattribute__(name)

        counted = Counted(train.z, train.p, train.r, train.options, train.answers)
        fit_listwise_mlp(counted, validation, ListwiseMlpSettings(max_epochs=30, patience=patience, **base), seed=0)  # type: ignore[arg-type]
        epochs.append(calls)
    assert epochs[0] < epochs[1]


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_generator_alone() -> None:
    train, validation = sample(60, 3), sample(30, 4)
    dropped = ListwiseMlpSettings(hidden=(16,), max_epochs=3, dropout=0.2)
    state = torch.random.get_rng_state()
    fits = [fit_listwise_mlp(train, validation, dropped, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    saved = [(b"".join(t.numpy().tobytes() for t in f.probe.tensors().values()), f.base_weight, f.scale) for f in fits]
    assert saved[0] == saved[1] != saved[2]


def test_a_signal_that_no_line_tells_is_found_by_the_network() -> None:
    train, validation, fresh = (sample(n, seed) for n, seed in ((900, 5), (300, 6), (500, 7)))
    found = fit_listwise_mlp(train, validation, SMALL, seed=0)
    network = cross_entropy(fresh, found.probe.predict(fresh.z), found.base_weight, found.scale)
    lines = fit_listwise_path(train.z, train.p, train.options, train.answers)
    linear = min(cross_entropy(fresh, one.probe.predict(fresh.z), one.base_weight, 1.0) for one in lines)
    scaled = min(cross_entropy(fresh, np.zeros(len(fresh.p)), a, 0.0) for a in np.linspace(0.0, 1.0, 21))
    assert linear > scaled - 0.02  # a line finds nothing beyond the temperature
    assert network < linear - 0.3
    assert 0.3 < found.base_weight < 0.8  # planted: one half


# ------------------------------------------------------------------------------------------------------ in the table


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ({"weight_decay": 0.1, "hidden": (8,), "max_epochs": 6, "learning_rate": 1e-2},)
    monkeypatch.setitem(LENSES, "listwise-mlp", replace(LENSES["listwise-mlp"], settings=settings))


def test_the_lens_steers_as_the_candidate_did_on_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale goes into the lens's gamma, and the base's weight is kept beside it."""
    quick(monkeypatch)
    store = PlantedStore(80, signal={1: 2.0})
    settings = FitSettings(lens="listwise-mlp", layers=(0, 1), temper=False)
    lens = fit_store(store, settings)
    data = data_of(store, settings)
    chosen, singles = choose_candidate(data, "listwise-mlp", FitSettings(layers=(0, 1)))
    assert len(singles) == 2
    assert lens.layers == chosen.recipe.layers == (1,)
    gamma = chosen.best("brier").gamma
    assert gamma > 0
    validation = np.repeat(data.rounds[0], store.table.options.sizes)
    ours = lens.apply(store)["listwise"][validation]
    assert ours == pytest.approx(chosen.probs(gamma)[validation], abs=1e-5)


def test_a_saved_network_lens_answers_alike(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    quick(monkeypatch)
    store = PlantedStore(60, signal={1: 2.0})
    lens = fit_store(store, FitSettings(lens="listwise-mlp", layers=(1,), temper=False))
    lens.save(tmp_path / "lens")
    fresh = PlantedStore(20, signal={1: 2.0}, seed=3)
    again = load_lens(tmp_path / "lens")
    assert again.apply(fresh)["listwise"].tobytes() == lens.apply(fresh)["listwise"].tobytes()
    assert "hidden" in again.trace.chosen.settings[0]


def test_with_folds_the_network_of_the_first_round_is_kept_and_the_lens_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network needs questions to stop on, so it is not fitted on everything."""
    quick(monkeypatch)
    store = PlantedStore(60, signal={1: 2.0})
    settings = FitSettings(lens="listwise-mlp", layers=(1,), folds=3, temper=False)
    lens = fit_store(store, settings)
    assert lens.training.n_validation == 60
    assert lens.training.n_train == int((~data_of(store, settings).rounds[0]).sum()) == 40
