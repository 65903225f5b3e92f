"""A queue takes a request whole or not at all, and a request is done once, whoever comes first."""

from __future__ import annotations

import pytest
from support.questions import toy_questions
from support.servers import Shop

from coral_lens.serve.queue import FullError, Job, JobQueue, Refusal, Scored


def job_of(shop: Shop, n: int, *, seconds: float = 60.0) -> Job:
    return Job(shop.lenses.find("first"), toy_questions(n), seconds=seconds)


def test_questions_are_counted_and_a_request_that_does_not_fit_is_not_taken_in_part(shop: Shop) -> None:
    queue = JobQueue(5)
    first, second = job_of(shop, 3), job_of(shop, 2)
    queue.put(first)
    with pytest.raises(FullError):
        queue.put(job_of(shop, 3))
    queue.put(second)
    assert (queue.waiting, queue.take(), queue.take(), queue.take(0.0)) == (5, first, second, None)
    # what is taken waits on until it is answered
    with pytest.raises(FullError):
        queue.put(job_of(shop, 1))
    queue.finished(3)
    queue.put(job_of(shop, 3))


def test_a_closed_queue_gives_out_what_it_has_and_takes_nothing(shop: Shop) -> None:
    queue, job = JobQueue(5), job_of(shop, 1)
    queue.put(job)
    queue.close()
    with pytest.raises(FullError):
        queue.put(job_of(shop, 1))
    assert (queue.take(), queue.take()) == (job, None)


def test_a_request_is_done_with_its_last_question_and_in_their_order(shop: Shop) -> None:
    job = job_of(shop, 3)
    for number in (2, 0, 1):
        assert not job.done.done()
        job.settle(number, Scored(Refusal(str(number)), n_tokens=10))
    assert job.done.result() == tuple(Scored(Refusal(str(number)), n_tokens=10) for number in range(3))
    assert job.is_dropped


def test_a_client_that_has_gone_is_not_an_error_when_the_answer_comes(shop: Shop) -> None:
    job = job_of(shop, 1)
    job.done.cancel()
    assert job.is_dropped
    job.settle(0, Scored(Refusal("late")))
    job.fail(ValueError("late"))
    assert job.done.cancelled()


def test_a_request_is_dropped_when_its_time_is_over(shop: Shop) -> None:
    assert job_of(shop, 1, seconds=-1.0).is_dropped
