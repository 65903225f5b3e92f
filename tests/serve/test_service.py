"""Requests that nobody waits for are dropped; failures are counted and said without a word of what was asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from support.questions import toy_questions
from support.servers import PATIENCE, Running, Shop, running, settings

from coral_lens.lens.artefact import Lens
from coral_lens.serve import worker
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.service import ask, unique
from coral_lens.serve.settings import Answering, Batching

BODY = {"lens": "first", "questions": {"question": "A secret?", "options": ["yes", "no"]}}


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def counted(server: Running, name: str) -> float:
    line = next(line for line in server.service.metrics.text().decode().splitlines() if line.startswith(name))
    return float(line.split()[-1])


def test_the_work_of_a_client_that_hangs_up_is_dropped(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    score, gone = worker.score_planned, Event()
    with running(shop.model, shop.lenses) as server:
        monkeypatch.setattr(worker, "score_planned", lambda planned: gone.wait(PATIENCE) and score(planned))
        host, port = server.address.removeprefix("http://").split(":")
        body = b'{"lens": "first", "questions": {"question": "a?", "options": ["b", "c"]}}'
        headers = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        head = f"POST /v1/predict HTTP/1.1\r\n{headers}"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: counted(server, "coral_queue_questions") == 1)
        wait_for(lambda: counted(server, "coral_dropped_total") == 1)
        gone.set()
        with server.client() as client:
            assert client.post("/v1/predict", json=BODY).status_code == 200
        wait_for(lambda: counted(server, "coral_queue_questions") == 0)


def test_a_request_that_takes_too_long_is_given_up(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    score = worker.score_planned
    monkeypatch.setattr(worker, "score_planned", lambda planned: time.sleep(1.0) or score(planned))
    batching = Batching(deadline=0.3, max_wait_ms=0.0)
    with running(shop.model, shop.lenses, settings(batching=batching)) as server, server.client() as client:
        reply = client.post("/v1/predict", json=BODY)
        assert counted(server, "coral_dropped_total") == 1
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "There was no answer within 0.3 seconds; come again later."
    assert reply.headers["Retry-After"] == "1"


def test_a_failure_of_ours_is_counted_and_said_without_the_text(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(planned: Any) -> Any:
        raise RuntimeError(planned.prepared.questions[0].text)

    with running(shop.model, shop.lenses) as server, server.client() as client:
        monkeypatch.setattr(worker, "score_planned", failing)
        reply = client.post("/v1/predict", json=BODY)
        assert counted(server, "coral_failures_total") == 1
        monkeypatch.undo()
        assert client.post("/v1/predict", json=BODY).status_code == 200
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "The server failed on this request; its log says where."
    said = capfd.readouterr().err
    assert "coral: a request failed with RuntimeError:" in said
    assert "secret" not in said


def test_where_the_lens_abstains_the_answer_is_marked_or_refused_as_the_server_was_started(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Lens.answers
    monkeypatch.setattr(
        Lens, "answers", lambda self, store: [replace(answer, abstain=True) for answer in answers(self, store)]
    )
    for refuses in (False, True):
        asked = settings(answering=Answering(refuse_abstained=refuses))
        with running(shop.model, shop.lenses, asked) as server, server.client() as client:
            (found,) = client.post("/v1/predict", json=BODY).json()["answers"]
        assert found["abstain"] is (None if refuses else True)
        assert found["refusal"] == (
            "Question '1': the answer is too uncertain for the stated risk." if refuses else None
        )


def test_ids_that_repeat_get_their_places() -> None:
    questions = [ask(name, "x", ("a", "b")) for name in ("a", "b", "a", "a (3)")]
    assert [q.id for q in unique(questions)] == ["a", "b", "a (3)", "a (3) (4)"]


@pytest.mark.parametrize(("text", "options"), [(" ", ("a", "b")), ("x", ("a",)), ("x", ("a", " "))])
def test_nonsense_is_the_mistake_of_the_client(text: str, options: tuple[str, ...]) -> None:
    with pytest.raises(Complaint) as raised:
        ask("q", text, options)
    assert raised.value.status == 422
    assert "Question 'q'" in raised.value.message


def test_a_toy_question_stays_as_it_is() -> None:
    questions = toy_questions(3)
    assert unique(questions) == questions
