"""Questions are divided by whole groups, and the seed alone decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.questions import toy_questions

from coral_lens.data.splits import sample, split_mask
from coral_lens.errors import CoralError
from coral_lens.records import Question


def grouped(sizes: list[int], task: str = "t") -> list[Question]:
    """Questions in groups of the given sizes."""
    return [
        Question(f"{task}/{g}/{i}", f"group {g}", f"Question {i} on {g}?", ("yes", "no"), 0, task=task)
        for g, size in enumerate(sizes)
        for i in range(size)
    ]


group_sizes = st.lists(st.integers(1, 6), min_size=4, max_size=40)


@settings(max_examples=50)
@given(group_sizes, group_sizes, st.floats(0.05, 0.8), st.integers(0, 2**32))
def test_no_group_is_split_and_every_task_gives_its_share_to_within_one_group(
    first: list[int], second: list[int], fraction: float, seed: int
) -> None:
    questions = grouped(first, "a") + grouped(second, "b")
    mask = split_mask(questions, fraction=fraction, seed=seed)
    for task, sizes in (("a", first), ("b", second)):
        sides: dict[str, set[bool]] = {}
        for question, marked in zip(questions, mask, strict=True):
            if question.task == task:
                sides.setdefault(question.group, set()).add(bool(marked))
        assert all(len(side) == 1 for side in sides.values())
        marked = sum(m for q, m in zip(questions, mask, strict=True) if q.task == task)
        assert fraction * sum(sizes) <= marked < fraction * sum(sizes) + max(sizes)


def test_a_fifth_of_single_questions_is_exactly_a_fifth_of_each_task() -> None:
    questions = grouped([1] * 50, "a") + grouped([1] * 10, "b")
    mask = split_mask(questions, fraction=0.2, seed=0)
    assert (mask[:50].sum(), mask[50:].sum()) == (10, 2)


def test_the_seed_decides_and_the_order_of_questions_does_not() -> None:
    questions = grouped([2] * 30)
    first = split_mask(questions, fraction=0.3, seed=1)
    assert split_mask(questions, fraction=0.3, seed=1).tolist() == first.tolist()
    assert split_mask(questions, fraction=0.3, seed=2).tolist() != first.tolist()
    assert split_mask(questions[::-1], fraction=0.3, seed=1)[::-1].tolist() == first.tolist()


def test_the_split_does_not_look_at_answers() -> None:
    questions = toy_questions(40)
    relabelled = [replace(q, answer=0) for q in questions]
    mask = split_mask(questions, fraction=0.2, seed=3)
    assert split_mask(relabelled, fraction=0.2, seed=3).tolist() == mask.tolist()


@pytest.mark.parametrize("sizes", [[25], [1]])
def test_one_group_cannot_be_divided(sizes: list[int]) -> None:
    with pytest.raises(CoralError, match=r"1 group\(s\) cannot be divided"):
        split_mask(grouped(sizes), fraction=0.2, seed=0)


def test_a_sample_keeps_the_order_and_is_the_whole_where_there_is_no_more() -> None:
    questions = grouped([1] * 20)
    some = sample(questions, 7, seed=5)
    assert len(some) == 7
    assert [questions.index(q) for q in some] == sorted(questions.index(q) for q in some)
    assert some == sample(questions, 7, seed=5) != sample(questions, 7, seed=6)
    assert sample(questions, 20, seed=5) == sample(questions, 99, seed=5) == questions
