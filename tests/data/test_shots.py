"""Worked examples of one's own questions are drawn as lm-eval draws them, and are never the question itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.samplers import ContextSampler
from support.questions import toy_questions

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.data.shots import n_shots, with_shots
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question


def ids(questions: list[Question]) -> list[list[str]]:
    return [[shot.id for shot in q.shots] for q in questions]


def drawn_by_lm_eval(questions: list[Question], pool: list[Question], n: int, *, same: bool) -> list[list[str]]:
    docs: list[dict[str, Any]] = [{"id": q.id} for q in pool]
    sampler = ContextSampler(docs, rnd=1234)
    return [[d["id"] for d in sampler.sample(n, eval_doc={"id": q.id} if same else None)] for q in questions]


def test_draws_from_another_file_are_lm_evals() -> None:
    pool, asked = toy_questions(30, seed=1), toy_questions(8, seed=2)
    assert ids(with_shots(asked, pool, 3, seed=1234)) == drawn_by_lm_eval(asked, pool, 3, same=False)


def test_draws_from_the_same_file_are_lm_evals_and_leave_the_question_out() -> None:
    pool = toy_questions(12, seed=1)
    shown = with_shots(pool, pool, 4, seed=1234)
    assert ids(shown) == drawn_by_lm_eval(pool, pool, 4, same=True)
    assert all(q.id not in chosen and len(chosen) == 4 for q, chosen in zip(pool, ids(shown), strict=True))


def test_a_question_that_is_there_twice_is_no_worked_example_of_itself() -> None:
    one, *others = toy_questions(6)
    copies = [Question(f"copy {i}", "c", one.text.upper(), one.options, one.answer) for i in range(4)]
    for seed in range(20):
        (shown,) = with_shots([one], [*copies, *others], 4, seed=seed)
        assert not {q.id for q in shown.shots} & {c.id for c in copies}


def test_fixed_examples_are_the_same_for_every_question() -> None:
    shown = with_shots(toy_questions(5, seed=2), toy_questions(30, seed=1), 3, seed=7, fixed=True)
    assert len(set(map(tuple, ids(shown)))) == 1
    assert {q.version for q in shown} == {"3 fixed shots"}
    assert n_shots(shown[0]) == 3


def test_examples_need_answers_and_enough_of_them() -> None:
    unlabelled = toy_questions(30, labelled=False)
    with pytest.raises(
        CoralError, match="3 worked examples need more than 3 labelled questions to draw from; 0 are there"
    ):
        with_shots(toy_questions(2), unlabelled, 3, seed=0)


def test_files_are_asked_with_examples_from_the_file_that_is_named(tmp_path: Path) -> None:
    train, new = tmp_path / "train.csv", tmp_path / "new.csv"
    train.write_text("question,A,B,answer\n" + "".join(f"what is {i}?,x{i},y{i},A\n" for i in range(9)))
    new.write_text("question,A,B\nand this?,x,y\n")
    (question,) = load_questions(new, TaskOptions(num_fewshot=2, fewshot_from=train))
    assert [shot.answer for shot in question.shots] == [0, 0]
    assert question.answer == UNKNOWN
    with pytest.raises(CoralError, match="say which file"):
        load_questions(new, TaskOptions(num_fewshot=2))
