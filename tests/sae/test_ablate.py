"""Selected features are those a plain computation selects; ablating one is what a whole pass without it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr
from support.autoencoders import DEAD, make_sae
from support.models import make_model
from support.plain_passes import hook_counts, plain_states, ragged_prompts
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.batches import Batch, collate, lay_out
from coral_lens.engine.edits import ReplaceStates
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.rerun import Checkpoint
from coral_lens.engine.scoring import ScoredBatch, score, score_batch
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import OptionTable, Prompt
from coral_lens.sae.ablate import (
    Ablation,
    Reconstruction,
    WithoutFeature,
    ablate_batch,
    ablate_fully,
    entry_groups,
    feature_tensor,
    run_ablation,
    states_without,
)
from coral_lens.sae.codes import CodeStore, Encoding, collect_codes
from coral_lens.sae.effects import AblationScores, Changes, changes_of, compare, effects
from coral_lens.sae.quality import patch
from coral_lens.sae.select import StreamingPearson, choose_features, correlate, impact, top_correlated
from coral_lens.sae.settings import AblationPlace
from coral_lens.sae.steer import SteerFeatures, Steering

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"atol": 1e-4, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 300 tokens, without timing the machine for the best size."""
    monkeypatch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 300)


def batches_of(model: Model) -> list[Batch]:
    prompts = ragged_prompts()
    plan = plan_for(prompts, token_budget=200, border=model.rope_border)
    return [lay_out(prompts, planned, packing=plan.packing) for planned in plan.batches]


# --------------------------------------------------------------------------------------------------------- ablation


@pytest.mark.parametrize(("where", "keep_error"), [("all", False), ("answer", True)])
def test_ablation_equals_a_whole_pass_without_the_feature(
    any_tiny: Model, where: AblationPlace, keep_error: bool
) -> None:
    what = Ablation(make_sae(1), feature_tensor([7, 3, DEAD, 20]), where, keep_error)
    batches = batches_of(any_tiny)
    assert any(batch.prefixes for batch in batches)
    before = hook_counts(any_tiny)
    for batch in batches:
        found = ablate_batch(any_tiny, batch, what)
        for j in range(4):
            torch.testing.assert_close(found.logprobs[j], ablate_fully(any_tiny, batch, what, j), **CLOSE)
        assert torch.equal(found.logprobs[2], found.reconstructed), "a dead feature changes nothing, to the bit"
        assert (found.logprobs[0] != found.reconstructed).any()
        if keep_error:
            torch.testing.assert_close(found.reconstructed, score_batch(any_tiny, batch).logprobs, **CLOSE)
    assert hook_counts(any_tiny) == before


def test_states_beyond_an_autoencoders_limit_are_not_touched(tiny: Model) -> None:
    batch = batches_of(tiny)[-1]
    norms = plain_norms(tiny, batch).sort().values
    gap = norms.diff()[len(norms) // 4 : -len(norms) // 4].argmax() + len(norms) // 4
    limit = float(norms[gap : gap + 2].mean())  # between two states, so that rounding moves none across it
    what = Ablation(replace(make_sae(1), norm_limit=limit), feature_tensor([7, 3]))
    found = ablate_batch(tiny, batch, what)
    for j in range(2):
        torch.testing.assert_close(found.logprobs[j], ablate_fully(tiny, batch, what, j), **CLOSE)
    assert (found.logprobs[0] != found.reconstructed).any()
    every = ablate_batch(tiny, batch, replace(what, sae=make_sae(1)))
    assert (every.reconstructed != found.reconstructed).any()
    none = ablate_batch(tiny, batch, replace(what, sae=replace(make_sae(1), norm_limit=1e-9)))
    assert none.n_computed == 0
    torch.testing.assert_close(none.reconstructed, score_batch(tiny, batch).logprobs, **CLOSE)


def plain_norms(model: Model, batch: Batch) -> torch.Tensor:
    """The lengths of the states of a batch at layer 1."""
    found: list[torch.Tensor] = []

    def look(states: torch.Tensor) -> torch.Tensor:
        found.append(states.norm(dim=-1))
        return states

    score_batch(model, batch, edits=[ReplaceStates(Site("residual", 1), look, "all")])
    return torch.cat(found)


def test_models_without_a_tree_are_ablated_too(plain_tiny: Model) -> None:
    prompts = ragged_prompts()[:3]
    plan = plan_for(prompts, token_budget=300, packing="plain")
    what = Ablation(make_sae(2), feature_tensor([7, 3, DEAD]))
    for planned in plan.batches:
        batch = lay_out(prompts, planned, packing="plain")
        found = ablate_batch(plain_tiny, batch, what)
        for j in range(3):
            torch.testing.assert_close(found.logprobs[j], ablate_fully(plain_tiny, batch, what, j), **CLOSE)
        assert torch.equal(found.logprobs[2], found.reconstructed)


def test_only_rows_in_which_a_feature_is_active_are_computed(tiny: Model) -> None:
    (batch, *_) = batches_of(tiny)
    dead = ablate_batch(tiny, batch, Ablation(make_sae(1), feature_tensor([DEAD, DEAD])))
    assert dead.n_computed == 0
    both = ablate_batch(tiny, batch, Ablation(make_sae(1), feature_tensor([7, DEAD]), "answer"))
    assert both.n_computed == len(batch.input_ids)


def test_top_k_features_are_ablated_by_the_codes_that_were_kept(tiny: Model) -> None:
    what = Ablation(make_sae(1, architecture="topk"), feature_tensor([7, 3, 11]))
    for batch in batches_of(tiny):
        found = ablate_batch(tiny, batch, what)
        for j in range(3):
            torch.testing.assert_close(found.logprobs[j], ablate_fully(tiny, batch, what, j), **CLOSE)


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_states_are_patched_on_the_device_where_they_are(architecture: str) -> None:
    """The meta device stands for a GPU: like there, a product of tensors on two devices is an error."""
    sae = replace(make_sae(1, architecture=architecture), threshold=torch.zeros(40))
    states, prompt = torch.zeros(1, 8, 32, device="meta"), Prompt("q", ((1, 2, 3, 4),) * 2, ((10, 11), (12, 13)))
    batch, site = collate({0: build_tree(prompt)}, [(0,)]), Site("residual", 1)
    steering = SteerFeatures(sae, Steering(torch.tensor([7, 3]), torch.tensor([0.5, 0.5])), 1.0)
    for keep_error in (False, True):
        what = Ablation(sae, feature_tensor([7, 3]), keep_error=keep_error)
        for edit in (Reconstruction(what), WithoutFeature(what, 1), steering, patch(sae)):
            assert edit.edit(site, states, batch).device.type == "meta"
    checkpoint = Checkpoint(batch, 1, states, None, torch.zeros(4), in_tuple=False)
    found = states_without(checkpoint, torch.ones(1, 8, 2), torch.tensor([0, 0]), torch.tensor([0, 1]), what)
    assert (found.device.type, found.shape) == ("meta", (2, 8, 32))
    assert sae.on(states.device) is sae.on(states.device), "copied once"
    assert sae.on(torch.device("cpu")) is sae


def test_long_rows_are_computed_few_at_a_time(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry brings its whole row's states, keys and mask, however few of its positions are computed."""
    (batch, *_) = [b for b in batches_of(tiny) if b.prefixes]
    assert batch.allowed is not None
    n_rows, _, n_keys = batch.allowed.shape
    codes = torch.zeros(n_rows, batch.input_ids.shape[1], 40)
    codes[:, -1] = 1.0
    rows, features = (codes > 0).any(dim=1).nonzero().T
    monkeypatch.setattr("coral_lens.sae.ablate.ENTRY_COLUMNS", 3 * n_keys)
    groups = list(entry_groups(rows, features, codes, batch))
    assert max(map(len, groups)) == 3
    assert torch.cat(groups).sort().values.tolist() == list(range(len(rows)))


# -------------------------------------------------------------------------------------------------------- selection


@settings(max_examples=25)
@given(st.integers(0, 1000), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([0.0, 1e4]))
def test_streaming_correlation_is_scipys(seed: int, sizes: list[int], offset: float) -> None:
    rng = np.random.default_rng(seed)
    n = sum(sizes) + 10
    r = rng.normal(size=n)
    codes = np.maximum(0, rng.normal(size=(n, 4)) + 0.5 * r[:, None]) + offset
    codes[:, 3] = 2.0
    found = StreamingPearson(4)
    for some in np.split(np.arange(n), np.cumsum(sizes)):
        found.add(codes[some], r[some])
    expected = [pearsonr(codes[:, j], r).statistic for j in range(3)]
    np.testing.assert_allclose(found.r[:3], expected, atol=1e-8)
    assert found.r[3] == 0
    np.testing.assert_allclose(found.mean, codes.mean(axis=0))
    assert found.n_active.tolist() == (codes > 1e-4).sum(axis=0).tolist()


def planted(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Feature 0 follows r, 1 opposes it, 2 is best but active nine times only, 3 is noise, 4 dead, 5 follows r less."""
    rng = np.random.default_rng(0)
    r = rng.normal(size=n)
    codes = np.zeros((n, 6))
    codes[:, 0] = np.maximum(0, r + 0.2 * rng.normal(size=n))
    codes[:, 1] = np.maximum(0, -r)
    top = np.argsort(-r)[:9]
    codes[top, 2] = r[top]
    codes[:, 3] = np.abs(rng.normal(size=n))
    codes[:, 5] = np.maximum(0, r + 2.0 * rng.normal(size=n))
    return codes, r


def test_selection_takes_positive_correlations_of_features_that_are_active_often_enough() -> None:
    codes, r = planted()
    found = correlate([(codes[:70], r[:70]), (codes[70:], r[70:])], 6)
    chosen = top_correlated(found, 2).tolist()
    assert chosen == [0, 5]
    assert not {1, 2, 4} & set(top_correlated(found, 6).tolist())


def test_impact_is_the_effect_on_the_probe_of_a_features_mean_activation() -> None:
    sae = make_sae(1, width=3, n_features=8)
    w, mean = np.array([1.0, -2.0, 0.5]), np.linspace(0, 1, 8)
    expected = [float(sum(sae.w_dec[j, i] * w[i] for i in range(3)) * mean[j]) for j in range(8)]
    np.testing.assert_allclose(impact(sae, w, mean), expected, rtol=1e-6)
    codes, r = planted()
    chosen = choose_features(correlate([(codes, r)], 6), np.array([0.1, -9.0, 99.0, 1.0, 50.0, 0.0]), k=2).chosen
    assert chosen["impact"] == [1, 3]


def test_nothing_to_correlate_is_refused_in_a_sentence() -> None:
    codes, r = planted()
    with pytest.raises(CoralError, match="9 samples are too few"):
        correlate([(codes[:9], r[:9])], 6)
    with pytest.raises(CoralError, match="All 6 features of the autoencoder are dead"):
        correlate([(0 * codes, r)], 6)
    with pytest.raises(CoralError, match="No feature is active in 10 of the 12 samples"):
        correlate([(codes[:12] * (np.arange(12) < 5)[:, None], r[:12])], 6)


def test_codes_of_options_are_means_over_their_tokens_and_resume(tmp_path: Path) -> None:
    tiny, questions, sae = make_model("llama"), toy_questions(12), make_sae(2)
    store = collect_codes(tiny, questions, tmp_path / "codes", Encoding(sae))
    asked = prepare(questions, Style(), tiny)
    seen = set()
    for coded in store:
        prompt = asked.prompts[coded.question]
        for j, (context, option) in enumerate(zip(prompt.contexts, prompt.options, strict=True)):
            states = plain_states(tiny, context, option, Site("residual", 2))[len(context) :]
            expected = sae.encode(states).mean(dim=0).numpy()
            np.testing.assert_allclose(coded.dense(sae.n_features)[j], expected, atol=1e-3)
        seen.add(coded.question)
    assert len(seen) == 12
    again = collect_codes(tiny, questions, tmp_path / "codes", Encoding(sae))
    assert again.manifest == store.manifest
    (tmp_path / "codes" / "journal.jsonl").write_text("")
    with pytest.raises(CoralError, match="is not finished"):
        CodeStore(tmp_path / "codes")
    with pytest.raises(CoralError, match="results of something else: sae is"):
        collect_codes(tiny, questions, tmp_path / "codes", Encoding(make_sae(2, n_features=41)))


# ---------------------------------------------------------------------------------------------------------- effects


def two_questions(ablated: list[list[float]], features: list[int]) -> AblationScores:
    """Two questions of two options, answers 0 and 1; the reconstruction gets both right with confidence 0.8."""
    right, wrong = float(np.log(0.8)), float(np.log(0.2))
    before = np.array([right, wrong, wrong, right])
    ones = np.ones(4, dtype=np.int64)
    table = OptionTable(before, ones, ones, ones, np.array([0, 2, 4]), np.array([0, 1]))
    rows = np.log(np.array(ablated)) if ablated else np.zeros((0, 4))
    return AblationScores(("a", "b"), table, before, rows, np.array(features, dtype=np.int64))


def test_changes_are_those_worked_by_hand() -> None:
    """Feature 4 turns question b round; feature 9 makes both surer; feature 2 does nothing."""
    scores = two_questions([[0.8, 0.2, 0.7, 0.3], [0.9, 0.1, 0.1, 0.9], [0.8, 0.2, 0.2, 0.8]], [4, 9, 2])
    found = changes_of(scores, "sum", n_boot=20)
    np.testing.assert_allclose(found["accuracy"].values, [-0.5, 0.0, 0.0])
    # before: |1 - 0.8| = 0.2; feature 4: (|1 - 0.8| + |0 - 0.7|) / 2 = 0.45; feature 9: 0.1
    np.testing.assert_allclose(found["ece"].values, [0.25, -0.1, 0.0], atol=1e-12)
    np.testing.assert_allclose(found["brier"].values, [(0.98 - 0.08) / 2, 0.02 - 0.08, 0.0], atol=1e-12)
    report = effects(scores, {"correlation": [0, 1], "random": [2]}, "sum", n_boot=20)
    assert report["groups"]["correlation"]["ece"]["mean"]["value"] == pytest.approx(0.075)
    assert report["groups"]["correlation"]["ece"]["quartiles"] == pytest.approx([-0.0125, 0.075, 0.1625])
    assert report["groups"]["random"]["ece"]["unmoved"] == 1
    assert report["against random"]["correlation"]["accuracy"]["value"] == pytest.approx(-0.25)
    one = report["features"]["9"]["ece"]
    assert one["value"] == pytest.approx(-0.1)
    assert one["low"] <= one["value"] <= one["high"]


def test_questions_of_one_article_are_resampled_together() -> None:
    scores = two_questions([[0.8, 0.2, 0.7, 0.3]], [4])
    assert np.ptp(changes_of(scores, "sum", n_boot=20)["accuracy"].draws) > 0
    together = replace(scores, groups=("article", "article"))
    assert np.ptp(changes_of(together, "sum", n_boot=20)["accuracy"].draws) == 0


def test_chosen_features_are_placed_among_random_ones_by_hand() -> None:
    """Random features change by 0 to 100, chosen ones by 200, -5 and 50; no question adds noise of its own."""
    values = np.array([200.0, -5.0, 50.0, *range(101)])
    changes = Changes(values, np.tile(values[:, None], 400))
    found = compare(changes, range(3), range(3, 104))
    assert found["value"] == pytest.approx(245 / 3 - 50)
    assert (found["low_random"], found["high_random"]) == pytest.approx((2.5, 97.5))
    assert (found["above"], found["below"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["rank"] == pytest.approx((101 + 0 + 50.5) / 303)
    # the standard error of the mean of 101 random features is 29.2 / sqrt(101) = 2.9
    assert 4.5 < found["value"] - found["low"] < 7.0
    assert 4.5 < found["high"] - found["value"] < 7.0


def test_a_killed_ablation_goes_on_to_the_same_bytes(tmp_path: Path, tiny: Model) -> None:
    questions, what = toy_questions(30), Ablation(make_sae(1), feature_tensor([7, 3, DEAD]), "answer")
    whole = run_ablation(tiny, questions, tmp_path / "whole", what)
    calls: list[int] = []

    def stop(n: int) -> None:
        calls.append(n)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ablation(tiny, questions, tmp_path / "killed", what, progress=stop)
    again = run_ablation(tiny, questions, tmp_path / "killed", what)
    for name in ("journal.jsonl", "shard-00000.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    np.testing.assert_array_equal(again.ablated, whole.ablated)
    np.testing.assert_array_equal(whole.ablated[2], whole.reconstructed)
    asked = prepare(questions, Style(), tiny)
    plan = plan_for(asked.prompts, token_budget=300)
    base = {q: b for s in score(tiny, asked.prompts, plan) for q, b in by_question(s)}
    for i in range(30):
        rows = slice(whole.table.offsets[i], whole.table.offsets[i + 1])
        np.testing.assert_allclose(whole.table.logprobs[rows], base[i], atol=1e-4)


def by_question(scored: ScoredBatch) -> list[tuple[int, np.ndarray]]:
    edges = scored.batch.option_offsets
    return [(q, scored.logprobs[edges[i] : edges[i + 1]].numpy()) for i, q in enumerate(scored.batch.questions)]
