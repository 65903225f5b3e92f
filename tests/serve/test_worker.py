"""One pass answers the questions of several lenses; an error is that of its own request, and the thread goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import make_model, rewrapped
from support.questions import toy_questions
from support.servers import Shop, settings

from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question
from coral_lens.serve import worker
from coral_lens.serve.lenses import open_lenses
from coral_lens.serve.metrics import ServeMetrics
from coral_lens.serve.queue import Job, JobQueue, Outcome, Refusal
from coral_lens.serve.worker import ModelThread

pytestmark = pytest.mark.usefixtures("one_thread")


def run(shop: Shop, jobs: Sequence[Job], model: Model | None = None) -> ModelThread:
    """Answer the jobs, which all wait when the thread begins."""
    queue = JobQueue(1000)
    for job in jobs:
        queue.put(job)
    queue.close()
    thread = ModelThread(model or shop.model, shop.lenses, queue, settings(), ServeMetrics(lambda: queue.waiting))
    thread.start()
    thread.join()
    assert queue.waiting == 0 or thread.failure
    return thread


def outcomes_of(job: Job) -> list[Outcome]:
    return [scored.outcome for scored in job.done.result(0)]


def job_of(shop: Shop, *questions: Question, lens: str = "first") -> Job:
    return Job(shop.lenses.find(lens), questions, seconds=60.0)


def test_one_pass_reads_the_layers_of_all_lenses(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = []
    score = worker.score_planned
    monkeypatch.setattr(worker, "score_planned", lambda planned: passes.append(planned) or score(planned))
    questions = toy_questions(4, labelled=False)
    jobs = [job_of(shop, *questions), job_of(shop, *questions, lens="second")]
    thread = run(shop, jobs)
    assert thread.ready.is_set()
    (planned,) = passes
    assert planned.extraction.layers == (1, 2)
    assert len(planned.prepared.prompts) == 8
    for job in jobs:
        wanted = job.lens.lens.predict(shop.model, questions)
        for given, answer in zip(outcomes_of(job), wanted, strict=True):
            assert isinstance(given, Answer)
            assert given.id == answer.id
            assert given.probs == pytest.approx(answer.probs, abs=1e-4)


@pytest.mark.parametrize("with_full", [False, True])
def test_the_pass_ends_after_the_deepest_layer_where_no_lens_needs_the_rest(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_full: bool
) -> None:
    leaving = fit(shop.model, toy_questions(60), FitSettings(exit_layer=1))
    leaving.save(tmp_path / "leaving")
    others = [f"second={shop.folder / 'second'}"] if with_full else []
    served = Shop(shop.model, open_lenses([str(tmp_path / "leaving"), *others]), shop.folder)
    ran: list[bool] = []
    score = worker.score_planned

    def watched(planned: Any) -> Any:
        handle = shop.model.blocks[-1].register_forward_hook(lambda *_: ran.append(True))
        with closing(SimpleNamespace(close=handle.remove)):
            return score(planned)

    monkeypatch.setattr(worker, "score_planned", watched)
    questions = toy_questions(3, labelled=False)
    wanted, job = leaving.predict(shop.model, questions), job_of(served, *questions, lens="leaving")
    run(served, [job])
    assert bool(ran) == with_full
    for given, answer in zip(outcomes_of(job), wanted, strict=True):
        assert isinstance(given, Answer)
        assert given.probs == pytest.approx(answer.probs, abs=1e-4)
        assert given.base_probs == ()


def test_an_error_in_a_batch_is_that_of_its_own_request(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    score = worker.score_planned

    def failing(planned: Any) -> Any:
        if any("bad" in q.text for q in planned.prepared.questions):
            raise RuntimeError("out of memory")
        return score(planned)

    monkeypatch.setattr(worker, "score_planned", failing)
    good, last = job_of(shop, *toy_questions(3)), job_of(shop, *toy_questions(1), lens="second")
    bad = job_of(shop, *toy_questions(1), Question("bad", "bad", "a bad one", ("a", "b")))
    run(shop, [good, bad, last])
    assert [type(o) for o in outcomes_of(good)] == [Answer] * 3
    assert isinstance(outcomes_of(last)[0], Answer)
    assert isinstance(bad.done.exception(0), RuntimeError)


def test_a_question_whose_states_are_not_finite_is_refused_alone(shop: Shop) -> None:
    model = make_model("llama", max_length=1024)
    token = model.tokenizer.encode("~")[0]
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[token] = float("nan")
    model = rewrapped(model)
    adopted = Shop(model, shop.lenses.settled(lambda lens: lens.adopted(model)), shop.folder)
    broken = Question("b", "b", "one ~ two", ("a", "b"))
    together = job_of(adopted, broken, *toy_questions(2))
    alone = job_of(adopted, broken, lens="second")
    run(adopted, [together, alone], model)
    sentence = "Question 'b': the model gives scores or states that are not finite."
    assert [isinstance(o, Answer) for o in outcomes_of(together)] == [False, True, True]
    assert outcomes_of(together)[0] == outcomes_of(alone)[0] == Refusal(sentence)


def test_a_lens_of_another_model_fails_the_self_check(shop: Shop) -> None:
    thread = run(shop, [], make_model("llama", seed=1, max_length=1024))
    assert not thread.ready.is_set()
    assert isinstance(thread.failure, CoralError)
    assert "is another model" in str(thread.failure)


def test_a_bug_outside_a_batch_ends_the_thread_and_is_told(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ModelThread, batch: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(ModelThread, "_time", broken)
    thread = run(shop, [job_of(shop, *toy_questions(1))])
    assert isinstance(thread.failure, AssertionError)
    assert not thread.ready.is_set()
