"""Two runs are compared on the questions that both answered, matched by id; what differs in their making is told."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral_lens.errors import CoralError
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question
from coral_lens.report.pages.compare import note_of, provenance_difference, write_comparison
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.pairing import B_MINUS_A, compared_rows, joint_run, match, match_runs
from coral_lens.report.tables.run import ResultsTable, results_table

NASTY = "<script>alert('x')</script><img src=x onerror=alert(1)>"


def evaluation(name: str, numbers: list[int], probs: dict[str, list[list[float]]], answers: list[int]) -> Evaluation:
    """A test set whose questions have the given numbers."""
    ids = tuple(f"t/{i}" for i in numbers)
    options = tuple(f"option {j}" for j in range(len(next(iter(probs.values()))[0])))
    questions = tuple(Question(i, i, f"What? {NASTY}", options, a) for i, a in zip(ids, answers, strict=True))
    offsets = Options.of_sizes([len(options)] * len(ids)).edges
    predictions = {
        m: Predictions(m, "tiny", name, "", ids, np.array(answers), offsets, np.concatenate(p))
        for m, p in probs.items()
    }
    return Evaluation(name, questions, predictions)


def run_of(*evaluations: Evaluation, title: str = "run", seed: int = 0) -> Run:
    return Run(title, evaluations, {"model": {"name": "tiny"}, "gamma": 1.0 + seed}, {"seed": seed, "same": "yes"})


def test_questions_are_matched_by_id_whatever_their_order() -> None:
    a = evaluation("t", [3, 1, 2], {"base": [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]}, [0, 1, 0])
    b = evaluation("renamed", [2, 3, 9], {"base": [[0.4, 0.6], [0.1, 0.9], [0.5, 0.5]]}, [0, 0, 1])
    found = match(a, b)
    assert found is not None
    assert [q.id for q in found.both.questions] == ["t/3", "t/2"]
    assert found.both.predictions["A: base"].probs.tolist() == [0.9, 0.1, 0.7, 0.3]
    assert found.both.predictions["B: base"].probs.tolist() == [0.1, 0.9, 0.4, 0.6]
    assert found.both.predictions["B: base"].answers.tolist() == [0, 0]
    assert found.n_alone == (1, 1)
    assert note_of(found) == (
        "2 questions in both; left out: 1 that only A has and 1 that only B has; B calls them renamed."
    )


def test_differences_are_b_minus_a_on_the_shared_questions_worked_by_hand() -> None:
    """A is right on 1 of 4 shared questions, B on 3 of them; a fifth, which only B has, does not count."""
    right, wrong = [0.8, 0.2], [0.4, 0.6]
    a = evaluation("t", [0, 1, 2, 3], {"coral": [right, wrong, wrong, wrong]}, [0] * 4)
    b = evaluation("t", [0, 1, 2, 3, 4], {"coral": [right, right, right, wrong, wrong]}, [0] * 5)
    runs = run_of(a), run_of(b)
    (table,) = results_table(joint_run(*runs, match_runs(*runs)), scope=B_MINUS_A, n_boot=100).tasks
    (comparison,) = table.comparisons
    assert (comparison.method, comparison.against) == ("B: coral", "A: coral")
    assert comparison.differences["accuracy"].value == 0.5
    assert comparison.differences["brier"].value == pytest.approx(2 * (0.08 - 0.72) / 4)
    assert set(comparison.p_values) == {"accuracy", "brier", "nll"}  # ECE may not rank so few


def test_a_question_whose_options_or_answer_changed_is_left_out() -> None:
    a = evaluation("t", [0, 1, 2], {"base": [[0.9, 0.1]] * 3}, [0, 0, 0])
    b = evaluation("t", [0, 1, 2], {"base": [[0.9, 0.1]] * 3}, [0, 1, 0])
    b = replace(b, questions=(*b.questions[:2], replace(b.questions[2], options=("other", "words"))))
    found = match(a, b)
    assert found is not None
    assert [q.id for q in found.both.questions] == ["t/0"]
    assert found.n_changed == 2
    assert "2 of the same id whose options or answer differ" in note_of(found)


def test_a_test_set_is_matched_with_its_namesake_first() -> None:
    zero, five = ({"base": [[p, 1 - p]] * 2} for p in (0.6, 0.9))
    a = run_of(evaluation("zero-shot", [0, 1], zero, [0, 0]), evaluation("five-shot", [0, 1], five, [0, 0]))
    b = run_of(evaluation("five-shot", [0, 1], five, [0, 0]), evaluation("zero-shot", [0, 1], zero, [0, 0]))
    assert [m.names for m in match_runs(a, b)] == [("zero-shot", "zero-shot"), ("five-shot", "five-shot")]


def test_runs_that_share_no_questions_are_refused_in_a_sentence() -> None:
    a = run_of(evaluation("arc", [0, 1], {"base": [[0.9, 0.1]] * 2}, [0, 0]))
    b = run_of(evaluation("obqa", [7], {"base": [[0.9, 0.1]]}, [0]))
    with pytest.raises(CoralError, match=r"share no questions.*first has arc \(2\), the second obqa \(1\)"):
        match_runs(a, b)


def test_lenses_of_other_names_are_compared_too() -> None:
    assert compared_rows(["A: base", "A: coral", "B: base", "B: listwise"]) == [
        ("B: base", "A: base"),
        ("B: listwise", "A: coral"),
    ]
    assert compared_rows(["A: base", "B: base"]) == [("B: base", "A: base")]


def test_a_clear_difference_stays_clear_however_many_methods_are_compared() -> None:
    """A bootstrap of n resamples gives no p-value below 2 / (n + 1), and Holm multiplies it by the number of tests."""
    better, worse = [[0.9, 0.1]] * 20, [[0.6, 0.4]] * 20
    names = [f"lens {i}" for i in range(15)]
    runs = [run_of(evaluation("t", list(range(20)), dict.fromkeys(names, p), [0] * 20)) for p in (worse, better)]
    table = results_table(joint_run(runs[0], runs[1], match_runs(*runs)), scope=B_MINUS_A, n_boot=30)
    (task,) = table.tasks
    assert table.n_tests == 15 * 3
    assert [c.verdict("brier") for c in task.comparisons] == [1] * 15


def test_what_differs_in_provenance_is_told_and_the_rest_is_counted() -> None:
    run = run_of(evaluation("t", [0], {"base": [[0.9, 0.1]]}, [0]))
    other = run_of(evaluation("t", [0], {"base": [[0.9, 0.1]]}, [0]), seed=2)
    differing, n_same = provenance_difference(run, other, ResultsTable((), 0, 1000, 4000, 0))
    assert differing == [("This run · seed", "0", "2"), ("Lens · gamma", "1.0", "3.0")]
    assert n_same >= 2  # the entry `same` and the model's name


def test_the_page_and_its_files_hold_the_differences_and_no_text_becomes_markup(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, methods = 60, ["base", f"coral {NASTY}"]
    answers = rng.integers(3, size=n).tolist()
    tasks = [
        evaluation(
            f"task {NASTY}", list(range(n)), {m: rng.dirichlet([1, 1, 1], size=n).tolist() for m in methods}, answers
        )
        for _ in range(2)
    ]
    page = write_comparison(run_of(tasks[0], title=f"one {NASTY}"), run_of(tasks[1], seed=1), tmp_path, n_boot=30)
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert "<img" not in text
    (record,) = json.loads((tmp_path / "comparison.json").read_text("utf-8"))["tests"]
    expected = paired_difference(tasks[1].predictions["base"], tasks[0].predictions["base"], "brier", n_boot=120)
    assert record["comparisons"][0]["differences"]["brier"]["value"] == expected.value
    assert record["n_shared"] == n
    lines = list(csv.DictReader((tmp_path / "comparison.csv").read_text("utf-8").splitlines()))
    assert len(lines) == 2 * 5  # two methods, five metrics
    assert "What differs in their making" in text
    assert text.count("<figure") == 1 + 3 + 2
    assert text.count('<details class="fold">') == 3
