"""`POST /v1/ask` answers what `lens.ask` does; a lens of the other kind, and each mistake, is one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.servers import PATIENCE, Running, Shop, running, settings

from coral_lens.engine import candidates
from coral_lens.engine.generation import Generated
from coral_lens.serve.ask import MOST_WAITING
from coral_lens.serve.complaints import FAILED
from coral_lens.serve.settings import Answering, Batching, Limits

pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")


def test_questions_get_what_the_lens_answers_in_their_order(asker: Running, shop: Shop) -> None:
    lens = asker.service.lenses.find("open")
    asked = ["Who?", "Which one?", "Why?", "When was it?"]
    wanted = {a.id: a for a in lens.lens.ask(shop.model, asked)}
    assert len(wanted) >= 2
    with asker.client() as client:
        found = client.post("/v1/ask", json={"lens": "open", "questions": asked}).json()
    assert (found["lens"], found["digest"]) == ("open", lens.digest)
    assert [a["id"] for a in found["answers"]] == ["1", "2", "3", "4"]
    for given in found["answers"]:
        if given["id"] not in wanted:
            assert "wrote no answer" in given["refusal"]
            continue
        answer = wanted[given["id"]]
        assert (given["answer"], given["refusal"]) == (answer.answer, None)
        assert given["confidence"] == pytest.approx(answer.confidence, abs=1e-4)
        assert [(c["text"], c["count"]) for c in given["candidates"]] == list(
            zip(answer.candidates, answer.counts, strict=True)
        )
        assert sum(c["probability"] for c in given["candidates"]) + given["none"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("route", "body", "status", "sentence"),
    [
        ("ask", {"lens": "first", "questions": "Who?"}, 422, "fitted on questions with options"),
        ("ask", {"lens": "open", "questions": " "}, 422, "is empty"),
        ("ask", {"lens": "open", "questions": []}, 422, "questions"),
        ("ask", {"lens": "open", "questions": [{"question": "Who?", "options": ["a", "b"]}]}, 422, "options"),
        (
            "ask",
            {"lens": "open", "questions": [{"question": "A?", "id": 1}, {"question": "B?", "id": 1}]},
            422,
            "same id",
        ),
        ("ask", {"lens": "open", "questions": ["Who?"] * 2000}, 413, "2000 questions"),
        ("ask", {"lens": "other", "questions": "Who?"}, 404, "no lens of that name"),
        (
            "predict",
            {"lens": "open", "questions": {"question": "A?", "options": ["a", "b"]}},
            422,
            "fitted on open questions",
        ),
    ],
)
def test_each_mistake_is_one_sentence(
    asker: Running, route: str, body: dict[str, object], status: int, sentence: str
) -> None:
    with asker.client() as client:
        reply = client.post(f"/v1/{route}", json=body)
    assert reply.status_code == status
    assert sentence in reply.text


def test_what_takes_too_long_is_given_up_and_its_work_ends(shop: Shop, asker: Running, monkeypatch: Any) -> None:
    """The writer is told by the bar that it moves; what waits behind is not begun."""
    begun: list[str] = []
    release = Event()
    told: list[bool] = []

    @contextmanager
    def slow(lens: Any, model: Any, questions: Any, *, bar: Any) -> Iterator[Any]:
        begun.append(questions[0].text)
        with bar("writing", 1, "questions") as advance:
            assert release.wait(PATIENCE)
            told.append(True)
            advance(1)
        raise AssertionError("nobody waits any more")

    monkeypatch.setattr("coral_lens.serve.ask.scored_open", slow)
    short = settings(batching=Batching(deadline=0.3))
    with running(shop.model, asker.service.lenses, short) as server, server.client() as client:
        with ThreadPoolExecutor(2) as pool:
            asked = {"lens": "open"}
            replies = list(pool.map(lambda q: client.post("/v1/ask", json=asked | {"questions": q}), ("A?", "B?")))
        release.set()
        assert [reply.status_code for reply in replies] == [503, 503]
        assert "no answer within 0.3 seconds" in replies[0].text
        text = client.get("/metrics").text
    assert (len(begun), told) == (1, [True])
    assert "coral_dropped_total 2.0" in text
    assert "coral_failures_total 0.0" in text


def test_a_question_that_is_too_long_is_refused_by_itself_and_not_cut(shop: Shop, asker: Running) -> None:
    """Of a longer one the model would read only the end."""
    asked = {"lens": "open", "questions": ["Which one?", {"question": "Why?", "context": "word " * 300, "id": "long"}]}
    with asker.client() as client:
        short, long = client.post("/v1/ask", json=asked).json()["answers"]
    assert short["answer"] is not None
    assert (long["answer"], long["candidates"]) == (None, None)
    room = shop.model.max_length - 64
    assert long["refusal"].endswith(f"tokens, and {room} are allowed; shorten it.")
    few = settings(limits=Limits(max_tokens=20))
    with running(shop.model, asker.service.lenses, few) as server, server.client() as client:
        (alone,) = client.post("/v1/ask", json=asked | {"questions": "Who is it?"}).json()["answers"]
    assert "and 20 are allowed" in alone["refusal"]


def test_questions_that_the_model_is_silent_to_are_refused_each_by_its_own_name(
    asker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [Generated(" ", (1,), finished=True)]
    monkeypatch.setattr(candidates, "generate_answers", lambda _, texts, **__: [silent for _ in texts])
    with asker.client() as client:
        reply = client.post("/v1/ask", json={"lens": "open", "questions": ["Who?", "Why?"]})
    assert reply.status_code == 200
    for name, answer in zip("12", reply.json()["answers"], strict=True):
        assert answer["refusal"].startswith(f"Question '{name}': the model wrote no answer")


def test_a_failure_of_ours_is_one_sentence_and_counted_and_says_nothing_of_the_question(
    shop: Shop, asker: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(logged: Any) -> None:
        raise OSError(f"no space left for {logged.questions[0].text}")

    with running(shop.model, asker.service.lenses) as server, server.client() as client:
        monkeypatch.setattr(server.service, "keep_books", full)
        reply = client.post("/v1/ask", json={"lens": "open", "questions": "A secret?"})
        text = client.get("/metrics").text
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == FAILED
    assert "coral_failures_total 1.0" in text
    said = capfd.readouterr().err
    assert "coral: a request failed with OSError:" in said
    assert "secret" not in said


def test_answers_are_counted_and_say_what_nobody_has_checked(shop: Shop, asker: Running, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    asked = settings(answering=Answering(log=log))
    with running(shop.model, asker.service.lenses, asked) as server, server.client() as client:
        reply = client.post("/v1/ask", json={"lens": "open", "questions": ["Who?", "Which one?", "Why?"]}).json()
        text = client.get("/metrics").text
    given = [answer for answer in reply["answers"] if not answer["refusal"]]
    assert given
    assert f'coral_answers_total{{lens="open"}} {len(given)}.0' in text
    assert f'coral_shift_count{{lens="open"}} {len(given)}.0' in text
    assert "coral_batch_questions_sum 3.0" in text
    assert f"coral_batch_tokens_sum {reply['tokens']}.0" in text
    assert reply["tokens"] > 0
    away = any(answer["trust"] < 1 for answer in given)
    assert bool(reply["note"]) == away
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [line["question"] for line in lines] == ["Who?", "Which one?", "Why?"]
    assert sum(line.get("type") == "refusal" for line in lines) == 3 - len(given)


def test_who_comes_when_too_many_wait_is_asked_to_come_again(asker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral_lens.serve.ask.MOST_WAITING", 0)
    with asker.client() as client:
        reply = client.post("/v1/ask", json={"lens": "open", "questions": "Who?"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "5"
    assert MOST_WAITING > 0
