"""Batches are cut by tokens and by time; a common input counts once; what nobody waits for is passed over."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from support.questions import toy_questions
from support.servers import Shop

from coral_lens.engine import prompts
from coral_lens.records import Question
from coral_lens.serve import batching
from coral_lens.serve.batching import BatchCutter, BatchRule, batch_tokens
from coral_lens.serve.queue import Job, JobQueue, Refusal

RULE = BatchRule(tokens=10_000, wait=0.0, longest=10_000)


def put(queue: JobQueue, shop: Shop, *questions: Question, lens: str = "first") -> Job:
    job = Job(shop.lenses.find(lens), questions, seconds=60.0)
    queue.put(job)
    return job


def cut(shop: Shop, queue: JobQueue, rule: BatchRule = RULE) -> list[list[tuple[Job, int]]]:
    """All batches of a queue, as requests and places in them."""
    queue.close()
    cutter, batches = BatchCutter(shop.model, queue, "tree", rule), []
    while (batch := cutter.next_batch()) is not None:
        batches.append([(item.job, item.number) for item in batch])
        queue.finished(len(batch))
    return batches


def test_requests_that_wait_share_a_batch_in_their_order(shop: Shop) -> None:
    queue = JobQueue(100)
    one, two = put(queue, shop, *toy_questions(2)), put(queue, shop, *toy_questions(1), lens="second")
    assert cut(shop, queue) == [[(one, 0), (one, 1), (two, 0)]]
    assert queue.waiting == 0


def test_a_batch_is_cut_by_its_tokens_and_a_larger_question_is_one_by_itself(shop: Shop) -> None:
    # a token is a byte: "Question: ..\nAnswer:" and two options of one letter, which share their space
    questions = [Question(str(n), str(n), "x" * n, ("a", "b")) for n in (10, 10, 200, 10)]
    questions = [replace(q, id=str(i)) for i, q in enumerate(questions)]
    queue = JobQueue(100)
    job = put(queue, shop, *questions)
    size = len("Question: \nAnswer: ") + 10 + 2
    assert cut(shop, queue, replace(RULE, tokens=2 * size)) == [[(job, 0), (job, 1)], [(job, 2)], [(job, 3)]]
    other = JobQueue(100)
    job = put(other, shop, *questions)
    assert cut(shop, other, replace(RULE, tokens=2 * size - 1))[0] == [(job, 0)]


def test_the_input_that_questions_share_counts_once(shop: Shop) -> None:
    passage = "It rains. " * 40
    questions = [Question(str(i), str(i), f"{i}?", ("a", "b"), passage=passage) for i in range(8)]
    rule = replace(RULE, tokens=800)
    together, apart = JobQueue(100), JobQueue(100)
    put(together, shop, *questions)
    assert [len(batch) for batch in cut(shop, together, rule)] == [8]
    queue = JobQueue(100)
    put(queue, shop, *questions)
    batch = BatchCutter(shop.model, queue, "tree", rule).next_batch() or []
    n_passage = len(f"{passage}\n")
    assert n_passage < batch_tokens(batch) < 2 * n_passage < sum(item.n_tokens for item in batch)
    for question in questions:
        put(apart, shop, question)
    assert [len(batch) for batch in cut(shop, apart, rule)] == [1] * 8


def test_a_long_text_that_many_questions_share_is_tokenised_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a megabyte would else stand for one for each of its questions and options."""
    passage, read = "It rains. " * 3000, [0]
    real = prompts.encode

    def counted(texts: list[str], *others: Any, **more: Any) -> Any:
        read[0] += sum(map(len, texts))
        return real(texts, *others, **more)

    for module in (prompts, batching):
        monkeypatch.setattr(module, "encode", counted)
    questions = [Question(str(i), str(i), f"{i}?", ("a", "b", "c"), passage=passage) for i in range(50)]
    queue = JobQueue(100)
    job, other = put(queue, shop, *questions), put(queue, shop, *toy_questions(1))
    assert cut(shop, queue, replace(RULE, longest=1000)) == [[(other, 0)]]
    assert len(passage) <= read[0] < 2 * len(passage)
    assert queue.waiting == 0
    refused = [one.outcome for one in job.done.result()]
    assert all(isinstance(one, Refusal) and "tokens that the model reads; shorten it" in one.reason for one in refused)


def test_who_asks_alone_waits_for_nobody_and_in_company_for_others(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, waits = JobQueue(100), list[float]()
    # so long that a busy machine is never slow in comparison; nobody really waits
    monkeypatch.setattr(batching, "COMPANY", 1e6)
    cutter, take = BatchCutter(shop.model, queue, "tree", replace(RULE, wait=1e6)), queue.take

    def at_once(timeout: float | None) -> Job | None:
        waits.append(timeout or 0.0)
        return take(0.0)

    monkeypatch.setattr(queue, "take", at_once)

    def waited() -> bool:
        waits.clear()
        batch = cutter.next_batch() or []
        queue.finished(len(batch))
        return max(waits) > 0

    put(queue, shop, *toy_questions(2))
    assert not waited(), "alone"
    put(queue, shop, *toy_questions(1))
    put(queue, shop, *toy_questions(1))
    assert waited(), "two are there, and a third might come"
    put(queue, shop, *toy_questions(1))
    assert waited(), "others were there a moment ago"
    cutter._company_until = 0.0
    put(queue, shop, *toy_questions(1))
    assert not waited()


def test_one_by_one_every_question_is_a_batch(shop: Shop) -> None:
    queue = JobQueue(100)
    put(queue, shop, *toy_questions(3))
    assert [len(batch) for batch in cut(shop, queue, replace(RULE, alone=True))] == [1, 1, 1]


def test_the_work_of_a_client_that_has_gone_is_not_done(shop: Shop) -> None:
    queue = JobQueue(100)
    gone, late, kept = (
        put(queue, shop, *toy_questions(3)),
        put(queue, shop, *toy_questions(2)),
        put(queue, shop, *toy_questions(1)),
    )
    gone.done.cancel()
    late.expires = time.monotonic() - 1
    assert cut(shop, queue) == [[(kept, 0)]]
    assert queue.waiting == 0


def test_a_client_that_goes_between_two_batches_of_its_request_is_passed_over_too(shop: Shop) -> None:
    queue = JobQueue(100)
    job, other = put(queue, shop, *toy_questions(3)), put(queue, shop, *toy_questions(1))
    cutter = BatchCutter(shop.model, queue, "tree", replace(RULE, alone=True))
    assert [item.number for item in cutter.next_batch() or []] == [0]
    job.done.cancel()
    assert [item.job for item in cutter.next_batch() or []] == [other]


def test_questions_that_cannot_be_asked_are_refused_and_their_tokens_are_told(shop: Shop) -> None:
    questions = [Question("long", "g", "x" * 60, ("a", "b")), Question("good", "g", "x", ("a", "b"))]
    queue = JobQueue(100)
    job = put(queue, shop, *questions)
    assert cut(shop, queue, replace(RULE, longest=50)) == [[(job, 1)]]
    reason = job._scored[0].outcome.reason  # type: ignore[union-attr]
    assert reason == "Question 'long' has 81 tokens with its options, and 50 are allowed; shorten it."


def test_an_error_while_prompts_are_made_is_that_of_its_request(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = JobQueue(100)
    bad, good = put(queue, shop, Question("bad", "g", "x", ("a", "b"))), put(queue, shop, *toy_questions(1))
    prepare = batching.prepare_any

    def failing(questions: tuple[Question, ...], *rest: object, **other: bool) -> object:
        if questions[0].id == "bad":
            raise RuntimeError("of a tokenizer")
        return prepare(questions, *rest, **other)  # type: ignore[arg-type]

    monkeypatch.setattr(batching, "prepare_any", failing)
    assert cut(shop, queue) == [[(good, 0)]]
    assert isinstance(bad.done.exception(), RuntimeError)
