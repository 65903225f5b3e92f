"""Shards are computed one into the next: the same bits as each by itself, and nothing goes on after the last is taken."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.questions import toy_questions

from coral_lens.engine import scoring
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import Extraction, PlannedQuestions, plan_questions
from coral_lens.engine.shard_work import compute_shard, compute_shards, count_questions, cut_shards

pytestmark = pytest.mark.usefixtures("two_threads")


def planned_shards(model: Model, *, neutral: bool = False) -> tuple[PlannedQuestions, list[Plan]]:
    extraction = Extraction(layers=(0, 2), token_budget=60, packing="tree", neutral=neutral)
    planned = plan_questions(model, toy_questions(24), extraction)
    shards = cut_shards(planned, 1500)
    assert len(shards) > 2
    assert min(len(shard.batches) for shard in shards[:-1]) > 1
    return planned, shards


@pytest.mark.parametrize("neutral", [False, True])
def test_shards_together_are_those_that_each_is_by_itself(tiny: Model, neutral: bool) -> None:
    planned, shards = planned_shards(tiny, neutral=neutral)
    told: list[int] = []
    together = list(compute_shards(planned, shards, told.append))
    assert sum(told) == sum(map(count_questions, shards)) == 24
    for shard, tensors in zip(shards, together, strict=True):
        alone = compute_shard(planned, shard, lambda _: None)
        assert list(alone) == list(tensors)
        assert ("neutral" in alone) == neutral
        assert all(torch.equal(alone[name], tensors[name]) for name in alone)


def test_batches_of_the_next_shard_are_computed_while_one_is_kept(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, shards = planned_shards(tiny)
    computed: list[int] = []
    usual = scoring.score_batch

    def counting(model: Model, batch: Any, **rest: Any) -> Any:
        computed.extend(batch.questions)
        return usual(model, batch, **rest)

    monkeypatch.setattr(scoring, "score_batch", counting)
    others = set(threading.enumerate())
    results = compute_shards(planned, shards, lambda _: None)
    next(results)
    later = {q for shard in shards[1:] for batch in shard.batches for q in batch.questions}
    deadline = time.monotonic() + 60
    while not later & set(computed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert later & set(computed)
    results.close()
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("coral")]
    assert len(computed) < 24, "what nobody takes is not computed"
