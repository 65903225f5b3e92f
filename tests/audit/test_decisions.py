"""Answers of servers of decisions are taken apart, in the formats of two clients, with labels by name or in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_lens.audit.reading import read_audited
from coral_lens.audit.tables import read_table
from coral_lens.data.settings import TableOptions
from coral_lens.errors import CoralError

OPENAI: dict[str, Any] = {
    "model": "my-lens",
    "answers": [
        {"type": "predicate", "name": "urgent", "probability": 0.9},
        {
            "type": "choice",
            "name": "kind",
            "choice": "true",
            "confidence": 0.6,
            "probabilities": [
                {"value": "true", "probability": 0.6},
                {"value": True, "probability": 0.3},
                {"value": "no", "probability": 0.1},
            ],
        },
        {
            "type": "score",
            "name": "anger",
            "score": 0.7,
            "confidence": 0.5,
            "probabilities": [
                {"label": "calm", "value": 0, "probability": 0.5},
                {"label": "cross", "value": 1, "probability": 0.3},
                {"label": "angry", "value": 2, "probability": 0.2},
            ],
        },
        {"type": "refusal", "name": "language"},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3},
}
TYPESAFE: dict[str, Any] = {
    "answers": {
        "urgent": {"type": "noul", "noul": 0.9},
        "kind": {"type": "choice", "choice": "bug", "confidence": 0.2, "probabilities": {"bug": 0.6, "wish": 0.4}},
        "anger": {
            "type": "score",
            "score": 0.7,
            "confidence": 0.2,
            "legend": {"0": "calm"},
            "probabilities": {"0": 0.5, "1": 0.3, "2": 0.2},
        },
    }
}


def probs_of(rows: list[dict[str, Any]]) -> tuple[list[list[float]], list[int], list[str]]:
    found = read_audited([rows])
    (said,) = found.systems.values()
    options = said.options
    return (
        [said.probs[options.of(i)].round(6).tolist() for i in range(len(said))],
        said.answers.tolist(),
        [q.id for q in found.questions],
    )


@pytest.mark.parametrize(
    "beside",
    [
        {"labels": {"urgent": True, "kind": True, "anger": "angry", "language": "French"}},
        {"labels": [True, True, 2, "French"]},
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_answers_to_openais_client(beside: dict[str, Any], nested: bool) -> None:
    row = {"id": "mail", **beside, **({"response": OPENAI} if nested else OPENAI)}
    probs, answers, ids = probs_of([row])
    assert probs == [[0.1, 0.9], [0.6, 0.3, 0.1], [0.5, 0.3, 0.2]]
    assert answers == [1, 1, 2]  # the truth itself is another option than the text "true"
    assert ids == ["mail.urgent", "mail.kind", "mail.anger"]


def test_answers_to_typesafes_client() -> None:
    probs, answers, _ = probs_of([{"response": TYPESAFE, "labels": {"urgent": False, "kind": "wish", "anger": 1}}])
    assert probs == [[0.1, 0.9], [0.6, 0.4], [0.5, 0.3, 0.2]]
    assert answers == [0, 1, 1]


def test_kinds_are_kept_and_rows_divide_into_subgroups() -> None:
    labels = {"urgent": True, "kind": "no", "anger": "calm"}
    found = read_audited([[{"response": OPENAI, "labels": labels, "team": "north"}]])
    assert [q.kind for q in found.questions] == ["yes-no", "choice", "score"]
    assert found.column("team") == ["north"] * 3
    assert found.column("name") == ["urgent", "kind", "anger"]


def test_one_answered_decision_in_a_row() -> None:
    probs, answers, _ = probs_of([{**OPENAI["answers"][0], "label": "no"}, {**OPENAI["answers"][2], "label": 1}])
    assert (probs, answers) == ([[0.1, 0.9], [0.5, 0.3, 0.2]], [0, 1])


def test_ids_may_be_counted_from_nought() -> None:
    made = [
        {"id": i, "answers": [{"type": "predicate", "name": "urgent", "probability": 0.3}], "labels": [True]}
        for i in (0, 1)
    ]
    assert probs_of(made)[2] == ["0.urgent", "1.urgent"]


def test_levels_may_be_counted_from_one() -> None:
    score = {"type": "score", "probabilities": {"1": 0.1, "2": 0.2, "3": 0.7}}
    rows = [{"id": f"q{level}", "answers": {"anger": score}, "labels": {"anger": level}} for level in (1, 2, 3)]
    assert probs_of(rows)[1] == [0, 1, 2]


def test_a_decision_without_label_is_named() -> None:
    with pytest.raises(CoralError, match=r"row 1.*1 of 3 rows have no label"):
        probs_of([{"response": OPENAI, "labels": {"urgent": True, "kind": "no"}}])


VALUE = (
    st.none() | st.booleans() | st.floats(0, 1) | st.sampled_from(["a", "b"]) | st.lists(st.integers(0, 1), max_size=2)
)
OPTION = st.dictionaries(st.sampled_from(["value", "label", "probability"]), VALUE, max_size=3)
ANSWER = st.fixed_dictionaries(
    {"type": st.sampled_from(["predicate", "noul", "choice", "score", "refusal"])},
    optional={
        "probability": VALUE,
        "noul": VALUE,
        "name": VALUE,
        "label": VALUE,
        "probabilities": VALUE
        | st.lists(OPTION, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), VALUE, max_size=3),
    },
)
ROW = ANSWER | st.fixed_dictionaries(
    {"answers": st.lists(ANSWER, max_size=3) | st.dictionaries(st.sampled_from("xy"), ANSWER, max_size=2)},
    optional={"labels": VALUE | st.dictionaries(st.sampled_from("xy"), VALUE, max_size=2), "id": VALUE},
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ROW, max_size=2))
def test_no_response_whatever_raises_anything_but_a_coral_error(made: list[dict[str, Any]]) -> None:
    try:
        sets = read_table(made, TableOptions(), name="mine")
    except CoralError:
        return
    assert all(np.isfinite(p.probs).all() for one in sets for p in one.systems.values())
