"""A run: the predictions of several methods on several tasks, in one folder that knows where every number came from.

run.json                    title, lens, model, versions, tasks
predictions/TASK.jsonl      one line per question: text, options, answer, the probabilities of each method
views/TASK.json             optional: each question's shift, and what each layer alone would change
report.html                 made from the two above by `coral report`
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from coral_lens.errors import CoralError
from coral_lens.metrics.display import Shown, Table
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, groups_of, ordered_of, question_from, question_record, targets_of
from coral_lens.report.names import task_names
from coral_lens.storage.files import (
    canonical,
    digest_file,
    file_name,
    kept_record,
    read_json,
    read_record,
    write_atomic,
    write_record,
)
from coral_lens.storage.outputs import has_word, refuse_replacing

FORMAT = 1
OF_DECISIONS = ("kind", "right", "soft")
"""What a line says of a question that is a decision; of others it has no such keys."""
SHOWN = ("accuracy", "ece", "brier", "nll")
"""The metrics that a printed run shows."""


@dataclass(frozen=True)
class View:
    """What a lens saw in the questions of one task, for people to look at."""

    method: str
    """The lens's row."""
    own: tuple[int, ...]
    """The layers that it reads."""
    layers: tuple[int, ...]
    """Those below; empty where the lens kept no probes of single layers."""
    changes: Float[np.ndarray, "layer row"]
    """The residual that a probe of this layer alone predicts for each option; kept to a thousandth."""
    shift: Float[np.ndarray, " question"]
    """How far each question lies from the training questions."""


@dataclass(frozen=True)
class Evaluation:
    """The questions of one task and what each method made of them."""

    name: str
    """Unique within the run, for people and for file names: the task, with its split where needed."""
    questions: tuple[Question, ...]
    predictions: dict[str, Predictions]
    """By method; the same questions in the same order."""
    trained_on: bool = False
    """Whether the lens was fitted on other questions of this task (held-out), or never saw the task (transfer)."""
    view: View | None = None


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """Everything that a report shows. Prints as a table of its main scores; `results_table` has intervals and tests."""

    title: str
    evaluations: tuple[Evaluation, ...]
    lens: dict[str, Any]
    """The lens's record, see Lens.record: layer, gamma, base, model, training, trace."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Versions, command, data sources, dropped repeats: name to text or number."""

    @property
    def titles(self) -> dict[str, str]:
        """The name of each test set for people, by its exact name."""
        return task_names(e.name for e in self.evaluations)

    def table(self) -> Table:
        """Return a row for each test set and method."""
        rows = tuple(
            (e.name, method, len(p), *(score(p, metric) for metric in SHOWN))
            for e in self.evaluations
            for method, p in e.predictions.items()
        )
        note = "Fractions; of ECE, Brier and NLL less is better. Intervals and comparisons: `coral report`."
        return Table(self.title, ("test set", "method", "questions", *SHOWN), rows, (note,))


def save_run(run: Run, folder: Path) -> None:
    """Write a run's predictions, then its record with their digests; what only the run before it had named goes."""
    files: dict[str, dict[str, Any]] = {}
    older = named_files(folder, (kept_record(folder / "run.json") or {}).get("tasks"))
    for evaluation in run.evaluations:
        path = folder / "predictions" / f"{file_name(evaluation.name)}.jsonl"
        write_atomic(path, "".join(prediction_lines(evaluation)).encode())
        files[evaluation.name] = {"file": path.name, "sha256": digest_file(path), "trained_on": evaluation.trained_on}
        if evaluation.view:
            path = folder / "views" / f"{file_name(evaluation.name)}.json"
            write_atomic(path, canonical(view_record(evaluation.view)).encode())
            files[evaluation.name]["view"] = {"file": path.name, "sha256": digest_file(path)}
    record = {"format": FORMAT, "title": run.title, "lens": run.lens, "provenance": run.provenance, "tasks": files}
    write_record(folder / "run.json", record)
    for path in older.keys() - named_files(folder, files).keys():
        # what was changed since is somebody's own
        if path.is_file() and not path.is_symlink() and digest_file(path) == older[path]:
            path.unlink()


def named_files(folder: Path, tasks: Any) -> dict[Path, str]:
    """Return the files that a run's record names, with their digests; of a record that is not ours none."""
    try:
        kept = [
            (kind, about)
            for task in tasks.values()
            for kind, about in (("predictions", task), ("views", task.get("view")))
        ]
        return {inside(folder / kind, about["file"]): about["sha256"] for kind, about in kept if about}
    except (AttributeError, KeyError, TypeError, CoralError):
        return {}


def prediction_lines(evaluation: Evaluation) -> list[str]:
    """Return one JSON line per question."""
    options = next(iter(evaluation.predictions.values())).options
    return [
        json.dumps(
            {
                "id": q.id,
                "text": q.text,
                "options": q.options,
                "answer": q.answer,
                "task": q.task,
                "split": q.split,
                "group": q.group,
                **{name: value for name, value in question_record(q).items() if name in OF_DECISIONS},
                "probs": {m: p.probs[options.of(i)].tolist() for m, p in evaluation.predictions.items()},
            },
            ensure_ascii=False,
        )
        + "\n"
        for i, q in enumerate(evaluation.questions)
    ]


def view_record(view: View) -> dict[str, Any]:
    """Return a view as JSON values: whole thousandths, which is finer than can be seen and a third of the bytes."""
    whole = np.rint(1000 * view.changes).astype(int).tolist()
    shift = np.round(view.shift, 3).tolist()
    return {"method": view.method, "own": view.own, "layers": view.layers, "thousandths": whole, "shift": shift}


def read_view(folder: Path, about: dict[str, Any]) -> View | None:
    """Read a task's view; None where the run has none, or it was deleted: it is for looking only."""
    kept = about.get("view")
    if not kept or not (path := inside(folder / "views", kept["file"])).exists():
        return None
    if digest_file(path) != kept["sha256"]:
        raise CoralError(f"{path} was changed after the run; remove it, or run `coral eval` again.")
    record = read_json(path)
    shift = np.array(record["shift"], dtype=np.float64)
    changes = np.array(record["thousandths"], dtype=np.float64).reshape(len(record["layers"]), -1) / 1000
    return View(record["method"], tuple(record["own"]), tuple(record["layers"]), changes, shift)


def load_run(folder: str | Path) -> Run:
    """Read a run and check its record and its predictions against their digests."""
    folder = Path(folder)
    record = read_record(folder / "run.json", remedy="run `coral eval` again", needs=("format",))
    if record["format"] != FORMAT:
        raise CoralError(f"{folder} has run format {record['format']!r}, but this version reads {FORMAT}.")
    try:
        return read_run(folder, record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, RecursionError) as error:
        # the record has no digest, because an earlier version wrote it, or somebody else did
        raise CoralError(
            f"{folder} cannot be read as a run ({type(error).__name__}: {error}); run `coral eval` again."
        ) from None


def read_run(folder: Path, record: dict[str, Any]) -> Run:
    """Make a run of its record and the files that it names."""
    evaluations = []
    for name, about in record["tasks"].items():
        path = inside(folder / "predictions", about["file"])
        if not path.exists() or digest_file(path) != about["sha256"]:
            raise CoralError(f"{path} is missing or was changed after the run; run `coral eval` again.")
        # bytes, because str.splitlines would also cut at U+2028 and its like, which a question may hold
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        read = read_evaluation(name, lines, model=record["lens"]["model"]["name"], trained_on=about["trained_on"])
        evaluations.append(replace(read, view=read_view(folder, about)))
    return Run(record["title"], tuple(evaluations), record["lens"], record["provenance"])


RESULTS = ("report.html", "results.md", "results.csv", "results.json")
"""What is made of a run, beside it."""


def refuse_other_run(folder: Path) -> None:
    """Refuse a folder in which a run would replace what it has not written: a page of somebody else, results of no run."""
    if folder.exists() and not folder.is_dir():
        raise CoralError(f"{folder} is a file, not a folder for a run; choose another --out.")
    is_run = has_word(folder / "run.json", '"format"')
    refuse_replacing(folder, ("run.json",), is_ours=lambda _: is_run)
    refuse_replacing(folder, RESULTS, is_ours=lambda path: is_run and (path.suffix != ".html" or is_page(path)))
    for inner, word in {"predictions": '{"id": ', "views": '{"layers":'}.items():
        names = [path.name for path in (folder / inner).glob("[!.]*")]
        refuse_replacing(folder / inner, names, is_ours=lambda path, word=word: has_word(path, word))  # type: ignore[misc]


def is_begun(folder: Path) -> bool:
    """Return whether a folder holds nothing but what a run writes before its record: it was killed then."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    # the record itself may be there under the name that it has while it is written
    return bool(names) and {n for n in names if not n.startswith(".run.json.")} <= {"predictions", "views"}


def is_page(path: Path) -> bool:
    """Return whether a page is one of ours: its title ends in what kind of page it is, in every version."""
    with path.open("rb") as file:
        return bool(re.search(rb"<title>.*\xc2\xb7 CORAL \w+</title>", file.read(2**16), re.DOTALL))


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder; a name that leads out of it is refused."""
    if Path(name).name != name:
        raise CoralError(f"{folder} has no file called {name!r}: a run names only files of its own folder.")
    return folder / name


def read_evaluation(name: str, lines: Sequence[dict[str, Any]], *, model: str, trained_on: bool) -> Evaluation:
    """Make an evaluation of the lines of a predictions file."""
    kept = ("id", "group", "text", "options", "answer", "task", "split")
    questions = tuple(
        question_from({n: line[n] for n in kept} | {n: line[n] for n in OF_DECISIONS if n in line}) for line in lines
    )
    options = Options.of_sizes([len(q.options) for q in questions])
    predictions = {
        method: Predictions(
            method=method,
            model=model,
            task=questions[0].task,
            split=questions[0].split,
            ids=tuple(q.id for q in questions),
            answers=np.array([q.answer for q in questions], dtype=np.int64),
            offsets=options.edges,
            probs=np.array([p for line in lines for p in line["probs"][method]]),
            groups=groups_of(questions),
            targets=targets_of(questions),
            ordered=ordered_of(questions),
        )
        for method in lines[0]["probs"]
    }
    return Evaluation(name, questions, predictions, trained_on)
