"""Commands that make lenses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.questions import toy_questions
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.fit import show_forgotten, show_left_out
from coral_lens.data.leaks import KEYS, question_keys
from coral_lens.lens.folder import load_lens
from coral_lens.lens.trace import ELSEWHERE

MODEL = Path(__file__).parents[1] / "golden" / "model"


def test_the_lens_that_ships_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", "--lens", "general", "--questions", "none.jsonl"])
    assert "The lens general comes with the package" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
def test_several_files_are_several_tasks_of_the_training_and_one_file_has_no_name(tmp_path: Path) -> None:
    trains = []
    for seed, name in enumerate(("easy", "hard")):
        rows = [
            {"id": f"{name} {q.id}", "question": q.text, "options": q.options, "answer": q.answer}
            for q in toy_questions(40, seed=seed)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        trains += ["--train", str(tmp_path / f"{name}.jsonl")]
    for out, given in {"both": trains, "one": trains[:2]}.items():
        words = ["fit", "--model", str(MODEL), *given, "--out", str(tmp_path / out), "--layers", "1"]
        CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
    both, one = (load_lens(tmp_path / out) for out in ("both", "one"))
    tasks = ["questions (easy.jsonl)", "questions (hard.jsonl)"]
    assert both.trust is not None
    assert (both.training.tasks, one.training.tasks) == (dict.fromkeys(tasks, 40), {"questions": 40})
    assert list(both.trust.scales) == tasks
    assert set(both.trace.answers) == {"", *tasks, ELSEWHERE}
    assert [part.part for part in both.trace.simulated] == [f"without {task}" for task in tasks]
    assert not both.is_home(toy_questions(10, seed=7)).any(), "another file is another task, as before"


def test_adapting_says_what_has_no_part_in_it_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    earlier, later = toy_questions(30, seed=1), toy_questions(12, seed=2)
    keys, fresh = question_keys(earlier, version=KEYS), np.arange(12) >= 5
    lens: Any = SimpleNamespace(adapted_on=keys, keys=KEYS, sets="sets", abstention=None)
    show_forgotten(lens, later, fresh)
    said = capsys.readouterr().out
    assert "5 questions were left out, because the lens was fitted on them." in said
    assert f"{len(keys)} labels of the earlier adaptation are forgotten: give them together with the new ones." in said
    assert "run `coral calibrate` again" in said
    show_left_out(2, adapted=True)
    assert capsys.readouterr().out == "2 questions were left out, because the lens was fitted or adapted on them.\n"
    lens.sets = None
    show_forgotten(lens, [*earlier, *later], np.ones(42, dtype=bool))
    assert capsys.readouterr().out == "", "they are all given again"
