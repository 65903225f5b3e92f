"""People read names that they know; where two would read alike, they are told apart."""

import pytest

from coral_lens.report.names import method_name, task_name, task_names


@pytest.mark.parametrize(
    ("exact", "said"),
    [
        ("commonsense_qa_cloze:validation", "CommonsenseQA"),
        ("social_iqa:validation", "Social IQa"),
        ("mmlu_high_school_physics:test", "MMLU, high school physics"),
        ("mmlu (57 tasks)", "MMLU (57 tasks)"),
        ("arc_easy (my-model)", "ARC-Easy (my-model)"),
        ("data/exam.jsonl", "exam.jsonl"),
        ("exam.csv", "exam.csv"),
        ("Reading (race_question:test)", "Reading"),
        ("mine (data/exam.jsonl)", "mine"),
        ("arc_easy:train held out of mix", "ARC-Easy"),
        ("unheard_of:test", "unheard_of:test"),
        ("toy", "toy"),
    ],
)
def test_a_test_set_is_called_as_people_call_it(exact: str, said: str) -> None:
    assert task_name(exact) == said


def test_no_two_test_sets_of_a_run_have_one_name() -> None:
    names = [
        "arc_easy:test",
        "arc_easy:validation",
        "piqa:validation",
        "commonsense_qa:test",
        "commonsense_qa_cloze:test",
    ]
    assert task_names(names) == {
        "arc_easy:test": "ARC-Easy, test",
        "arc_easy:validation": "ARC-Easy, validation",
        "piqa:validation": "PIQA",
        "commonsense_qa:test": "CommonsenseQA (commonsense_qa:test)",
        "commonsense_qa_cloze:test": "CommonsenseQA (commonsense_qa_cloze:test)",
    }
    assert len(set(task_names(["a/x.jsonl", "b/x.jsonl"]).values())) == 2


def test_a_method_of_two_runs_keeps_its_run() -> None:
    assert [method_name(m) for m in ("coral", "B: coral", "listwise tempered")] == [
        "CORAL",
        "B: CORAL",
        "listwise tempered",
    ]
