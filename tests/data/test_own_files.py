"""Questions of several files are of a task each, as far as they name none; those of one file stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

from coral_lens.data.open_questions import load_open_questions
from coral_lens.data.own_files import apart_by_file, is_file_task
from coral_lens.data.questions import load_questions
from coral_lens.records import UNNAMED, Question


def file_of(path: Path, n: int = 2) -> Path:
    path.parent.mkdir(exist_ok=True)
    rows = [{"question": f"{path.parent.name} {path.stem} {i}?", "options": ["a", "b"], "answer": 0} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def tasks(*questions: Question) -> list[str]:
    return [q.task for q in apart_by_file(questions)]


def test_questions_of_two_files_name_them_and_those_of_one_stay_as_they_are(tmp_path: Path) -> None:
    easy, hard = (load_questions(file_of(tmp_path / name)) for name in ("easy.jsonl", "hard.jsonl"))
    assert tasks(*easy, *hard) == ["questions (easy.jsonl)"] * 2 + ["questions (hard.jsonl)"] * 2
    assert apart_by_file(easy) == easy
    assert [q.columns for q in apart_by_file([*easy, *hard])] == [q.columns for q in (*easy, *hard)]


def test_files_of_one_name_are_told_apart_without_their_folders(tmp_path: Path) -> None:
    both = [q for folder in "ab" for q in load_questions(file_of(tmp_path / folder / "train.jsonl", 1))]
    assert tasks(*both) == ["questions (train.jsonl)", "questions (train.jsonl, 2)"]


def test_a_task_with_a_name_keeps_it_and_what_is_of_no_file_stays_unnamed(tmp_path: Path) -> None:
    one, other = (load_questions(file_of(tmp_path / name, 1))[0] for name in ("one.jsonl", "other.jsonl"))
    named, made = Question("n", "n", "n?", ("a", "b"), task="arc_easy"), Question("m", "m", "m?", ("a", "b"))
    (listed,) = load_questions([{"question": "l?", "options": ["a", "b"]}])
    assert tasks(named, one) == ["arc_easy", UNNAMED], "one file beside a task is told apart already"
    assert tasks(named, one, made, listed) == ["arc_easy", "questions (one.jsonl)", UNNAMED, UNNAMED]
    assert tasks(one, other) == ["questions (one.jsonl)", "questions (other.jsonl)"]


def test_open_questions_are_told_apart_in_the_same_way(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"{name}?", "answer": "x"}), "utf-8")
    both = [q for name in ("one", "other") for q in load_open_questions(tmp_path / f"{name}.jsonl")]
    assert [q.task for q in apart_by_file(both)] == ["questions (one.jsonl)", "questions (other.jsonl)"]


def test_what_names_a_file_is_no_task_that_others_could_be_of() -> None:
    assert [is_file_task(task) for task in (UNNAMED, "questions (a.jsonl)", "questions_of_mine", "arc_easy")] == [
        True, True, False, False,
    ]  # fmt: skip
