"""Probes agree with scikit-learn where it has them, and the MLP is the paper's and keeps its best state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from coral_lens import probes
from coral_lens.errors import CoralError
from coral_lens.probes import (
    HIDDEN,
    PENALTIES,
    PROBES,
    Dropout,
    LayerData,
    LinearProbe,
    MlpSettings,
    MlpTraining,
    NetworkProbe,
    Probe,
    build_mlp,
    chunks,
    fit_mlp,
    fit_ridge_folds,
    fit_ridge_path,
    fit_standardiser,
    hidden_of_depth,
    mlp_loss,
    r_squared,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny networks lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = MlpSettings(hidden=(16, 8), max_epochs=8, batch_size=32)


def data(n: int = 200, width: int = 12, *, seed: int = 0, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """States and residuals that depend on them, by a fixed rule, and on noise."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, width)).astype(np.float32)
    weight = np.linspace(-0.3, 0.3, width)
    return z, np.tanh(z @ weight) + noise * rng.normal(size=n)


# ------------------------------------------------------------------------------------------------------- standardiser


def test_standardised_training_states_have_mean_zero_and_scale_one() -> None:
    states = (data(500)[0] * 7 + 3).astype(np.float32)
    z = fit_standardiser(states)(states)
    np.testing.assert_allclose(z.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(z.std(axis=0), 1.0, atol=1e-5)
    np.testing.assert_allclose(z, StandardScaler().fit_transform(states), atol=1e-4)


def test_other_states_are_standardised_with_training_statistics() -> None:
    train, other = np.array([[0.0], [2.0]], np.float32), np.array([[5.0]], np.float32)
    assert fit_standardiser(train)(other).tolist() == [[4.0]]  # (5 - 1) / 1


@pytest.mark.parametrize("value", [0.0, 0.1, -3e4])
def test_a_constant_column_is_centred_and_not_blown_up(value: float) -> None:
    states = np.column_stack([np.full(50, value), np.arange(50)]).astype(np.float32)
    standardiser = fit_standardiser(states)
    assert standardiser.scale[0] == 1.0
    assert np.abs(standardiser(states)[:, 0]).max() < 1e-2
    assert standardiser(states + np.float32([0.5, 0]))[0, 0] == pytest.approx(0.5, abs=1e-2)


def test_an_ordinary_column_beside_a_massive_one_is_scaled_by_its_own_spread() -> None:
    rng = np.random.default_rng(0)
    states = np.column_stack([1e5 + 1e3 * rng.normal(size=400), 0.02 * rng.normal(size=400)]).astype(np.float32)
    z = fit_standardiser(states)(states)
    np.testing.assert_allclose(z.std(axis=0), 1.0, rtol=1e-3)


# -------------------------------------------------------------------------------------------------------------- ridge


@pytest.mark.parametrize(("n", "width"), [(200, 12), (20, 40)])
def test_every_penalty_of_the_path_is_scikit_learns_ridge(n: int, width: int) -> None:
    z, r = data(n, width)
    z = z + np.float32(0.5)  # so that the intercept matters
    for penalty, probe in zip(PENALTIES, fit_ridge_path(z, r), strict=True):
        reference = Ridge(alpha=penalty, solver="cholesky").fit(z.astype(np.float64), r)
        np.testing.assert_allclose(probe.weight, reference.coef_, rtol=1e-6, atol=1e-8 * np.abs(reference.coef_).max())
        assert probe.bias == pytest.approx(reference.intercept_, rel=1e-8)
        np.testing.assert_allclose(probe.predict(z), reference.predict(z.astype(np.float64)), rtol=1e-6, atol=1e-9)


def test_ridge_worked_by_hand() -> None:
    # centred z = (-1, 1), centred r = (-0.5, 0.5): w = 1 / (2 + penalty), b = mean r - mean z * w
    z, r = np.array([[1.0], [3.0]], np.float32), np.array([0.0, 1.0])
    light, heavy = fit_ridge_path(z, r, [2.0, 8.0])
    assert (light.weight[0], light.bias) == pytest.approx((1 / 4, 0.5 - 2 / 4))
    assert (heavy.weight[0], heavy.bias) == pytest.approx((1 / 10, 0.5 - 2 / 10))


def test_a_heavy_penalty_predicts_the_mean() -> None:
    z, r = data()
    (probe,) = fit_ridge_path(z, r, [1e14])
    np.testing.assert_allclose(probe.predict(z), r.mean(), atol=1e-9)


def test_a_ridge_probe_comes_back_from_its_tensors_to_the_bit() -> None:
    z, r = data()
    probe = fit_ridge_path(z, r)[4]
    again = PROBES[probe.kind](probe.tensors())
    assert isinstance(again, LinearProbe)
    assert isinstance(again, Probe)
    assert again.predict(z).tobytes() == probe.predict(z).tobytes()


def ragged_folds(n: int, *, n_folds: int = 3, seed: int = 0) -> np.ndarray:
    """The fold of each row, by scikit-learn, of questions with two to five options."""
    sizes = np.random.default_rng(seed).integers(2, 6, size=n)
    groups = np.repeat(np.arange(n), sizes)[:n]
    folds = np.empty(n, dtype=np.int64)
    for k, (_, held_out) in enumerate(GroupKFold(n_folds).split(groups, groups=groups)):
        folds[held_out] = k
    return folds


def fold_by_fold(z: np.ndarray, r: np.ndarray, folds: np.ndarray, penalty: float) -> np.ndarray:
    """What scikit-learn predicts of each fold after standardising and fitting on the others."""
    predicted = np.empty(len(r))
    for k in np.unique(folds):
        pipeline = make_pipeline(StandardScaler(), Ridge(alpha=penalty, solver="cholesky"))
        pipeline.fit(z[folds != k].astype(np.float64), r[folds != k])
        predicted[folds == k] = pipeline.predict(z[folds == k].astype(np.float64))
    return predicted


@pytest.mark.parametrize(("n", "width", "offset"), [(200, 12, 0.0), (200, 12, 300.0), (30, 60, 0.5)])
def test_every_fold_and_penalty_is_scikit_learns_on_ragged_questions(n: int, width: int, offset: float) -> None:
    z, r = data(n, width)
    z, folds = z * np.float32(7) + np.float32(offset), ragged_folds(n)
    predicted, probes_of_all = fit_ridge_folds(z, r, folds)
    for penalty, ours, probe in zip(PENALTIES, predicted, probes_of_all, strict=True):
        theirs = fold_by_fold(z, r, folds, penalty)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
        whole = Ridge(alpha=penalty, solver="cholesky").fit(z.astype(np.float64), r)
        np.testing.assert_allclose(probe.weight, whole.coef_, rtol=0, atol=1e-6 * np.abs(whole.coef_).max())


def test_columns_that_are_constant_everywhere_or_outside_one_fold_are_not_blown_up() -> None:
    z, r = data(90, 6)
    folds = np.arange(90) % 3
    z[:, 0] = 3.3
    z[:, 1] = np.where(np.arange(90) == 6, 4.0, 0.1)  # varies in fold 0 alone
    predicted, probes_of_all = fit_ridge_folds(z, r, folds, [1.0])
    assert probes_of_all[0].weight[0] == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(predicted[0], fold_by_fold(z, r, folds, 1.0), atol=1e-6)


def test_states_that_are_all_constant_predict_the_mean_of_the_other_folds() -> None:
    _, r = data(60)
    folds = np.arange(60) % 2
    predicted, probes_of_all = fit_ridge_folds(np.full((60, 4), 2.5, np.float32), r, folds, [1.0, 10.0])
    for row in predicted:
        np.testing.assert_allclose(row, np.where(folds == 0, r[folds == 1].mean(), r[folds == 0].mean()))
    assert probes_of_all[0].predict(np.zeros((1, 4), np.float32))[0] == pytest.approx(r.mean())


def test_equal_residuals_give_a_probe_that_predicts_them() -> None:
    z, _ = data(60)
    predicted, probes_of_all = fit_ridge_folds(z, np.full(60, 0.25), np.arange(60) % 3)
    np.testing.assert_allclose(predicted, 0.25, atol=1e-12)
    np.testing.assert_allclose(probes_of_all[0].weight, 0.0, atol=1e-12)


@pytest.mark.parametrize("fit", [fit_ridge_path, lambda z, r: fit_ridge_folds(z, r, np.arange(len(r)) % 2)])
def test_a_state_that_is_no_number_is_named(fit: Callable[..., object]) -> None:
    z, r = data(50)
    z[31, 7] = np.nan
    with pytest.raises(CoralError, match=r"state of row 31 is nan in column 7.*Extract the activations again"):
        fit(z, r)
    with pytest.raises(CoralError, match=r"residual of row 3 is inf"):
        fit(data(50)[0], np.where(np.arange(50) == 3, np.inf, r))


def test_penalties_and_folds_that_make_no_sense_are_refused() -> None:
    z, r = data(50)
    with pytest.raises(CoralError, match=r"must be above 0. Got \[0.0\]"):
        fit_ridge_path(z, r, [0.0])
    with pytest.raises(CoralError, match=r"at least two folds. Got 1 for 50 rows"):
        fit_ridge_folds(z, r, np.zeros(50, np.int64))
    with pytest.raises(CoralError, match="0 rows"):
        fit_standardiser(np.zeros((0, 3), np.float32))


# ---------------------------------------------------------------------------------------------------- chunks of rows


def test_chunks_cover_every_row_once() -> None:
    width = probes.CHUNK_BYTES // 8 // 10  # ten rows a chunk
    assert [(c.start, c.stop) for c in chunks(25, width)] == [(0, 10), (10, 20), (20, 25)]
    assert [(c.start, c.stop) for c in chunks(2, 10**12)] == [(0, 1), (1, 2)]


def test_streaming_in_chunks_equals_doing_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    z, r = data(103, 12)
    z, folds = z * np.float32(3) + np.float32(40), ragged_folds(103)
    whole, whole_scale = fit_ridge_folds(z, r, folds)[0], fit_standardiser(z)
    mlp = fit_mlp((z, r), (z, r), SMALL, seed=0)
    at_once = [mlp.predict(z), fit_ridge_path(z, r)[3].predict(z), whole_scale(z)]
    monkeypatch.setattr(probes, "CHUNK_BYTES", 8 * 12 * 10)
    scale = fit_standardiser(z)
    np.testing.assert_allclose(scale.mean, whole_scale.mean, rtol=1e-6)
    np.testing.assert_allclose(scale.scale, whole_scale.scale, rtol=1e-6)
    np.testing.assert_allclose(fit_ridge_folds(z, r, folds)[0], whole, rtol=1e-8, atol=1e-10)
    streamed = [mlp.predict(z), fit_ridge_path(z, r)[3].predict(z), whole_scale(z)]
    for one, other in zip(streamed, at_once, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_probes_learn_from_half_precision_states_in_a_file(tmp_path: Path) -> None:
    z, r = data(200)
    half = np.memmap(tmp_path / "z", dtype=np.float16, mode="w+", shape=z.shape)
    half[:] = z
    half.flush()
    mapped = np.memmap(tmp_path / "z", dtype=np.float16, mode="r", shape=z.shape)
    same = z.astype(np.float16).astype(np.float32)
    assert fit_ridge_path(mapped, r)[2].weight.tobytes() == fit_ridge_path(same, r)[2].weight.tobytes()
    ours, theirs = (fit_mlp((a, r), (a[:50], r[:50]), SMALL, seed=0) for a in (mapped, same))
    assert ours.predict(mapped).tobytes() == theirs.predict(same).tobytes()
    standardiser = fit_standardiser(mapped)
    np.testing.assert_array_equal(standardiser.scale, fit_standardiser(same).scale)
    assert standardiser(mapped, out=half) is half
    np.testing.assert_array_equal(half, standardiser(same).astype(np.float16))


# ----------------------------------------------------------------------------------------------------------- R squared


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=2, max_size=20))
def test_r_squared_is_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    r, r_hat = (np.array(side) for side in zip(*pairs, strict=True))
    if np.ptp(r) > 1e-6:
        assert r_squared(r, r_hat) == pytest.approx(r2_score(r, r_hat), rel=1e-9, abs=1e-9)


def test_r_squared_by_hand() -> None:
    # squared errors 0.25 + 0.25, total 0.5 + 0.5 around the mean 0
    r = np.array([np.sqrt(0.5), -np.sqrt(0.5)])
    assert r_squared(r, r - 0.5) == pytest.approx(0.5)
    assert r_squared(r, np.zeros(2)) == pytest.approx(0.0)
    assert r_squared(r, r) == 1.0
    assert r_squared(np.ones(3), np.zeros(3)) == 0.0


# ---------------------------------------------------------------------------------------------------------------- MLP


def test_the_network_is_the_papers() -> None:
    network = build_mlp(576, HIDDEN, dropout=MlpSettings().dropout)
    linear = [(m.in_features, m.out_features) for m in network if isinstance(m, nn.Linear)]
    assert linear == [(576, 1024), (1024, 512), (512, 256), (256, 128), (128, 1)]
    kinds = [nn.Linear, nn.ReLU, nn.Dropout] * 4 + [nn.Linear, nn.Tanh]
    assert all(isinstance(module, kind) for module, kind in zip(network, kinds, strict=True))
    assert {m.p for m in network if isinstance(m, nn.Dropout)} == {0.2}
    assert MlpSettings().hidden == HIDDEN == (1024, 512, 256, 128)


def test_predictions_lie_between_minus_one_and_one() -> None:
    probe = NetworkProbe(build_mlp(3, (4,), dropout=0.2), (4,))
    with torch.no_grad():
        for parameter in probe.network.parameters():
            parameter.mul_(1e3)
    r_hat = probe.predict(data(300, 3)[0] * 100)
    assert np.abs(r_hat).max() <= 1.0
    assert len(r_hat) == 300


def test_the_loss_by_hand() -> None:
    # mean((0.5, -0.5)^2) = 0.25 and mean(0.5^2, 0^2) = 0.125
    r, r_hat = torch.tensor([1.0, -0.5]), torch.tensor([0.5, 0.0])
    assert float(mlp_loss(r, r_hat, output_penalty=0.0)) == 0.25
    assert float(mlp_loss(r, r_hat, output_penalty=2.0)) == 0.5


def test_dropout_is_off_when_predicting_even_if_the_network_was_left_in_training() -> None:
    z, r = data(64)
    probe = fit_mlp((z, r), (z, r), SMALL, seed=0)
    first = probe.predict(z)
    probe.network.train()
    assert probe.predict(z).tobytes() == first.tobytes()
    probe.network.train()
    for module in probe.network:
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert not np.allclose(probe.network(torch.from_numpy(z))[:, 0].detach().numpy(), first)


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_global_generator_alone() -> None:
    z, r = data()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = fit_mlp((z, r), (z[:50], r[:50]), SMALL, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = fit_mlp((z, r), (z[:50], r[:50]), SMALL, seed=4)
    third = fit_mlp((z, r), (z[:50], r[:50]), SMALL, seed=5)
    assert all(torch.equal(t, second.tensors()[name]) for name, t in first.tensors().items())
    assert not torch.equal(first.tensors()["probe.0.weight"], third.tensors()["probe.0.weight"])


def test_an_mlp_comes_back_from_its_tensors_to_the_bit() -> None:
    z, r = data()
    probe = fit_mlp((z, r), (z, r), SMALL, seed=0)
    again = PROBES["mlp"](probe.tensors())
    assert isinstance(again, NetworkProbe)
    assert again.hidden == (16, 8)
    assert again.predict(z).tobytes() == probe.predict(z).tobytes()


def test_the_tensors_of_an_mlp_with_many_layers_come_back_in_order() -> None:
    network = build_mlp(5, (7, 6, 5, 4), dropout=0.0)  # module numbers 0, 3, 6, 9, 12: not in the order of their names
    probe = NetworkProbe(network, (7, 6, 5, 4))
    again = NetworkProbe.from_tensors(dict(reversed(probe.tensors().items())))
    assert again.hidden == (7, 6, 5, 4)
    assert again.predict(data(10, 5)[0]).tobytes() == probe.predict(data(10, 5)[0]).tobytes()


def test_the_best_state_is_kept_as_a_copy_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule turns around in validation, so that every epoch of training makes it worse after the first."""
    z, r = data(200)
    validation = (z, -r)
    losses, states = [], []
    real = probes.train_epoch

    def noting(network: nn.Sequential, *rest: object) -> None:
        real(network, *rest)  # type: ignore[arg-type]
        network.eval()
        with torch.no_grad():
            r_hat = network(torch.from_numpy(z))[:, 0]
        losses.append(float(mlp_loss(torch.from_numpy(-r).float(), r_hat, output_penalty=0.0)))
        states.append({name: t.clone() for name, t in network.state_dict().items()})

    monkeypatch.setattr(probes, "train_epoch", noting)
    kept = fit_mlp((z, r), validation, MlpSettings(hidden=(16,), max_epochs=30, patience=4), seed=0)
    best = int(np.argmin(losses))
    assert best < len(losses) - 1
    assert len(losses) == best + 1 + 4  # patience epochs without a better one, then it stops
    assert all(torch.equal(t, states[best][name.removeprefix("probe.")]) for name, t in kept.tensors().items())
    assert not torch.equal(kept.tensors()["probe.0.weight"], states[-1]["0.weight"])


def test_training_stops_at_the_last_epoch_while_it_still_improves() -> None:
    z, r = data(400, noise=0.0)
    epochs: list[int] = []
    settings = MlpSettings(hidden=(16,), dropout=0.0, weight_decay=0.0, learning_rate=1e-2, max_epochs=5, patience=5)
    probe = fit_mlp((z, r), (z, r), settings, seed=0, on_epoch=lambda: epochs.append(1))
    assert len(epochs) == 5
    assert r_squared(r, probe.predict(z)) > 0.3


def test_a_fit_that_pauses_ends_with_the_bytes_of_one_that_does_not() -> None:
    z, r = data()
    whole = fit_mlp((z, r), (z[:50], r[:50]), SMALL, seed=3)
    training = MlpTraining(12, SMALL, seed=3)
    for epochs in (1, 2, 5, 8):
        training.advance(LayerData(z, r, z[:50], r[:50]), epochs)
        assert training.epochs == epochs
    assert training.finished
    assert all(torch.equal(t, training.probe().tensors()[name]) for name, t in whole.tensors().items())
    assert training.r2 == pytest.approx(r_squared(r[:50], whole.predict(z[:50])), abs=1e-12)


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    dropout = Dropout(0.2)
    dropped = dropout(torch.ones(1000, 200))
    assert float((dropped == 0).float().mean()) == pytest.approx(0.2, abs=0.005)
    assert dropped.unique().tolist() == [0.0, 1.25]
    assert dropout.eval()(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("depth", "hidden"), [(0, ()), (1, (1024,)), (3, (1024, 512, 256)), (4, HIDDEN)])
def test_a_depth_takes_the_first_of_the_papers_layers(depth: int, hidden: tuple[int, ...]) -> None:
    assert hidden_of_depth(depth) == hidden
    with pytest.raises(CoralError, match=r"must be 0 to 4 hidden layers. Got 5"):
        hidden_of_depth(5)


def test_depth_zero_is_a_linear_probe_with_a_tanh_and_comes_back_from_its_tensors() -> None:
    z, r = data(400, noise=0.01)
    fit = MlpSettings(hidden=hidden_of_depth(0), learning_rate=2e-2, weight_decay=0.01, max_epochs=25, batch_size=64)
    probe = fit_mlp((z, r), (z, r), fit, seed=0)
    assert r_squared(r, probe.predict(z)) > 0.95
    weight, bias = (t.double().numpy() for t in probe.tensors().values())
    np.testing.assert_allclose(probe.predict(z), np.tanh(z @ weight[0] + bias), atol=1e-6)
    assert PROBES["mlp"](probe.tensors()).predict(z).tobytes() == probe.predict(z).tobytes()


def test_an_mlp_handles_constant_states_and_equal_residuals_and_names_what_is_no_number() -> None:
    z, r = data(64)
    flat = fit_mlp((np.zeros_like(z), r), (np.zeros_like(z), r), SMALL, seed=0).predict(z)
    level = fit_mlp((z, np.full(64, 0.2)), (z, np.full(64, 0.2)), SMALL, seed=0).predict(z)
    assert np.isfinite(flat).all()
    assert np.isfinite(level).all()
    with pytest.raises(CoralError, match="state of row 2 is inf in column 1"):
        fit_mlp((z, r), (np.where(np.arange(64 * 12).reshape(64, 12) == 25, np.float32(np.inf), z), r), SMALL, seed=0)


def test_a_fit_that_diverges_at_once_says_so() -> None:
    z, r = data(200)
    wild = MlpSettings(hidden=(16,), weight_decay=1e30, learning_rate=1e30, batch_size=16)
    with pytest.raises(CoralError, match=r"diverged in its first epoch at learning rate 1e\+30.*make either smaller"):
        fit_mlp((z, r), (z, r), wild, seed=0)


def test_an_mlp_learns_what_a_linear_probe_cannot() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1500, 2)).astype(np.float32)
    r = 0.8 * np.sign(z[:, 0] * z[:, 1])
    train, validation = (z[:1000], r[:1000]), (z[1000:], r[1000:])
    settings = MlpSettings(hidden=(32, 16), learning_rate=1e-2, weight_decay=0.01, dropout=0.0, max_epochs=30)
    mlp = fit_mlp(train, validation, settings, seed=0)
    linear = max(r_squared(validation[1], p.predict(validation[0])) for p in fit_ridge_path(*train))
    assert r_squared(validation[1], mlp.predict(validation[0])) > 0.6 > 0.1 > linear


def test_the_output_penalty_shrinks_predictions() -> None:
    z, r = data(400)
    free, held = (
        fit_mlp((z, r), (z, r), MlpSettings(hidden=(16,), max_epochs=15, output_penalty=penalty), seed=0)
        for penalty in (0.0, 5.0)
    )
    assert (held.predict(z) ** 2).mean() < 0.5 * (free.predict(z) ** 2).mean()
