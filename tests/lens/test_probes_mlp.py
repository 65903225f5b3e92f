"""The MLP is the paper's and keeps its best state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.planted import planted_rows
from torch import nn

from coral_lens.errors import CoralError
from coral_lens.lens.correction import PROBES
from coral_lens.lens.probes import listwise, mlp
from coral_lens.lens.probes.mlp import (
    HIDDEN,
    Dropout,
    LayerData,
    MlpSettings,
    MlpTraining,
    NetworkProbe,
    build_mlp,
    fit_mlp,
    hidden_of_depth,
    mlp_loss,
)
from coral_lens.lens.probes.ridge import fit_ridge_path
from coral_lens.lens.probes.standardise import r_squared
from coral_lens.lens.training_data import Sample, usable_device
from coral_lens.ragged import Options


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny networks lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = MlpSettings(hidden=(16, 8), max_epochs=8, batch_size=32)


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
    r_hat = probe.predict(planted_rows(300, 3)[0] * 100)
    assert np.abs(r_hat).max() <= 1.0
    assert len(r_hat) == 300


def test_the_loss_by_hand() -> None:
    # mean((0.5, -0.5)^2) = 0.25 and mean(0.5^2, 0^2) = 0.125
    r, r_hat = torch.tensor([1.0, -0.5]), torch.tensor([0.5, 0.0])
    assert float(mlp_loss(r, r_hat, output_penalty=0.0)) == 0.25
    assert float(mlp_loss(r, r_hat, output_penalty=2.0)) == 0.5


def test_dropout_is_off_when_predicting_even_if_the_network_was_left_in_training() -> None:
    z, r = planted_rows(64)
    probe = fit_mlp(LayerData(z, r, z, r), SMALL, seed=0)
    first = probe.predict(z)
    probe.network.train()
    assert probe.predict(z).tobytes() == first.tobytes()
    probe.network.train()
    for module in probe.network:
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert not np.allclose(probe.network(torch.from_numpy(z))[:, 0].detach().numpy(), first)


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_global_generator_alone() -> None:
    z, r = planted_rows()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = fit_mlp(LayerData(z, r, z[:50], r[:50]), SMALL, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = fit_mlp(LayerData(z, r, z[:50], r[:50]), SMALL, seed=4)
    third = fit_mlp(LayerData(z, r, z[:50], r[:50]), SMALL, seed=5)
    assert all(torch.equal(t, second.tensors()[name]) for name, t in first.tensors().items())
    assert not torch.equal(first.tensors()["probe.0.weight"], third.tensors()["probe.0.weight"])


def test_an_mlp_comes_back_from_its_tensors_to_the_bit() -> None:
    z, r = planted_rows()
    probe = fit_mlp(LayerData(z, r, z, r), SMALL, seed=0)
    again = PROBES["mlp"](probe.tensors())
    assert isinstance(again, NetworkProbe)
    assert again.hidden == (16, 8)
    assert again.predict(z).tobytes() == probe.predict(z).tobytes()


def test_the_tensors_of_an_mlp_with_many_layers_come_back_in_order() -> None:
    network = build_mlp(5, (7, 6, 5, 4), dropout=0.0)  # module numbers 0, 3, 6, 9, 12: not in the order of their names
    probe = NetworkProbe(network, (7, 6, 5, 4))
    again = NetworkProbe.from_tensors(dict(reversed(probe.tensors().items())))
    assert again.hidden == (7, 6, 5, 4)
    assert again.predict(planted_rows(10, 5)[0]).tobytes() == probe.predict(planted_rows(10, 5)[0]).tobytes()


def test_the_best_state_is_kept_as_a_copy_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule turns around in validation, so that every epoch of training makes it worse after the first."""
    z, r = planted_rows(200)
    validation = (z, -r)
    losses, states = [], []
    real = mlp.train_epoch

    def noting(network: nn.Sequential, *rest: object) -> None:
        real(network, *rest)  # type: ignore[arg-type]
        network.eval()
        with torch.no_grad():
            r_hat = network(torch.from_numpy(z))[:, 0]
        losses.append(float(mlp_loss(torch.from_numpy(-r).float(), r_hat, output_penalty=0.0)))
        states.append({name: t.clone() for name, t in network.state_dict().items()})

    monkeypatch.setattr(mlp, "train_epoch", noting)
    kept = fit_mlp(LayerData(z, r, *validation), MlpSettings(hidden=(16,), max_epochs=30, patience=4), seed=0)
    best = int(np.argmin(losses))
    assert best < len(losses) - 1
    assert len(losses) == best + 1 + 4  # patience epochs without a better one, then it stops
    assert all(torch.equal(t, states[best][name.removeprefix("probe.")]) for name, t in kept.tensors().items())
    assert not torch.equal(kept.tensors()["probe.0.weight"], states[-1]["0.weight"])


def test_training_stops_at_the_last_epoch_while_it_still_improves() -> None:
    z, r = planted_rows(400, noise=0.0)
    epochs: list[int] = []
    settings = MlpSettings(hidden=(16,), dropout=0.0, weight_decay=0.0, learning_rate=1e-2, max_epochs=5, patience=5)
    probe = fit_mlp(LayerData(z, r, z, r), settings, seed=0, on_epoch=lambda: epochs.append(1))
    assert len(epochs) == 5
    assert r_squared(r, probe.predict(z)) > 0.3


def test_a_fit_that_pauses_ends_with_the_bytes_of_one_that_does_not() -> None:
    z, r = planted_rows()
    whole = fit_mlp(LayerData(z, r, z[:50], r[:50]), SMALL, seed=3)
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
    z, r = planted_rows(400, noise=0.01)
    fit = MlpSettings(hidden=hidden_of_depth(0), learning_rate=2e-2, weight_decay=0.01, max_epochs=25, batch_size=64)
    probe = fit_mlp(LayerData(z, r, z, r), fit, seed=0)
    assert r_squared(r, probe.predict(z)) > 0.95
    weight, bias = (t.double().numpy() for t in probe.tensors().values())
    np.testing.assert_allclose(probe.predict(z), np.tanh(z @ weight[0] + bias), atol=1e-6)
    assert PROBES["mlp"](probe.tensors()).predict(z).tobytes() == probe.predict(z).tobytes()


def test_an_mlp_handles_constant_states_and_equal_residuals_and_names_what_is_no_number() -> None:
    z, r = planted_rows(64)
    flat = fit_mlp(LayerData(np.zeros_like(z), r, np.zeros_like(z), r), SMALL, seed=0).predict(z)
    level = fit_mlp(LayerData(z, np.full(64, 0.2), z, np.full(64, 0.2)), SMALL, seed=0).predict(z)
    assert np.isfinite(flat).all()
    assert np.isfinite(level).all()
    with pytest.raises(CoralError, match="state of row 2 is inf in column 1"):
        fit_mlp(
            LayerData(z, r, np.where(np.arange(64 * 12).reshape(64, 12) == 25, np.float32(np.inf), z), r), SMALL, seed=0
        )


def test_a_fit_that_diverges_at_once_says_so() -> None:
    z, r = planted_rows(200)
    wild = MlpSettings(hidden=(16,), weight_decay=1e30, learning_rate=1e30, batch_size=16)
    with pytest.raises(CoralError, match=r"diverged in its first epoch at learning rate 1e\+30.*make either smaller"):
        fit_mlp(LayerData(z, r, z, r), wild, seed=0)


def test_an_mlp_learns_what_a_linear_probe_cannot() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1500, 2)).astype(np.float32)
    r = 0.8 * np.sign(z[:, 0] * z[:, 1])
    train, validation = (z[:1000], r[:1000]), (z[1000:], r[1000:])
    settings = MlpSettings(hidden=(32, 16), learning_rate=1e-2, weight_decay=0.01, dropout=0.0, max_epochs=30)
    mlp = fit_mlp(LayerData(*train, *validation), settings, seed=0)
    linear = max(r_squared(validation[1], p.predict(validation[0])) for p in fit_ridge_path(*train))
    assert r_squared(validation[1], mlp.predict(validation[0])) > 0.6 > 0.1 > linear


def test_the_output_penalty_shrinks_predictions() -> None:
    z, r = planted_rows(400)
    free, held = (
        fit_mlp(LayerData(z, r, z, r), MlpSettings(hidden=(16,), max_epochs=15, output_penalty=penalty), seed=0)
        for penalty in (0.0, 5.0)
    )
    assert (held.predict(z) ** 2).mean() < 0.5 * (free.predict(z) ** 2).mean()


# ------------------------------------------------------------------------------------------------------------- devices


def test_a_network_is_trained_on_the_device_of_its_data_by_the_same_code() -> None:
    """A device without numbers stands for a GPU: whatever is left on the CPU cannot be mixed with it."""
    z, r = planted_rows(64)
    settings = MlpSettings(hidden=(16, 8), batch_size=32)
    training = MlpTraining(12, settings, seed=0, device="meta")
    mlp.train_epoch(training.network, training.optimiser, (z, r), settings, np.random.default_rng(0))
    assert {p.device.type for p in training.network.parameters()} == {"meta"}
    assert {t.device.type for state in training.optimiser.state.values() for t in state.values() if t.ndim} == {"meta"}
    here = MlpTraining(12, settings, seed=0)
    assert [p.shape for p in training.network.parameters()] == [p.shape for p in here.network.parameters()]


def test_a_listwise_network_too() -> None:
    network = build_mlp(5, (4,), dropout=0.2).to("meta")
    logs = torch.zeros(2, device="meta", requires_grad=True)
    options = Options.of_sizes(np.array([2, 3]))
    sample = Sample(
        np.zeros((5, 5), np.float32), np.full(5, 0.5), np.zeros(5), options, np.array([0, 2]), device="meta"
    )
    rows = listwise.rows_of_sample(sample, np.array([1, 0]))
    assert {t.device.type for t in vars(rows).values() if isinstance(t, torch.Tensor)} == {"meta"}
    listwise.loss(network, logs, rows).backward()
    assert logs.grad is not None
    assert logs.grad.device.type == "meta"


def test_a_device_that_is_not_there_is_refused_in_a_sentence() -> None:
    assert usable_device("cpu") == "cpu"
    assert usable_device(None) in ("cpu", "cuda")
    with pytest.raises(CoralError, match=r"--device hpu cannot be used here \(.*\); take cpu, or leave it out\."):
        usable_device("hpu")
