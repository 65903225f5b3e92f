"""The parts of models are found by structure, and what cannot be used is refused in a sentence."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import FAMILIES, make_llama, make_model, make_tokenizer, paths_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from coral_lens.engine import architectures
from coral_lens.engine.architectures import FAMILIES as FAMILY_RECORDS
from coral_lens.engine.architectures import Family, family_of
from coral_lens.engine.model import wrap
from coral_lens.errors import CoralError


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_every_family_are_found(family: str) -> None:
    model = make_model(family)
    part, paths = model.hf.get_submodule, paths_of(model.hf)
    assert model.blocks == tuple(part(paths.blocks))
    assert model.norm is part(paths.norm)
    assert model.head is model.hf.lm_head
    blocks = part(paths.blocks) if paths.projection else ()
    assert model.projections == tuple(block.get_submodule(str(paths.projection)) for block in blocks)
    assert (model.n_layers, model.width) == (3, 32)


FORMS = {
    "llama": "full",
    "gpt2": "full",
    "gpt_neox": "full",
    "mistral": "sliding",
    "mistral-window": "sliding",
    "phi3": "sliding",
    "phi3-longrope": "sliding",
    "qwen2": "by_layer",
    "qwen3": "by_layer",
    "gemma2": "by_layer",
    "gemma3": "by_layer",
    "bloom": "full",
    "mamba": "full",
}


@pytest.mark.parametrize(("family", "form"), FORMS.items())
def test_each_family_has_its_form_of_mask(family: str, form: str) -> None:
    assert make_model(family).mask_form == form


def test_no_other_file_names_a_family() -> None:
    engine = Path(architectures.__file__).parent
    words = {name for family in FAMILY_RECORDS.values() for name in (family.rms_norm, family.gated_mlp)}
    words |= {*FAMILY_RECORDS, "mpt", "mamba", "gemma"}
    for path in sorted(engine.parent.rglob("*.py")):
        texts = {n.value for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant)}
        assert path.name == "architectures.py" or not texts & (words - {None}), path


def test_a_family_that_is_not_listed_has_safe_defaults() -> None:
    assert family_of("mamba") == family_of("never heard of") == Family()
    assert not Family().takes_gaps
    assert not Family().in_blocks


def test_a_generation_of_gemma_that_is_not_listed_needs_bos_too() -> None:
    assert family_of("gemma9") == Family(needs_bos=True)
    assert family_of("gemma2").needs_bos


def tiny_opt() -> PreTrainedModel:
    """Its blocks lie one module deeper than is looked for."""
    size = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    return OPTForCausalLM(OPTConfig(**size, num_hidden_layers=2, num_attention_heads=2, vocab_size=258))


def tiny_bert(kind: Callable[[BertConfig], PreTrainedModel]) -> PreTrainedModel:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(BertConfig(**size, vocab_size=258))


@pytest.mark.parametrize(
    ("make", "architecture", "looked_for"),
    [
        (tiny_opt, "OPTForCausalLM", ["one list of 2 blocks", "a final norm named norm"]),
        (lambda: tiny_bert(BertForMaskedLM), "BertForMaskedLM", ["one list of 2 blocks", "a final norm named norm"]),
        (lambda: tiny_bert(BertModel), "BertModel", ["an output embedding"]),
    ],
)
def test_an_unknown_architecture_is_told_what_was_looked_for(
    make: Callable[[], PreTrainedModel], architecture: str, looked_for: list[str]
) -> None:
    with pytest.raises(CoralError) as error:
        wrap(make(), make_tokenizer(), name="other")
    assert f"The architecture {architecture}" in str(error.value)
    for part in looked_for:
        assert part in str(error.value)


def test_a_model_that_lacks_one_projection_has_none() -> None:
    hf = make_llama()
    attention = hf.model.layers[1].self_attn
    attention.mix, attention.o_proj = attention.o_proj, None
    assert wrap(hf, make_tokenizer(), name="odd").projections == ()
