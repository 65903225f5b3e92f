"""Flex attention gives what dense masks give, for every family, and is left where it fails.

Where there is no GPU it runs uncompiled: the arithmetic and the masks are those of the compiled kernel, its speed is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.models import FAMILIES, make_model

from coral_lens.engine import _flex, self_check
from coral_lens.engine.batches import lay_out
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import PrefixCaches, ScoredBatch, score_batch
from coral_lens.records import Prompt

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
WITH_TREES = sorted(name for name, tiny in FAMILIES.items() if tiny.takes_tree and name != "gpt2")
"""GPT-2 looks at its mask before it hands it on, and knows dense ones only."""
SHARED = tuple(range(60, 110))
PROMPTS = [Prompt(f"q{i}", ((*SHARED, *range(i, i + 5)),) * 2, ((7, i), (9, 10, i))) for i in range(6)]
PROMPTS += [Prompt(f"p{i}", ((100 + i, *range(20 + i)),) * 2, ((1, 2), (3,))) for i in range(4)]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take flex attention for the CPU too, uncompiled."""
    monkeypatch.setattr(_flex, "DEVICES", ("cpu",))
    with torch.compiler.set_stance("force_eager"):
        yield


def without_blocks(name: str) -> Model:
    model = make_model(name)
    return replace(model, family=replace(model.family, in_blocks=False))


def scored(model: Model) -> list[ScoredBatch]:
    """Scores of rows with a shared prefix and of rows without, each laid out as the model likes it best."""
    batches = [lay_out(PROMPTS, p, joined=model.joins_rows) for p in plan_for(PROMPTS, token_budget=200).batches]
    assert any(batch.prefixes for batch in batches)
    assert any(not batch.prefixes for batch in batches)
    reader = PooledResidual((0, model.n_layers))
    return [score_batch(model, batch, readers=[reader], prefixes=PrefixCaches(model)) for batch in batches]


@pytest.mark.parametrize("family", WITH_TREES)
def test_every_family_scores_alike_with_flex_attention_and_with_dense_masks(
    family: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model, calls = without_blocks(family), 0
    dense, before = scored(model), model.hf.config.get_text_config()._attn_implementation
    assert not model.joins_rows
    request.getfixturevalue("on_the_cpu")
    make = _flex.block_mask

    def counted(allowed: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        return make(allowed)

    monkeypatch.setattr(_flex, "block_mask", counted)
    assert model.joins_rows
    flexible = scored(model)
    assert calls >= len(flexible)
    for one, other in zip(dense, flexible, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.readings, other.readings)
    assert model.hf.config.get_text_config()._attn_implementation == before, "the model is as it was"


def test_squares_in_which_nothing_is_seen_are_left_out() -> None:
    allowed = torch.block_diag(*[torch.ones(128, 128).tril()] * 4).bool()[None]
    mask = _flex.block_mask(allowed)
    assert mask.sparsity() == 75.0, "of sixteen squares, the four of the diagonal are computed"


def test_a_gpu_takes_it_and_the_cpu_does_not() -> None:
    hf = make_model("llama").hf
    assert _flex.works_with(hf, torch.device("cuda", 1))
    assert not _flex.works_with(hf, torch.device("cpu"))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_family_that_knows_dense_masks_only_keeps_them() -> None:
    assert not make_model("gpt2").attends_flexibly


@pytest.mark.usefixtures("on_the_cpu")
def test_where_it_cannot_be_compiled_trees_have_dense_masks_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(allowed: torch.Tensor) -> object:
        raise NotImplementedError("no compiler")

    model = without_blocks("llama")
    monkeypatch.setattr(_flex, "block_mask", broken)
    with pytest.warns(UserWarning, match=r"flex attention is not used.*NotImplementedError"):
        assert self_check.packing_of(model) == "tree"
    assert not model.attends_flexibly
    assert len(scored(model)) > 1
