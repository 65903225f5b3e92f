"""Open questions are read from every kind of file; what is no open question is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral_lens.data.open_questions import OpenQuestion, as_open, load_open_questions
from coral_lens.data.same_answer import answer_key
from coral_lens.data.settings import SourceOptions, TableOptions
from coral_lens.errors import CoralError


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_answers_may_be_one_or_a_list_of_texts_or_numbers_or_missing(tmp_path: Path) -> None:
    rows = [
        {"question": "Who?", "answers": ["Ann", "Anne", "Ann"], "topic": "people"},
        {"question": "How many?", "answer": 8, "id": "n"},
        {"question": "Which?", "answer": ["a b", 3.5]},
        {"question": "Why?", "context": "A passage."},
        {"question": "Where?", "answers": [float("nan"), "here"]},
        {"question": "When?", "answers": [float("nan")], "answer": "now"},
    ]
    found = load_open_questions(lines(tmp_path / "open.jsonl", rows))
    assert [q.answers for q in found] == [("Ann", "Anne"), ("8",), ("a b", "3.5"), (), ("here",), ("now",)]
    assert [q.id for q in found][:4] == ["open:1", "n", "open:3", "open:4"]
    assert found[0].columns["topic"] == "people"
    assert found[3].passage == "A passage."


def test_csv_has_lists_as_json_or_between_bars_and_a_single_answer_may_hold_a_bar(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    path.write_text('question,answers\nWho?,Ann|Anne\nWhich?,"[""x"", ""y""]"\nWhat?,\n', "utf-8")
    assert [q.answers for q in load_open_questions(path)] == [("Ann", "Anne"), ("x", "y"), ()]
    path.write_text("question,answer\nWho?,a|b\n", "utf-8")
    assert load_open_questions(path)[0].answers == ("a|b",)


def test_a_list_of_dicts_and_plain_texts_are_questions_too() -> None:
    (found,) = load_open_questions([{"question": "Who?", "answer": "Ann"}], SourceOptions(limit=1))
    assert found.answers == ("Ann",)
    assert as_open("Who?") == [OpenQuestion("1", "Who?")]
    assert [q.id for q in as_open(["Who?", found])] == ["1", found.id]
    with pytest.raises(CoralError, match="Two questions have the id '1'"):
        as_open(["Who?", OpenQuestion("1", "Why?")])


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"question": "Who?", "options": ["a", "b"]}], r"line 1: these questions have options.*--train"),
        ([{"query_text_x": "Who?"}], r"line 1: no field is the question; found 'query_text_x'"),
        ([{"question": "  "}], r"line 1, field 'question': Question 'open:1' is empty"),
        ([{"question": "Who?", "answers": ["Ann", "?!"]}], r"line 1.*the answer '\?!', which says nothing"),
        ([{"question": "Who?", "answer": {"value": 1}}], r"line 1.*an answer or a list of answers is expected"),
        ([{"question": "Who?", "id": "x"}, {"question": "Why?", "id": "x"}], r"lines 1 and 2: both have the id 'x'"),
        ([{"question": "Who \ud800?"}], r"half of a surrogate pair"),
        ([], r"holds no questions"),
    ],
)
def test_what_is_no_open_question_is_refused_in_one_sentence(tmp_path: Path, rows: list[Any], sentence: str) -> None:
    with pytest.raises(CoralError, match=sentence):
        load_open_questions(lines(tmp_path / "open.jsonl", rows))


def test_bad_rows_can_be_left_out_and_a_name_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "open.jsonl", [{"question": ""}, {"question": "Who?"}])
    found = load_open_questions(path, SourceOptions(table=TableOptions(skip_bad=True)))
    assert [q.text for q in found] == ["Who?"]
    with pytest.raises(CoralError, match="arc_easy is no file of questions"):
        load_open_questions("arc_easy")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
rows_of_anything = st.dictionaries(
    st.sampled_from(["question", "answer", "answers", "id", "group", "context", "options", "other"]), values
)
contents = st.one_of(
    st.binary(max_size=200),
    st.lists(rows_of_anything | values, max_size=4).map(lambda rs: "\n".join(map(json.dumps, rs)).encode()),
    st.text(alphabet='question,;\tanswers|AB"\n\r[]0123 ', max_size=120).map(
        lambda t: f"question,answers\n{t}".encode()
    ),
)


@given(content=contents, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz"]))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_whatever_raises_anything_but_a_coral_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(content)
    message, questions = str(path), []
    try:
        questions = load_open_questions(path)
    except CoralError as error:
        message = str(error)
    assert str(path) in message
    assert len({q.id for q in questions}) == len(questions)
    for q in questions:
        assert q.text.strip()
        assert all(map(answer_key, q.answers))
        assert "".join((q.id, q.text, *q.answers, q.passage)).encode("utf-8")


said = st.text(st.characters(categories=["Lu", "Ll", "Nd"]), min_size=1, max_size=20).map(
    lambda word: f" {word}, \u2028 "
)


@given(question=st.text(min_size=1).filter(str.strip), answers=st.lists(said, max_size=4))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_as_json_is_read_back(tmp_path: Path, question: str, answers: list[str]) -> None:
    (read,) = load_open_questions(lines(tmp_path / "open.jsonl", [{"question": question, "answers": answers}]))
    assert read.text == question
    assert read.answers == tuple(dict.fromkeys(answer.strip() for answer in answers))
