"""TypeSafe's own client gets every type of answer, in its own classes, and its own exceptions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import typesafe_sdk as typesafe
from support.servers import Running

from coral_lens.lens.answers import Answer
from coral_lens.serve.systemone import confidence_beyond_chance

STATE = {"subject": "Duplicate charge", "message": "I was charged twice, please help."}
QUESTIONS = {
    "billing": typesafe.Noul(instructions="Is it about billing?", criteria={"true": "Money is asked for"}),
    "tone": typesafe.Choice(instructions="What is the tone?", criteria={"angry": "upset", "calm": None, "glad": None}),
    "urgency": typesafe.Score(instructions="How urgent?", criteria=["Can wait", "This week", {"when": "today"}]),
}
NEVER = typesafe.RetryPolicy(max_retries=0)


def check_answers(found: Any) -> None:
    assert 0 < found.nouls["billing"].noul < 1
    tone, urgency = found.choices["tone"], found.scores["urgency"]
    assert list(tone.probabilities) == ["angry", "calm", "glad"]
    assert tone.choice == max(tone.probabilities, key=tone.probabilities.get)
    assert tone.confidence == pytest.approx((3 * tone.probabilities[tone.choice] - 1) / 2)
    assert urgency.legend == {0: "Can wait", 1: "This week", 2: {"when": "today"}}
    assert urgency.score == pytest.approx(urgency.probabilities[1] + 2 * urgency.probabilities[2])
    assert found.usage.input_tokens > 0


def test_every_type_of_question_is_answered_in_the_classes_of_the_client(server: Running) -> None:
    with typesafe.TypeSafeClient(api_key="none", base_url=server.address, retry=NEVER) as client:
        found = client.system_one(state=STATE, questions=QUESTIONS, model="first")
        check_answers(found)
        assert found.model == "first"
        assert [model.name for model in client.models.list().models] == ["first", "second"]


def test_each_answer_says_in_words_what_nobody_has_checked(server: Running) -> None:
    body = {
        "model": "second",
        "state": "s",
        "questions": {"which": {"type": "choice", "criteria": {"a": None, "b": ""}}},
    }
    with server.client() as client:
        (found,) = client.post("/v1/systemone", json=body).json()["answers"].values()
    assert found["coral"]["note"].startswith("Harm cannot be excluded on a task that a lens was not fitted on")


def test_the_asynchronous_client_gets_the_same(server: Running) -> None:
    async def ask() -> Any:
        async with typesafe.AsyncTypeSafeClient(api_key="none", base_url=server.address, retry=NEVER) as client:
            return await client.system_one(state="I was charged twice.", questions=QUESTIONS, model="second")

    check_answers(asyncio.run(ask()))


def test_a_question_that_is_too_long_is_passed_over_and_the_others_are_answered(server: Running) -> None:
    questions = QUESTIONS | {"long": typesafe.Noul(instructions="Is it so? " * 150)}
    with typesafe.TypeSafeClient(api_key="none", base_url=server.address, retry=NEVER) as client:
        found = client.system_one(state=STATE, questions=questions, model="first")
    assert set(found.answers) == set(QUESTIONS)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"model": "none"}, typesafe.TypeSafeNotFoundError, "served here are first, second"),
        (
            {"questions": {"box": typesafe.Box(instructions="The dog")}},
            typesafe.TypeSafeUnprocessableEntityError,
            "Images",
        ),
        (
            {"questions": {"one": typesafe.Score(criteria=["only"])}},
            typesafe.TypeSafeUnprocessableEntityError,
            "questions.one.score.criteria",
        ),
    ],
)
def test_mistakes_are_the_exceptions_of_the_client(
    server: Running, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    request: dict[str, Any] = {"state": STATE, "questions": QUESTIONS, "model": "first"} | changes
    with (
        typesafe.TypeSafeClient(api_key="none", base_url=server.address, retry=NEVER) as client,
        pytest.raises(error, match=sentence),
    ):
        client.system_one(**request)


@pytest.mark.parametrize(("probs", "confidence"), [((0.5, 0.5), 0), ((1.0, 0.0, 0.0), 1), ((0.7, 0.1, 0.1, 0.1), 0.6)])
def test_confidence_is_what_lies_beyond_chance(probs: tuple[float, ...], confidence: float) -> None:
    answer = Answer("q", 0, "a", max(probs), probs, probs, 1.0)
    assert confidence_beyond_chance(answer) == pytest.approx(confidence)
