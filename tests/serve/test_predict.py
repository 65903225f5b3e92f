"""Our own route answers what `lens.predict` does, whatever shares the batch."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.questions import toy_questions
from support.servers import GOOD, Running, Shop, running, settings
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.engine.model import Model
from coral_lens.lens.answers import OF_KINDS
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question
from coral_lens.serve.lenses import ServedLenses, open_lenses
from coral_lens.serve.settings import Batching

CLIENTS = 64


def body_of(*questions: Question, lens: str = "first") -> dict[str, Any]:
    rows = [{"id": q.id, "question": q.text, "options": list(q.options), "context": q.passage} for q in questions]
    return {"lens": lens, "questions": rows}


def assert_same(given: dict[str, Any], wanted: dict[str, Any], *, exactly: bool = False) -> None:
    for name, value in wanted.items():
        if isinstance(value, float):
            assert given[name] == (value if exactly else pytest.approx(value, abs=1e-4, rel=1e-3))
        elif isinstance(value, tuple) and not exactly:
            assert given[name] == pytest.approx(list(value), abs=1e-4)
        else:
            assert given[name] == (list(value) if isinstance(value, tuple) else value)


def predicted(shop: Shop, lens: str, questions: list[Question]) -> list[dict[str, Any]]:
    answers = [asdict(answer) for answer in shop.lens(lens).predict(shop.model, questions)]
    return [{name: value for name, value in a.items() if name not in OF_KINDS} for a in answers]


@pytest.mark.parametrize("lens", ["first", "second"])
def test_a_request_of_many_questions_gets_what_the_lens_predicts(server: Running, shop: Shop, lens: str) -> None:
    questions = toy_questions(30, seed=3, labelled=False)
    with server.client() as client:
        reply = client.post("/v1/predict", json=body_of(*questions, lens=lens))
    assert reply.status_code == 200
    found = reply.json()
    assert (found["lens"], found["digest"]) == (lens, shop.lenses.find(lens).digest)
    for given, wanted in zip(found["answers"], predicted(shop, lens, questions), strict=True):
        assert_same(given, wanted)
        assert given["refusal"] is None


def test_of_64_clients_each_gets_the_answer_to_its_own_question(server: Running, shop: Shop) -> None:
    questions = toy_questions(CLIENTS, seed=5, labelled=False)
    lenses = ["first", "second"] * (CLIENTS // 2)
    wanted = {lens: predicted(shop, lens, questions) for lens in set(lenses)}

    def ask(i: int) -> dict[str, Any]:
        with server.client() as client:
            return client.post("/v1/predict", json=body_of(questions[i], lens=lenses[i])).json()["answers"][0]

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(CLIENTS)))
    for i, given in enumerate(answers):
        assert_same(given, wanted[lenses[i]][i])


def test_one_by_one_the_answers_are_the_same_to_the_bit(shop: Shop) -> None:
    questions = toy_questions(12, seed=7, labelled=False)
    with (
        running(shop.model, shop.lenses, settings(batching=Batching(one_by_one=True))) as server,
        server.client() as client,
    ):
        answers = client.post("/v1/predict", json=body_of(*questions, lens="second")).json()["answers"]
    for question, given in zip(questions, answers, strict=True):
        assert_same(given, predicted(shop, "second", [question])[0], exactly=True)


def test_one_question_needs_neither_a_list_nor_an_id(server: Running) -> None:
    with server.client() as client:
        reply = client.post(
            "/v1/predict", json={"lens": "first", "questions": {"question": "2 + 2?", "options": [3, 4.5, "four"]}}
        )
    (answer,) = reply.json()["answers"]
    assert answer["id"] == "1"
    assert len(answer["probs"]) == 3
    assert sum(answer["probs"]) == pytest.approx(1)


def test_ids_that_come_twice_are_told_apart(server: Running) -> None:
    rows = [{"id": "a", "question": f"{i} + 2?", "options": ["3", "4"]} for i in range(3)]
    with server.client() as client:
        answers = client.post("/v1/predict", json={"lens": "first", "questions": rows}).json()["answers"]
    assert [a["id"] for a in answers] == ["a", "a (2)", "a (3)"]
    assert len({tuple(a["probs"]) for a in answers}) == 3


def test_a_question_that_cannot_be_asked_is_refused_alone(server: Running) -> None:
    rows = [
        {"question": "2 + 2?", "options": ["3", "4"]},
        {"question": "which one? " * 200, "options": ["3", "4"]},
    ]
    with server.client() as client:
        reply = client.post("/v1/predict", json={"lens": "first", "questions": rows})
    first, second = reply.json()["answers"]
    assert first["answer"] in (0, 1)
    assert second["refusal"] == "Question '2' is longer than the 1024 tokens that the model reads; shorten it."
    assert second["probs"] is None


def test_a_question_is_answered_as_if_it_were_alone_also_beside_others_with_the_same_options(
    server: Running, shop: Shop
) -> None:
    first, second = (replace(q, options=("red", "green")) for q in toy_questions(2, seed=8, labelled=False))
    with server.client() as client:
        answers = client.post("/v1/predict", json=body_of(first, second, lens="second")).json()["answers"]
    for question, given in zip((first, second), answers, strict=True):
        assert_same(given, predicted(shop, "second", [question])[0])


def test_where_a_lens_is_away_from_home_it_says_what_nobody_has_checked(server: Running) -> None:
    asked = {"question": "2 + 2?", "options": ["3", "4"]}
    with server.client() as client:
        notes = [
            client.post("/v1/predict", json={"lens": lens, "questions": asked}).json()["note"]
            for lens in ("first", "second")
        ]
    assert notes[0].startswith("This lens is believed on every task as on its own. Harm cannot be excluded on a task")
    assert notes[1].startswith("Harm cannot be excluded on a task that a lens was not fitted on")


def test_at_home_there_is_no_note_in_any_format_and_none_among_the_models(shop: Shop) -> None:
    lenses = shop.lenses.settled(lambda lens: lens.at_home())
    with running(shop.model, lenses) as server, server.client() as client:
        found = client.post("/v1/predict", json=GOOD["/v1/predict"]).json()
        decided = client.post("/v1/decisions", json=GOOD["/v1/decisions"]).json()
        models = client.get("/v1/models").json()["data"]
    assert found["note"] is None
    assert {answer["home"] for answer in found["answers"]} == {True}
    assert {answer["coral"]["note"] for answer in decided["answers"]} == {None}
    assert [model["coral"]["note"] for model in models] == [None, None]


def test_where_the_lens_does_not_answer_better_each_format_says_that_the_answer_is_the_models(shop: Shop) -> None:
    second = shop.lenses.find("second")
    assert second.lens.trust is not None
    kept = replace(second, lens=replace(second.lens, trust=replace(second.lens.trust, answers={"": False})))
    with running(shop.model, ServedLenses({"second": kept})) as server, server.client() as client:
        (answer,) = client.post("/v1/predict", json=body_of(*toy_questions(1, seed=4), lens="second")).json()["answers"]
        decided = client.post("/v1/decisions", json=GOOD["/v1/decisions"] | {"model": "second"}).json()["answers"]
    assert answer["kept"]
    assert answer["answer"] == answer["base_probs"].index(max(answer["base_probs"]))
    assert all(one["coral"]["kept"] for one in decided)


def test_pmi_is_served_as_it_is_predicted(shop: Shop, tmp_path: Path) -> None:
    """Its base takes one more pass, in which each option stands after a neutral context."""
    fit(shop.model, toy_questions(60), FitSettings(base="pmi", layers=(1,))).save(tmp_path / "pmi")
    lenses = open_lenses([str(tmp_path / "pmi"), f"second={shop.folder / 'second'}"])
    questions = toy_questions(6, seed=3, labelled=False)
    with running(shop.model, lenses) as server, server.client() as client:
        found = client.post("/v1/predict", json=body_of(*questions, lens="pmi")).json()["answers"]
        others = client.post("/v1/predict", json=body_of(*questions, lens="second")).json()["answers"]
    wanted = [asdict(answer) for answer in lenses.find("pmi").lens.predict(shop.model, questions)]
    for given, one, other in zip(found, wanted, others, strict=True):
        assert given["probs"] == pytest.approx(list(one["probs"]), abs=1e-4)
        assert given["base_probs"] == pytest.approx(list(one["base_probs"]), abs=1e-4)
        assert given["base_probs"] != pytest.approx(other["base_probs"], abs=1e-4), "another base than the other lens's"


def test_the_lens_that_ships_answers_over_http_what_the_command_does(smollm2: Model, tmp_path: Path) -> None:
    """With the real model: three questions, one of them a decision about a text."""
    rows = [
        {"id": "bees", "question": "What do bees make?", "options": ["honey", "milk", "bread"]},
        {"id": "chalk", "question": "What do you write with on a blackboard?", "options": ["a shoe", "chalk"]},
        {"id": "late", "question": "Which team answers?", "options": ["billing", "parcels"], "context": "It is late."},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with running(smollm2, open_lenses(["general"])) as server, server.client() as client:
        given = client.post("/v1/predict", json={"questions": rows}).json()["answers"]
    words = ["predict", "--questions", str(file), "--out", str(tmp_path / "answers.jsonl"), "--dtype", "float32"]
    CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
    wanted = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    for one, other in zip(given, wanted, strict=True):
        assert (one["id"], one["option"], one["abstain"]) == (other["id"], other["option"], other["abstain"])
        for name in ("probs", "base_probs", "options_in_set"):
            assert one[name] == pytest.approx(other[name], abs=1e-4)
        for name in ("confidence", "shift", "trust"):
            assert one[name] == pytest.approx(other[name], abs=1e-3)
