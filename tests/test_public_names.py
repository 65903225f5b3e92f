"""What the package offers by name takes a folder or a file as text wherever it takes a Path."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.questions import toy_questions

import coral_lens
from coral_lens.engine.model import Model

TAKES_PATHS = {"ActivationStore", "Answers.save", "apply_maps", "audit_probabilities", "load_maps", "write_audit",
               "Lens.adapt", "Lens.ask", "Lens.predict", "Lens.predictions", "Lens.save", "Lens.scored", "TaskOptions",
               "adapt", "ask", "calibrate", "evaluate", "extract", "fit", "fit_open", "load_lens", "load_model",
               "load_open_questions", "load_questions", "load_run",
               "load_study", "predict", "run_study"}  # fmt: skip


def annotations_of(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    """The arguments of a public name and of its methods, with their types as text."""
    if not inspect.isclass(thing):
        yield from ((name, str(p.annotation)) for p in inspect.signature(thing).parameters.values())
        return
    for own, member in vars(thing).items():
        if inspect.isfunction(member) and (own == "__init__" or not own.startswith("_")):
            label = name if own == "__init__" else f"{name}.{own}"
            yield from ((label, str(p.annotation)) for p in inspect.signature(member).parameters.values())
    if is_dataclass(thing):
        yield from ((name, str(field.type)) for field in fields(thing))


def test_whatever_takes_a_path_takes_text() -> None:
    every = [pair for name in coral_lens.__all__ for pair in annotations_of(name, getattr(coral_lens, name))]
    with_path = {(name, text) for name, text in every if re.search(r"\bPath\b", text)}
    assert {name for name, _ in with_path} == TAKES_PATHS
    assert [(name, text) for name, text in with_path if not re.search(r"\bstr\b", text)] == []


@pytest.mark.usefixtures("one_thread")
def test_a_lens_is_fitted_measured_and_asked_with_folders_as_text(tiny: Model, tmp_path: Path) -> None:
    questions = toy_questions(60)
    settings = coral_lens.FitSettings(layers=(1, 2), lens="ridge")
    for part in (tiny.hf, tiny.tokenizer):
        part.save_pretrained(tmp_path / "model")
    model = coral_lens.load_model(tmp_path / "model", device="cpu")
    store = coral_lens.extract(model, questions[:40], f"{tmp_path}/store", extraction=coral_lens.Extraction((1, 2)))
    assert coral_lens.ActivationStore(f"{tmp_path}/store").questions == store.questions
    lens = coral_lens.fit(model, questions[:40], settings, work_dir=f"{tmp_path}/fit")
    lens.save(f"{tmp_path}/lens")
    answers = coral_lens.predict(lens, model, questions[40:], work_dir=f"{tmp_path}/answers")
    assert answers == coral_lens.load_lens(f"{tmp_path}/lens").predict(model, questions[40:])
    run = coral_lens.evaluate(lens, model, questions[40:], work_dir=f"{tmp_path}/run")
    assert len(run.evaluations[0].questions) == 20


def test_data_of_a_task_is_read_from_a_folder_given_as_text(tmp_path: Path) -> None:
    (tmp_path / "sciq").mkdir()
    row = {"question": "What is wet?", "distractor1": "a", "distractor2": "b", "distractor3": "c",
           "correct_answer": "water", "support": ""}  # fmt: skip
    (tmp_path / "sciq" / "test.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    (question,) = coral_lens.load_questions("sciq:test", coral_lens.TaskOptions(data_dir=str(tmp_path)))
    assert question.options[question.answer] == "water"
