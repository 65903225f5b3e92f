"""The parts of a training mixture: tasks, small ones together, or clusters of the questions of one."""

from __future__ import annotations

import numpy as np
import pytest
from support.questions import toy_questions

from coral_lens.lens.domains import FEWEST_IN_PART, MOST_DOMAINS, domains_of
from coral_lens.records import Question


def of_tasks(counts: dict[str, int]) -> tuple[list[Question], np.ndarray]:
    names = [task for task, n in counts.items() for _ in range(n)]
    questions = [Question(str(i), str(i), "?", ("a", "b"), 0, task=task) for i, task in enumerate(names)]
    return questions, np.random.default_rng(0).normal(size=(len(questions), 5)).astype(np.float32)


def test_each_large_task_is_a_part() -> None:
    questions, at = of_tasks({"b": FEWEST_IN_PART, "a": FEWEST_IN_PART + 5})
    assert domains_of(questions, at, seed=0) == ["b"] * FEWEST_IN_PART + ["a"] * (FEWEST_IN_PART + 5)


def test_a_small_task_joins_a_large_one() -> None:
    questions, at = of_tasks({"a": FEWEST_IN_PART, "b": FEWEST_IN_PART, "tiny": FEWEST_IN_PART - 1, "one": 1})
    parts = domains_of(questions, at, seed=0)
    assert set(parts) == {"a", "b"}
    assert len(set(parts[2 * FEWEST_IN_PART :])) == 1


def test_many_tasks_are_left_out_together_in_a_few_parts() -> None:
    questions, at = of_tasks({f"subject {i:02}": FEWEST_IN_PART for i in range(15)} | {"tiny": 2})
    parts = domains_of(questions, at, seed=0)
    assert len(set(parts)) == MOST_DOMAINS
    for i in range(15):  # a task is never divided
        assert len(set(parts[i * FEWEST_IN_PART : (i + 1) * FEWEST_IN_PART])) == 1


@pytest.mark.parametrize("counts", [{"a": 200}, {"a": 150, "tiny": 20}])
def test_one_task_is_divided_into_clusters_that_depend_on_the_seed_alone(counts: dict[str, int]) -> None:
    questions, at = of_tasks(counts)
    at[: len(at) // 2] += 30.0
    parts = domains_of(questions, at, seed=3)
    assert parts == domains_of(questions, at, seed=3)
    assert 2 <= len(set(parts)) <= 4
    # two clouds far apart share no cluster
    assert not set(parts[: len(at) // 2]) & set(parts[len(at) // 2 :])


def test_the_unit_of_a_neuron_does_not_decide_the_clusters() -> None:
    questions, at = of_tasks({"a": 120})
    units = np.geomspace(1e-3, 1e3, 5).astype(np.float32)
    assert domains_of(questions, at * units, seed=0) == domains_of(questions, at, seed=0)


def test_few_questions_still_have_two_parts() -> None:
    questions = toy_questions(20)
    at = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    assert len(set(domains_of(questions, at, seed=0))) == 2
