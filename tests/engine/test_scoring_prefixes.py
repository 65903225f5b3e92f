"""Caches of prefixes are computed once, kept by their size, and the last used stay longest."""

from __future__ import annotations

from typing import Any

import torch

from coral_lens.engine.model import PrefixCache
from coral_lens.engine.packing import plan_for
from coral_lens.engine.scoring import PrefixTable
from coral_lens.records import Prompt


def cache_of(n_bytes: int) -> PrefixCache:
    keys = torch.zeros(n_bytes // 2, dtype=torch.uint8)
    return PrefixCache([(keys, keys)], torch.zeros(1, 1))


def test_what_was_used_last_is_kept_within_the_bytes_and_the_very_last_always() -> None:
    table, computed = PrefixTable(100), []

    def get(*prefix: int, n_bytes: int = 40) -> None:
        def compute(company: Any) -> PrefixCache:
            computed.append(company[0])
            return cache_of(n_bytes)

        table.get((prefix,), compute)

    for prefix in ((1,), (2,), (1,), (3,), (1,), (2,)):
        get(*prefix)
    assert computed == [(1,), (2,), (3,), (2,)]  # 3 took the place of 2, which was used before 1
    assert table.n_bytes == 80
    get(4, n_bytes=1000)
    assert table.n_bytes == 1000
    get(5)
    assert table.n_bytes == 40


def test_the_longest_known_start_leaves_the_last_token_of_a_context() -> None:
    table = PrefixTable(1000)
    for company in (((1, 2),), ((1, 2, 3),), ((7,), (1, 2, 3, 4))):
        table.get(company, lambda _: cache_of(2))
    assert [table.longest(context) for context in ((1, 2, 3, 4, 5), (1, 2, 3), (1, 9), (1, 2))] == [3, 2, 0, 0]


def test_a_prompt_that_is_kept_has_its_prefix_even_alone_and_a_batch_has_one_prefix() -> None:
    def prompt(name: str, *context: int) -> Prompt:
        return Prompt(name, (context, context), ((1,), (2,)))

    prompts = [prompt("a", *range(100)), prompt("b", *range(50, 150)), prompt("c", *range(20))]
    plan = plan_for(prompts, token_budget=1024, kept=(64, 96, 0))
    assert [(batch.rows, batch.prefixes) for batch in plan.batches] == [
        (((0,),), (64,)),
        (((1,),), (96,)),
        (((2,),), (0,)),
    ]
    together = plan_for([prompts[0], prompt("d", *range(80), 7)], token_budget=1024, kept=(64, 64))
    assert [(batch.rows, batch.prefixes) for batch in together.batches] == [(((0, 1),), (64,))]
