"""Heads: a stack trains each network as it would be trained alone, and a signal planted in two heads is found there."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.planted import PlantedStore

from coral_lens.analysis import heads as head_plan
from coral_lens.analysis import heads as heads_module
from coral_lens.analysis.files import write_analysis
from coral_lens.analysis.folds import divide_into_folds
from coral_lens.analysis.heads import (
    HeadShape,
    HeadTraining,
    analyse_heads,
    cumulative_share,
    fold_parts,
    plan_heads,
    stacks,
    summarise,
)
from coral_lens.analysis.stacked import Stack, StackData, StackFit, fit_stack
from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, MlpTraining
from coral_lens.report.figures.analysis import write_analysis_pictures

SMALL = MlpSettings(hidden=(16, 8), batch_size=32, patience=3, max_epochs=12, learning_rate=3e-3)
KNOW = {(1, 2), (2, 0)}
"""The heads that know the answers."""

pytestmark = pytest.mark.usefixtures("one_thread")


class Headed(PlantedStore):
    """Two blocks of three heads with four columns each."""

    def __init__(self, n: int, *, seed: int = 0) -> None:
        super().__init__(n, seed=seed)
        rng = np.random.default_rng(seed)
        rows, offsets, answers = len(self.table.logprobs), self.table.offsets, self.table.answers
        y = np.zeros(rows)
        y[offsets[:-1] + answers] = 1.0
        self.outputs = {b: rng.normal(size=(rows, 3, 4)).astype(np.float32) for b in (1, 2)}
        for block, head in KNOW:
            self.outputs[block][:, head, 1] += 2.5 * y.astype(np.float32)
        self.blocks = (1, 2)

    def heads(self, block: int) -> np.ndarray:
        return self.outputs[block]


def stack_of(n_members: int, *, seed: int = 0) -> StackData:
    rng = np.random.default_rng(seed)
    rows, index = 150, np.random.default_rng(9).permutation(150)
    z = torch.from_numpy(rng.normal(size=(n_members, rows, 5)).astype(np.float32))
    r = z[0, :, 0].double().numpy() * 0.2 + rng.normal(size=rows) * 0.2
    return StackData(z, r, index[:90], index[90:120], index[120:])


def fresh(data: StackData) -> StackData:
    """The same rows in memory of their own: a fit uses them up."""
    return replace(data, z=data.z.clone())


@pytest.mark.parametrize("changed", [{}, {"dropout": 0.0}, {"output_penalty": 0.3, "weight_decay": 0.0}])
def test_each_network_of_a_stack_ends_as_it_would_alone(changed: dict[str, float]) -> None:
    """Against the paper's own probe, whose gradient comes from autograd: same rows, masks, stopping and best state."""
    settings, data = replace(SMALL, max_epochs=25, patience=2, **changed), stack_of(4)
    fit = fit_stack(fresh(data), settings, seed=3)
    for i in range(4):
        z = data.z[i].numpy()
        alone = MlpTraining(5, settings, seed=3)
        alone.advance(
            LayerData(z[data.train], data.r[data.train], z[data.stop], data.r[data.stop]), settings.max_epochs
        )
        assert fit.epochs[i] == alone.epochs
        assert fit.r_hat[i] == pytest.approx(alone.probe().predict(z[data.test]), abs=1e-5)
    assert len(set(fit.epochs.tolist())) > 1, "members should stop at different times"


def test_it_does_not_matter_what_else_is_in_the_stack() -> None:
    data = stack_of(6)
    whole = fit_stack(fresh(data), SMALL, seed=1)
    half = fit_stack(replace(data, z=data.z[3:]), SMALL, seed=1)
    assert half.r_hat == pytest.approx(whole.r_hat[3:], abs=1e-6)
    assert half.epochs.tolist() == whole.epochs[3:].tolist()


def test_every_network_is_counted_once_when_it_is_done() -> None:
    for most in (2, 12):
        told: list[int] = []
        fit_stack(stack_of(5), replace(SMALL, max_epochs=most), seed=0, on_done=told.append)
        assert sum(told) == 5


def test_a_signal_planted_in_two_heads_is_found_there(tmp_path: Path) -> None:
    store = Headed(80)
    found = analyse_heads(store, divide_into_folds(store), training=HeadTraining(SMALL), work=tmp_path / "work")
    clear = {(row.layer, row.head) for row in found.rows if row.r2.low > 0.05}
    assert clear == KNOW
    assert sorted(found.rows, key=lambda row: -row.r2.value)[0].r2.value == found.highest
    assert found.needed.value == 2
    assert found.needed_share.value == pytest.approx(2 / 6)
    assert found.top_share.value == 1.0
    assert found.mean.low < found.mean.value < found.mean.high
    record = write_analysis("heads", found, tmp_path)
    assert write_analysis_pictures(record, tmp_path) == ["heads", "heads-map"]


def test_a_killed_analysis_goes_on_and_damaged_predictions_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Headed(40)
    data = divide_into_folds(store)
    monkeypatch.setattr(heads_module, "STACK", 3)
    first = analyse_heads(store, data, training=HeadTraining(SMALL), work=tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    raw = bytearray(files[0].read_bytes())
    raw[-5] ^= 1
    files[0].write_bytes(raw)
    trained: list[int] = []
    real = heads_module.predict_heads
    monkeypatch.setattr(heads_module, "predict_heads", lambda *a: (trained.append(1), real(*a))[1])
    assert analyse_heads(store, data, training=HeadTraining(SMALL), work=tmp_path) == first
    assert len(trained) == 1
    analyse_heads(store, data, training=HeadTraining(replace(SMALL, max_epochs=1)), work=tmp_path)
    assert len(trained) == 3, "other settings are another analysis"


def test_questions_that_train_stop_and_are_predicted_are_never_the_same() -> None:
    data = divide_into_folds(Headed(60))
    for k in range(5):
        parts = fold_parts(data, k, share=heads_module.STOPPING)
        assert (np.sum(parts, axis=0) == 1).all()
        assert (parts[2] == (data.fold == k)).all()
        assert 0.1 < parts[1].sum() / parts[:2][0].sum() < 0.5


def test_cumulative_shares_by_hand() -> None:
    """Positive signal 4 + 3 + 2 + 1; what is below 0 adds nothing and takes nothing away."""
    shares = cumulative_share(np.array([0.01, -0.05, 0.04, 0.03, 0.02]))
    assert shares == pytest.approx([0.4, 0.7, 0.9, 1.0, 1.0])
    assert cumulative_share(np.array([-0.1, 0.0])).tolist() == [0.0, 0.0]


def test_a_summary_by_hand() -> None:
    """Three heads hold 80 % as it is, two and four of five in the resamples: the interval is theirs, the value its own."""
    values = np.array([0.01, -0.05, 0.04, 0.03, 0.02])
    two, four = np.array([0.0, 0.0, 0.06, 0.04, 0.0]), np.array([0.02, -0.03, 0.02, 0.02, 0.02])
    found = summarise(Headed(20), [(1, head) for head in range(5)], np.stack([values, *[two, values, four] * 20]))
    assert (found.needed.value, found.needed_share.value, found.highest) == (3, 0.6, 0.04)
    assert (found.needed.low, found.needed.high) == (2, 4)
    assert (found.needed_share.low, found.needed_share.high) == pytest.approx((0.4, 0.8))
    assert (found.top_share.value, found.top_share.low) == (1.0, 1.0)
    assert found.mean.value == pytest.approx(0.01)
    assert (found.mean.low, found.mean.high) == pytest.approx((0.01, 0.02))
    assert found.clear == 2, "heads 2 and 3 are above 0 in every resample; the others are not"


def test_while_a_stack_is_trained_its_rows_are_held_twice_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Headed(60)
    rows = len(store.table.logprobs)
    store.outputs = {b: np.random.default_rng(b).normal(size=(rows, 3, 512)).astype(np.float32) for b in (1, 2)}
    once, held = 2 * store.outputs[1].nbytes, []

    def watched(data: StackData, *_: object, **__: object) -> StackFit:
        held.append(tracemalloc.get_traced_memory()[0] / once)
        return StackFit(np.zeros((6, len(data.test))), np.zeros(6, dtype=np.int64))

    monkeypatch.setattr(heads_module, "fit_stack", watched)
    tracemalloc.start()
    heads_module.predict_heads(store, (1, 2), divide_into_folds(store), HeadTraining(SMALL))
    peak = tracemalloc.get_traced_memory()[1] / once
    tracemalloc.stop()
    assert len(held) == 5
    assert max(held) < 2.1
    assert peak < 2.5, "a head at a time is standardised"


def test_networks_that_go_on_take_the_place_of_those_that_have_stopped() -> None:
    data = stack_of(4)
    rows, stack = data.z.clone(), Stack(data.z, SMALL, seed=0)
    stack.train_epoch(data.r, data.train, np.random.default_rng(0))
    stack.keep(np.array([False, True, False, True]))
    assert stack.alive.tolist() == [1, 3]
    assert torch.equal(stack.z, rows[[1, 3]])
    assert stack.z.data_ptr() == data.z.data_ptr(), "no copy of the rows"


def test_a_store_without_heads_names_the_command_that_makes_one() -> None:
    store = Headed(30)
    store.blocks = ()
    with pytest.raises(CoralError, match="The store holds no heads; make one that does: `coral extract"):
        analyse_heads(store, divide_into_folds(store))


def test_stacks_are_whole_blocks() -> None:
    assert list(stacks((1, 2, 3, 4, 5, 6, 7), 9)) == [(1, 2, 3, 4, 5, 6), (7,)]
    assert list(stacks((1, 2), 64)) == [(1,), (2,)]


def test_a_plan_counts_networks_and_bytes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """960 heads of 128 columns, 40,000 rows: a stack of one block; a millisecond a step and 400 steps an epoch."""
    monkeypatch.setattr(head_plan, "time_step", lambda *_: 1e-3)
    plan = plan_heads(HeadShape(blocks=30, heads=32, head_dim=128, rows=40_000))
    assert (plan.networks, plan.stack) == (4800, 32)
    assert plan.disk == 30 * 32 * 128 * 40_000 * 2
    steps = 40_000 * 0.8 * 0.8 / 64
    assert plan.seconds == pytest.approx(head_plan.EPOCHS * 4800 * steps * 1e-3)
    assert plan.most_seconds == pytest.approx(100 * 4800 * steps * 1e-3)
    assert 2 * 4 * 32 * 40_000 * 128 < plan.memory < 2.5 * 4 * 32 * 40_000 * 128


def test_a_step_takes_time() -> None:
    shape = HeadShape(blocks=1, heads=2, head_dim=4, rows=100)
    assert head_plan.time_step(shape, SMALL) > 0


def test_a_stack_is_trained_on_the_device_of_its_rows() -> None:
    """A device without numbers stands for a GPU: whatever is left on the CPU cannot be mixed with it."""
    stack = Stack(torch.zeros(3, 40, 6, device="meta"), replace(SMALL, dropout=0.2), seed=0)
    stack.train_epoch(np.zeros(40), np.arange(30), np.random.default_rng(0))
    assert {t.device.type for t in (*stack.weights, *stack.biases)} == {"meta"}
    assert [w.shape for w in stack.weights] == [w.shape for w in Stack(torch.zeros(3, 4, 6), SMALL, seed=0).weights]
