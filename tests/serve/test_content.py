"""JSON of any kind is written out as text, but for what could not be given back; half of a surrogate pair is found at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from support.servers import Running

from coral_lens.serve.ask import AskRequest
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import DEEPEST, is_torn, text_of_json
from coral_lens.serve.decisions import DecisionRequest
from coral_lens.serve.predict import PredictRequest
from coral_lens.serve.systemone import SystemOneRequest


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_json_is_written_out_as_deep_as_it_may_lie_in_itself() -> None:
    assert text_of_json("as it is") == "as it is"
    assert text_of_json({"ä": [1, {"b": None}]}) == '{"ä": [1, {"b": null}]}'
    assert text_of_json(nested(DEEPEST)) == json.dumps(nested(DEEPEST))
    with pytest.raises(Complaint, match="more than 100 deep"):
        text_of_json({"a": nested(DEEPEST)})


@pytest.mark.parametrize("depth", [DEEPEST + 1, 300, 700])
def test_levels_that_could_not_be_given_back_are_the_clients_mistake(server: Running, depth: int) -> None:
    question = {"type": "score", "criteria": [nested(depth), "high"]}
    with server.client() as client:
        reply = client.post("/v1/systemone", json={"model": "first", "state": "s", "questions": {"q": question}})
    assert reply.status_code == 422
    assert "deep in itself" in reply.json()["error"]["message"]


MANY = [None] * 1000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (PredictRequest, {"questions": MANY}),
        (PredictRequest, {"questions": {"question": "a", "options": MANY}}),
        (AskRequest, {"questions": MANY}),
        (DecisionRequest, {"model": "a", "input": MANY, "questions": MANY}),
        (DecisionRequest, {"model": "a", "input": "a", "questions": [{"type": "predicate", "instructions": MANY}]}),
        (SystemOneRequest, {"model": "a", "state": "", "questions": {"q": {"type": "score", "criteria": MANY}}}),
    ],
)
def test_of_many_wrong_values_the_first_is_complained_of(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Each complaint takes a kilobyte, and all of them would be made before one is told."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() < 10


@given(st.text(st.characters(codec=None, categories=["L", "P", "Cs", "So"])))
def test_a_text_is_torn_if_it_holds_half_of_a_pair(text: str) -> None:
    assert is_torn(text) == any("\ud800" <= character <= "\udfff" for character in text)
