"""Evaluate lenses on tasks: from question sources to a Run. Questions that a lens was fitted on are never counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coral_lens.engine.extract import Extraction, score_questions
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.progress import questions_bar
from coral_lens.records import UNKNOWN, Predictions, Question, Scored
from coral_lens.report.figures.run import write_run_pictures
from coral_lens.report.pages.run import write_report
from coral_lens.report.runs import Evaluation, Run, View, save_run
from coral_lens.report.tables.run import results_table
from coral_lens.storage.files import digest, digest_file, file_name, read_json, write_json

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


VIEW_BYTES = 512 * 2**20
"""Test sets whose states of all layers would be larger are not looked at layer by layer."""


@dataclass(frozen=True)
class TestSet:
    """Questions under a name."""

    name: str
    questions: tuple[Question, ...]


def evaluate_lenses(
    lenses: Sequence[Lens], model: Model, tests: Sequence[TestSet], *, work_dir: Path | None = None
) -> tuple[list[Evaluation], dict[str, int]]:
    """Return the evaluation of each test set, and how many of its questions were left out because a lens knew them.

    The questions are scored once for all lenses, which must start from the same base probabilities and prompts.
    """
    names = method_names(lenses)
    # the lens whose view is kept: the first listwise one, which reports are about, or the first
    looked = min(range(len(lenses)), key=lambda i: lenses[i].rule != "listwise")
    needed = {layer for lens in lenses for layer in lens.layers}
    evaluations, left_out = [], {}
    trained = {task.split(":")[0] for lens in lenses for task in lens.training["tasks"]}
    for test in tests:
        questions = unseen(lenses, test)
        left_out[test.name] = len(test.questions) - len(questions)
        for lens in lenses:
            lens.check(model, questions)
        seen = layers_to_look_at(lenses[looked], questions)
        what = Extraction(layers=tuple(sorted(needed | set(seen))), style=lenses[0].style)
        folder = work_dir / file_name(test.name) if work_dir else None
        with (
            questions_bar(test.name, len(questions)) as advance,
            score_questions(model, questions, what, folder=folder, progress=advance) as store,
        ):
            predictions: dict[str, Predictions] = {}
            for name, lens in zip(names, lenses, strict=True):
                found = lens.predictions_on(store)
                predictions |= {"base": found["base"], "temperature": found["temperature"]}
                for method in dict.fromkeys((lens.plain_method, lens.method)):
                    row = method.replace(lens.plain_method, name)
                    predictions[row] = found[method].renamed(row)
            saw = view_on(lenses[looked], store, names[looked], seen)
        asked = tuple(store.questions)
        evaluations.append(Evaluation(test.name, asked, predictions, any(q.task in trained for q in asked), saw))
    return evaluations, left_out


def layers_to_look_at(lens: Lens, questions: Sequence[Question]) -> tuple[int, ...]:
    """Return the layers whose probes the lens kept; none where the states of so many questions would fill the disk."""
    if lens.view is None:
        return ()
    size = 2 * lens.view.weight.size * sum(len(q.options) for q in questions)
    return lens.view.layers if size <= VIEW_BYTES else ()


def view_on(lens: Lens, store: Scored, name: str, layers: tuple[int, ...]) -> View:
    """Return what a lens saw in the questions of a store."""
    p = lens.base_probs(store.table)
    changes = lens.view.changes(store, p) if lens.view and layers else np.zeros((0, len(p)))
    return View(lens.method.replace(lens.plain_method, name), lens.layers, layers, changes, lens.shifts(store))


def method_names(lenses: Sequence[Lens]) -> list[str]:
    """Return a name for the plain row of each lens, and refuse lenses that cannot stand in one table."""
    first = lenses[0]
    for lens in lenses[1:]:
        for what in ("base", "style"):
            if getattr(lens, what) != getattr(first, what):
                raise CoralError(
                    f"The lenses cannot be compared: one has {what} {getattr(first, what)}, another "
                    f"{getattr(lens, what)}; fit them alike."
                )
    names = [lens.plain_method for lens in lenses]
    if len(set(names)) < len(names):
        names = [f"{lens.plain_method} ({lens.kind})" for lens in lenses]
    return [n if names.count(n) == 1 else f"{n} {i + 1}" for i, n in enumerate(names)]


def unseen(lenses: Sequence[Lens], test: TestSet) -> list[Question]:
    """Return the labelled questions of a test set that no lens was fitted on; refuse a set that has none."""
    unlabelled = [q.id for q in test.questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"{test.name}: {len(unlabelled)} questions have no answer, first {unlabelled[0]!r}; evaluation needs labels "
            "(use `coral predict` for unlabelled questions)."
        )
    seen = np.any([lens.is_seen(test.questions) for lens in lenses], axis=0)
    kept = [q for q, known in zip(test.questions, seen, strict=True) if not known]
    if not kept:
        raise CoralError(
            f"{test.name}: all {len(test.questions)} questions were used to fit this lens; evaluate on others."
        )
    return kept


FORMAT = 2
"""Of what a study writes; another one makes its reports again."""


def write_run(run: Run, folder: Path) -> None:
    """Save a run, and make its tables, figures and page unless they were made of the very same run before and are as then."""
    save_run(run, folder)
    mark, results = folder / "finished.json", folder / "results.json"
    key = digest([FORMAT, digest_file(folder / "run.json")])
    if mark.exists() and results.exists() and read_json(mark) == {"run": key, "results": digest_file(results)}:
        return
    table = results_table(run)
    write_run_pictures(run, table, folder / "figures")
    write_report(run, folder, table=table)
    write_json(mark, {"run": key, "results": digest_file(results)})
