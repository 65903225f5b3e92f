"""The doctor finds a sound model sound, and says what is wrong with a broken one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.models import WINDOW_FAMILIES, make_llama, make_model, make_tokenizer, rewrapped, with_mask
from tokenizers import normalizers

from coral_lens.engine.architectures import Family
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.self_check import choose_packing, examine
from coral_lens.errors import CoralError

pytestmark = pytest.mark.usefixtures("one_thread")


def complaints(model: Model) -> dict[str, str]:
    return {finding.name: finding.text for finding in examine(model) if not finding.ok}


def said_of(model: Model) -> dict[str, str]:
    return {finding.name: finding.text for finding in examine(model)}


def test_every_family_is_sound(any_tiny: Model) -> None:
    assert complaints(any_tiny) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_family_is_sound_in_half_precision(any_tiny: Model, dtype: torch.dtype) -> None:
    half = wrap(deepcopy(any_tiny.hf).to(dtype), any_tiny.tokenizer, name="half")
    assert complaints(half) == {}


def test_a_family_that_takes_no_tree_is_sound_but_for_the_packing(plain_tiny: Model) -> None:
    said = complaints(plain_tiny)
    assert list(said) == ["packed against plain"]
    assert said["packed against plain"].startswith("refused")


def test_a_model_without_attention_has_no_output_projections() -> None:
    assert said_of(make_model("mamba"))["output projections"] == "none"


def test_a_wrong_layer_map_of_a_recurrent_model_is_found() -> None:
    model = make_model("mamba")
    broken = replace(model, blocks=tuple(model.blocks[i] for i in (1, 0, 2)))
    assert list(complaints(broken)) == ["packed against plain", "layer map"]


def test_the_embedded_model_is_sound(smollm2: Model) -> None:
    assert complaints(smollm2) == {}


def test_the_parts_are_named_as_the_model_names_them(tiny: Model) -> None:
    said = said_of(tiny)
    assert said["layers"] == "0 (embeddings) to 3, width 32, 4 heads"
    assert said["blocks"] == "model.layers.0 ... model.layers.2"
    assert said["final norm, head"] == "model.norm, lm_head"
    assert said["output projections"] == "model.layers.0.self_attn.o_proj ... model.layers.2.self_attn.o_proj"
    assert said["attention mask"] == "full"
    assert said["dtype, device"] == "float32, cpu"
    assert said["longest input"] == "256 tokens"


@pytest.mark.parametrize(("bos", "expected"), [(False, "not added by"), (True, "added by")])
def test_bos_is_reported_as_the_tokenizer_adds_it(bos: bool, expected: str) -> None:
    assert said_of(make_model("llama", bos=bos))["BOS"].startswith(expected)


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_a_mask_without_the_window_is_found(family: str) -> None:
    said = complaints(with_mask(make_model(family), "full"))
    assert list(said) == ["packed against plain"]
    assert "log-probs differ by" in said["packed against plain"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_without_the_window_is_found_in_half_precision(dtype: torch.dtype) -> None:
    model = make_model("mistral-window")
    half = wrap(model.hf.to(dtype), model.tokenizer, name="half")
    assert list(complaints(with_mask(half, "full"))) == ["packed against plain"]


def test_weights_that_are_not_finite_are_found() -> None:
    model = make_model("llama")
    model.hf.model.norm.weight[0] = float("nan")
    said = complaints(rewrapped(model))
    assert list(said) == ["scores and states"]
    assert "not finite" in said["scores and states"]


def test_a_mask_that_the_model_refuses_is_found(tiny: Model) -> None:
    said = complaints(with_mask(tiny, "by_layer"))
    assert list(said) == ["packed against plain"]
    assert said["packed against plain"].startswith("refused")


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (0, 1, 1)], ids=str)
def test_a_wrong_layer_map_is_found(tiny: Model, order: tuple[int, ...]) -> None:
    broken = replace(tiny, blocks=tuple(tiny.blocks[i] for i in order))
    assert list(complaints(broken)) == ["layer map"]


def test_a_wrong_final_norm_is_found() -> None:
    model = make_model("llama")
    model.hf.model.norm.weight *= 2
    model = rewrapped(model)
    other = model.hf.model.layers[0].input_layernorm
    assert list(complaints(replace(model, norm=other))) == ["layer map"]


def test_logits_that_the_model_scales_in_a_way_that_is_not_known_are_found_and_refused() -> None:
    model = make_model("granite")
    unlisted = replace(model, family=Family())
    assert list(complaints(unlisted)) == ["logits"]
    with pytest.raises(CoralError, match=r"'tiny-granite' \(model type 'granite'\) does not take its logits from its"):
        choose_packing(unlisted)
    assert choose_packing(model) == "tree"


def test_a_tokenizer_that_loses_text_is_found() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    said = complaints(wrap(make_llama(), tokenizer, name="lower"))
    assert list(said) == ["text round trip"]
    assert "became 'hello, wörld!" in said["text round trip"]
