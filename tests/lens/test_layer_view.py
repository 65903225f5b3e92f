"""What each layer would say is what its own probe says; it is kept beside the lens, and a lens works without it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.planted import PlantedStore, one_network

from coral_lens.errors import CoralError
from coral_lens.lens import layer_view
from coral_lens.lens.artefact import Lens
from coral_lens.lens.choose import SCREENED_LAYERS
from coral_lens.lens.features import build_inputs
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.layer_view import VIEW_FILE, load_view, view_of
from coral_lens.lens.probes.registry import LENSES
from coral_lens.lens.rules import correct_rows, tilt
from coral_lens.lens.settings import FitSettings
from coral_lens.report.figures.choice import layer_curve

KNOWS = 1
"""The layer that knows the answers."""


NETWORK = one_network(search="grid", learning_rate=(1e-2,), hidden=(16,), epochs=30)


@pytest.fixture(scope="module", params=["ridge", "listwise", "mlp"])
def lens(request: pytest.FixtureRequest) -> Lens:
    network = {"network": NETWORK} if request.param == "mlp" else {}
    return fit_store(PlantedStore(150, signal={KNOWS: 3.0}), FitSettings(lens=request.param, temper=False, **network))


@pytest.fixture(scope="module")
def fresh() -> PlantedStore:
    return PlantedStore(60, signal={KNOWS: 3.0}, seed=9)


def test_at_the_lenss_layer_it_is_the_lenss_own_probe(lens: Lens, fresh: PlantedStore) -> None:
    assert lens.view is not None
    assert lens.layers == (KNOWS,)
    p, options = lens.base_probs(fresh.table), fresh.table.options
    ours = lens.correction
    scores = ours.probe.predict(ours.standardiser(build_inputs(fresh.layer(KNOWS), p, options, ours.inputs)))
    expected = scores if ours.rule == "residual" else tilt(ours.base_weight * np.log(p), scores, options, gamma=1.0) - p
    found = lens.view.changes(fresh, p)
    assert found.shape == (3, len(p))
    close = 2e-3 if lens.kind == "mlp" else 1e-5  # the weights of networks are kept in half precision
    assert found[lens.view.layers.index(KNOWS)] == pytest.approx(expected, abs=close)
    assert lens.view.is_of(lens.correction)


def test_the_layer_that_knows_raises_the_right_option_and_the_others_do_not(lens: Lens, fresh: PlantedStore) -> None:
    assert lens.view is not None
    changes = lens.view.changes(fresh, lens.base_probs(fresh.table))
    right = correct_rows(fresh.table) == 1
    gains = dict(zip(lens.view.layers, changes[:, right].mean(axis=1), strict=True))
    assert gains[KNOWS] > 0.25
    assert max(gains[layer] for layer in (0, 2)) < gains[KNOWS] / 2


def test_it_comes_back_from_the_disk_and_may_be_missing(lens: Lens, fresh: PlantedStore, tmp_path: Path) -> None:
    assert lens.view is not None
    lens.save(tmp_path / "lens")
    p = lens.base_probs(fresh.table)
    again = load_lens(tmp_path / "lens").view
    assert again is not None
    assert [(c.layers, c.rule, c.inputs, c.base_weight) for c in again.corrections] == [
        (c.layers, c.rule, c.inputs, c.base_weight) for c in lens.view.corrections
    ]
    assert np.array_equal(again.changes(fresh, p), lens.view.changes(fresh, p))
    (tmp_path / "lens" / VIEW_FILE).unlink()
    without = load_lens(tmp_path / "lens")
    assert without.view is None
    assert np.array_equal(without.apply(fresh)[lens.method], lens.apply(fresh)[lens.method])
    (tmp_path / "lens" / VIEW_FILE).write_bytes(b"damaged")
    with pytest.raises(CoralError, match="the lens works without it"):
        load_lens(tmp_path / "lens")


def test_a_network_that_a_lens_screens_for_shows_the_layers_that_it_was_trained_on_itself(
    fresh: PlantedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"weight_decay": 0.1, "learning_rate": 1e-2, "hidden": (8,), "max_epochs": 20}
    monkeypatch.setitem(LENSES, "listwise-mlp", replace(LENSES["listwise-mlp"], settings=(one,)))
    fitted = fit_store(PlantedStore(150, signal={KNOWS: 3.0}), FitSettings(lens="listwise-mlp", temper=False))
    assert len(fitted.trace.layers) == SCREENED_LAYERS
    assert fitted.view is not None
    assert fitted.view.layers == tuple(trial.layer for trial in fitted.trace.layers)
    p, options, own = fitted.base_probs(fresh.table), fresh.table.options, fitted.correction
    scores = fitted.view.corrections[fitted.view.layers.index(KNOWS)].scores(p, fresh.layer(KNOWS), options)
    assert own.scale == 1.0
    learned = fitted.gamma / fitted.trace.chosen.gamma
    assert scores.scores == pytest.approx(learned * own.scores(p, fresh.layer(KNOWS), options).scores, abs=2e-2)


def test_the_views_of_a_network_that_an_earlier_version_kept_are_not_its_own(lens: Lens) -> None:
    """It kept ridge's probes beside a network: they are not shown."""
    ridge = fit_store(PlantedStore(60, signal={KNOWS: 3.0}), FitSettings(lens="ridge"))
    assert ridge.view is not None
    assert ridge.view.is_of(lens.correction) == (lens.kind != "mlp")
    record = ridge.record() | {"probe": "mlp"}
    assert layer_curve(ridge.record()) is not None
    assert layer_curve(record) is None


def test_networks_too_large_for_a_file_beside_the_lens_are_not_kept(
    lens: Lens, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lens.view is not None
    monkeypatch.setattr(layer_view, "LARGEST_VIEW", 1)
    assert (view_of(lens.view.corrections) is None) == (lens.kind == "mlp")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale", torch.ones(1, dtype=torch.float64)),
        ("1.probe.0.weight", torch.zeros(16, 3)),
        ("1.standardiser.scale", torch.zeros(8)),
        ("layers", torch.tensor([-1, 1, 2])),
        ("2.probe.3.bias", None),
    ],
)
def test_a_view_of_networks_that_makes_no_sense_is_refused(
    name: str, wrong: torch.Tensor | None, tmp_path: Path
) -> None:
    fitted = fit_store(
        PlantedStore(60, signal={KNOWS: 3.0}), FitSettings(lens="mlp", network=one_network(hidden=(16,)))
    )
    assert fitted.view is not None
    path = tmp_path / VIEW_FILE
    path.write_bytes(fitted.view.content())
    assert load_view(tmp_path, None) is not None
    tensors = load_file(path)
    tensors.pop(name)
    if wrong is not None:
        tensors[name] = wrong
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    save_file(tensors, path, metadata=about)
    with pytest.raises(CoralError, match="the lens works without it"):
        load_view(tmp_path, None)


def test_a_lens_chosen_by_folds_keeps_none() -> None:
    assert fit_store(PlantedStore(60, signal={KNOWS: 3.0}), FitSettings(lens="ridge", folds=3)).view is None
