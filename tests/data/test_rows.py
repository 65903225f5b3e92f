"""Rows that are decisions: states, instructions, descriptions, kinds, several right or soft answers; and prompts as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TableOptions, parse_classes
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question


def one(row: dict[str, Any], **said: Any) -> Question:
    (question,) = load_questions([row], TableOptions(**said))
    return question


def refused(row: dict[str, Any], **said: Any) -> str:
    with pytest.raises(CoralError) as error:
        load_questions([row], TableOptions(**said))
    return str(error.value)


# ------------------------------------------------------------------------------------------------------- states and questions


def test_questions_about_one_state_read_it_and_belong_together() -> None:
    state = {"customer": "Ada", "orders": [3, 4]}
    rows = [{"state": state, "question": q, "options": ["x", "y"]} for q in ("first?", "second?")]
    first, second = load_questions([*rows, {"state": "other", "question": "third?", "options": ["x", "y"]}])[:2]
    assert first.passage == second.passage == '{"customer": "Ada", "orders": [3, 4]}'
    assert first.group == second.group != first.id
    assert first.group.startswith("state-")


def test_a_row_may_hold_several_questions_about_its_state(tmp_path: Path) -> None:
    request = {
        "id": "ticket-7",
        "state": "My parcel is late.",
        "channel": "mail",
        "questions": [
            {"id": "angry", "kind": "yes-no", "question": "The customer is angry."},
            {"question": "What is it about?", "options": ["delivery", "refund"], "answer": "delivery"},
        ],
    }
    path = tmp_path / "decisions.jsonl"
    path.write_text(json.dumps(request) + "\n" + json.dumps({**request, "id": None}) + "\n")
    first, second, third, fourth = load_questions(path)
    assert [q.id for q in (first, second, third, fourth)] == ["ticket-7.angry", "ticket-7.2", "2.angry", "2.2"]
    assert {q.passage for q in (first, second)} == {"My parcel is late."}
    assert first.group == second.group
    assert (second.options, second.answer, second.columns["channel"]) == (("delivery", "refund"), 0, "mail")


def test_instructions_are_kept_apart_and_are_the_question_where_there_is_no_other() -> None:
    row = {"question": "Which?", "options": ["x", "y"]}
    told = one({**row, "instructions": "Be strict."})
    assert (told.text, told.instructions) == ("Which?", "Be strict.")
    assert one(row, instructions="Be strict.") == told
    asked = one({"instructions": "Is it urgent?", "options": ["x", "y"]})
    assert (asked.text, asked.instructions) == ("Is it urgent?", "")


def test_a_table_of_texts_and_classes_is_read_with_what_is_said_of_it() -> None:
    rows = [{"review": "Great!", "label": "good"}, {"review": "Dull.", "label": "bad"}]
    said = TableOptions(
        columns={"state": "review"}, classes={"bad": "", "good": "worth seeing"}, instructions="Is it good?"
    )
    first, second = load_questions(rows, said)
    assert (first.text, first.passage, first.options, first.answer) == ("Is it good?", "Great!", ("bad", "good"), 1)
    assert first.descriptions == ("", "worth seeing")
    assert second.answer == 0


def test_the_names_of_classes_in_a_dataset_are_options() -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    data = Dataset.from_dict({"question": ["Great!", "Dull."], "label": [1, 0]}, features=features)
    questions = load_questions(data)
    assert [(q.options, q.answer) for q in questions] == [(("negative", "positive"), 1), (("negative", "positive"), 0)]


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("bad, good", {"bad": "", "good": ""}),
        ("c.json", {"bad": "not worth it", "good": ""}),
        ("l.json", {"a": "", "b": ""}),
    ],
)
def test_classes_are_names_or_a_file(tmp_path: Path, monkeypatch: Any, text: str, classes: dict[str, str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"bad": "not worth it", "good": ""}')
    Path("l.json").write_text('["a", "b"]')
    assert parse_classes(text) == classes


@pytest.mark.parametrize("text", ["one", "a,a", "none.json", "bad.json", "a,,b"])
def test_what_are_no_classes_is_refused(tmp_path: Path, monkeypatch: Any, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"a": 1, "b": 2}')
    with pytest.raises(CoralError, match=r"must name two or more different classes|cannot be read"):
        parse_classes(text)


# ---------------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        (True, 1),
        (False, 0),
        ("yes", 1),
        ("No", 0),
        ("true", 1),
        ("F", 0),
        (1, 1),
        (0, 0),
        ("1", 1),
        (1.0, 1),
        (None, UNKNOWN),
    ],
)
def test_the_answer_of_a_yes_no_question_is_a_truth(answer: Any, index: int) -> None:
    question = one({"question": "It is late.", "answer": answer}, kind="yes-no")
    assert (question.options, question.answer, question.kind) == (("no", "yes"), index, "yes-no")


def test_a_yes_no_question_equals_a_choice_of_two_but_for_its_kind() -> None:
    statement = one({"question": "It is late.", "kind": "yes-no", "answer": True})
    choice = one({"question": "It is late.", "options": ["no", "yes"], "answer": "yes"})
    assert (statement.text, statement.options, statement.answer) == (choice.text, choice.options, choice.answer)


def test_a_truth_may_name_an_option() -> None:
    assert one({"question": "?", "options": ["false", "true"], "answer": True}).answer == 1
    assert one({"question": "?", "options": [True, False], "answer": True}).answer == 0
    both = one({"question": "?", "options": ["true", True, False], "answer": True})
    assert (both.options, both.answer) == (("true", "true", "false"), 1)
    assert one({"question": "?", "options": ["spam", "ham"], "kind": "yes-no", "answer": True}).answer == 1


@pytest.mark.parametrize("name", ["predicate", "noul", "yes_no", "Boolean"])
def test_a_kind_may_be_called_as_servers_call_it(name: str) -> None:
    assert one({"question": "It is late.", "kind": name}).kind == "yes-no"


def test_the_level_of_a_score_is_named_by_itself_and_not_by_its_place() -> None:
    numbers = {"question": "How bad?", "kind": "score", "levels": [1, 2, 3, 4, 5]}
    assert one({**numbers, "answer": 4}).answer == 3
    words = {"question": "How bad?", "kind": "score", "levels": ["low", "middle", "high"]}
    assert [one({**words, "answer": a}).answer for a in (2, "high", "C")] == [2, 2, 2]
    assert "9 is out of range" in refused({**numbers, "answer": 9})


def test_the_level_of_a_score_in_a_table_of_text_is_named_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("question,options,answer,kind\nHow bad?,1|2|3|4|5,4,score\nHow bad?,1|2|3|4|5,1,score\n")
    assert [q.answer for q in load_questions(path)] == [3, 0]


# ------------------------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    "options",
    [
        {"options": [{"value": "refund", "description": "money back"}, {"value": "other"}]},
        {"options": {"refund": "money back", "other": None}},
        {"options": ["refund", "other"], "descriptions": ["money back", None]},
        {"options": ["refund", "other"], "descriptions": {"refund": "money back"}},
        {"options": [{"label": "refund", "description": "money back"}, {"label": "other", "description": ""}]},
    ],
)
def test_descriptions_of_options_may_be_given_in_five_ways(options: dict[str, Any]) -> None:
    question = one({"question": "What is wanted?", **options, "answer": "other"})
    assert question.options == ("refund", "other")
    assert question.descriptions == ("money back", "")
    assert question.answer == 1


def test_descriptions_that_do_not_fit_are_refused() -> None:
    row = {"question": "?", "options": ["x", "y"]}
    assert "has 1 descriptions for 2 options" in refused({**row, "descriptions": ["only"]})
    assert "field 'descriptions': a description for each" in refused({**row, "descriptions": 3})


# -------------------------------------------------------------------------------------- several right options, and soft answers

ROW = {"question": "Which?", "options": ["red", "green", "blue"]}


@pytest.mark.parametrize("answers", [[0, 2], ["red", "blue"], ["A", "C"], [2, 0, 2]])
def test_several_options_may_be_right(answers: list[Any]) -> None:
    question = one({**ROW, "answers": answers})
    assert (question.right, question.answer, question.target) == ((0, 2), 0, (0.5, 0.0, 0.5))
    assert one({**ROW, "answer": answers}) == question


def test_one_right_option_in_a_list_is_a_plain_answer() -> None:
    assert one({**ROW, "answers": ["green"]}) == one({**ROW, "answer": 1})
    assert one({**ROW, "answers": []}).answer == UNKNOWN


def test_several_right_options_stand_in_a_cell_of_text(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('question,A,B,C,answers\nWhich?,red,green,blue,A|C\nWhich?,red,green,blue,"[""B"", ""C""]"\n')
    assert [q.right for q in load_questions(path)] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("soft", [[7, 2, 1], [0.7, 0.2, 0.1], {"red": 7, "green": 2, "blue": 1}, "[7, 2, 1]"])
def test_a_soft_answer_is_shares_or_counts(soft: Any) -> None:
    question = one({**ROW, "soft": soft})
    assert question.soft == pytest.approx((0.7, 0.2, 0.1))
    assert (question.answer, question.right) == (0, ())


def test_a_soft_answer_all_on_one_option_is_that_option() -> None:
    assert one({**ROW, "soft": [0, 3, 0]}) == one({**ROW, "answer": 1})
    assert Question("1", "1", "?", ("x", "y"), soft=(0.0, 1.0)) == Question("1", "1", "?", ("x", "y"), 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"soft": [1, 2]}, "field 'soft': a share or a count for each of the 3 options is expected. Got [1, 2] (list)"),
        ({"soft": [1, -1, 0]}, "field 'soft': a share or a count"),
        ({"soft": [0, 0, 0]}, "field 'soft': a share or a count"),
        ({"soft": {"purple": 1}}, "field 'soft': 'purple' is no option ('red', 'green', 'blue')."),
        ({"soft": [1, 1, 1], "answer": 0}, "It has both `answer` and `soft`; give one of them."),
        ({"answers": [0, 5]}, "field 'answers': 5 is out of range"),
        ({"answers": [[0]]}, "field 'answers': a list of right options is expected"),
    ],
)
def test_what_is_no_soft_answer_is_refused(row: dict[str, Any], said: str) -> None:
    assert said in refused({**ROW, **row})


# ---------------------------------------------------------------------------------------------------------- prompts as they are


def test_a_row_may_bring_its_prompt_and_what_is_scored_after_it() -> None:
    row = {"prompt": "Wo liegt Wien?\nAntwort:", "continuations": [" in Österreich", " in Ungarn"], "answer": 0}
    question = one(row)
    assert question.rendered is not None
    assert question.rendered.contexts == ("Wo liegt Wien?\nAntwort:",) * 2
    assert question.rendered.continuations == (" in Österreich", " in Ungarn")
    assert question.rendered.choices == ("in Österreich", "in Ungarn")
    assert (question.text, question.answer) == ("Wo liegt Wien?\nAntwort:", 0)
    named = one({**row, "options": ["Österreich", "Ungarn"], "question": "Wo liegt Wien?", "answer": "Ungarn"})
    assert (named.options, named.text, named.answer) == (("Österreich", "Ungarn"), "Wo liegt Wien?", 1)


def test_continuations_that_do_not_fit_the_options_are_refused() -> None:
    row = {"prompt": "p", "continuations": [" x"], "options": ["x", "y"]}
    assert "field 'continuations': a text for each of the 2 options is expected" in refused(row)


# ------------------------------------------------------------------------------------------------- what is written is read back

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), min_size=1, max_size=12).filter(str.strip)
# cells of tables end where white space begins only for people: they are kept as they are
written = st.fixed_dictionaries(
    {
        "question": texts,
        "options": st.lists(texts, min_size=2, max_size=5),
        "state": st.none() | texts,
        "instructions": texts,
    },
)


@given(st.lists(written, min_size=1, max_size=5), st.data())
def test_what_is_written_is_read_back_from_rows(rows: list[dict[str, Any]], data: Any) -> None:
    answers = [data.draw(st.integers(0, len(row["options"]) - 1)) for row in rows]
    read = load_questions([{**row, "answer_index": a} for row, a in zip(rows, answers, strict=True)])
    for question, row, answer in zip(read, rows, answers, strict=True):
        assert (question.text, question.options, question.answer) == (row["question"], tuple(row["options"]), answer)
        assert question.passage == (row["state"] or "")
        assert question.instructions in ("", row["instructions"])
        assert question.columns["question"] == row["question"]


@given(
    st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=5),
    st.sampled_from(",;\t|"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_is_written_is_read_back_from_tables(
    tmp_path_factory: Any, rows: list[tuple[str, str, str]], separator: str, end: str
) -> None:
    import csv

    path = tmp_path_factory.mktemp("tables") / "q.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter=separator, lineterminator=end)
        table.writerow(["question", "A", "B", "answer_index"])
        table.writerows((*row, 1) for row in rows)
    read = load_questions(path)
    # Python's csv module reads a line end inside a cell as it stands there
    assert [(q.text, *q.options, q.answer) for q in read] == [(*row, 1) for row in rows]
