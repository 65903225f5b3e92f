"""Fused norms and gates give what transformers gives, and are gone afterwards."""

from __future__ import annotations

import pytest
import torch
from support.models import FAMILIES, make_model
from transformers import PreTrainedModel

from coral_lens.engine._kernels import fused, substitute
from coral_lens.engine.architectures import family_of


def block_list(hf: PreTrainedModel) -> str:
    """The name of the list of blocks."""
    n = hf.config.get_text_config().num_hidden_layers
    return next(k for k, m in hf.base_model.named_children() if isinstance(m, torch.nn.ModuleList) and len(m) == n)


def changed(hf: PreTrainedModel) -> list[str]:
    return [name for name, module in hf.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_module_gives_what_it_gave(name: str) -> None:
    hf = make_model(name).hf
    torch.manual_seed(0)
    known = [module for module in hf.modules() if substitute(module) is not None]
    family = family_of(hf.config.model_type)
    expected = {name for name in (family.rms_norm, family.gated_mlp) if name is not None}
    assert {type(module).__name__ for module in known} == expected
    for module in known:
        width = module.weight.shape[0] if hasattr(module, "weight") else module.gate_proj.in_features
        states = 10 * torch.randn(2, 7, width)
        if hasattr(module, "weight"):
            torch.nn.init.normal_(module.weight)
        given = states.clone()
        with torch.inference_mode():
            wanted = module(states)
            with fused(hf):
                assert "forward" in vars(module)
                torch.testing.assert_close(module(states), wanted)
        assert torch.equal(states, given)
    assert not changed(hf)


def test_all_is_as_before_after_an_error() -> None:
    hf = make_model("llama").hf
    with fused(hf):
        assert len(changed(hf)) == 3 * 3 + 1
    with pytest.raises(RuntimeError, match="stop"), fused(hf):
        raise RuntimeError("stop")
    assert not changed(hf)


def test_float16_and_modules_that_others_changed_are_left_alone() -> None:
    hf = make_model("llama").hf
    norm = hf.model.norm
    norm.forward = own = norm.forward
    with fused(hf):
        assert vars(norm)["forward"] is own
    assert vars(norm)["forward"] is own
    hf.to(torch.float16)
    with fused(hf):
        assert changed(hf) == ["model.norm"]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mamba"}))  # which keeps its stream in float32 by itself
def test_in_bfloat16_the_stream_of_families_with_known_norms_is_float32(name: str) -> None:
    hf = make_model(name).hf.to(torch.bfloat16)
    seen: list[torch.dtype] = []
    for block in hf.base_model.get_submodule(block_list(hf)).children():
        block.register_forward_hook(lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out).dtype))
    with torch.inference_mode(), fused(hf):
        final = hf.base_model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
    known = family_of(hf.config.model_type).rms_norm is not None
    assert set(seen) == {torch.float32 if known else torch.bfloat16}
    assert final.dtype == torch.bfloat16


def test_in_bfloat16_a_norm_rounds_once_at_its_end() -> None:
    hf = make_model("llama").hf
    states = torch.randn(4, 32)
    torch.nn.init.normal_(hf.model.norm.weight)
    rounded = hf.model.norm.weight.detach().to(torch.bfloat16)
    hf.model.norm.weight.data = rounded.float()
    with torch.inference_mode(), fused(hf):
        wanted = hf.model.norm(states).to(torch.bfloat16)
    hf.to(torch.bfloat16)
    with torch.inference_mode(), fused(hf):
        assert torch.equal(hf.model.norm(states), wanted)


def test_another_activation_is_left_alone() -> None:
    mlp = make_model("llama").hf.model.layers[0].mlp
    assert substitute(mlp) is not None
    mlp.act_fn = torch.nn.GELU()
    assert substitute(mlp) is None
