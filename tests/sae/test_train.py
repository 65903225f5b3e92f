"""The autoencoder's formulas, its folder, its training and its measures, on states whose structure is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.models import make_model
from support.plain_passes import hook_counts, plain_states
from support.questions import toy_questions
from torch import Tensor

from coral_lens.data.settings import Style
from coral_lens.engine.extract import extract
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.planned import Extraction
from coral_lens.engine.prompts import prepare
from coral_lens.engine.scoring import score
from coral_lens.errors import CoralError
from coral_lens.sae import train as training
from coral_lens.sae.autoencoder import Autoencoder, load_autoencoder
from coral_lens.sae.codes import sae_digest
from coral_lens.sae.quality import fidelity, loss_recovered, patch
from coral_lens.sae.settings import Sampling, TrainingSettings
from coral_lens.sae.states import (
    Minibatches,
    OrdinaryStates,
    PooledStates,
    TokenStore,
    collect,
    count_states,
    draw_questions,
    iter_states,
)
from coral_lens.sae.steer import SteerFeatures, Steering
from coral_lens.sae.train import (
    SaeWeights,
    first_weights,
    folded,
    loss_of,
    resample,
    statistics_of,
    train,
    train_step,
)
from coral_lens.storage.resumable import locked

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = TrainingSettings(
    expansions=(2, 3), penalty=0.3, batch_size=64, epochs=6, resample=20, checkpoint=7, learning_rate=3e-3
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 300 tokens, without timing the machine for the best size."""
    monkeypatch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 300)


class KnownStates:
    """Sparse sums of a few directions, which an autoencoder can find."""

    def __init__(self, *, width: int = 12, n_directions: int = 18, n: int = 1600, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.directions = torch.nn.functional.normalize(torch.randn(n_directions, width, generator=rng), dim=1)
        active = torch.rand(n, n_directions, generator=rng) < 0.1
        amounts = active * (1 + torch.rand(n, n_directions, generator=rng))
        shift = 5 * torch.randn(width, generator=rng)
        self._shards = list((amounts @ self.directions + shift).tensor_split(8))
        model = {"name": "known", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}
        self.manifest = {"model": model, "sampling": {"where": "known"}}
        self.n_shards = 8
        self.held_out, self.training = range(7, 8), range(7)

    def states(self, shard: int) -> Tensor:
        return self._shards[shard]


def some_weights(width: int = 5, n_features: int = 9) -> SaeWeights:
    rng = torch.Generator().manual_seed(3)
    w = first_weights(width, n_features, seed=1)
    w.w_enc, w.w_dec = torch.randn(width, n_features, generator=rng), torch.randn(n_features, width, generator=rng)
    w.b_enc, w.b_dec = torch.randn(n_features, generator=rng), torch.randn(width, generator=rng)
    return w


# --------------------------------------------------------------------------------------------------------- formulas


def plain_loss(w: dict[str, np.ndarray], z: np.ndarray, penalty: float) -> float:
    """The paper's loss, state by state and feature by feature."""
    total = 0.0
    for state in z:
        codes = [max(0.0, float(state @ w["w_enc"][:, j] + w["b_enc"][j])) for j in range(w["w_enc"].shape[1])]
        z_hat = w["b_dec"] + sum(f * w["w_dec"][j] for j, f in enumerate(codes))
        sparsity = sum(abs(f) * np.sqrt((w["w_dec"][j] ** 2).sum()) for j, f in enumerate(codes))
        total += float(((state - z_hat) ** 2).sum()) + penalty * sparsity
    return total / len(z)


def test_the_loss_and_its_gradient_are_those_of_the_plain_formula() -> None:
    w, z = some_weights(), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    arrays = {n: t.double().numpy() for n, t in w.parameters().items()}
    for p in w.parameters().values():
        p.requires_grad_(True)
    loss, _, _ = loss_of(w, z, penalty=0.7)
    assert float(loss.detach()) == pytest.approx(plain_loss(arrays, z.double().numpy(), 0.7), rel=1e-5)
    gradients = torch.autograd.grad(loss, list(w.parameters().values()))
    for (name, value), gradient in zip(arrays.items(), gradients, strict=True):
        for at in np.ndindex(*value.shape):
            step = np.zeros_like(value)
            step[at] = 1e-6
            up, down = (plain_loss({**arrays, name: value + s * step}, z.double().numpy(), 0.7) for s in (1, -1))
            assert float(gradient[at]) == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-3)


def test_short_codes_along_long_directions_gain_nothing() -> None:
    """Without the decoder's norms in the penalty, scaling f_j down and d_j up would lower the loss."""
    w, z = some_weights(), torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    factors = torch.linspace(0.2, 5.0, 9)
    scaled = replace(w, w_enc=w.w_enc / factors, b_enc=w.b_enc / factors, w_dec=w.w_dec * factors[:, None])
    torch.testing.assert_close(loss_of(scaled, z, penalty=0.7)[0], loss_of(w, z, penalty=0.7)[0])


def test_folding_z_scores_into_the_weights_changes_nothing() -> None:
    w, source = some_weights(12, 20), KnownStates()
    statistics = statistics_of(source)
    states = source.states(0)
    everything = torch.cat([source.states(i) for i in source.training])
    torch.testing.assert_close(statistics.mean, everything.mean(dim=0))
    torch.testing.assert_close(statistics.scale, everything.std(dim=0, correction=0))
    z = statistics(states)
    codes = (z @ w.w_enc + w.b_enc).relu()
    sae = folded(w, statistics, layer=1, k=0, about={})
    torch.testing.assert_close(sae.encode(states), codes, atol=1e-4, rtol=1e-4)
    h_hat = (codes @ w.w_dec + w.b_dec) * statistics.scale + statistics.mean
    torch.testing.assert_close(sae.reconstruct(states), h_hat, atol=1e-4, rtol=1e-4)
    ablated = (codes @ w.w_dec + w.b_dec - codes[:, 3:4] * w.w_dec[3]) * statistics.scale + statistics.mean
    torch.testing.assert_close(h_hat - sae.encode(states)[:, 3:4] * sae.w_dec[3], ablated, atol=1e-4, rtol=1e-4)


def test_top_k_keeps_the_largest_codes_only() -> None:
    sae = Autoencoder(torch.eye(4), torch.zeros(4), torch.eye(4), torch.zeros(4), layer=0, architecture="topk", k=2)
    assert sae.encode(torch.tensor([[3.0, 1.0, 2.0, -9.0], [-1.0, -2.0, 5.0, -3.0]])).tolist() == [
        [3.0, 0.0, 2.0, 0.0],
        [0.0, 0.0, 5.0, 0.0],
    ]


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_some_features_are_encoded_as_all_of_them_are(architecture: str) -> None:
    w = some_weights()
    threshold = torch.linspace(0, 2, 9) if architecture == "jumprelu" else None
    sae = Autoencoder(w.w_enc, w.b_enc, w.w_dec, w.b_dec, 0, architecture, 3, threshold)
    states, some = torch.randn(6, 5), torch.tensor([7, 0, 4])
    torch.testing.assert_close(sae.encode_some(states, some), sae.encode(states)[:, some])


# ----------------------------------------------------------------------------------------------------------- folder


def saelens_folder(folder: Path, config: dict[str, object], **tensors: Tensor) -> Path:
    """A folder as SAELens' documentation describes it: W_enc [d_in, d_sae], W_dec [d_sae, d_in], and a configuration."""
    folder.mkdir()
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def test_a_folder_reads_back_as_it_was_written(tmp_path: Path) -> None:
    w, statistics = some_weights(12, 20), statistics_of(KnownStates())
    sae = folded(w, statistics, layer=3, k=4, about={"model": {"name": "known", "weights": "w" * 64}})
    sae.save(tmp_path / "sae")
    again = load_autoencoder(tmp_path / "sae")
    assert (again.layer, again.architecture, again.k, again.about) == (3, "topk", 4, sae.about)
    for name in ("w_enc", "b_enc", "w_dec", "b_dec"):
        assert torch.equal(getattr(again, name), getattr(sae, name))
    assert torch.equal(again.statistics["scale"], statistics.scale)
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    keys = {"architecture", "d_in", "d_sae", "dtype", "device", "apply_b_dec_to_input", "normalize_activations", "k"}
    assert keys <= set(config)
    assert config["metadata"]["hook_name"] == "blocks.2.hook_resid_post"


def test_an_autoencoder_of_saelens_computes_what_saelens_does(tmp_path: Path) -> None:
    """Its encoder subtracts b_dec first where `apply_b_dec_to_input` says so, as it does unless told otherwise."""
    w, x = some_weights(), torch.randn(3, 5)
    tensors = {"W_enc": w.w_enc, "b_enc": w.b_enc, "W_dec": w.w_dec, "b_dec": w.b_dec}
    where = {"metadata": {"hook_name": "blocks.4.hook_resid_post"}, "architecture": "standard"}
    sae = load_autoencoder(saelens_folder(tmp_path / "standard", where, **tensors))
    codes = ((x - w.b_dec) @ w.w_enc + w.b_enc).relu()
    torch.testing.assert_close(sae.encode(x), codes)
    torch.testing.assert_close(sae.reconstruct(x), codes @ w.w_dec + w.b_dec)
    assert sae.layer == 5

    old = {"hook_name": "blocks.4.hook_resid_pre", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}}
    sae = load_autoencoder(saelens_folder(tmp_path / "old", {**old, "apply_b_dec_to_input": False}, **tensors))
    codes = (x @ w.w_enc + w.b_enc).relu()
    assert sae.layer == 4
    torch.testing.assert_close(
        sae.encode(x).sort(descending=True).values[:, :2], codes.sort(descending=True).values[:, :2]
    )
    assert (sae.encode(x) > 0).sum(dim=1).max() <= 2

    rescaled = {**where, "architecture": "topk", "k": 2, "rescale_acts_by_decoder_norm": True}
    sae = load_autoencoder(
        saelens_folder(tmp_path / "rescaled", {**rescaled, "apply_b_dec_to_input": False}, **tensors)
    )
    norms = w.w_dec.norm(dim=1)
    values, at = ((x @ w.w_enc + w.b_enc) * norms).topk(2)
    torch.testing.assert_close(sae.encode(x), torch.zeros(3, 9).scatter(1, at, values.relu()))
    torch.testing.assert_close(sae.decode(sae.encode(x)), sae.encode(x) / norms @ w.w_dec + w.b_dec)

    threshold = torch.full((9,), 0.5)
    jump = {**where, "architecture": "jumprelu", "apply_b_dec_to_input": False}
    sae = load_autoencoder(saelens_folder(tmp_path / "jump", jump, threshold=threshold, **tensors))
    pre = x @ w.w_enc + w.b_enc
    torch.testing.assert_close(sae.encode(x), torch.where(pre > 0.5, pre, 0.0))


def test_folders_that_cannot_be_used_are_refused_in_a_sentence(tmp_path: Path, tiny: Model) -> None:
    w = some_weights()
    tensors = {"W_enc": w.w_enc, "b_enc": w.b_enc, "W_dec": w.w_dec, "b_dec": w.b_dec}
    here = {"metadata": {"hook_name": "blocks.0.hook_resid_post"}}
    with pytest.raises(CoralError, match="architecture 'gated'"):
        load_autoencoder(saelens_folder(tmp_path / "a", {**here, "architecture": "gated"}, **tensors))
    with pytest.raises(CoralError, match="'layer_norm' at run time"):
        load_autoencoder(saelens_folder(tmp_path / "b", {**here, "normalize_activations": "layer_norm"}, **tensors))
    with pytest.raises(CoralError, match=r"'blocks.1.hook_mlp_out', which is not a layer"):
        load_autoencoder(saelens_folder(tmp_path / "c", {"hook_name": "blocks.1.hook_mlp_out"}, **tensors))
    with pytest.raises(CoralError, match="has no W_dec"):
        load_autoencoder(saelens_folder(tmp_path / "d", here, **{k: v for k, v in tensors.items() if k != "W_dec"}))
    sae = load_autoencoder(saelens_folder(tmp_path / "e", here, **tensors))
    with pytest.raises(CoralError, match="is of layer 1, not of layer 2; leave --layer out"):
        load_autoencoder(tmp_path / "e", layer=2)
    assert load_autoencoder(tmp_path / "c", layer=2).layer == 2
    with pytest.raises(CoralError, match="width 5 at layer 1, but 'tiny-llama' has width 32"):
        sae.check(tiny)
    other = replace(zero_error(32), about={"model": {"name": "other", "weights": "0" * 64}})
    with pytest.raises(CoralError, match="trained on states of 'other'"):
        other.check(tiny)


# --------------------------------------------------------------------------------------------------------- training


def test_training_finds_the_directions_that_states_are_made_of(tmp_path: Path) -> None:
    source = KnownStates()
    settings = replace(SMALL, epochs=15, penalty=0.5, learning_rate=1e-2)
    found = train(source, tmp_path, settings, layer=1)
    assert set(found) == {2, 3}
    directions = source.directions / statistics_of(source).scale
    for sae in found.values():
        rows = sae.w_dec / sae.statistics["scale"]
        match = torch.nn.functional.normalize(directions, dim=1) @ torch.nn.functional.normalize(rows, dim=1).T
        assert match.max(dim=1).values.median() > 0.9
        quality = fidelity(sae, source, source.held_out)
        assert quality.explained > 0.8
        assert quality.l0 < 8


def test_massive_states_are_kept_from_training_and_left_as_they_are(tmp_path: Path) -> None:
    source = KnownStates()
    plain = statistics_of(source)
    median = torch.cat([source.states(i) for i in source.training]).norm(dim=1).median()
    for shard in source._shards:
        shard[3] *= 100.0
    assert float((statistics_of(source).scale / plain.scale).min()) > 2, "a few of them change what z-scores are"
    ordinary = OrdinaryStates.of(source, 10.0)
    assert ordinary.norm_limit == pytest.approx(10 * float(median), rel=0.01)
    assert [len(source.states(i)) - len(ordinary.states(i)) for i in range(8)] == [1] * 8
    torch.testing.assert_close(statistics_of(ordinary).scale, plain.scale, rtol=0.05, atol=0.0)
    assert torch.equal(OrdinaryStates.of(source, 0.0).states(2), source.states(2)), "0 keeps all"

    sae = train(source, tmp_path, replace(SMALL, epochs=3), layer=1)[2]
    assert sae.norm_limit == ordinary.norm_limit == load_autoencoder(tmp_path / "2x").norm_limit
    torch.testing.assert_close(sae.statistics["scale"], statistics_of(ordinary).scale)
    assert train(source, tmp_path / "all", replace(SMALL, massive=0.0), layer=1)[2].norm_limit is None
    found = fidelity(sae, source, source.held_out)
    assert (found.n_massive, found.n_states) == (1, len(source.states(7)) - 1)
    assert replace(found, n_massive=0) == fidelity(sae, ordinary, source.held_out)


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_a_state_beyond_the_limit_has_no_codes_and_is_its_own_reconstruction(architecture: str) -> None:
    states = KnownStates().states(0)[:10].clone()
    states[3] *= 100.0
    w = some_weights(12, 20)
    threshold = torch.full((20,), 0.1) if architecture == "jumprelu" else None
    free = Autoencoder(w.w_enc, w.b_enc, w.w_dec, w.b_dec, 1, architecture, 4, threshold)  # type: ignore[arg-type]
    sae = replace(free, norm_limit=1000.0)
    others = torch.arange(10) != 3
    codes, features = sae.encode(states), torch.tensor([2, 5, 11])
    assert not codes[3].any()
    assert torch.equal(codes[others], free.encode(states)[others])
    assert torch.equal(sae.encode_some(states, features)[3], torch.zeros(3))
    assert torch.equal(sae.reconstruct(states)[3], states[3])
    assert torch.equal(sae.reconstruct(states)[others], free.reconstruct(states)[others])
    steered = SteerFeatures(sae, Steering(features, torch.full((3,), 1 / 3)), 5.0)._steer(states)
    assert torch.equal(steered[3], states[3])
    assert not torch.equal(steered[others], states[others])
    assert sae_digest(sae) != sae_digest(free)


class KilledError(Exception):
    """The run is stopped here."""


@contextmanager
def killed_after(n: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop training in its n-th step."""
    real, left = training.train_step, [n]

    def step(*args: object, **kwargs: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        real(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(training, "train_step", step)
        with pytest.raises(KilledError):
            yield


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_killed_training_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = KnownStates(n=800), replace(SMALL, epochs=2)
    train(source, tmp_path / "whole", settings, layer=1)
    for n in (3, 31):  # before the first checkpoint, and between two
        with killed_after(n, monkeypatch):
            train(source, tmp_path / "killed", settings, layer=1)
    train(source, tmp_path / "killed", settings, layer=1)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    train(source, tmp_path / "other", replace(settings, seed=1), layer=1)
    assert files_of(tmp_path / "other") != files_of(tmp_path / "whole")


def test_a_second_process_may_not_train_in_the_same_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "checkpoint"), pytest.raises(CoralError, match="is being written by another process"):
        train(KnownStates(n=200), tmp_path, SMALL, layer=1)
    assert list((tmp_path / "checkpoint").iterdir()) == []


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    settings = replace(SMALL, epochs=1)
    train(KnownStates(n=400), tmp_path, settings, layer=1)
    with pytest.raises(CoralError, match="a training with other settings"):
        train(KnownStates(n=400), tmp_path, replace(settings, penalty=1.0), layer=1)


def test_a_silent_feature_starts_anew_at_a_state_that_is_reconstructed_badly() -> None:
    w, z = some_weights(), torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
    errors = torch.zeros(50)
    errors[17] = 1.0
    w.silent[:] = torch.tensor([0, 99, 0, 0, 99, 0, 0, 0, 0])
    before = {n: t.clone() for n, t in w.parameters().items()}
    w.moments["v.w_dec"][:] = 1.0
    assert resample(w, z, errors, replace(SMALL, resample=50), step=0) == 2
    direction = torch.nn.functional.normalize(z[17] - w.b_dec, dim=0)
    for j in (1, 4):
        torch.testing.assert_close(torch.nn.functional.normalize(w.w_dec[j], dim=0), direction)
        assert w.b_enc[j] == 0
        assert (w.moments["v.w_dec"][j] == 0).all()
    alive = [0, 2, 3, 5, 6, 7, 8]
    assert torch.equal(w.w_dec[alive], before["w_dec"][alive])
    assert torch.equal(w.w_enc[:, alive], before["w_enc"][:, alive])
    assert (w.silent == 0).all()


def test_learning_rate_and_penalty_are_warmed_up() -> None:
    settings = TrainingSettings(learning_rate=1.0, warm_up=0.1, penalty=2.0, penalty_warm_up=0.2, decay=0.2)
    assert [settings.rate_at(i, 100) for i in (0, 4, 9, 50, 80, 99)] == pytest.approx([0.1, 0.5, 1, 1, 1, 0.05])
    assert [settings.penalty_at(i, 100) for i in (0, 9, 19, 60)] == pytest.approx([0.1, 1, 2, 2])
    assert replace(settings, k=8).penalty_at(60, 100) == 0


def test_every_state_is_read_once_a_pass_whatever_step_it_begins_at() -> None:
    source = KnownStates(n=803)
    counts = {i: len(source.states(i)) for i in source.training}
    batches = Minibatches(source, counts, batch_size=64, epochs=2)
    found = list(batches.iterate())
    assert len(found) == sum(batches.sizes())
    everything = torch.cat([source.states(i) for i in source.training])
    assert torch.equal(torch.cat(found).sort(dim=0).values, torch.cat([everything] * 2).sort(dim=0).values)
    for some, other in zip(batches.iterate(start=13), found[13:], strict=True):
        assert torch.equal(some, other)


def test_nonsense_settings_are_refused() -> None:
    wrong_ones = [{"expansions": ()}, {"expansions": (4, 4)}, {"batch_size": 0}, {"learning_rate": 0.0}]
    for wrong in (*wrong_ones, {"massive": 0.5}, {"massive": nan}):
        with pytest.raises(CoralError):
            TrainingSettings(**wrong)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- token states


def test_token_states_are_those_of_ordinary_passes_and_end_at_the_layer(any_tiny: Model) -> None:
    asked = prepare(toy_questions(3), Style(), any_tiny)
    plan = plan_for(asked.prompts, token_budget=300, border=any_tiny.rope_border)
    before, calls = hook_counts(any_tiny), []
    handle = any_tiny.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    found = torch.cat([states for _, states in iter_states(any_tiny, asked.prompts, plan, layer=2)])
    handle.remove()
    assert not calls
    assert hook_counts(any_tiny) == before
    expected = []
    for prompt in asked.prompts:
        for context, option in zip(prompt.contexts, prompt.options, strict=True):
            expected.append(plain_states(any_tiny, context, option, Site("residual", 2)))
    # each distinct state once, whatever the order
    distance = torch.cdist(torch.cat(expected), found, compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.min(dim=1).values.max() < 1e-3
    assert distance.min(dim=0).values.max() < 1e-3


def test_token_states_of_shared_prefixes_are_kept_once(tiny: Model) -> None:
    shots = "A worked example that all share. " * 3
    questions = [replace(q, text=shots + q.text) for q in toy_questions(6)]
    asked = prepare(questions, Style(), tiny)
    plan = plan_for(asked.prompts, token_budget=300)
    batches = list(iter_states(tiny, asked.prompts, plan, layer=1))
    assert any(batch.prefixes for batch, _ in batches)
    distinct = {c[:i] for p in asked.prompts for c in p.contexts for i in range(1, len(c) + 1)}
    n_shared = max(len(p) for batch, _ in batches for p in batch.prefixes)
    n_answer = sum(len(batch.answer_tokens.unique()) for batch, _ in batches)
    assert sum(len(states) for _, states in batches) >= n_shared + n_answer
    assert sum(len(states) for _, states in batches) < len(distinct) + n_answer + n_shared
    for packing in ("tree", "plain"):
        laid = plan_for(asked.prompts, token_budget=300, packing=packing)
        for where in ("all", "answer", "context"):
            found = iter_states(tiny, asked.prompts, laid, layer=1, where=where)
            assert sum(len(states) for _, states in found) == count_states(asked.prompts, laid, where)


def test_states_that_questions_share_are_not_counted_for_each_of_them() -> None:
    """Questions of 10 states after a prefix of 90: by themselves 600 states are 6 questions, together 60 less their prefixes."""

    def count(some: Sequence[int]) -> int:
        return 90 + 10 * len(some)

    cuts = draw_questions(200, Sampling(layer=1, tokens=600, shard_tokens=150), count)
    assert 600 <= sum(map(count, cuts)) < 900
    assert all(150 <= count(cut) < 300 for cut in cuts[1:]), "only the first may be small, which is not held out"
    assert len({q for cut in cuts for q in cut}) == sum(map(len, cuts))
    everything = draw_questions(200, Sampling(layer=1, tokens=0, shard_tokens=150), count)
    assert sorted(q for cut in everything for q in cut) == list(range(200))


def test_a_killed_collection_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, tiny: Model) -> None:
    questions, what = toy_questions(24), Sampling(layer=1, tokens=900, shard_tokens=150)
    whole = collect(tiny, questions, tmp_path / "whole", what)
    assert whole.n_shards >= 5
    counts = [len(whole.states(i)) for i in range(whole.n_shards)]
    assert sum(counts) >= 900
    done: list[int] = []

    def stop(n: int) -> None:
        done.append(n)
        if len(done) == 3:
            raise KilledError

    @contextmanager
    def killing(_: str, total: int, __: str) -> Iterator[Callable[[int], None]]:
        assert total == len(whole.questions(range(whole.n_shards)))
        yield stop

    with pytest.raises(KilledError):
        collect(tiny, questions, tmp_path / "killed", what, bar=killing)
    with pytest.raises(CoralError, match="is not finished"):
        TokenStore(tmp_path / "killed")
    (tmp_path / "killed" / "shard-00000.safetensors").write_bytes(b"damaged")
    collect(tiny, questions, tmp_path / "killed", what)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    with pytest.raises(CoralError, match="results of something else"):
        collect(tiny, questions, tmp_path / "killed", replace(what, where="answer"))
    assert set(whole.questions(whole.held_out)).isdisjoint(whole.questions(whole.training))


def test_too_few_questions_are_refused(tmp_path: Path, tiny: Model) -> None:
    with pytest.raises(CoralError, match="cannot be trained on 2 question"):
        collect(tiny, toy_questions(2), tmp_path, Sampling(layer=1))
    with pytest.raises(CoralError, match="Layer 9 does not exist"):
        collect(tiny, toy_questions(8), tmp_path, Sampling(layer=9))


def test_pooled_states_of_a_store_may_be_trained_on_instead(tmp_path: Path, tiny: Model) -> None:
    store = extract(tiny, toy_questions(30), tmp_path / "store", extraction=Extraction(layers=(1,), token_budget=300))
    source = PooledStates(store, 1)
    held_out = {tuple(state) for i in source.held_out for state in source.states(i).tolist()}
    of_question = [rows.tolist() for rows in np.split(store.layer(1), store.table.offsets[1:-1])]
    shares = [np.mean([tuple(state) in held_out for state in rows]) for rows in of_question]
    assert sorted(set(shares)) == [0.0, 1.0], "questions are held out as wholes"
    read = torch.cat([source.states(i) for i in range(source.n_shards)]).sort(dim=0).values
    assert torch.equal(read, torch.from_numpy(store.layer(1)).sort(dim=0).values)
    found = train(source, tmp_path / "sae", replace(SMALL, expansions=(2,), epochs=1), layer=1)
    found[2].check(tiny)
    with pytest.raises(CoralError, match=r"holds layers \[1\], not 2"):
        PooledStates(store, 2)


# ---------------------------------------------------------------------------------------------------------- quality


def zero_error(width: int) -> Autoencoder:
    """An autoencoder that gives back what it is given, to the bit: h is the difference of its two halves."""
    eye = torch.eye(width)
    return Autoencoder(
        torch.cat([eye, -eye], dim=1), torch.zeros(2 * width), torch.cat([eye, -eye]), torch.zeros(width), 1
    )


def test_patching_a_perfect_reconstruction_is_the_unpatched_model(any_tiny: Model) -> None:
    asked = prepare(toy_questions(4), Style(), any_tiny)
    plan = plan_for(asked.prompts, token_budget=300, border=any_tiny.rope_border)
    sae = zero_error(32)
    base = [scored.logprobs for scored in score(any_tiny, asked.prompts, plan)]
    patched = [scored.logprobs for scored in score(any_tiny, asked.prompts, plan, edits=[patch(sae)])]
    torch.testing.assert_close(torch.cat(patched), torch.cat(base), atol=1e-5, rtol=1e-6)
    found = loss_recovered(any_tiny, sae, asked.prompts, [q.answer for q in asked.questions])
    assert found.share == pytest.approx(1.0, abs=1e-4)
    assert found.zeroed != pytest.approx(found.clean, abs=1e-3)


def test_quality_is_what_its_definitions_say() -> None:
    """Of two columns one is reconstructed and one is not; one of four features is never active."""
    w_enc = torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    b_enc, w_dec = torch.tensor([0.0, 0.0, 1.0, -1.0]), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    sae = Autoencoder(w_enc, b_enc, w_dec, torch.zeros(2), 0, statistics={"scale": torch.tensor([1.0, 2.0])})
    source = KnownStates()
    source._shards = [torch.tensor([[1.0, 2.0], [-1.0, -2.0], [3.0, 2.0], [-3.0, -2.0]])] * 8
    found = fidelity(sae, source, [0])
    assert (found.n_states, found.l0, found.dead) == (4, 2.0, 0.25)
    # z-scored: variances 20 and 4, of which 4 is left; raw: 20 and 16, of which 16 is left
    assert found.explained == pytest.approx(20 / 24)
    assert found.explained_raw == pytest.approx(20 / 36)


def test_quality_of_many_shards_is_that_of_their_states_together() -> None:
    source, states = KnownStates(), torch.cat([KnownStates().states(i) for i in (2, 5, 6)]) + 1e3
    sae = replace(zero_error(12), b_enc=torch.full((24,), -1e3))  # what is left is 1e3, or less
    together, apart = KnownStates(), KnownStates()
    together._shards = [states]
    apart._shards = list(states.tensor_split(3))
    one, many = fidelity(sae, together, [0]), fidelity(sae, apart, [0, 1, 2])
    assert (many.n_states, many.l0, many.dead) == (one.n_states, one.l0, one.dead)
    codes = sae.encode(states)
    left = (states - sae.decode(codes)).double().square().sum()
    whole = (states.double() - states.double().mean(dim=0)).square().sum()
    assert many.explained_raw == pytest.approx(1 - float(left / whole), rel=1e-9)
    with pytest.raises(CoralError, match="of states of width 16, but these have width 12"):
        fidelity(zero_error(16), source, [0])


def test_the_model_of_another_width_is_refused_before_it_runs() -> None:
    with pytest.raises(CoralError, match="use the model that it was trained on"):
        loss_recovered(make_model("gpt2"), zero_error(16), [], [])


def test_autoencoders_are_trained_on_the_device_that_they_are_given() -> None:
    """A device without numbers stands for a GPU: whatever is left on the CPU cannot be mixed with it."""
    weights = first_weights(6, 24, seed=0).to("meta")
    for k in (0, 4):
        train_step(weights, torch.zeros(10, 6, device="meta"), TrainingSettings(k=k), at=(0, 10))
    assert {t.device.type for t in weights.tensors().values()} == {"meta"}
    assert {n: t.shape for n, t in weights.tensors().items()} == {
        n: t.shape for n, t in first_weights(6, 24, seed=0).tensors().items()
    }
