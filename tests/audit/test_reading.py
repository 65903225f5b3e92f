"""One door: tables, frames, logs of lm-eval and of Inspect, answers of a lens and runs, alone and several at once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.audits import Row, audited, lines, rows

from coral_lens import AuditSettings, audit_probabilities
from coral_lens.audit.measure import run_of
from coral_lens.audit.reading import read_audited, read_logs
from coral_lens.errors import CoralError
from coral_lens.metrics.scores import score
from coral_lens.report.runs import save_run

LOGS = Path(__file__).parent / "logs"


def logged(row: Row, number: int) -> Row:
    """A line as lm-eval writes it."""
    answers = [[str(math.log(p)), "False"] for p in row["probs"]]
    return {
        "doc_id": number,
        "doc": {},
        "target": str(row["options"].index(row["label"])),
        "arguments": {
            f"gen_args_{i}": {"arg_0": row["question"], "arg_1": f" {o}"} for i, o in enumerate(row["options"])
        },
        "resps": [[a] for a in answers],
        "filtered_resps": answers,
        "filter": "none",
        "metrics": ["acc"],
        "acc": float(row["options"][int(np.argmax(row["probs"]))] == row["label"]),
    }


def lm_eval_log(folder: Path, task: str, *, seed: int = 0) -> Path:
    made = [logged(row, i) for i, row in enumerate(rows(50, seed=seed))]
    return lines(folder / "model" / f"samples_{task}_2026-01-02T03-04-05.678.jsonl", made)


def test_a_log_of_lm_eval_has_the_same_numbers_as_the_table_that_it_was_made_of(tmp_path: Path) -> None:
    found = read_audited([lm_eval_log(tmp_path, "mails")])
    (expected,) = audited(50).systems.values()
    assert found.systems["sum (acc)"].probs == pytest.approx(expected.probs)
    assert found.systems["sum (acc)"].answers.tolist() == expected.answers.tolist()
    assert list(found.sources) == [str(tmp_path / "model" / "samples_mails_2026-01-02T03-04-05.678.jsonl")]


def test_logs_of_several_tasks_are_one_set_divided_by_task(tmp_path: Path) -> None:
    lm_eval_log(tmp_path, "mails"), lm_eval_log(tmp_path, "letters", seed=3)
    for found in (read_audited([tmp_path]), read_audited([f"{tmp_path}/*/samples_*"]), read_logs([tmp_path])):
        assert len(found.questions) == 100
        assert sorted(set(found.column("task"))) == ["letters", "mails"]
        assert [e.name for e in run_of(found).evaluations] == sorted(set(found.tests), key=found.tests.index)


def test_a_log_of_inspect_is_told_by_its_content(tmp_path: Path) -> None:
    found = read_audited([LOGS / "inspect.eval"])
    assert (found.name, list(found.systems)) == ("sums", ["mockllm/model"])


def test_a_run_is_audited_with_all_its_methods(tmp_path: Path) -> None:
    given = read_audited([[r | {"probs": {"base": r["probs"], "even": [0.25] * 4}} for r in rows(50)]])
    save_run(run_of(given), tmp_path / "run")
    found = read_audited([tmp_path / "run"])
    assert list(found.systems) == ["base", "even"]
    assert found.systems["base"].probs.tolist() == given.systems["base"].probs.tolist()


def test_files_of_the_same_questions_are_systems_and_keep_their_digests(tmp_path: Path) -> None:
    one, two = lines(tmp_path / "one.jsonl", rows(30)), lines(tmp_path / "two.jsonl", rows(30, sharpness=2))
    found = audit_probabilities([one, two])
    assert list(found.audited.systems) == ["one.jsonl", "two.jsonl"]
    assert set(found.audited.sources) == {str(one), str(two)}
    assert found.compared is not None


def test_a_frame_and_a_list_of_rows_are_audited_alike() -> None:
    settings = AuditSettings(by=("topic",))
    frame, listed = (audit_probabilities(s, settings) for s in (pd.DataFrame(rows(60)), rows(60)))
    assert frame.metrics == listed.metrics
    assert frame.groups == listed.groups


def test_what_a_lens_chose_is_no_label() -> None:
    """`coral predict` calls its choice `answer`: taken for the label, every answer would be right."""
    row = {"id": "q", "answer": 0, "option": "a", "confidence": 0.7, "probs": [0.7, 0.3], "base_probs": [0.5, 0.5]}
    with pytest.raises(CoralError, match="1 of 1 rows have no label"):
        read_audited([[row]])
    assert read_audited([[row | {"label": 1, "options": ["a", "b"]}]]).questions[0].answer == 1


def test_answers_of_a_lens_are_read_from_the_file_that_predict_writes() -> None:
    made = [
        {"input_answer": r["label"], "answer": "spam", "confidence": max(r["probs"]), "base_probs": [0.25] * 4}
        | {k: r[k] for k in ("id", "question", "options", "probs")}
        for r in rows(20)
    ]
    found = read_audited([made])
    assert list(found.systems) == ["lens", "base"]
    assert score(found.systems["lens"], "accuracy") == score(next(iter(audited(20).systems.values())), "accuracy")


def test_what_cannot_be_put_together_is_refused(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", rows(5))
    two = lines(tmp_path / "two.jsonl", [r | {"id": f"z{i}"} for i, r in enumerate(rows(5))])
    with pytest.raises(CoralError, match="neither questions nor systems in common"):
        read_audited([one, two])
    with pytest.raises(CoralError, match="no such file or folder"):
        read_audited([tmp_path / "nothing.csv"])
