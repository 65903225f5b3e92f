"""Costs are ratios of what was measured; what was interrupted has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_lens.storage.files import write_json
from coral_lens.study.costs import Cost, CostRecord, add_scoring, method_cost, read_steps, scoring_cost, write_costs

SCORING = {"a": Cost(100, 20.0, 10.0), "b": Cost(50, 20.0, 10.0)}
"""0.1 processor seconds a question of a, 0.2 of b."""


def test_a_method_that_starts_from_the_scores_pays_for_them_too() -> None:
    steps = {"training": Cost(300, 7.0, 9.0), "a": Cost(100, 20.0, 5.0), "b": Cost(50, 20.0, 15.0)}
    shared = method_cost("lens", steps, SCORING, from_scores=True)
    alone = method_cost("iti", steps, SCORING, from_scores=False)
    assert (shared.relative, alone.relative) == (2.0, 1.0)
    assert (shared.questions_per_second, alone.questions_per_second) == (150 / 80, 150 / 40)
    assert shared.training_seconds == 7.0


def test_on_a_gpu_the_clock_counts_and_not_the_processor() -> None:
    scoring = {"a": Cost(100, 20.0, 10.0, "cuda")}
    assert method_cost("m", {"a": Cost(100, 5.0, 80.0)}, scoring, from_scores=False).relative == 0.25


def test_a_test_set_without_a_cost_is_not_counted() -> None:
    steps = {"a": None, "b": Cost(50, 10.0, 20.0)}
    assert method_cost("m", steps, SCORING, from_scores=False).relative == 2.0
    nothing = method_cost("m", {"a": None}, SCORING, from_scores=False)
    assert (nothing.training_seconds, nothing.questions_per_second, nothing.relative) == (None, None, None)


def test_an_interrupted_step_has_no_cost_and_a_measured_one_keeps_it(tmp_path: Path) -> None:
    costs = CostRecord(tmp_path)
    with costs.measuring("training", 10):
        pass
    with pytest.raises(KeyboardInterrupt), costs.measuring("a", 3):
        raise KeyboardInterrupt
    before = read_steps(tmp_path / "cost.json")
    again = CostRecord(tmp_path)
    for step in ("training", "a", "b"):
        with again.measuring(step, 5):
            pass
    after = read_steps(tmp_path / "cost.json")
    assert after["training"] == before["training"]
    assert after["a"] is None
    assert after["b"] is not None
    assert after["b"].questions == 5


def test_the_cost_of_scoring_adds_up_over_resumed_walks(tmp_path: Path) -> None:
    assert scoring_cost(tmp_path) is None
    for cost in (Cost(10, 1.0, 2.0), Cost(0, 9.0, 9.0), Cost(30, 2.0, 5.0)):
        add_scoring(tmp_path, cost)
    assert scoring_cost(tmp_path) == Cost(40, 3.0, 7.0)


def test_the_table_says_what_was_not_measured(tmp_path: Path) -> None:
    base = method_cost("base", {"a": Cost(100, 0.0, 0.0)}, SCORING, from_scores=True)
    text = write_costs([base, method_cost("x", {}, {}, from_scores=True)], tmp_path).read_text("utf-8")
    assert "| base | — | 5.00 | 1.00 |" in text
    assert "| x | — | — | — |" in text


def test_a_damaged_file_of_costs_is_said_to_be_one_and_a_step_may_have_any_name(tmp_path: Path) -> None:
    record = CostRecord(tmp_path)
    for step in ("training", "digest", "steps"):
        with record.measuring(step, 4):
            pass
    assert set(read_steps(tmp_path / "cost.json")) == {"training", "digest", "steps"}
    text = (tmp_path / "cost.json").read_text()
    (tmp_path / "cost.json").write_text(text.replace('"questions": 4', '"questions": 5', 1))
    with pytest.warns(UserWarning, match="damaged: what was measured there is shown as a dash"):
        assert read_steps(tmp_path / "cost.json") == {}


def test_costs_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    write_json(tmp_path / "cost.json", {"training": {"questions": 4, "seconds": 2.0, "cpu_seconds": 3.0}, "test": None})
    assert read_steps(tmp_path / "cost.json") == {"training": Cost(4, 2.0, 3.0), "test": None}


def test_what_a_killed_run_left_beside_the_costs_is_removed_when_they_are_read(tmp_path: Path) -> None:
    left, other = tmp_path / ".cost.json.649e3abb.tmp", tmp_path / ".other.json.649e3abb.tmp"
    for path in (left, other):
        path.write_text("{")
    assert read_steps(tmp_path / "cost.json") == {}
    assert [p.name for p in tmp_path.iterdir()] == [other.name]


def test_it_is_removed_too_where_no_question_is_left_to_score(tmp_path: Path) -> None:
    (tmp_path / ".cost.json.649e3abb.tmp").write_text("{")
    add_scoring(tmp_path, Cost(0, 0.1, 0.1))
    assert list(tmp_path.iterdir()) == []
