"""The parts of models are found by structure, and what cannot be used is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.models import FAMILIES, PLAIN_FAMILIES, SIZES, WINDOW, make_hflm, make_model, make_tokenizer, paths_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from coral_lens.engine.architectures import Model, wrap
from coral_lens.errors import CoralError

# ----------------------------------------------------------------------------------------------------------- parts


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PLAIN_FAMILIES])
def test_the_longest_input_is_that_of_the_positions(family: str) -> None:
    assert make_model(family).max_length == SIZES["max_position_embeddings"] == 256


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_model_without_positions_reads_2048_tokens_as_in_lm_eval(family: str) -> None:
    model = make_model(family)
    assert model.max_length == make_hflm(model).max_length == 2048


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


def test_a_wrapped_model_is_frozen_and_in_evaluation_mode() -> None:
    hf = FAMILIES["llama"]().train()
    model = wrap(hf, make_tokenizer(), name="tiny")
    assert not model.hf.training
    assert not any(p.requires_grad for p in model.hf.parameters())


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
    hf = FAMILIES["llama"]()
    attention = hf.model.layers[1].self_attn
    attention.mix, attention.o_proj = attention.o_proj, None
    assert wrap(hf, make_tokenizer(), name="odd").projections == ()


# ------------------------------------------------------------------------------------------------- cached prefixes


def test_a_prefix_keeps_all_its_keys_also_in_layers_with_a_window(any_tiny: Model) -> None:
    long, short = tuple(range(3 * WINDOW)), (7, 8)
    cache = any_tiny.prefill([long, short])
    assert len(cache.layers) == 3
    for keys, values in cache.layers:
        assert keys.shape[0] == values.shape[0] == 2
        assert keys.shape[2] == values.shape[2] == len(long)
    assert cache.positions.tolist() == [list(range(len(long)))] * 2


def test_rows_take_the_keys_of_their_prefixes_cut_to_the_longest(tiny: Model) -> None:
    cache = tiny.prefill([(1, 2, 3), (4, 5)])
    mixed, same = cache.for_rows([1, 0, 1], 2), cache.for_rows([1, 1], 3)
    assert mixed.positions.tolist() == [[0, 1]] * 3
    for whole, some, both in zip(cache.layers, mixed.layers, same.layers, strict=True):
        for states, of_rows, of_one in zip(whole, some, both, strict=True):
            assert torch.equal(of_rows, torch.stack([states[i, :, :2] for i in (1, 0, 1)]))
            assert torch.equal(of_one, torch.stack([states[1]] * 2))
            assert of_one.data_ptr() == states[1].data_ptr(), "rows of one prefix need no copies"


def test_reading_a_cache_leaves_it_as_it_was(tiny: Model) -> None:
    cache = tiny.prefill([(1, 2, 3)])
    before = [(keys.clone(), values.clone()) for keys, values in cache.layers]
    tokens, allowed = torch.tensor([[4, 5]]), torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]).bool()
    for _ in range(2):
        tiny.tree_body(tokens, torch.tensor([[3, 4]]), allowed, cache)
    for (keys, values), (old_keys, old_values) in zip(cache.layers, before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


# ------------------------------------------------------------------------------------------------------------ chat

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def chat_model(template: str | None) -> Model:
    model = make_model("llama")
    model.tokenizer.chat_template = template
    return model


def test_a_model_without_a_chat_template_is_told_so(tiny: Model) -> None:
    with pytest.raises(CoralError, match=r"'tiny-llama' has no chat template; leave --apply-chat-template out"):
        tiny.chat_template(MESSAGES)


@pytest.mark.parametrize("template", [TURNS, NO_SYSTEM + TURNS])
def test_the_chat_template_is_applied_as_lm_eval_applies_it(template: str) -> None:
    model = chat_model(template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    assert model.chat_template(MESSAGES) == make_hflm(model).apply_chat_template(MESSAGES)


def test_a_template_without_a_system_role_drops_the_system_message() -> None:
    assert chat_model(TURNS).chat_template(MESSAGES) == "<system>Be brief.<user>Hello"
    assert chat_model(NO_SYSTEM + TURNS).chat_template(MESSAGES) == "<user>Hello"


def test_the_last_message_is_left_open_where_no_answer_is_asked_for() -> None:
    model = chat_model(TURNS + "</s>")
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I think"}]
    assert model.chat_template(history, add_generation_prompt=False) == "<user>Hello<assistant>I think"
