"""Mixed and whole-number arithmetic: what the layers compute, which models take them, and which precision is chosen."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.models import FAMILIES, make_model, rewrapped
from support.plain_passes import logprobs_of, ragged_prompts, run
from torch import nn

from coral_lens.engine import precision as precision_module
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.precision import (
    Int8Linear,
    MixedLinear,
    WideEmbedding,
    choose_precision,
    make_int8,
    make_mixed,
    precision_of,
    recorded_precision,
    rounding,
    set_precision,
)
from coral_lens.engine.self_check import check_prompts, self_check
from coral_lens.errors import CoralError

TEXTS = [list(range(60, 100)), list(range(120, 150))]
OF_LINEAR_LAYERS = sorted(set(FAMILIES) - {"gpt2", "mamba", "bloom"})
"""Families of tiny models; GPT-2 has layers of its own kind, and the others take no trees."""


def converted(model: Model, precision: str) -> Model:
    hf = deepcopy(model.hf)
    set_precision(hf, precision, TEXTS)
    return rewrapped(Model(**{**vars(model), "hf": hf}))


# --------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_mixed_layer_rounds_its_factors_and_its_product_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, multiplies: bool
) -> None:
    monkeypatch.setattr(precision_module, "has_bfloat16", lambda: multiplies)
    torch.manual_seed(0)
    layer, states = nn.Linear(40, 7), torch.randn(3, 40)
    nn.init.normal_(layer.bias, std=100.0)
    weight = layer.weight.detach().to(torch.bfloat16)
    make_mixed(layer)
    product = (states.to(torch.bfloat16).double() @ weight.T.double()).to(torch.bfloat16).float()
    torch.testing.assert_close(layer(states), product + layer.bias, rtol=2**-7, atol=2**-9)
    assert layer(states).dtype == torch.float32
    assert layer.bias.dtype == torch.float32
    assert layer.weight.dtype == (torch.bfloat16 if multiplies else torch.float32)
    assert torch.equal(layer.weight.float(), weight.float())


def test_a_processor_without_bfloat16_multiplies_the_same_factors_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "has_bfloat16", lambda: False)
    torch.manual_seed(0)
    layer, states = nn.Linear(40, 7, bias=False), torch.randn(3, 40)
    weight = layer.weight.detach().to(torch.bfloat16).double()
    make_mixed(layer)
    wanted = (states.to(torch.bfloat16).double() @ weight.T).float()
    torch.testing.assert_close(layer(states), wanted, rtol=1e-5, atol=1e-6)


def test_a_layer_of_whole_numbers_worked_by_hand() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.tensor([[1.27, -0.5], [0.0, 2.0]]), requires_grad=False)
    make_int8(layer, torch.tensor([1.27, 2.0]))  # no column gives anything away
    assert layer.weight.tolist() == [[127, -50], [0, 127]]
    # the state has the unit 2 / 127: it becomes 64 (63.5), 127
    (found,) = layer(torch.tensor([[1.0, 2.0]]))
    unit = 2 / 127
    assert found.tolist() == pytest.approx([(64 * 127 - 127 * 50) * unit * 0.01, 127 * 127 * unit * 2 / 127], rel=1e-6)


def test_columns_in_which_states_are_large_give_half_of_their_size_to_the_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    states = torch.randn(200, 64)
    states[:, 3] *= 300.0  # without smoothing, all other columns would be rounded to a handful of whole numbers
    wanted = states @ weight.T

    def error(largest: torch.Tensor) -> float:
        layer = nn.Linear(64, 50, bias=False)
        layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
        make_int8(layer, largest)
        return float((layer(states) - wanted).norm())

    assert error(states.abs().amax(dim=0)) < 0.25 * error(weight.abs().amax(dim=0))


def test_a_state_of_zeros_gives_zeros() -> None:
    layer = nn.Linear(4, 3, bias=False)
    make_int8(layer, torch.ones(4))
    assert torch.equal(layer(torch.zeros(2, 4)), torch.zeros(2, 3))


# --------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("precision", ["mixed", "int8"])
@pytest.mark.parametrize("family", OF_LINEAR_LAYERS)
def test_every_family_scores_nearly_as_in_float32_and_its_trees_are_exact(family: str, precision: str) -> None:
    model = make_model(family)
    other, prompts = converted(model, precision), ragged_prompts()
    exact, found = (logprobs_of(run(m, prompts)) for m in (model, other))
    assert other.precision == precision
    assert other.dtype == torch.float32
    assert float(((found - exact) / exact).abs().max()) < (0.01 if precision == "mixed" else 0.05)
    assert not torch.equal(found, exact)
    assert self_check(other, check_prompts(other)).sound


@pytest.mark.parametrize("precision", ["mixed", "int8"])
def test_weights_that_embedding_and_head_share_stay_shared_and_states_begin_in_float32(precision: str) -> None:
    hf = make_model("llama").hf
    hf.lm_head.weight = hf.model.embed_tokens.weight
    set_precision(hf, precision, TEXTS)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert type(hf.model.embed_tokens) is WideEmbedding
    assert hf.model.embed_tokens(torch.tensor([1])).dtype == torch.float32
    kinds = {type(m) for m in hf.base_model.modules() if isinstance(m, nn.Linear)}
    assert kinds == {MixedLinear if precision == "mixed" else Int8Linear}
    assert {p.dtype for n, p in hf.named_parameters() if "norm" in n} == {torch.float32}


def test_an_embedding_that_scales_keeps_its_own_weights() -> None:
    hf = make_model("gemma3").hf
    hf.lm_head.weight = hf.model.embed_tokens.weight
    before = hf.model.embed_tokens(torch.tensor([3, 4]))
    set_precision(hf, "mixed", TEXTS)
    assert torch.equal(hf.model.embed_tokens(torch.tensor([3, 4])), before)
    assert torch.equal(hf.lm_head.weight.float(), hf.lm_head.weight.to(torch.bfloat16).float())
    assert not torch.equal(hf.lm_head.weight.float(), hf.model.embed_tokens.weight)


def test_a_model_of_other_layers_is_refused() -> None:
    with pytest.raises(CoralError, match="GPT2LMHeadModel is not made of linear layers that compute in mixed; use bfl"):
        set_precision(make_model("gpt2").hf, "mixed", TEXTS)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed", "int8"])
def test_a_model_has_one_fingerprint_and_one_name_for_its_precision_in_all_records(
    precision: str, tmp_path: Path
) -> None:
    model = make_model("llama")
    model.hf.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=precision)
    assert loaded.fingerprint == model.fingerprint
    assert precision_of(loaded.hf) == precision
    assert recorded_precision({"dtype": loaded.precision_record}, device="cpu") == precision
    assert f"weights in {precision} on cpu" in repr(loaded)
    loaded.verify()
    run(loaded, ragged_prompts())


def test_converted_weights_that_are_changed_are_refused(tmp_path: Path) -> None:
    model = converted(make_model("llama"), "int8")
    model.hf.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.hf.model.layers[0].mlp.up_proj.weight.data = model.hf.model.layers[0].mlp.up_proj.weight.data.clone()
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        run(model, ragged_prompts())


def test_precisions_round_their_factors_by_known_amounts() -> None:
    assert [rounding(p) for p in ("float32", "bfloat16", "mixed", "int8")] == [2**-23, 2**-7, 2**-7, 1 / 127]


@pytest.mark.parametrize(
    ("record", "device", "wanted"),
    [
        ({"dtype": "torch.float32"}, "cpu", "float32"),
        ({"dtype": "mixed"}, "cpu", "mixed"),
        ({"dtype": "mixed"}, "cuda:1", None),
        ({"dtype": "torch.bfloat16"}, "cuda", "bfloat16"),
        ({"dtype": "torch.float8"}, "cpu", None),
        ({}, None, None),
    ],
)
def test_a_recorded_precision_is_taken_where_it_exists(
    record: dict[str, str], device: str | None, wanted: str | None
) -> None:
    assert recorded_precision(record, device=device) == wanted


# ---------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(("gain", "wanted"), [(1.49, "float32"), (1.5, "mixed")])
def test_mixed_is_chosen_where_it_is_half_as_fast_again_and_timed_once(
    gain: float, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path))
    monkeypatch.setattr(precision_module, "SMALLEST", 0)
    monkeypatch.setattr(precision_module, "gain_of_mixed", lambda shapes: timed.append(shapes) or gain)
    hf = make_model("llama").hf
    assert [choose_precision(hf), choose_precision(hf)] == [wanted] * 2
    assert timed == [[(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]]


def test_tiny_models_and_those_of_other_layers_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "gain_of_mixed", lambda _: pytest.fail("was timed"))
    assert choose_precision(make_model("llama").hf) == "float32"
    monkeypatch.setattr(precision_module, "SMALLEST", 0)
    assert choose_precision(make_model("gpt2").hf) == "float32"


def test_the_gain_is_a_positive_number() -> None:
    assert precision_module.gain_of_mixed([(64, 32), (32, 64)]) > 0
