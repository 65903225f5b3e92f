"""Choose how many tokens go into a batch: timed once per model and machine while that is idle, and kept in the cache.

The choice changes speed, and the last bits of results; a store therefore records its budget and never asks here again. A
budget that the user sets is not looked at either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from coral_lens.engine._machine import is_busy, is_tiny, keep, record_path
from coral_lens.engine.packing import plan_for
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.records import Prompt
from coral_lens.storage.files import kept_record

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


BUDGETS = (512, TOKEN_BUDGET, 2048, 4096)
GAIN = 1.05
"""How much faster than the default a budget must be: less than this is what machines waver by."""
ROUNDS = 3
SECONDS = 10.0
"""A model so slow that the timing would take longer keeps the default."""
WORTH_TIMING = 64
"""Fewer questions are scored in less time than the timing takes."""

Timer = Callable[["Model", Sequence[Prompt], int], float]
"""Returns the seconds that scoring the prompts takes at a token budget."""


def choose_budget(model: Model, n_questions: int, *, timer: Timer | None = None) -> int:
    """Return the token budget for a model on this machine: the one kept in the cache, else the one found by timing.

    Few questions are not worth the timing, and beside other work it would say nothing: both get the default.
    """
    if is_tiny(model):
        return TOKEN_BUDGET
    path = record_path(model, "budgets")
    kept = (kept_record(path) or {}).get("token_budget")
    if kept in BUDGETS:
        return kept
    if n_questions < WORTH_TIMING or is_busy():
        return TOKEN_BUDGET
    times = measure(model, timer or seconds)
    budget = fastest(times)
    keep(path, {"token_budget": budget, "seconds": {str(b): statistics.median(s) for b, s in times.items()}})
    return budget


def measure(model: Model, timer: Timer) -> Mapping[int, Sequence[float]]:
    """Time the budgets in turns on the same made-up prompts; only the default's single time where that takes too long."""
    few, many = made_up(model, 256), made_up(model, max(BUDGETS))
    timer(model, few, TOKEN_BUDGET)  # the first pass of a process is slow
    first = timer(model, few, TOKEN_BUDGET)
    if first * max(BUDGETS) / 256 * len(BUDGETS) > SECONDS:
        return {TOKEN_BUDGET: [first]}
    times: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for budget in BUDGETS:
            times[budget].append(timer(model, many, budget))
        if time.perf_counter() - start > SECONDS:
            break
    return times


def fastest(times: Mapping[int, Sequence[float]]) -> int:
    """Return the budget with the shortest median time if it beats the default in every round and by enough, else that."""
    best = min(times, key=lambda budget: statistics.median(times[budget]))
    gains = [usual / own for usual, own in zip(times[TOKEN_BUDGET], times[best], strict=True)]
    return best if statistics.median(gains) > GAIN and min(gains) > 1 else TOKEN_BUDGET


def made_up(model: Model, n_tokens: int) -> list[Prompt]:
    """Return prompts of 48 context tokens and four options of 4, each beginning with a token of its own."""
    vocabulary = int(model.hf.config.get_text_config().vocab_size)
    prompts = []
    for i in range(max(1, n_tokens // 64)):
        context = tuple((i * 64 + j) % vocabulary for j in range(48))
        options = tuple(tuple((i * 64 + 48 + 4 * o + j) % vocabulary for j in range(4)) for o in range(4))
        prompts.append(Prompt(f"made up {i}", (context,) * 4, options))
    return prompts


def seconds(model: Model, prompts: Sequence[Prompt], budget: int) -> float:
    """Score prompts and return how long it takes."""
    plan = plan_for(prompts, token_budget=budget)
    start = time.perf_counter()
    for _ in score(model, prompts, plan):
        pass
    return time.perf_counter() - start
