"""Run a study: fits, predictions and runs for each model and mixture, each made once.

    WORK/MODEL/states/SOURCE/           what the model made of a source (see `states`)
    WORK/MODEL/MIXTURE/METHOD/SEED/     what a method keeps (a lens), and its predictions, one file for each test set
    OUT/runs/MODEL/MIXTURE/             predictions of all methods, tables, figures, report.html, costs.md
    OUT/study.json                      the study, its questions and what was dropped

A killed run goes on where it was and ends with the same bytes as an undisturbed one, but for the costs.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coral_lens.data.own_files import apart_by_file
from coral_lens.data.settings import Style
from coral_lens.engine.loading import load_model
from coral_lens.errors import need
from coral_lens.lens.fit import check_questions
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.training_data import usable_device
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import NOTES, FitContext, QuestionSet
from coral_lens.methods.registry import CONTROLS, METHODS, ZERO_SHOT, read_method
from coral_lens.metrics.scores import score
from coral_lens.records import predictions_of
from coral_lens.report.pages.study import ReportedRun, write_study
from coral_lens.report.runs import Run, is_begun, load_run, refuse_other_run
from coral_lens.report.tables.run import ABOUT_ALL, subject_of
from coral_lens.storage.files import digest, file_name, read_record, versions, write_record
from coral_lens.storage.progress import Bar, bar_of, silent
from coral_lens.study.config import Study, load_study
from coral_lens.study.costs import FILE as COST_FILE
from coral_lens.study.costs import method_cost, read_steps, scoring_cost, write_costs
from coral_lens.study.evaluate import FORMAT, LEAK_GUARD, Measurement, write_run
from coral_lens.study.folders import Folders, check_folders, claim
from coral_lens.study.plan import Load, MixturePlan, Plan, definitions_of, loader, plan_study, selected
from coral_lens.study.predictions import LENS, Rows, described, method_folder, method_predictions
from coral_lens.study.states import Helpers, OpenModel, StudyStates, Surroundings


@dataclass(frozen=True)
class Prepared:
    """A study whose methods and questions were checked; no model is loaded yet."""

    study: Study
    methods: tuple[tuple[MethodEntry, Any], ...]
    """Each with its settings, the controls first."""
    load: Load
    plan: Plan

    def record(self) -> dict[str, Any]:
        """Return the study with its questions and what was dropped."""
        return {
            "format": FORMAT,
            "name": self.study.name,
            "study": self.study.model_dump(mode="json"),
            "mixtures": {
                m.mixture.name: {
                    "questions": {part.source.label: len(part.ids) for part in m.parts},
                    "n_dropped": m.n_dropped,
                    "dropped because a test set holds them too": m.dropped,
                    LEAK_GUARD: m.reasons,
                }
                for m in self.plan.mixtures
            },
            "tests": {
                t.name: {
                    "source": t.part.source.label,
                    "questions": t.n_questions,
                    "drawn": "all" if t.part.source.n is None else f"{t.part.source.n} at random",
                    "shots": t.part.source.shots,
                    "n_left_out": t.n_left_out,
                    **({"adapted on": f"{len(t.adapt.ids)} of {t.adapt.source.label}"} if t.adapt else {}),
                    **({"apart": True} if t.apart else {}),
                }
                for t in self.plan.tests
            },
            "versions": versions(),
        }


def prepare_study(study: Study, data: Path | None) -> Prepared:
    """Check a study as far as that is possible without a model: methods, tasks, splits, leaks, numbers of questions."""
    named = {entry.row for entry in study.method}
    entries = [*(MethodEntry(kind=c) for c in CONTROLS if c not in named), *study.method]
    methods = tuple((entry, read_method(entry)) for entry in entries)
    load = loader(study, data)
    plan = plan_study(study, load)
    style = Style(study.style, study.chat)
    tested = [q for test in plan.tests for q in selected(test.part, load)]
    for mixture in plan.mixtures:
        trained = apart_by_file([q for part in mixture.parts for q in selected(part, load)])
        check_questions(trained)
        for entry, settings in methods:
            METHODS[entry.kind].check([*trained, *tested], style, settings)
            METHODS[entry.kind].check_training(trained, settings)
    return Prepared(study, methods, load, plan)


def run_study(
    study: Study | str | Path,
    out: str | Path | None = None,
    *,
    work: str | Path | None = None,
    data: str | Path | None = None,
    bar: Bar | bool = True,
) -> tuple[Run, ...]:
    """Run a study up to its report, from wherever it was stopped; return the run of each model and training mixture.

    A study is a TOML file, the name of a ready-made one (`probe1-small`), or what `load_study` returned. Results go to the
    folder `out`, by default the study's name; states, lenses and predictions go to `work`, which studies may share. `data` is
    a folder with TASK/SPLIT.jsonl files, which is searched before the embedded data and the hub. Progress is shown in a
    terminal and in a notebook; `bar=False` shows nothing.
    """
    wanted = study if isinstance(study, Study) else load_study(study)
    target = Path(out or wanted.name)
    folders = Folders(
        target, Path(work) if work else target.with_name(f"{target.name}.work"), Path(data) if data else None
    )
    run_prepared(prepare_study(wanted, folders.data), folders, open_model=load_model, bar=bar_of(bar))
    mixtures = [file_name(mixture.name) for mixture in wanted.mixture]
    return tuple(load_run(folders.runs_of(name) / mixture) for name in wanted.models for mixture in mixtures)


def run_prepared(
    prepared: Prepared,
    folders: Folders,
    *,
    open_model: OpenModel,
    bar: Bar = silent,
    device: str | None = None,
    helpers: Helpers | None = None,
) -> Path:
    """Run a study to its end, from wherever an earlier run was stopped, and write its report; return the page.

    `device` is where networks are trained, by default the GPU if there is one. `helpers` compute states and fits elsewhere.
    """
    need("report", by="A study")
    record = prepared.record()
    check_folders(folders, holds="study.json", kind="study")
    claim(folders.out, record)
    around = Surroundings(folders, open_model, bar, usable_device(device), helpers)
    runs = []
    for name in prepared.study.models:
        model_run = StudyRun(prepared, name, around)
        if helpers:
            model_run.have_fitted(helpers)
        runs += [
            ReportedRun(name, m.mixture.name, model_run.run(m, folders.runs_of(name) / file_name(m.mixture.name)))
            for m in prepared.plan.mixtures
        ]
        del model_run
        gc.collect()  # one model in memory at a time
    return write_study(record, runs, folders.out)


def run_alone(
    prepared: Prepared,
    folders: Folders,
    *,
    open_model: OpenModel,
    bar: Bar = silent,
    device: str | None = None,
) -> Path:
    """Run a study of one model and one mixture, and leave its run in the folder for results itself; return that."""
    need("report", by="A study")
    (name,), (plan,) = prepared.study.models, prepared.plan.mixtures
    if not is_begun(folders.out):
        check_folders(folders, holds="run.json", kind="run")
    refuse_other_run(folders.out)
    around = Surroundings(folders, open_model, bar, usable_device(device))
    return StudyRun(prepared, name, around).run(plan, folders.out)


class StudyRun:
    """One model's way through a study."""

    def __init__(self, prepared: Prepared, name: str, around: Surroundings) -> None:
        self.prepared, self.study, self.name, self.bar = prepared, prepared.study, name, around.bar
        self.device, self._around = around.device, around
        self.states = StudyStates(prepared.study, prepared.load, name, around)
        self._opened: dict[str, tuple[QuestionSet, list[QuestionSet], Path]] = {}

    def run(self, plan: MixturePlan, folder: Path) -> Path:
        """Fit every method on a mixture, predict every test set, and write the run with its report; return its folder."""
        _, tests, work = self._sets(plan)
        results = Results(tests)
        for method in self.prepared.methods:
            for i, seed in enumerate(self.study.seeds):
                results.add(self._predictions(plan, method, seed), shown=i == 0)
            if method[0].kind == "base":
                results.add(self._without_shots(tests), shown=True)
        write_run(self._measurement(plan, results, work).run(tests, self._provenance(plan, work)), folder)
        write_record(folder / "seeds.json", {"seeds": list(self.study.seeds), "scores": results.scores})
        self._write_costs(work, folder)
        return folder

    def have_fitted(self, helpers: Helpers) -> None:
        """Have all states computed, then all fits; what is left to do afterwards finds them on the disk."""
        for plan in self.prepared.plan.mixtures:
            self._sets(plan)
        helpers.fit(self.study, self._around.folders, self.name)

    def fit(self, plan: MixturePlan, method: int, seed: int) -> None:
        """Fit one method on a mixture with one seed and predict every test set, unless that was done before."""
        self._predictions(plan, self.prepared.methods[method], seed)

    def _sets(self, plan: MixturePlan) -> tuple[QuestionSet, list[QuestionSet], Path]:
        """Return what is trained on, what is tested on, and where fits keep their work."""
        name = plan.mixture.name
        if name not in self._opened:
            train = self.states.question_set(name, plan.parts)
            work = self.states.folder / file_name(f"{name}-{digest(train.states.manifest)[:8]}")
            self._opened = {name: (train, [self.states.test_set(t) for t in self.prepared.plan.tests], work)}
        return self._opened[name]

    def _predictions(self, plan: MixturePlan, method: tuple[MethodEntry, Any], seed: int) -> Rows:
        (entry, settings), (train, tests, work) = method, self._sets(plan)
        folder = method_folder(work, entry, settings) / str(seed)
        common, mixed = self._common(plan, seed), self._around.folders.mixed
        context = FitContext(self.states.model, train, common, folder, self.bar, self.device, mixed)
        return method_predictions(context, entry, settings, tests)

    def _common(self, plan: MixturePlan, seed: int) -> FitSettings:
        return FitSettings(
            base=self.study.base,
            style=self.states.style,
            layers=self.study.layers,
            validation=plan.mixture.validation_of_rest,
            stratified=plan.mixture.stratified,
            seed=seed,
        )

    def _without_shots(self, tests: Sequence[QuestionSet]) -> Rows:
        """Return the row of the unsteered model on the same questions without worked examples, where they have some."""
        rows: Rows = {}
        for test, plan in zip(tests, self.prepared.plan.tests, strict=True) if self.study.zero_shot else ():
            if store := self.states.without_shots(test, plan.part):
                probs = base_probs(store.table, self.study.base)
                rows[test.name] = {ZERO_SHOT: predictions_of(ZERO_SHOT, store, probs)}
        return rows

    # -------------------------------------------------------------------------------------------------- the run

    def _measurement(self, plan: MixturePlan, results: Results, work: Path) -> Measurement:
        trained = {d.data for s in plan.mixture.sources for d in definitions_of(s)}
        sources = {t.name: t.part.source for t in self.prepared.plan.tests}
        return Measurement(
            title=f"{self.study.name}: {self.name}, trained on {plan.mixture.name}",
            lens=self._lens(work, results),
            predict=lambda test: results.rows[test.name],
            trained_on=lambda test: bool(trained & {d.data for d in definitions_of(sources[test.name])}),
        )

    def _provenance(self, plan: MixturePlan, work: Path) -> dict[str, Any]:
        record, notes = self.prepared.record(), self._notes(work)
        return {
            "study": self.study.name,
            "mixture": plan.mixture.name,
            "methods": {entry.row: described(entry, settings) for entry, settings in self.prepared.methods},
            "prompts": "the same for every method; base is the unsteered model on them (few-shot)",
            "training": record["mixtures"][plan.mixture.name],
            "tests": record["tests"],
            "seed": self.study.seed,
            "versions": versions(),
            **({"notes": notes} if notes else {}),
        }

    def _first_seed(self, work: Path) -> dict[str, Path]:
        """Return where each method keeps its work under the first seed, by row: what reports are about."""
        seed = str(self.study.seeds[0])
        return {entry.row: method_folder(work, entry, settings) / seed for entry, settings in self.prepared.methods}

    def _notes(self, work: Path) -> dict[str, Any]:
        """Return what methods remarked."""
        paths = {row: folder / NOTES for row, folder in self._first_seed(work).items()}
        return {row: read_record(path, remedy=again(path.parent)) for row, path in paths.items() if path.exists()}

    def _lens(self, work: Path, results: Results) -> dict[str, Any]:
        """Return the record of the lens that the report is about; where no method is a lens, of the model alone."""
        test, rows = results.tests[0], next(iter(results.rows.values()))
        subject = (subject_of(rows) or "").removesuffix(" tempered")
        folder = self._first_seed(work).get(subject)
        if folder and (record := folder / LENS).exists():
            known = read_record(record, remedy=again(folder))
            return {k: v for k, v in known.items() if k not in ("tensors", "sha256")}
        return {"model": test.states.manifest["model"], "base": self.study.base}

    def _write_costs(self, work: Path, folder: Path) -> None:
        """Write what each method took."""
        scoring = {t.name: scoring_cost(self.states.store(t.part.source).folder) for t in self.prepared.plan.tests}
        folders = self._first_seed(work)
        rows = [
            method_cost(
                entry.row,
                read_steps(folders[entry.row] / COST_FILE),
                scoring,
                from_scores=METHODS[entry.kind].from_scores,
            )
            for entry, _ in self.prepared.methods
        ]
        write_costs(rows, folder)


def again(folder: Path) -> str:
    """Return what to do about a damaged record of a method."""
    return f"delete {folder} and run the study again: only this method is fitted anew"


class Results:
    """What all methods make of the test sets of a run."""

    def __init__(self, tests: Sequence[QuestionSet]) -> None:
        self.tests = tests
        self.rows: Rows = {t.name: {} for t in tests}
        """Under the first seed: what tables show."""
        self.scores: dict[str, dict[str, dict[str, list[float]]]] = {t.name: {} for t in tests}
        """By test set, row and metric: the score under each seed."""

    def add(self, rows: Rows, *, shown: bool) -> None:
        """Add rows of predictions under one more seed."""
        for test, predictions in rows.items():
            if shown:
                self.rows[test] |= predictions
            for row, one in predictions.items():
                for metric in ABOUT_ALL.columns:
                    self.scores[test].setdefault(row, {}).setdefault(metric, []).append(score(one, metric))
