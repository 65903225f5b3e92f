"""The user's own questions: what is read is what was meant, and every mistake is answered with file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral_lens.data.questions import load_questions, read_questions
from coral_lens.data.settings import TableOptions, TaskOptions
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN

RANGE = "the 4 options are numbered 0 to 3"
GOOD: dict[str, Any] = {"question": "What is 2 + 2?", "options": ["3", "4", "5"], "answer": 1}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write(tmp_path: Path, *rows: dict[str, Any] | str, name: str = "own.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
    return path


def complaint(path: Path) -> str:
    with pytest.raises(CoralError) as error:
        read_questions(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_all_fields_of_a_line_arrive(tmp_path: Path) -> None:
    row = {**GOOD, "id": "q7", "group": "sums", "context": "Numbers are added."}
    (question,) = read_questions(write(tmp_path, row))
    assert (question.id, question.group, question.text) == ("q7", "sums", "What is 2 + 2?")
    assert question.options == ("3", "4", "5")
    assert (question.answer, question.passage, question.rendered) == (1, "Numbers are added.", None)


def test_ids_default_to_file_and_line_and_groups_to_ids(tmp_path: Path) -> None:
    first, second = read_questions(write(tmp_path, GOOD, "", GOOD))
    assert (first.id, second.id) == ("own:1", "own:3")
    assert (first.group, second.group) == ("own:1", "own:3")


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        (2, ["x", "y", "z"], 2),
        ("B", ["x", "y", "z"], 1),
        ("b", ["x", "y", "z"], 1),
        (" C ", ["x", "y", "z"], 2),
        ("z", ["x", "y", "z"], 2),  # the text of the third option, not the 26th letter
        ("A", ["A", "B"], 0),
        (1, [3, 1, 2], 1),  # a number is an index, never a text
        ("1", [3, 1, 2], 1),  # a text is a text
        (None, ["x", "y"], UNKNOWN),
        ("", ["x", "y"], UNKNOWN),
    ],
)
def test_an_answer_is_an_index_a_text_or_a_letter(
    tmp_path: Path, answer: Any, options: list[Any], expected: int
) -> None:
    (question,) = read_questions(write(tmp_path, {"question": "?", "options": options, "answer": answer}))
    assert question.answer == expected


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("lines", "answers"),
    [
        (["?,1,2,3,4,1", "?,1,2,3,4,2", "?,1,2,3,4,0"], [1, 2, 0]),  # 0 is no option: all are numbers
        (["?,1,2,3,4,1", "?,1,2,3,4,2", "?,1,2,3,4,4"], [0, 1, 3]),  # 4 is no number: all are texts
        (["?,1,2,3,4,1", "?,5,6,7,8,7"], [0, 2]),
        (["?,D,A,B,C,A", "?,w,x,y,z,B"], [0, 1]),  # B is no option's text: all are letters
        (["?,D,A,B,C,A", "?,w,x,y,z,y"], [1, 2]),  # y is no letter of an option: all are texts
        (["?,0,1,2,3,1", "?,0,1,2,3,3"], [1, 3]),  # both say the same
        (["?,1,2,3,4,", "?,w,x,y,z,1", "?,1,2,3,4,2"], [UNKNOWN, 1, 2]),
    ],
)
def test_answers_of_a_table_are_read_in_the_one_way_that_fits_the_whole_file(
    tmp_path: Path, lines: list[str], answers: list[int]
) -> None:
    path = table(tmp_path, "question,a,b,c,d,answer", *lines)
    assert [q.answer for q in read_questions(path)] == answers
    assert [q.answer for q in load_questions(path, TaskOptions(limit=1))] == answers[:1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["?,1,2,3,4,1", "?,1,2,3,4,2"], "line 2: the answer may be the text of option 1 or the number of option 2"),
        (["?,w,x,y,z,1", "?,1,2,3,4,2", "?,w,x,y,z,w"], "line 3: the answer may be the text of option 2 or the number"),
        (["?,B,A,c,d,B"], "line 2: the answer may be the text of option 1 or the letter of option 2"),
    ],
)
def test_a_table_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    message = complaint(table(tmp_path, "question,a,b,c,d,answer", *lines))
    assert said in message
    assert "`answer_index`" in message


def test_a_letter_in_json_is_no_text_where_the_other_answers_are_letters(tmp_path: Path) -> None:
    vitamins = {"question": "Which vitamin?", "options": ["D", "C", "B"], "answer": "C"}
    plain = {"question": "?", "options": ["x", "y", "z"], "answer": "A"}
    assert [q.answer for q in read_questions(write(tmp_path, vitamins, plain))] == [2, 0]
    assert "the text of option 2 or the letter of option 3" in complaint(write(tmp_path, vitamins))


def test_an_answer_index_is_never_a_text(tmp_path: Path) -> None:
    lines = ("question,a,b,c,answer_index", "?,1,2,3,1", "?,1,2,3,2", "?,1,2,3,")
    assert [q.answer for q in read_questions(table(tmp_path, *lines))] == [1, 2, UNKNOWN]
    row = {"question": "?", "options": ["x", "y"]}
    assert read_questions(write(tmp_path, {**row, "answer_index": 1}))[0].answer == 1
    assert "both `answer` and `answer_index`" in complaint(write(tmp_path, {**row, "answer_index": 1, "answer": "x"}))
    assert "line 2, column 'answer_index': a whole number" in complaint(table(tmp_path, lines[0], "?,1,2,3,B"))
    assert "line 2, column 'answer_index': 3 is out of range" in complaint(table(tmp_path, lines[0], "?,1,2,3,3"))


def numbered(tmp_path: Path, kind: str, *answers: int | str | None, field: str = "answer") -> Path:
    """A file of questions of four options with these answers, as JSON or as a table."""
    if kind == "csv":
        return table(tmp_path, f"question,a,b,c,d,{field}", *(f"?,w,x,y,z,{'' if a is None else a}" for a in answers))
    return write(tmp_path, *({"question": "?", "options": ["w", "x", "y", "z"], field: a} for a in answers))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_numbers_that_may_be_counted_from_1_are_asked_about(tmp_path: Path, kind: str) -> None:
    path = numbered(tmp_path, kind, *[1, 2, 3] * 3, None, 2)
    assert complaint(path) == (
        f"{path}: no answer is 0 and none is the last number, so they may be counted from 0 or from 1; say which with "
        "--answer-base 0 or --answer-base 1."
    )
    with pytest.raises(CoralError, match="from 0 or from 1"):  # a limit does not change what the numbers mean
        load_questions(path, TaskOptions(limit=2))
    for base in (0, 1):
        told = load_questions(path, TableOptions(answer_base=base))
        assert [q.answer for q in told] == [*(n - base for n in [1, 2, 3] * 3), UNKNOWN, 2 - base]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_numbers_are_counted_from_1_where_one_is_as_large_as_there_are_options(tmp_path: Path, kind: str) -> None:
    questions = load_questions(numbered(tmp_path, kind, 1, 4, None, 2))
    assert [q.answer for q in questions] == [0, 3, UNKNOWN, 1]
    assert questions.summary == "4 questions, 4 options each, answers are numbers counted from 1, 1 unknown"
    limited = load_questions(numbered(tmp_path, kind, *[1, 2, 3] * 9, 4), TaskOptions(limit=2))
    assert [q.answer for q in limited] == [0, 1]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([1, 2, 3] * 3, [1, 2, 3] * 3),  # nine: it may be chance
        ([*[1, 2, 3] * 9, 0], [*[1, 2, 3] * 9, 0]),
        ([*[1, 2, 3] * 9, "w"], [*[1, 2, 3] * 9, 0]),
        ([*[1, 2, 3] * 9, "C"], [*[1, 2, 3] * 9, 2]),
    ],
)
def test_a_0_a_letter_or_a_text_says_that_numbers_are_counted_from_0(
    tmp_path: Path, kind: str, answers: list[int | str], expected: list[int]
) -> None:
    assert [q.answer for q in read_questions(numbered(tmp_path, kind, *answers))] == expected


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_answer_index_without_a_0_is_not_questioned(tmp_path: Path, kind: str) -> None:
    path = numbered(tmp_path, kind, *[1, 2, 3] * 4, field="answer_index")
    assert [q.answer for q in read_questions(path)] == [1, 2, 3] * 4


def test_numbers_are_counted_from_1_among_options_that_are_numbers_too(tmp_path: Path) -> None:
    header, settled = "question,a,b,c,d,answer", ["?,w,x,y,z,1"] * 5
    assert "from 0 or from 1" in complaint(table(tmp_path, header, *settled, *["?,1,2,3,4,2"] * 5))
    both = table(tmp_path, header, *["?,0,1,2,3,2"] * 20)  # number and text agree in every line
    assert {q.answer for q in read_questions(both)} == {2}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("answers", [(0, 4), (1, 5), (4, 0, 1)])
def test_a_number_beyond_the_options_is_out_of_range_however_it_is_counted(
    tmp_path: Path, kind: str, answers: tuple[int, ...]
) -> None:
    message = complaint(numbered(tmp_path, kind, *answers))
    assert f"{max(answers)} is out of range: {RANGE}. Leave it out if it is not known; --answer-base 1" in message
    path = numbered(tmp_path, kind, 4, field="answer_index")
    assert f"4 is out of range: {RANGE}. Leave it out if it is not known." in complaint(path)


def test_a_question_without_answer_is_fine(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path, {"question": "?", "options": ["x", "y"]}))
    assert question.answer == UNKNOWN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": 3}, "'answer': 3 is out of range"),
        ({"answer": -1}, "'answer': -1 is out of range"),
        ({"answer": "D"}, "'answer': 'D' is out of range: the letters of the 3 options are A to C."),
        ({"answer": "four"}, "'answer': 'four' is neither a letter nor the text of an option"),
        ({"answer": 1.5}, "'answer': 1.5 is neither a letter nor the text of an option"),
        ({"answer": True}, "'answer': True is neither a letter nor the text of an option"),
        ({"answer": {"a": 1}}, "'answer': {'a': 1} is neither a letter nor the text of an option"),
        ({"answer": "4", "options": ["4", "4"]}, "'answer': '4' is the text of several options"),
        ({"options": ["4"], "answer": 0}, "'options': Question 'own:2' has 1 option"),
        ({"options": [], "answer": None}, "'options': Question 'own:2' has no options"),
        ({"options": [], "answer": "B"}, "'options': Question 'own:2' has no options"),
        ({"options": None}, "'options': Question 'own:2' has no options"),
        ({"options": ["3", " "]}, "'options': Question 'own:2' has an empty option (number 2)"),
        ({"options": ["3", ["4"]]}, "'options': a text is expected. Got ['4'] (list) instead."),
        ({"options": "3|4"}, "'options': a list of options is expected. Got '3|4' (str) instead."),
        ({"question": " "}, "'question': the question is empty"),
        ({"question": None}, "'question': the question is empty"),
        ({"question": ["?"]}, "'question': a text is expected. Got ['?'] (list) instead."),
        ({"question": "\ud800"}, "'question': '\\ud800' holds half of a surrogate pair"),
        ({"id": 0.5}, "'id': a text or a whole number is expected. Got 0.5 (float) instead."),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    message = complaint(write(tmp_path, {**GOOD, "answer": 0, "id": "a"}, {**GOOD, "id": None, **change}))
    assert f", line 2, field {said}" in message


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    assert "line 1: no field has the options; found 'question'." in complaint(write(tmp_path, {"question": "?"}))
    assert "line 1: no field is the question; found 'options'." in complaint(write(tmp_path, {"options": ["a", "b"]}))


@pytest.mark.parametrize("wrong", ["quesion", "anwser", "option"])
def test_a_misspelt_field_is_not_carried_along_in_silence(tmp_path: Path, wrong: str) -> None:
    meant = {"quesion": "question", "anwser": "answer", "option": "options"}[wrong]
    row = {wrong if name == meant else name: value for name, value in GOOD.items()}
    path = write(tmp_path, row)
    message = complaint(path)
    assert f"line 1: unknown field {wrong!r}, and none is called {meant!r}. Did you mean {meant!r}?" in message
    assert f"say --columns {meant}={wrong}" in message
    (question,) = load_questions(path, TableOptions(columns={meant: wrong}))
    assert question == read_questions(write(tmp_path, GOOD))[0]


def test_a_field_that_is_no_part_of_a_question_is_carried_along(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path, {**GOOD, "topic": "sums", "level": 3}, {**GOOD, "answer": 0}))
    assert [q.columns["topic"] for q in questions] == ["sums", None]
    assert list(questions[0].columns) == ["question", "options", "answer", "topic", "level"]
    assert questions.summary == (
        "2 questions, 3 options each, answers are numbers counted from 0, 2 columns carried along"
    )
    unasked = load_questions(write(tmp_path, {**GOOD, "anwser": 1}), TableOptions(columns={"answer": ""}))
    assert unasked[0].answer == UNKNOWN


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    message = complaint(write(tmp_path, {**GOOD, "id": 5}, GOOD, {**GOOD, "id": "5"}))
    assert "lines 1 and 3: both have the id '5'" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": ', "malformed JSON"),
        ("[1, 2]", "Got a list instead"),
        ("null", "Got a NoneType instead"),
        ("[" * 100_000, "malformed JSON"),
        ('{"answer": ' + "9" * 5000 + "}", "malformed JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    message = complaint(write(tmp_path, GOOD, line))
    assert ", line 2: " in message
    assert said in message


def test_a_byte_that_is_not_utf8_is_located(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    first = json.dumps(GOOD).encode() + b"\n"
    path.write_bytes(first + b'{"question": "caf\xe9"}\n')
    assert f"line 2: not UTF-8 (byte 0xe9 at offset {len(first) + 17})" in complaint(path)


def test_utf16_is_refused_at_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(json.dumps(GOOD).encode("utf-16"))
    assert "line 1: not UTF-8 (byte 0xff at offset 0)" in complaint(path)


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_questions(path)) == 1


@pytest.mark.parametrize("content", ["", "\n\n", "question,options\n"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: str) -> None:
    for name in ("own.csv", "own.jsonl") if "question" not in content else ("own.csv",):
        path = tmp_path / name
        path.write_text(content)
        assert "holds no questions" in complaint(path)


def test_gzip_is_read_and_a_truncated_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl.gz"
    whole = gzip.compress((json.dumps(GOOD) + "\n").encode() * 1, mtime=0)
    path.write_bytes(whole)
    assert read_questions(path)[0].id == "own:1"
    path.write_bytes(whole[:-12])
    assert "truncated or damaged" in complaint(path)
    path.write_bytes(b"not gzip at all")
    assert "truncated or damaged" in complaint(path)


def test_gzip_that_becomes_a_thousand_times_as_large_is_refused_before_it_takes_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coral_lens.storage.lines.UNHARMED", 10_000)
    path = tmp_path / "own.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b" " * 300_000))  # one line
    assert "expands to more than 100 times its size" in complaint(path)
    monkeypatch.setenv("CORAL_EXPANSION", "2000")
    assert len(read_questions(path)) == 1
    monkeypatch.setenv("CORAL_EXPANSION", "many")
    with pytest.raises(CoralError, match="CORAL_EXPANSION must be a whole number"):
        read_questions(path)


@pytest.mark.parametrize("name", ["own.txt", "own.pdf", "own.xls", "own.txt.gz"])
def test_a_file_of_another_kind_is_refused_by_its_ending(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, GOOD, name=name)
    assert complaint(path) == (
        f"{path}: files that end in .jsonl, .ndjson, .json, .csv, .tsv, .tab, .parquet, .arrow, .feather, .xlsx are read (also "
        "with .gz)."
    )


@pytest.mark.parametrize("content", [b"question,A,B\r?,x,y\r", b"question,A,B\n?,x,y\r?,x,y\n"])
def test_a_carriage_return_alone_ends_a_line_as_on_old_macintoshes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(content)
    assert {(q.text, q.options) for q in read_questions(path)} == {("?", ("x", "y"))}


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert "No such file" in complaint(tmp_path / "none.jsonl")
    assert "directory" in complaint(tmp_path)


CSV = {
    "json list": 'question,options,answer\n2 + 2?,"[""3"", ""4""]",B\n',
    "bars": "question,options,answer\n2 + 2?,3 | 4,1\n",
    "columns": "question,option_a,option_b,option_c,answer\n2 + 2?,3,4,,4\n",
    "letters": "answer,A,B,question\nb,3,4,2 + 2?\n",
    "byte order mark": "\ufeffquestion,A,B,answer\n2 + 2?,3,4,B\n",
    "Windows line ends": "question,A,B,answer\r\n2 + 2?,3,4,B\r\n",
    "two kinds of line ends": "question,A,B,answer\r\n2 + 2?,3,4,B\n",
    "semicolons": "\ufeffid;question;option_a;option_b;answer\r\n;2 + 2?;3;4;B\r\n",
    "tabs": "question\toptions\tanswer\n2 + 2?\t3|4\tB\n",
    "quoted names": '"A";"B";"Question";"Answer"\n3;"4";"2 + 2?";4\n',
}


@pytest.mark.parametrize("form", CSV)
def test_csv_says_the_same_in_every_form(tmp_path: Path, form: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV[form], "utf-8", newline="")
    (question,) = read_questions(path)
    assert (question.text, question.options, question.answer) == ("2 + 2?", ("3", "4"), 1)
    assert question.id == "own:2"


@pytest.mark.parametrize("name", ["own.tsv", "own.TSV", "own.CSV", "own.tsv.gz"])
def test_a_table_may_have_other_endings(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = CSV["tabs"].encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (question,) = load_questions(path)
    assert (question.id, question.options, question.answer) == ("own:2", ("3", "4"), 1)


def test_commas_in_cells_of_a_table_with_semicolons_are_text(tmp_path: Path) -> None:
    (question,) = read_questions(table(tmp_path, "", "question;A;B;answer", "Half of 3, in numbers?;1,5;2,5;1,5"))
    assert (question.text, question.options) == ("Half of 3, in numbers?", ("1,5", "2,5"))


def test_csv_questions_may_have_different_numbers_of_options_and_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('question,A,B,C,D,answer\n"two\nlines",1,2,,,\nfour,1,2,3,4,D\n')
    two, four = read_questions(path)
    assert (two.text, len(two.options), two.answer) == ("two\nlines", 2, UNKNOWN)
    assert (len(four.options), four.answer, four.id) == (4, 3, "own:4")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("question,A,C\n?,x,y\n", "header: the option columns must be a, b, c, ... without a gap. Got A, C instead"),
        ("question,A,B,options\n?,x,y,z\n", "header: options stand in 'options' and in columns of their own (A, B)"),
        ("question,answer\n?,x\n", "header: no column has the options; found 'question', 'answer'."),
        ("A,B\nx,y\n", "header: no column is the question; found 'A', 'B'."),
        ("question,A,B,anwser\n?,x,y,A\n", "header: unknown column 'anwser', and none is called 'answer'."),
        ("quesion;A;B\n?;x;y\n", "header: unknown column 'quesion', and none is called 'question'."),
        ("question,A;B\n?,x;y\n", "header: no column has the options; found 'question', 'A;B'."),
        ("question,A,a\n?,x,y\n", "line 1: the column 'A' appears twice"),
        (
            "question,A,B,option_a,option_b\n?,x,y,x,y\n",
            "header: the options may be A+B or option_a+option_b; say which",
        ),
        ("question,A,B,gold,label\n?,x,y,A,B\n", "header: both 'gold' and 'label' may be the answer; say which"),
        ("question,A,B\n?,x\n", "line 2: 2 cells, but the header has 3 columns"),
        ("question,A,B,C\n?,x,,z\n", "line 2: Question 'own:2' has an empty option (number 2)"),
        ("question,A,B\n?,x,\n", "line 2: Question 'own:2' has 1 option(s)"),
        ('question,A,B\n"?,x,y\n', "malformed CSV"),
        ("question,options\n?,only\n", "line 2, column 'options': Question 'own:2' has 1 option(s)"),
        ("question,options,answer\n?,,B\n", "line 2, column 'options': Question 'own:2' has no options"),
        ("question,A,B,answer\n?,,,B\n", "line 2: Question 'own:2' has no options"),
        (
            "question,A,B,answer\n?,x,y,c\n",
            "line 2, column 'answer': 'c' is out of range: the letters of the 2 options are A to B",
        ),
        ("question,A,B,answer\n?,x,y,7\n", "line 2, column 'answer': 7 is out of range"),
    ],
)
def test_bad_csv_is_refused_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(content)
    assert said in complaint(path)


def test_a_limit_reads_only_the_first_questions(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, {**GOOD, "answer": 0}, "this line is never read")
    assert len(load_questions(path, TaskOptions(limit=2))) == 2


def test_one_door_for_files_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openbookqa").mkdir()  # a folder of the same name does not hide the task
    write(tmp_path, GOOD, name="mine")
    assert load_questions("mine")[0].task == "questions"
    asked = load_questions("openbookqa:validation", TaskOptions(limit=2))
    assert [q.split for q in asked] == ["validation", "validation"]
    assert asked == load_questions("openbookqa", TaskOptions(limit=2, split="validation"))


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("none.jsonl", TaskOptions(), "cannot be read"),
        ("opnbookqa", TaskOptions(), "Did you mean 'openbookqa'"),
        ("openbookqa:", TaskOptions(), "name a split"),
        ("openbookqa:train", TaskOptions(split="test"), "'train'.*'test'"),
        ("x" * 5000, TaskOptions(), "There is no task called"),
        ("nul\0l", TaskOptions(), "There is no task called"),
        ("nul\0l.csv", TaskOptions(), "cannot be read"),
    ],
)
def test_a_source_that_is_nothing_is_refused(source: str, options: TaskOptions, said: str) -> None:
    with pytest.raises(CoralError, match=said):
        load_questions(source, options)


def test_splits_of_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="no splits"):
        load_questions(write(tmp_path, GOOD), TaskOptions(split="test"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
rows = st.dictionaries(
    st.sampled_from(["question", "options", "answer", "answer_index", "id", "group", "context", "other"]),
    json_values | st.lists(st.text(max_size=4), max_size=5),
)
contents = st.one_of(
    st.binary(max_size=200),
    st.lists(rows, max_size=4).map(lambda rs: "\n".join(map(json.dumps, rs)).encode()),
    st.text(alphabet='question,;\toptions|answerABCD"\n\r[]0123 ', max_size=120).map(str.encode),
    st.lists(st.lists(st.sampled_from(["question", "A", "B", "answer", "x", "", '"', "1"])), max_size=4).map(
        lambda lines: b"question,A,B,answer\n" + "\n".join(map(",".join, lines)).encode()
    ),
)


@given(
    content=contents, suffix=st.sampled_from([".jsonl", ".csv", ".jsonl.gz", ".csv.gz", ".tsv"]), packed=st.booleans()
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_whatever_raises_anything_but_a_coral_error(
    tmp_path: Path, content: bytes, suffix: str, packed: bool
) -> None:
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(gzip.compress(content) if packed and suffix.endswith(".gz") else content)
    message, questions = str(path), []
    try:
        questions = read_questions(path)
    except CoralError as error:
        message = str(error)
    assert str(path) in message
    assert len({q.id for q in questions}) == len(questions)
    for q in questions:
        assert q.answer == UNKNOWN or 0 <= q.answer < len(q.options)
        assert "".join((q.id, q.text, *q.options, q.passage)).encode("utf-8")


@given(
    question=st.text(min_size=1).filter(str.strip),
    options=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=7),
    data=st.data(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_as_json_is_read_back(tmp_path: Path, question: str, options: list[str], data: Any) -> None:
    answer = data.draw(st.integers(0, len(options) - 1))
    row = {"question": question, "options": options, "answer": answer}
    (read,) = read_questions(write(tmp_path, row))
    assert (read.text, read.options, read.answer) == (question, tuple(options), answer)
