"""Answers come back beside the rows that were asked, in every form of a table, and their own columns never change their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coral_lens.data.questions import load_questions
from coral_lens.lens.answers import OURS, Answer, Answers, holds_answers

ROWS = [
    {"key": 7, "question": "Which?", "A": "red", "B": "=blue", "answer": "B", "topic": "colours"},
    {"key": 8, "question": "Which?", "A": "red", "B": "blue", "answer": "A", "topic": None},
]


@pytest.fixture
def answers() -> Answers:
    questions = load_questions(ROWS)
    made = [
        Answer(q.id, 1, q.options[1], 0.75, (0.25, 0.75), (0.5, 0.5), 1.25, options_in_set=(0, 1), abstain=i == 1)
        for i, q in enumerate(questions)
    ]
    return Answers(made, questions)


def test_columns_of_the_input_come_first_and_one_that_has_a_name_of_ours_is_renamed(answers: Answers) -> None:
    first = answers.rows()[0]
    assert list(first) == ["key", "question", "A", "B", "input_answer", "topic", *OURS]
    assert (first["key"], first["input_answer"], first["answer"], first["option"]) == (7, "B", 1, "=blue")


def test_an_id_of_the_input_is_the_id() -> None:
    questions = load_questions([{"id": 5, "question": "?", "options": ["x", "y"], "note": "n"}])
    (row,) = Answers([Answer("5", 0, "x", 0.9, (0.9, 0.1), (0.5, 0.5), 1.0)], questions).rows()
    assert list(row)[:4] == ["id", "question", "options", "note"]
    assert (row["id"], row["option"], row["abstain"]) == ("5", "x", None)


def test_a_frame_has_a_row_for_each_answer(answers: Answers) -> None:
    frame = answers.to_frame()
    assert list(frame.columns) == list(answers.rows()[0])
    assert frame["abstain"].tolist() == [False, True]
    assert frame["probs"].tolist() == [(0.25, 0.75)] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_answers_are_written_by_the_ending_of_the_file_and_can_be_asked_again(
    tmp_path: Path, answers: Answers, name: str
) -> None:
    path = tmp_path / name
    answers.save(path)
    assert holds_answers(path)
    from coral_lens.data.settings import TableOptions

    again = load_questions(path, TableOptions(columns={"answer": "input_answer"}))
    assert [(q.text, q.answer) for q in again] == [("Which?", 1), ("Which?", 0)]
    probs = again[0].columns["probs"]
    assert (json.loads(probs) if isinstance(probs, str) else probs) == [0.25, 0.75]


def test_answers_without_their_questions_have_our_columns_alone() -> None:
    (row,) = Answers([Answer("5", 0, "x", 0.9, (0.9, 0.1), (0.5, 0.5), 1.0)]).rows()
    assert tuple(row) == OURS
