"""OpenAI's own client gets every type of answer, in its own classes, and its own exceptions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from support.servers import Running, Shop

from coral_lens.records import Question

STATE = "The customer writes: I was charged twice for one order, please help."
PREDICATE = {"type": "predicate", "name": "billing", "instructions": "The message is about billing."}
CHOICE = {
    "type": "choice",
    "name": "tone",
    "instructions": "What is the tone?",
    "choices": [{"value": "angry", "description": "An upset message"}, {"value": "calm"}, {"value": "glad"}],
}
SCORE = {
    "type": "score",
    "instructions": "How urgent is it?",
    "levels": [{"label": "can wait"}, {"label": "this week"}, {"label": "today", "description": "within hours"}],
}


def client_of(server: Running, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, **options)


def check_answers(found: Any) -> None:
    predicate, choice, score = found.answers
    assert (predicate.type, predicate.name) == ("predicate", "billing")
    assert 0 < predicate.probability < 1
    assert [p.value for p in choice.probabilities] == ["angry", "calm", "glad"]
    best = max(choice.probabilities, key=lambda p: p.probability)
    assert (choice.name, choice.choice, choice.confidence) == ("tone", best.value, best.probability)
    assert score.name is None
    assert [(p.label, p.value) for p in score.probabilities] == [("can wait", 0), ("this week", 1), ("today", 2)]
    expected = sum(p.value * p.probability for p in score.probabilities)
    assert score.score == pytest.approx(expected)
    assert score.confidence == max(p.probability for p in score.probabilities)
    assert found.usage.input_tokens == found.usage.total_tokens > 3 * len(STATE.encode())


def test_every_type_of_question_is_answered_in_the_classes_of_the_client(server: Running, shop: Shop) -> None:
    with client_of(server) as client:
        found = client.decisions.create(model="first", input=STATE, questions=[PREDICATE, CHOICE, SCORE])
    check_answers(found)
    assert found.model == "first"
    coral = found.answers[1].coral
    assert coral["lens"] == "first"
    assert coral["digest"] == shop.lenses.find("first").digest
    assert coral["confidence"] == found.answers[1].confidence
    assert len(coral["base_probabilities"]) == 3
    assert coral["shift"] > 0


def test_the_client_reads_in_words_what_nobody_has_checked(server: Running) -> None:
    with client_of(server) as client:
        (found,) = client.decisions.create(model="second", input=STATE, questions=[CHOICE]).answers
        models = {model.id: model.coral for model in client.models.list()}
    assert found.coral["home"] is False
    assert found.coral["note"].startswith("Harm cannot be excluded on a task that a lens was not fitted on")
    assert models["second"]["note"] == found.coral["note"]
    assert models["first"]["note"].startswith("This lens is believed on every task as on its own. Harm cannot be")


def test_the_asynchronous_client_gets_the_same(server: Running) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            return await client.decisions.create(model="second", input=STATE, questions=[PREDICATE, CHOICE, SCORE])

    check_answers(asyncio.run(ask()))


def test_probabilities_are_those_of_the_lens_for_the_question_that_is_asked(server: Running, shop: Shop) -> None:
    """As those of a file of decisions that says the same."""
    choice = Question(
        "tone", "tone", "What is the tone?", ("angry", "calm", "glad"), passage=STATE,
        descriptions=("An upset message", "", ""),
    )  # fmt: skip
    statement = Question("b", "b", PREDICATE["instructions"], ("no", "yes"), passage=STATE, kind="yes-no")
    of_choice, of_statement = shop.lens("first").predict(shop.model, [choice, statement])
    with client_of(server) as client:
        found, predicate = client.decisions.create(model="first", input=STATE, questions=[CHOICE, PREDICATE]).answers
    assert [p.probability for p in found.probabilities] == pytest.approx(list(of_choice.probs), abs=1e-4)
    assert predicate.probability == pytest.approx(of_statement.p_true, abs=1e-4)


def test_a_boolean_and_a_text_that_reads_alike_are_different_values(server: Running) -> None:
    question = CHOICE | {"choices": [{"value": True}, {"value": "true"}, {"value": False}]}
    with client_of(server) as client:
        (found,) = client.decisions.create(model="first", input=STATE, questions=[question]).answers
    assert [p.value for p in found.probabilities] == [True, "true", False]
    assert found.probabilities[0].probability != found.probabilities[1].probability
    assert type(found.choice) in (bool, str)


def test_messages_with_parts_and_json_are_read(server: Running) -> None:
    messages = [
        {"role": "system", "content": "Be fair."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": STATE}, {"type": "input_json", "data": {"paid": 2}}],
        },
        {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "two payments"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
    ]
    with client_of(server) as client:
        found = client.decisions.create(
            model="first", input=messages, questions=[PREDICATE], prompt_cache_key="k", safety_identifier="s"
        )
    assert found.answers[0].type == "predicate"


def test_a_question_that_is_too_long_is_a_refusal_and_the_others_are_answered(server: Running) -> None:
    long = PREDICATE | {"name": "long", "instructions": "It is so. " * 150}
    with client_of(server) as client:
        found = client.decisions.create(model="first", input=STATE, questions=[PREDICATE, long])
    assert [(a.type, a.name) for a in found.answers] == [("predicate", "billing"), ("refusal", "long")]
    assert "longer than the 1024 tokens" in found.answers[1].coral["reason"]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"model": "frist"}, openai.NotFoundError, "Did you mean 'first'?"),
        ({"questions": []}, openai.UnprocessableEntityError, "questions cannot be used"),
        ({"questions": [PREDICATE | {"type": "essay"}]}, openai.UnprocessableEntityError, "questions.0"),
        ({"questions": [{"type": "predicate"}]}, openai.UnprocessableEntityError, "instructions is missing"),
        ({"questions": [PREDICATE | {"nmae": "x"}]}, openai.UnprocessableEntityError, "nmae is unknown"),
        ({"questions": [PREDICATE | {"instructions": " "}]}, openai.UnprocessableEntityError, "'billing' is empty"),
        (
            {"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "a"}]}]},
            openai.UnprocessableEntityError,
            "same option twice",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
            openai.UnprocessableEntityError,
            "Images cannot be read here",
        ),
    ],
)
def test_mistakes_are_the_exceptions_of_the_client(
    server: Running, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    request: dict[str, Any] = {"model": "first", "input": STATE, "questions": [PREDICATE]} | changes
    with client_of(server) as client, pytest.raises(error) as raised:
        client.decisions.create(**request)
    assert sentence in str(raised.value)


def test_the_lenses_are_listed_for_the_client(server: Running) -> None:
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["first", "second"]
