"""Whatever is sent, the answer is a status and one sentence, nothing of it is repeated as a traceback, and the server lives."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.servers import GOOD, Running, Shop, running, settings

from coral_lens.serve import worker
from coral_lens.serve.settings import Answering, Batching, Limits

WRONG: tuple[Any, ...] = (
    None,
    0,
    -1,
    1.5,
    True,
    "",
    " ",
    "\ud800",
    "x" * 5000,
    [],
    [[]],
    {},
    {"type": []},
    [None],
    "\x00",
)
"""What stands where something else should."""
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"nan",
    b"\xff\xfe",
    b'{"a":' * 5000,
    b"[" * 20_000,
    b'{"lens": ' + b"9" * 9000 + b"}",
)
N_REFUSED = 340
"""Bodies of each route that must have been refused, so that all routes together refuse more than 1,000."""
MOST_AT_ONCE = 200


def places(value: Any, *above: Any) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in ((*above, key), *places(one, *above, key))]


def changed(body: Any, rng: random.Random) -> Any:
    """The body with one place changed, taken away, or joined by another."""
    copy = json.loads(json.dumps(body))
    *above, key = rng.choice(places(copy))
    owner = copy
    for step in above:
        owner = owner[step]
    match rng.randrange(4):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[rng.choice(("unknown", "", "\ud800", "lens"))] = rng.choice(WRONG)
        case _:
            owner[key] = rng.choice(WRONG)
    return copy


@pytest.mark.parametrize("route", GOOD)
def test_a_malformed_body_is_one_sentence_and_the_server_goes_on(server: Running, route: str) -> None:
    rng, bodies, refused = random.Random(route), list(RAW), 0
    with server.client(headers={"Content-Type": "application/json"}) as client:
        assert client.post(route, json=GOOD[route]).status_code == 200
        while refused < N_REFUSED:
            bodies += [json.dumps(changed(GOOD[route], rng)).encode() for _ in range(MOST_AT_ONCE - len(bodies))]
            with ThreadPoolExecutor(8) as pool:
                replies = list(pool.map(lambda body: client.post(route, content=body), bodies))
            for body, reply in zip(bodies, replies, strict=True):
                if reply.status_code == 200:  # some changes are sound
                    continue
                refused += 1
                assert reply.status_code in (400, 404, 413, 422), (body, reply.text)
                message = reply.json()["error"]["message"]
                assert message.endswith((".", "?")), message
                assert "Traceback" not in reply.text
                assert "\n" not in message
            bodies = []
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post(route, json=GOOD[route]).status_code == 200
    assert N_REFUSED * len(GOOD) > 1000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/predict", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/page/none.js", 404),
        ("DELETE", "/health", 405),
    ],
)
def test_a_wrong_route_is_one_sentence(server: Running, method: str, path: str, status: int) -> None:
    with server.client() as client:
        reply = client.request(method, path)
    assert reply.status_code == status
    assert "see /openapi.json" in reply.json()["error"]["message"]


def test_a_body_that_is_no_json_by_its_type_is_not_read(server: Running) -> None:
    """A page of another site may send a form or plain text without asking; JSON it may not."""
    with server.client() as client:
        reply = client.post(
            "/v1/predict", content=json.dumps(GOOD["/v1/predict"]), headers={"Content-Type": "text/plain"}
        )
    assert reply.status_code == 422


@pytest.mark.parametrize(
    ("limits", "body", "sentence"),
    [
        (
            Limits(max_questions=2),
            {"questions": [{"question": "a?", "options": ["b", "c"]}] * 3},
            "3 questions, and 2 are",
        ),
        (Limits(max_options=2), {"questions": {"question": "a?", "options": ["b", "c", "d"]}}, "3 options, and 2 are"),
        (Limits(max_body=100), {"questions": {"question": "a?" * 90, "options": ["b", "c"]}}, "more than 100 bytes"),
    ],
)
def test_what_is_too_large_is_refused_as_such(shop: Shop, limits: Limits, body: dict[str, Any], sentence: str) -> None:
    with running(shop.model, shop.lenses, settings(limits=limits)) as server, server.client() as client:
        reply = client.post("/v1/predict", json=body | {"lens": "first"})
    assert reply.status_code == 413
    assert sentence in reply.json()["error"]["message"]


def test_the_description_names_every_route_and_every_schema_that_it_refers_to(server: Running) -> None:
    with server.client() as client:
        found = client.get("/openapi.json").json()
    assert {*GOOD, "/v1/ask", "/v1/models", "/health", "/ready", "/metrics"} == set(found["paths"])
    names = {part.split('"')[0] for part in json.dumps(found).split("#/components/schemas/")[1:]}
    assert names <= set(found["components"]["schemas"])


def test_readiness_health_and_metrics(server: Running) -> None:
    with server.client() as client:
        client.post("/v1/predict", json=GOOD["/v1/predict"])
        assert client.get("/ready").json() == {"status": "ready"}
        text = client.get("/metrics").text
    for name in ("answers_total", "shift_bucket", "confidence_bucket"):
        assert re.search(rf'^coral_{name}{{.*lens="first"}} [1-9]', text, re.MULTILINE), name
    counters = ("abstained", "changed", "refusals", "dropped", "failures", "cached_tokens")
    assert {f"# TYPE coral_{name}_total counter" for name in counters} <= set(text.splitlines())
    for name in ("batch_tokens_sum", "batch_questions_sum", "batch_seconds_count"):
        assert re.search(rf"^coral_{name} [1-9]", text, re.MULTILINE), name
    assert re.search(r'^coral_request_seconds_count{route="/v1/predict"} [1-9]', text, re.MULTILINE)
    assert re.search(r"^coral_dropped_total 0\.0$", text, re.MULTILINE)
    assert 'coral_requests_total{route="/v1/predict",status="200"}' in text
    assert re.search(r"^coral_queue_questions [01]\.0$", text, re.MULTILINE)


def test_answers_are_logged_only_where_that_is_asked_for(shop: Shop, tmp_path: Any, capfd: Any) -> None:
    log = tmp_path / "answers.jsonl"
    rows = [
        {"question": "A secret?", "options": ["yes", "no"]},
        {"question": "A secret? " * 300, "options": ["yes", "no"]},
    ]
    asked = {"lens": "first", "questions": rows}
    with running(shop.model, shop.lenses, settings(answering=Answering(log=log))) as server, server.client() as client:
        reply = client.post("/v1/predict", json=asked).json()
    first, second = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert (first["lens"], first["question"], first["options"]) == ("first", "A secret?", ["yes", "no"])
    assert first["probs"] == reply["answers"][0]["probs"]
    assert second["reason"] == reply["answers"][1]["refusal"]
    assert log.stat().st_mode & 0o077 == 0
    with running(shop.model, shop.lenses, settings(answering=Answering(log=log))) as server, server.client() as client:
        client.post("/v1/predict", json=asked)
    assert len(log.read_text("utf-8").splitlines()) == 4
    out, err = capfd.readouterr()
    assert "secret" not in out + err


def test_a_full_queue_asks_to_come_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    score = worker.score_planned
    monkeypatch.setattr(worker, "score_planned", lambda planned: time.sleep(1.0) or score(planned))
    limits, batching = Limits(max_questions=4), Batching(queue=4)
    body = {"lens": "first", "questions": [{"question": "a?", "options": ["b", "c"]}] * 3}
    with running(shop.model, shop.lenses, settings(limits=limits, batching=batching)) as server:

        def ask(_: int) -> Any:
            with server.client() as client:
                return client.post("/v1/predict", json=body)

        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(ask, range(6)))
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    late = next(reply for reply in replies if reply.status_code == 429)
    assert 1 <= int(late.headers["Retry-After"]) <= 60
    assert "come again" in late.json()["error"]["message"]
