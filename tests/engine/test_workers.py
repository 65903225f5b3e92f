"""Batches side by side: the same bits whatever the number of threads, and nothing of the given model is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models import cast_weights, make_model
from support.plain_passes import draw_ids, hook_counts, ragged_prompts

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine import scoring
from coral_lens.engine._workers import n_workers, side_by_side, twins_of
from coral_lens.engine.batches import Batch
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model, PrefixCache, wrap
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import ScoredBatch, companies, score
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

BUDGET = 60


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def scored(model: Model, prompts: list[Prompt], n_threads: int, budget: int = BUDGET) -> list[ScoredBatch]:
    torch.set_num_threads(n_threads)
    plan = plan_for(prompts, token_budget=budget)
    return list(score(model, prompts, plan, readers=[PooledResidual((0, model.n_layers))]))


def assert_same_bits(one: list[ScoredBatch], other: list[ScoredBatch]) -> None:
    assert [b.batch.questions for b in one] == [b.batch.questions for b in other]
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.logprobs, b.logprobs)
        assert all(torch.equal(a.readings[name], b.readings[name]) for name in a.readings)


def with_prefixes() -> list[Prompt]:
    """Questions after three prefixes, some batches with two of them."""
    prompts = []
    for i in range(45):
        shots = draw_ids(40 + i // 15, 300 + i // 15)
        prompts.append(Prompt(f"q{i}", ((*shots, *draw_ids(30, i)),) * 2, ((5, i), (6, 7, i))))
    return prompts


class Threads:
    """Notes how many threads compute where it reads."""

    sites = (Site("residual", 1),)

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def fresh(self) -> Threads:
        return Threads(self.seen)

    def read(self, site: Site, states: torch.Tensor, batch: Batch) -> None:
        self.seen.append(torch.get_num_threads())

    def take(self) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("n_threads", [2, 3, 64])
def test_the_number_of_threads_changes_no_bit_and_no_order(tiny: Model, n_threads: int) -> None:
    prompts = [*ragged_prompts(), *with_prefixes()]
    assert_same_bits(scored(tiny, prompts, n_threads), scored(tiny, prompts, 1))


def test_nor_does_it_with_the_real_model(smollm2: Model) -> None:
    questions = load_questions("arc_easy:validation", TaskOptions(limit=8))
    prompts = list(prepare(questions, Style(), smollm2).prompts)
    assert_same_bits(scored(smollm2, prompts, 2, budget=200), scored(smollm2, prompts, 1, budget=200))


def test_every_batch_has_one_thread_but_one_that_is_alone_and_wanted_soon(tiny: Model) -> None:
    prompts, seen = [Prompt(f"q{i}", ((1, 2, i),) * 2, ((4, i), (5,))) for i in range(20)], list[int]()
    torch.set_num_threads(2)
    for budget, divide, wanted in ((BUDGET, False, 1), (BUDGET, True, 1), (10_000, False, 1), (10_000, True, 2)):
        list(score(tiny, prompts, plan_for(prompts, token_budget=budget), readers=[Threads(seen)], divide=divide))
        assert set(seen) == {wanted}
        seen.clear()
    assert torch.get_num_threads() == 2


def test_prefixes_are_computed_once_in_the_same_company_as_on_one_thread(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[tuple[int, ...], ...]] = []
    prefill = Model.prefill

    def noting(self: Model, prefixes: tuple[tuple[int, ...], ...], *, last: int | None = None) -> PrefixCache:
        computed.append(prefixes)
        return prefill(self, prefixes, last=last)

    monkeypatch.setattr(Model, "prefill", noting)
    prompts = with_prefixes()
    one = scored(tiny, prompts, 1)
    alone, wanted = list(computed), companies(prompts, plan_for(prompts, token_budget=BUDGET))
    computed.clear()
    assert_same_bits(scored(tiny, prompts, 2), one)
    assert sorted(computed) == sorted(alone) == sorted(set(wanted))
    assert len(wanted) > len(set(wanted)) > 1


def test_hooks_are_on_twins_only_and_weights_are_shared(tiny: Model) -> None:
    before, seen = hook_counts(tiny), list[object]()

    class Watching(Threads):
        def fresh(self) -> Watching:
            return Watching(self.seen)

        def read(self, site: Site, states: torch.Tensor, batch: Batch) -> None:
            seen.append(hook_counts(tiny) == before)

    torch.set_num_threads(2)
    prompts = ragged_prompts()
    list(score(tiny, prompts, plan_for(prompts, token_budget=BUDGET), readers=[Watching([])]))
    assert seen == [True] * len(plan_for(prompts, token_budget=BUDGET).batches)
    twins = twins_of(tiny, 2)
    assert twins_of(tiny, 2)[1].hf is twins[1].hf
    for twin in twins:
        assert twin.hf is not tiny.hf
        pairs = zip(twin.hf.parameters(), tiny.hf.parameters(), strict=True)
        assert all(a is b for a, b in pairs)


def test_an_error_in_a_batch_reaches_the_caller_and_leaves_nothing_behind(tiny: Model) -> None:
    class Failing(Threads):
        def fresh(self) -> Failing:
            return Failing(self.seen)

        def read(self, site: Site, states: torch.Tensor, batch: Batch) -> None:
            raise RuntimeError("stop")

    torch.set_num_threads(2)
    before, prompts = hook_counts(tiny), ragged_prompts()
    with pytest.raises(RuntimeError, match="stop"):
        list(score(tiny, prompts, plan_for(prompts, token_budget=BUDGET), readers=[Failing([])]))
    assert hook_counts(tiny) == before
    assert torch.get_num_threads() == 2
    assert_same_bits(scored(tiny, prompts, 2), scored(tiny, prompts, 1))


def test_who_asks_for_no_more_gets_no_more(tiny: Model) -> None:
    seen: list[int] = []
    torch.set_num_threads(2)
    prompts = ragged_prompts() * 5
    plan = plan_for(prompts, token_budget=30)
    results = score(tiny, prompts, plan, readers=[Threads(seen)])
    next(results)
    results.close()
    assert 1 <= len(seen) <= 6 < len(plan.batches)
    assert torch.get_num_threads() == 2


def test_a_question_that_is_not_finite_is_named_whichever_thread_meets_it() -> None:
    model = make_model("llama")
    model.hf.model.embed_tokens.weight.data[200] = float("nan")
    model = wrap(model.hf, model.tokenizer, name="broken")
    prompts = [Prompt(f"q{i}", ((1, 2, 200 if i == 7 else 3),) * 2, ((4, i), (5,))) for i in range(12)]
    torch.set_num_threads(2)
    broken: list[int] = []
    plan = plan_for(prompts, token_budget=20)
    done = [q for b in score(model, prompts, plan, on_broken=broken.append) for q in b.batch.questions]
    assert broken == [7]
    assert sorted(done) == [i for i in range(12) if i != 7]
    with pytest.raises(CoralError, match="'q7'"):
        list(score(model, prompts, plan))


def test_changed_weights_are_refused_and_a_model_in_another_dtype_gets_other_twins() -> None:
    model, prompts = make_model("llama"), ragged_prompts()
    exact = scored(model, prompts, 2)
    cast_weights(model, torch.bfloat16)
    assert not torch.equal(scored(model, prompts, 2)[0].logprobs, exact[0].logprobs)
    model.hf.model.norm.weight.data[4] += 1
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        scored(model, prompts, 2)


def test_workers_are_for_the_cpu_and_no_more_than_batches(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    assert [n_workers(tiny, n) for n in (1, 3, 9)] == [1, 3, 4]
    monkeypatch.setattr("coral_lens.engine._workers.devices_of", lambda _: {"cuda"})
    assert n_workers(tiny, 9) == 1


def test_results_come_in_the_order_of_the_jobs_and_no_worker_has_two_at_a_time() -> None:
    import time

    busy: set[str] = set()

    def compute(worker: str, job: int) -> int:
        assert worker not in busy
        busy.add(worker)
        time.sleep(0.01 if job % 3 else 0.03)
        busy.remove(worker)
        return job * job

    assert list(side_by_side(range(20), ["a", "b", "c"], compute)) == [i * i for i in range(20)]


def test_few_questions_are_cut_so_that_all_threads_have_some(tiny: Model, tmp_path: Path) -> None:
    from support.questions import toy_questions

    from coral_lens.engine import extract

    questions = toy_questions(12)
    torch.set_num_threads(2)
    planned = extract.plan_questions(tiny, questions, extract.Extraction((1,)))
    budget = extract.even_budget(planned)
    sizes = [len(p.contexts[0]) for p in planned.prepared.prompts]
    assert sum(sizes) / 2 <= budget < scoring.TOKEN_BUDGET
    torch.set_num_threads(1)
    assert extract.even_budget(planned) == scoring.TOKEN_BUDGET
