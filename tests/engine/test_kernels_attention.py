"""Attention block by block gives what a dense mask gives, and only where it is meant to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.models import FAMILIES, make_model
from torch import Tensor

from coral_lens.engine._kernels import NAME, STEP, attend, attend_grouped, block_attention, cut_blocks
from coral_lens.engine.architectures import family_of
from coral_lens.engine.batches import lay_out
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import PrefixCaches, score_batch
from coral_lens.records import Prompt


def tree_mask(n: int, trunk: int, past: int) -> Tensor:
    """A causal trunk and two branches that do not see each other, after a prefix that all see."""
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    middle = (trunk + n) // 2
    mask[middle:, trunk:middle] = False
    return torch.cat([torch.ones(n, past, dtype=torch.bool), mask], dim=1)


@pytest.mark.parametrize("past", [0, 11])
@pytest.mark.parametrize("sizes", [(5,), (3, STEP, 2 * STEP + 9), (1, 1)])
def test_blocks_give_what_the_dense_mask_gives(sizes: tuple[int, ...], past: int) -> None:
    torch.manual_seed(0)
    width, edges = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    allowed = torch.zeros(width, past + width, dtype=torch.bool)
    for start, stop in pairwise(edges):
        part = tree_mask(stop - start, (stop - start) // 2, past)
        allowed[start:stop, :past] = part[:, :past]
        allowed[start:stop, past + start : past + stop] = part[:, past:]
    query = torch.randn(1, 6, width, 8)
    key, value = torch.randn(1, 2, past + width, 8), torch.randn(1, 2, past + width, 8)
    blocks = cut_blocks(allowed, list(pairwise(edges)))
    found, _ = attend(None, query, key, value, None, scaling=0.3, blocks=blocks)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed[None, None], scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("masked", [True, False])
def test_heads_that_share_keys_attend_with_one_token_as_if_each_had_its_own(
    heads: tuple[int, int], masked: bool
) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(3, heads[0], 1, 8), torch.randn(2, 3, heads[1], 11, 8)
    mask = torch.rand(3, 1, 1, 11) > 0.4 if masked else None
    found, _ = attend_grouped(None, query, key, value, mask, scaling=0.3)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_masks_cover_only_the_keys_that_some_query_does_not_see() -> None:
    (block,) = cut_blocks(torch.ones(3 * STEP, 3 * STEP, dtype=torch.bool).tril(), [(0, 3 * STEP)])
    # a query sees itself and all before it, so that the first column of its own piece is seen by all
    assert [tuple(piece.mask.shape) for piece in block.pieces] == [(STEP, STEP - 1)] * 3


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_only_listed_families_without_a_window_attend_in_blocks(family: str) -> None:
    model = make_model(family)
    window = getattr(model.hf.config, "sliding_window", None)
    assert model.attends_in_blocks == (family_of(model.hf.config.model_type).in_blocks and window is None)


def test_bfloat16_attends_in_blocks_and_float16_as_ever() -> None:
    model = make_model("llama")
    model.hf.to(torch.bfloat16)
    assert model.attends_in_blocks
    model.hf.to(torch.float16)
    assert not model.attends_in_blocks


def test_in_bfloat16_the_sums_of_attention_are_those_of_float32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8).to(torch.bfloat16) for _ in range(3))
    blocks = cut_blocks(torch.ones(9, 9, dtype=torch.bool).tril(), [(0, 9)])
    half, _ = attend(None, query, key, value, None, scaling=0.3, blocks=blocks)
    full, _ = attend(None, query.float(), key.float(), value.float(), None, scaling=0.3, blocks=blocks)
    assert torch.equal(half, full.to(torch.bfloat16))


def test_one_row_and_padded_rows_score_alike(any_tiny: Model) -> None:
    shared = tuple(range(60, 110))
    prompts = [Prompt(f"q{i}", ((*shared, *range(i, i + 5)),) * 2, ((7, i), (9, 10, i))) for i in range(6)]
    prompts += [Prompt(f"p{i}", ((100 + i, *range(20 + i)),) * 2, ((1, 2), (3,))) for i in range(4)]
    for planned in plan_for(prompts, token_budget=200).batches:
        scored = []
        for joined in (False, True):
            batch = lay_out(prompts, planned, joined=joined)
            assert bool(batch.blocks) == joined
            assert not joined or int(batch.lengths.sum()) == batch.input_ids.numel()
            scored.append(
                score_batch(any_tiny, batch, readers=[PooledResidual((0, 2))], prefixes=PrefixCaches(any_tiny))
            )
        torch.testing.assert_close(scored[0].logprobs, scored[1].logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scored[0].readings, scored[1].readings)


def test_the_model_attends_as_before_also_after_an_error() -> None:
    hf = make_model("llama").hf
    with block_attention(hf):
        assert hf.config._attn_implementation == NAME
    assert hf.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="stop"), block_attention(hf):
        raise RuntimeError("stop")
    assert hf.config._attn_implementation == "sdpa"
