"""A model is frozen, knows its longest input, keeps the keys of prefixes, and applies its chat template as lm-eval does."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models.utils import resolve_max_length
from support.models import (
    PLAIN_FAMILIES,
    SIZES,
    TREE_FAMILIES,
    WINDOW,
    make_hflm,
    make_llama,
    make_model,
    make_tokenizer,
)

from coral_lens.engine.model import Model, max_length, wrap
from coral_lens.errors import CoralError


def test_a_model_prints_in_a_line_or_two(tiny: Model) -> None:
    assert re.fullmatch(
        r"<Model tiny-llama: llama, 3 layers of width 32, [\d,]+ weights in float32 on cpu, reads 256 tokens>",
        repr(tiny),
    )


def test_wrapping_leaves_a_model_as_it_is() -> None:
    hf = make_llama().train().requires_grad_(True)
    model = wrap(hf, make_tokenizer(), name="tiny")
    assert model.hf is hf
    assert all(module.training for module in hf.modules())
    assert all(p.requires_grad for p in hf.parameters())


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_the_longest_input_is_that_of_the_positions(family: str) -> None:
    assert make_model(family).max_length == SIZES["max_position_embeddings"] == 256


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_model_without_positions_reads_2048_tokens_as_in_lm_eval(family: str) -> None:
    model = make_model(family)
    assert model.max_length == make_hflm(model).max_length == 2048


@pytest.mark.parametrize(
    "config",
    [
        {"n_positions": 64, "max_position_embeddings": 128, "n_ctx": 32},
        {"max_position_embeddings": 128, "n_ctx": 32},
        {"max_position_embeddings": None, "n_ctx": 32},
        {},
    ],
)
@pytest.mark.parametrize("tokenizer", [{"model_max_length": 512}, {"model_max_length": int(1e30)}, {}])
def test_the_longest_input_is_found_by_the_rule_of_lm_eval(config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    names: tuple[Any, Any] = SimpleNamespace(**config), SimpleNamespace(**tokenizer)
    assert max_length(*names) == resolve_max_length(*names, default=2048)


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
