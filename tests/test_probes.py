"""Probes agree with scikit-learn where it has them, and the MLP is the paper's and keeps its best state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from torch import nn

from coral_lens import probes
from coral_lens.probes import (
    HIDDEN,
    PENALTIES,
    PROBES,
    LinearProbe,
    MlpSettings,
    NetworkProbe,
    Probe,
    build_mlp,
    fit_mlp,
    fit_ridge_path,
    fit_standardiser,
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
    kinds = [type(m) for m in network]
    assert kinds == [nn.Linear, nn.ReLU, nn.Dropout] * 4 + [nn.Linear, nn.Tanh]
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
    torch.manual_seed(0)
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
