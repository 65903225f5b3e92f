"""What each layer would say is what its own probe says; it is kept beside the lens, and a lens works without it."""

from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore

from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.features import build_inputs
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.layer_view import VIEW_FILE
from coral_lens.lens.rules import correct_rows, tilt
from coral_lens.lens.settings import FitSettings

KNOWS = 1
"""The layer that knows the answers."""


@pytest.fixture(scope="module", params=["ridge", "listwise"])
def lens(request: pytest.FixtureRequest) -> Lens:
    return fit_store(PlantedStore(150, signal={KNOWS: 3.0}), FitSettings(lens=request.param, temper=False))


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
    assert found[lens.view.layers.index(KNOWS)] == pytest.approx(expected, abs=1e-5)


def test_the_layer_that_knows_raises_the_right_option_and_the_others_do_not(lens: Lens, fresh: PlantedStore) -> None:
    assert lens.view is not None
    changes = lens.view.changes(fresh, lens.base_probs(fresh.table))
    right = correct_rows(fresh.table) == 1
    gains = dict(zip(lens.view.layers, changes[:, right].mean(axis=1), strict=True))
    assert gains[KNOWS] > 0.3
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


def test_a_lens_chosen_by_folds_keeps_none() -> None:
    assert fit_store(PlantedStore(60, signal={KNOWS: 3.0}), FitSettings(lens="ridge", folds=3)).view is None
