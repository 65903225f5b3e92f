"""The one road to a run: test sets without questions that leak, predictions of every method on them, and the run's folder.

`evaluate` measures lenses on questions that a model has not scored yet; a study measures its methods on the states that it
keeps. Both go through a `Measurement`. Only what lm-eval logged becomes a run without it: there is nothing to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.data.answers import ELSEWHERE
from coral_lens.data.leaks import ARTICLE, REPEATED, SHOWN, Guard, Leaks
from coral_lens.data.settings import Style
from coral_lens.data.wording import asked_as
from coral_lens.engine.extract import score_questions
from coral_lens.engine.planned import Extraction
from coral_lens.engine.settings import STATE_PLACES, StatePlace
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.methods.interface import Predict, QuestionSet
from coral_lens.records import UNKNOWN, Predictions, Question, Scored
from coral_lens.report.figures.run import write_run_pictures
from coral_lens.report.pages.run import write_report
from coral_lens.report.reach import SIDE_BY_SIDE, reach_of
from coral_lens.report.runs import Evaluation, Run, View, save_run
from coral_lens.report.tables.run import results_table, temperature_of
from coral_lens.storage.bundles import is_whole
from coral_lens.storage.files import digest, digest_file, file_name, kept_record, versions, write_record
from coral_lens.storage.progress import Bar, bar_of

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


def evaluate(
    lens: Lens | Sequence[Lens] | Mapping[str, Lens],
    model: Model,
    questions: Sequence[Question] | Mapping[str, Sequence[Question]],
    *,
    guard: Guard | None = None,
    work_dir: str | Path | None = None,
    bar: Bar | bool = True,
) -> Run:
    """Measure one lens, or several side by side, on labelled questions, or on several named sets of them.

    Lenses of one kind are told apart by their names if they are given as a mapping, else by number. Questions that a lens was
    fitted, adapted or calibrated on are left out and counted. A lens keeps only the keys of these questions: pass
    `guard_of(training questions)` as `guard` to leave out questions on the same articles, and on edited copies of these, as well.
    The questions are scored once for all lenses, which must start from the same base probabilities and prompts. With `work_dir`
    their states are kept there, and an interrupted evaluation can go on. Progress is shown in a terminal and in a notebook;
    `bar=False` shows nothing.
    """
    panel = panel_of(lens)
    given = questions if isinstance(questions, Mapping) else {label_of(questions): questions}
    sets = {name: asked_as(test, panel.style) for name, test in given.items()}
    for one in panel.lenses:
        one.check(model, [q for test in sets.values() for q in test])
    guards = panel.guard if guard is None else panel.guard + guard
    leaks = {name: leaks_of(name, test, guards) for name, test in sets.items()}
    kept = {name: leaks[name].kept(test) for name, test in sets.items()}
    provenance: dict[str, Any] = {"versions": versions(), **panel.overridden, **leak_record(sets, leaks, guards)}
    provenance |= panel.side_by_side(kept)
    scored = iter_scored(panel, model, kept, work_dir=Path(work_dir) if work_dir else None, bar=bar_of(bar))
    return panel.measurement.run(scored, provenance)


@dataclass(frozen=True)
class Measurement:
    """What is measured on test sets, and what a run says of it."""

    title: str
    lens: dict[str, Any]
    """The record of the lens that the report is about."""
    predict: Predict
    """Gives the rows of a test set's table."""
    trained_on: Callable[[QuestionSet], bool]
    """Whether other questions of a test set's task were trained on."""
    view: Callable[[QuestionSet], View | None] = lambda _: None
    """What a lens saw in a test set, for people to look at."""

    def run(self, tests: Iterable[QuestionSet], provenance: dict[str, Any]) -> Run:
        """Return the run of all test sets, which are taken one by one: the states of one may be gone when the next comes."""
        evaluations = tuple(
            Evaluation(t.name, tuple(t.states.questions), self.predict(t), self.trained_on(t), self.view(t))
            for t in tests
        )
        return Run(self.title, evaluations, self.lens, provenance)


# ------------------------------------------------------------------------------------------------------------ leaks

LEFT_OUT = "questions left out because the lens was fitted on them"
LEAK_GUARD = "leak guard"


def leaks_of(name: str, questions: Sequence[Question], guard: Guard) -> Leaks:
    """Return which questions of a test set leak; refuse a set of which nothing would be left, or that has no answers."""
    unlabelled = [q.id for q in questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"{name}: {len(unlabelled)} questions have no answer, first {unlabelled[0]!r}; evaluation needs labels "
            f"(use `coral predict` for unlabelled questions). {ELSEWHERE}"
        )
    leaks = guard.find(questions)
    if leaks.mask.all():
        remedy = "set the shots to 0" if set(leaks.counts) == {SHOWN} else "evaluate on others"
        reasons = ", ".join(f"{reason}: {n}" for reason, n in leaks.counts.items())
        raise CoralError(
            f"{name}: all {len(questions)} questions were used to fit, adapt or calibrate this lens, or are shown in prompts "
            f"({reasons}); {remedy}."
        )
    return leaks


def leak_record(
    sets: Mapping[str, Sequence[Question]], leaks: Mapping[str, Leaks], guard: Guard
) -> dict[str, dict[str, Any]]:
    """Return what a run says of the guard: what it could check, and how many questions it left out of each set, by reason."""
    record: dict[str, Any] = {"checked": ", ".join(guard.checked)}
    if ARTICLE not in guard.checked and any(q.group != q.id for questions in sets.values() for q in questions):
        record["not checked"] = "articles and edited copies of them: a lens keeps only the keys of its questions"
    record["left out"] = {name: one.counts for name, one in leaks.items() if one.counts}
    return {LEFT_OUT: {name: one.counts.get(REPEATED, 0) for name, one in leaks.items()}, LEAK_GUARD: record}


def label_of(questions: Sequence[Question]) -> str:
    """Return what a set of questions is called that was given without a name: its task and split, if there is one of each."""
    labels = {f"{q.task}:{q.split}" if q.split else q.task for q in questions}
    return labels.pop() if len(labels) == 1 else "questions"


# ----------------------------------------------------------------------------------------------------------- lenses

VIEW_BYTES = 512 * 2**20
"""Test sets whose states of all layers would be larger are not looked at layer by layer."""


@dataclass(frozen=True)
class LensPanel:
    """Lenses that stand side by side in one table; those that cannot are refused."""

    lenses: tuple[Lens, ...]
    labels: tuple[str, ...] = ()
    """What the user calls each; empty where they have no names."""

    def __post_init__(self) -> None:
        first = self.lenses[0]
        for lens in self.lenses[1:]:
            for name in ("base", "style"):
                if getattr(lens, name) != getattr(first, name):
                    raise CoralError(
                        f"The lenses cannot be compared: one has {name} {getattr(first, name)}, another "
                        f"{getattr(lens, name)}; fit them alike."
                    )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the plain row of each lens is called: by its method, its kind, its label or its number, the first that differ."""
        plain = [lens.plain_method for lens in self.lenses]
        kinds = [f"{lens.plain_method} ({lens.kind})" for lens in self.lenses]
        called = [f"{name} ({label})" for name, label in zip(plain, self.labels, strict=False)]
        names = next((some for some in (plain, kinds, called) if len(set(some)) == len(plain)), kinds)
        return tuple(n if names.count(n) == 1 else f"{n} {i + 1}" for i, n in enumerate(names))

    @cached_property
    def looked(self) -> int:
        """Number of the lens whose view is kept: the first listwise one, which reports are about, or the first."""
        return min(range(len(self.lenses)), key=lambda i: self.lenses[i].correction.rule != "listwise")

    @property
    def style(self) -> Style:
        """How all of them ask."""
        return self.lenses[0].style

    @property
    def guard(self) -> Guard:
        """What the lenses know of the questions that they were fitted on."""
        return Guard(tuple((REPEATED, lens.is_seen) for lens in self.lenses))

    @property
    def overridden(self) -> dict[str, list[str]]:
        """On which models they are used in spite of other fingerprints."""
        notes = [note for lens in self.lenses for note in lens.training.overrides]
        return {"overridden": notes} if notes else {}

    @property
    def measurement(self) -> Measurement:
        """How they become a run: its title, its record and its words are those of the lens that is looked at."""
        lens = self.lenses[self.looked]
        title = f"{lens.model['name']}: {lens.name}"
        return Measurement(title, lens.record(), self.predict, self.trained_on, self.view)

    def side_by_side(self, sets: Mapping[str, Sequence[Question]]) -> dict[str, list[dict[str, Any]]]:
        """Return for each of several lenses how far it is believed on test sets; nothing of one, whose record says it."""
        if len(self.lenses) == 1:
            return {}
        reaches = [
            reach_of(lens.record(), [set_ for set_, test in sets.items() if is_own(lens, test)], row)
            for row, lens in zip(self.names, self.lenses, strict=True)
        ]
        return {SIDE_BY_SIDE: [reach.to_json() for reach in reaches]}

    @property
    def places(self) -> tuple[StatePlace, ...]:
        """Where the model is read for all of them."""
        return tuple(place for place in STATE_PLACES if any(place in lens.places for lens in self.lenses))

    def layers(self, questions: Sequence[Question]) -> tuple[int, ...]:
        """Return the layers that are read of questions, to steer and to look at."""
        needed = {layer for lens in self.lenses for layer in lens.layers}
        return tuple(sorted(needed | set(self.layers_to_look_at(questions))))

    def layers_to_look_at(self, questions: Sequence[Question]) -> tuple[int, ...]:
        """Return the layers whose probes a lens kept; none where the states of so many questions would fill the disk."""
        lens = self.lenses[self.looked]
        view = lens.view
        if view is None or not view.is_of(lens.correction):
            return ()
        size = 2 * view.n_weights * sum(len(q.options) for q in questions)
        return view.layers if size <= VIEW_BYTES else ()

    def predict(self, test: QuestionSet) -> dict[str, Predictions]:
        """Return base, temperature and the rows of each lens.

        Temperature is that of the lens that is looked at. Another lens, which may be from other questions, has its own row of it
        where it differs.
        """
        found = [lens.predictions_on(test.states) for lens in self.lenses]
        rows = {name: found[self.looked][name] for name in ("base", "temperature")}
        for name, lens, predictions in zip(self.names, self.lenses, found, strict=True):
            for method in dict.fromkeys((lens.plain_method, lens.method)):
                row = method.replace(lens.plain_method, name)
                rows[row] = predictions[method].renamed(row)
        for name, predictions in zip(self.names, found, strict=True):
            own = predictions["temperature"].renamed(temperature_of(name))
            if not np.array_equal(own.probs, rows["temperature"].probs):
                rows[own.method] = own
        return rows

    def trained_on(self, test: QuestionSet) -> bool:
        """Whether the lens that is looked at was fitted on the task of a test set."""
        return is_own(self.lenses[self.looked], test.states.questions)

    def view(self, test: QuestionSet) -> View:
        """Return what a lens saw in the questions of a test set."""
        lens, name, states = self.lenses[self.looked], self.names[self.looked], test.states
        p, layers = lens.base_probs(states.table), self.layers_to_look_at(states.questions)
        layers = layers if set(layers) <= set(states.layers) else ()
        changes = lens.view.changes(states, p) if lens.view and layers else np.zeros((0, len(p)))
        return View(lens.method.replace(lens.plain_method, name), lens.layers, layers, changes, lens.shifts(states))


def panel_of(lens: Lens | Sequence[Lens] | Mapping[str, Lens]) -> LensPanel:
    """Return one lens, or several with their names if they have any, as they stand in a table."""
    if isinstance(lens, Lens):
        return LensPanel((lens,))
    return LensPanel(tuple(lens.values()), tuple(lens)) if isinstance(lens, Mapping) else LensPanel(tuple(lens))


def is_own(lens: Lens, questions: Sequence[Question]) -> bool:
    """Return whether a test set is of a task that a lens was fitted on."""
    return bool(lens.is_home(questions).any())


def iter_scored(
    panel: LensPanel, model: Model, sets: Mapping[str, Sequence[Question]], *, work_dir: Path | None, bar: Bar
) -> Iterator[QuestionSet]:
    """Score set after set; without `work_dir` the states of one are thrown away before the next is scored."""
    for name, questions in sets.items():
        extraction = Extraction(
            layers=panel.layers(questions),
            style=panel.style,
            read=panel.places,
            neutral=panel.lenses[0].base == "pmi",
        )
        folder = work_dir / file_name(name) if work_dir else None
        with (
            bar(name, len(questions), "questions") as advance,
            score_questions(model, questions, extraction, folder=folder, progress=advance) as store,
        ):
            yield scored_set(name, questions, store)


def scored_set(name: str, questions: Sequence[Question], store: Scored) -> QuestionSet:
    """Return the questions that a model could score, with their prompts and states."""
    known = {q.id: q for q in questions}
    return QuestionSet(name, store, lambda: tuple(known[q.id] for q in store.questions))


# ---------------------------------------------------------------------------------------------------------- writing

FORMAT = 2
"""Of what a study writes; another one makes its reports again."""


def write_run(run: Run, folder: Path) -> None:
    """Save a run, and make its tables, figures and page unless they were made of the very same run before and are as then."""
    save_run(run, folder)
    mark, key = folder / "finished.json", digest([FORMAT, digest_file(folder / "run.json")])
    made = kept_record(mark) or {}
    digests = made.get("files") or {}
    if made.get("run") == key and digests and all(is_whole(folder / name, wanted) for name, wanted in digests.items()):
        return
    table = results_table(run)
    write_run_pictures(run, table, folder / "figures")
    write_report(run, folder, table=table)
    written = sorted((*folder.glob("results.*"), *folder.glob("figures/*"), folder / "report.html"))
    files = {path.relative_to(folder).as_posix(): digest_file(path) for path in written if path.is_file()}
    write_record(mark, {"run": key, "files": files})
