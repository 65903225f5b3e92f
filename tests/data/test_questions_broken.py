"""Three hundred broken tables, each broken in one place that is known: the complaint names the file, the row and the column."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TableOptions
from coral_lens.errors import CoralError

Row = dict[str, Any]
N = 12


def sound_rows(rng: random.Random) -> list[Row]:
    made = []
    for i in range(N):
        options = [f"{word} {i}" for word in rng.sample(["red", "blue", "green", "a long way", "none"], 4)]
        row = {"id": f"q{i}", "question": f"Which of these is number {i}?", "options": options, "answer": i % 4}
        made.append(row | {"note": f"n{i}", "kind": "choice"})
    return made


# ------------------------------------------------------------------------------------------- one broken row, and its column

BREAKS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "no question": ("question", lambda r: {**r, "question": None}),
    "a blank question": ("question", lambda r: {**r, "question": "  "}),
    "no options": ("options", lambda r: {**r, "options": []}),
    "missing options": ("options", lambda r: {**r, "options": None}),
    "one option": ("options", lambda r: {**r, "options": r["options"][:1]}),
    "a blank option": ("options", lambda r: {**r, "options": [*r["options"][:2], " ", "x"]}),
    "an option that is a list": ("options", lambda r: {**r, "options": [["x"], "y"]}),
    "a number for options": ("options", lambda r: {**r, "options": 7}),
    "labels and texts of different number": (
        "options",
        lambda r: {**r, "options": {"text": ["x", "y"], "label": ["A"]}},
    ),
    "a place beyond the last": ("answer", lambda r: {**r, "answer": 9}),
    "a negative place": ("answer", lambda r: {**r, "answer": -2}),
    "a place that is no whole number": ("answer", lambda r: {**r, "answer": 1.5}),
    "a letter beyond the last": ("answer", lambda r: {**r, "answer": "G"}),
    "a text of no option": ("answer", lambda r: {**r, "answer": "purple"}),
    "a truth": ("answer", lambda r: {**r, "answer": True}),
    "an object for an answer": ("answer", lambda r: {**r, "answer": {"x": 1}}),
    "right options of which one is none": ("answer", lambda r: {**r, "answer": [0, 8]}),
    "an id that is a list": ("id", lambda r: {**r, "id": ["x"]}),
    "an unknown kind": ("kind", lambda r: {**r, "kind": "riddle"}),
    "half a character": ("question", lambda r: {**r, "question": "what \ud800 is this"}),
}
TEXT_BREAKS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "no question": ("question", lambda r: {**r, "question": ""}),
    "a blank question": ("question", lambda r: {**r, "question": "   "}),
    "no options": ("options", lambda r: {**r, "options": ""}),
    "one option": ("options", lambda r: {**r, "options": "only"}),
    "a blank option": ("options", lambda r: {**r, "options": "a | | b"}),
    "a place beyond the last": ("answer", lambda r: {**r, "answer": "7"}),
    "a letter beyond the last": ("answer", lambda r: {**r, "answer": "Q"}),
    "a text of no option": ("answer", lambda r: {**r, "answer": "purple"}),
    "an unknown kind": ("kind", lambda r: {**r, "kind": "riddle"}),
    "cells missing": ("", lambda r: {"id": r["id"], "question": r["question"]}),
    "cells too many": ("", lambda r: {**r, "more": "x", "still more": "y"}),
}


def as_lines(path: Path, made: list[Row]) -> int:
    path.write_bytes("".join(json.dumps(row) + "\n" for row in made).encode())
    return 1


def as_gzipped_lines(path: Path, made: list[Row]) -> int:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in made).encode()))
    return 1


def as_document(path: Path, made: list[Row]) -> int:
    path.write_text(json.dumps(made), "utf-8")
    return 1


def as_csv(path: Path, made: list[Row]) -> int:
    """Write a table; the first question is in its second line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", delimiter="\t" if path.suffix == ".tsv" else ",")
    writer.writerow(made[0 if len(made[0]) == 6 else 1])
    for row in made:
        writer.writerow([" | ".join(v) if isinstance(v, list) else v for v in row.values()])
    path.write_text(text.getvalue(), "utf-8")
    return 2


FORMS: dict[str, tuple[Callable[[Path, list[Row]], int], str, str]] = {
    "q.jsonl": (as_lines, "line", "field"),
    "q.jsonl.gz": (as_gzipped_lines, "line", "field"),
    "q.json": (as_document, "row", "field"),
    "q.csv": (as_csv, "line", "column"),
    "q.tsv": (as_csv, "line", "column"),
}


def broken(seed: int, folder: Path) -> tuple[Path, str, list[str]]:
    """Write a table that is broken in one place; return it, what a complaint must say, and the ids of all other rows."""
    rng = random.Random(seed)
    made, at = sound_rows(rng), rng.randrange(N)
    name = rng.choice(list(FORMS))
    write, unit, noun = FORMS[name]
    breaks = TEXT_BREAKS if noun == "column" else BREAKS
    column, spoil = breaks[rng.choice(list(breaks))]
    made[at] = spoil(made[at])
    first = write(folder / name, made)
    place = f"{folder / name}, {unit} {at + first}"
    sound = [f"q{i}" for i in range(N) if i != at]
    return folder / name, f"{place}, {noun} {column!r}: " if column else f"{place}: ", sound


@pytest.mark.parametrize("part", range(10))
def test_three_hundred_broken_tables_are_named_by_file_line_and_column(tmp_path: Path, part: int) -> None:
    for seed in range(30 * part, 30 * part + 30):
        path, said, sound = broken(seed, tmp_path)
        with pytest.raises(CoralError) as error:
            load_questions(path)
        assert str(error.value).startswith(said), f"{seed}: {error.value}"
        assert "\n" not in str(error.value)
        kept = load_questions(path, TableOptions(skip_bad=True))
        assert [q.id for q in kept] == sound, seed
        assert f"; 1 row left out: {said}" in kept.summary


def test_every_way_to_break_a_table_is_among_the_three_hundred(tmp_path: Path) -> None:
    """The draws of the seeds, without reading."""
    drawn = set()
    for seed in range(300):
        rng = random.Random(seed)
        sound_rows(rng), rng.randrange(N)
        noun = FORMS[rng.choice(list(FORMS))][2]
        breaks = TEXT_BREAKS if noun == "column" else BREAKS
        drawn.add((noun, rng.choice(list(breaks))))
    assert drawn == {("column", b) for b in TEXT_BREAKS} | {("field", b) for b in BREAKS}


# --------------------------------------------------------------------------------------------------- rows that are left out


def test_bad_lines_of_json_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"question": "Which?", "options": ["a", "b"], "answer": "a"}
    path = tmp_path / "q.jsonl"
    path.write_bytes(
        b"\n".join([json.dumps(good).encode(), b"{not json", b'"text"', b"\xff\xfe{}", json.dumps(good).encode()])
    )
    questions = load_questions(path, TableOptions(skip_bad=True))
    assert [q.id for q in questions] == ["q:1", "q:5"]
    assert questions.summary.startswith(
        "2 questions, 2 options each, answers are the options' texts; 3 rows left out: "
    )
    assert f"{path}, line 4: not UTF-8 (byte 0xff" in questions.summary


def test_a_table_of_which_nothing_is_left_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("question,A,B\n,x,y\n,x,y\n")
    with pytest.raises(
        CoralError, match=r"holds no questions: all 2 rows were left out, the first because of .*line 2"
    ):
        load_questions(path, TableOptions(skip_bad=True))


def test_what_concerns_the_whole_table_is_never_left_out(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('question,A,B\nwhich?,x,y\n"which?,x,y\n')
    with pytest.raises(CoralError, match="malformed CSV"):
        load_questions(path, TableOptions(skip_bad=True))
    path.write_text("topic,A,B\nwhich?,x,y\n")
    with pytest.raises(CoralError, match="no column is the question"):
        load_questions(path, TableOptions(skip_bad=True))


def test_many_bad_rows_do_not_take_the_good_ones_with_them(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    lines = [f"which {i}?,x,{'' if i % 3 == 0 else 'y'},{'A' if i % 5 else 'Z'}" for i in range(5000)]
    path.write_text("question,A,B,answer\n" + "\n".join(lines) + "\n")
    questions = load_questions(path, TableOptions(skip_bad=True))
    kept = [i for i in range(5000) if i % 3 and i % 5]
    assert [q.text for q in questions] == [f"which {i}?" for i in kept]
    assert f"{5000 - len(kept):,} rows left out" in questions.summary
