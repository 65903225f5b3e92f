"""The walk through a study: states, fits, predictions and runs for each model and mixture, each made once.

    WORK/MODEL/states/SOURCE/           what the model made of a source, whoever asks for it; in a dtype that was asked for
                                        by name, in a folder beside it
    WORK/MODEL/MIXTURE/METHOD/SEED/     what a method keeps (a lens), and its predictions, one file for each test set
    OUT/runs/MODEL/MIXTURE/             predictions of all methods, tables, figures, report.html, costs.md
    OUT/study.json                      the study, its questions and what was dropped

A killed walk goes on where it was and ends with the same bytes as an undisturbed one, but for the costs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import Extraction, all_layers, extract
from coral_lens.errors import CoralError
from coral_lens.lens.fit import check_questions
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import NOTES, FitContext, QuestionSet, prompts_digest
from coral_lens.methods.registry import CONTROLS, METHODS, ZERO_SHOT, read_method
from coral_lens.metrics.scores import score
from coral_lens.progress import Bar, silent
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.report.pages.study import StudyRun, write_study
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.run import ABOUT_ALL, subject_of
from coral_lens.storage.files import digest, file_name, read_json, versions, write_json
from coral_lens.study.config import Source, Study
from coral_lens.study.costs import FILE as COST_FILE
from coral_lens.study.costs import Stopwatch, add_scoring, method_cost, read_steps, scoring_cost, write_costs
from coral_lens.study.evaluate import FORMAT, write_run
from coral_lens.study.folders import Places, check_places, claim
from coral_lens.study.plan import (
    Load,
    MixturePlan,
    Plan,
    Selection,
    TestPlan,
    definitions_of,
    loader,
    plan_study,
    selected,
)
from coral_lens.study.predictions import Rows, described, method_folder, method_predictions

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


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
        trained = [q for part in mixture.parts for q in selected(part, load)]
        check_questions(trained)
        for entry, settings in methods:
            METHODS[entry.kind].check([*trained, *tested], style, settings)
    return Prepared(study, methods, load, plan)


def run_study(prepared: Prepared, places: Places, *, open_model: Callable[[str], Model], bar: Bar = silent) -> Path:
    """Walk a study to its end, from wherever an earlier walk was stopped, and write its report; return the page."""
    record = prepared.record()
    check_places(places, holds="study.json", what="study")
    claim(places.out, record)
    runs = []
    for name in prepared.study.models:
        walk = Walk(prepared, places, name, open_model, bar)
        runs += [StudyRun(name, m.mixture.name, walk.run(m)) for m in prepared.plan.mixtures]
        del walk
        gc.collect()  # one model in memory at a time
    return write_study(record, runs, places.out)


def run_alone(prepared: Prepared, places: Places, *, open_model: Callable[[str], Model], bar: Bar = silent) -> Path:
    """Walk a study of one model and one mixture, and leave its run in the folder for results itself; return that."""
    (name,), (plan,) = prepared.study.models, prepared.plan.mixtures
    check_places(places, holds="run.json", what="run")
    return Walk(prepared, places, name, open_model, bar).run(plan, places.out)


class Walk:
    """The walk of one model through a study."""

    def __init__(
        self, prepared: Prepared, places: Places, name: str, open_model: Callable[[str], Model], bar: Bar
    ) -> None:
        self.prepared, self.study, self.name, self.bar = prepared, prepared.study, name, bar
        self.work = places.of_model(name)
        self.runs = places.out / "runs" / file_name(name)
        self.data = places.data
        self._open = open_model
        self._stores: dict[Source, ActivationStore] = {}
        self._first: tuple[Mapping[str, Any], str] | None = None

    @cached_property
    def _model(self) -> Model:
        model = self._open(self.name)
        self._check_same({**model.fingerprint, "dtype": str(model.dtype)}, "the model as it is now")
        return model

    def model(self) -> Model:
        """Return the model, loaded when it is first needed."""
        return self._model

    @cached_property
    def _asked(self) -> Load:
        # the chat template is the model's own, so that its prompts cannot be made before it is loaded
        return loader(self.study, self.data, self._model.chat_template) if self.study.chat else self.prepared.load

    # ------------------------------------------------------------------------------------------------- states

    def states(self, source: Source) -> ActivationStore:
        """Return what the model made of a source: from the disk if it was finished before, else extracted now."""
        if source not in self._stores:
            self._stores[source] = self._open_states(source)
        return self._stores[source]

    def _check_same(self, about: Mapping[str, Any], where: str) -> None:
        """Refuse to mix what different models, or one in different dtypes, have made."""
        self._first = self._first or (about, where)
        known, there = self._first
        for what in ("weights", "tokenizer", "dtype"):
            if known[what] != about[what]:
                raise CoralError(
                    f"Other {what} of {self.name!r} in {there} ({known[what][:14]}) than in {where} ({about[what][:14]}); delete "
                    "what the other one made, choose another --work, or ask for its --dtype."
                )

    def _open_states(self, source: Source, *, only: frozenset[str] | None = None) -> ActivationStore:
        """Return the store of a source; with `only`, of these questions alone, and their scores without states."""
        identity = self._identity(source) | ({} if only is None else {"layers": [], "only": digest(sorted(only))})
        n = source.n or "all"
        folder = self.work / "states" / f"{file_name(source.label)}-{n}-{source.shots}shot-{digest(identity)[:8]}"

        def wanted(load: Load) -> list[Question]:
            return [q for q in load(source) if only is None or q.id in only]

        mark, key = folder / "finished.json", digest([identity, prompts_digest(wanted(self.prepared.load))])
        if mark.exists() and read_json(mark).get("key") == key:
            if is_younger(self.name, mark):
                self.model()  # which is compared with the store
            store = ActivationStore(folder)
            self._check_same(store.manifest["model"], str(folder))
            return store
        model, questions = self.model(), wanted(self._asked)
        layers = () if only is not None else self.study.layers or all_layers(model)
        what = Extraction(layers=layers, style=self._style)
        done: list[int] = []
        watch = Stopwatch()
        with self.bar(source.label, len(questions), "questions") as advance:

            def progress(n: int) -> None:
                done.append(n)
                advance(n)

            store = extract(model, questions, folder, what=what, progress=progress)
        # the first number is of questions that were scored before
        add_scoring(folder, watch.read(sum(done[1:]), model.device.type))
        write_json(mark, {"key": key})
        self._check_same(store.manifest["model"], str(folder))
        return store

    def _identity(self, source: Source) -> dict[str, Any]:
        study = self.study
        how = {"style": study.style, "chat": study.chat, "layers": study.layers, "fixed_shots": study.fixed_shots}
        return source.model_dump(mode="json") | how | {"seed": study.seed if source.n else None}

    @property
    def _style(self) -> Style:
        return Style(self.study.style, self.study.chat)

    def question_set(self, name: str, parts: Iterable[Selection]) -> QuestionSet:
        """Return selected questions with their states."""
        chosen = [(self.states(part.source), part) for part in parts if part.ids]
        joined = JoinedStore([Subset(s, np.array([q.id in part.ids for q in s.questions])) for s, part in chosen])
        ids = [q.id for q in joined.questions]

        def asked() -> tuple[Question, ...]:
            known = {q.id: q for _, part in chosen for q in self._asked(part.source)}
            return tuple(known[i] for i in ids)

        return QuestionSet(name, joined, asked)

    def test_set(self, plan: TestPlan) -> QuestionSet:
        """Return the questions of a test with their states, and those that methods may adapt on."""
        found, part = self.question_set(plan.name, [plan.part]), plan.adapt
        return found if part is None else replace(found, adapt=lambda: tuple(selected(part, self._asked)))

    # -------------------------------------------------------------------------------------------- predictions

    def run(self, plan: MixturePlan, folder: Path | None = None) -> Path:
        """Fit every method on a mixture, predict every test set, and write the run with its report; return its folder."""
        train = self.question_set(plan.mixture.name, plan.parts)
        tests = [self.test_set(t) for t in self.prepared.plan.tests]
        place = self.work / file_name(f"{plan.mixture.name}-{digest(train.states.manifest)[:8]}")
        rows: Rows = {t.name: {} for t in tests}
        seeds: dict[str, dict[str, dict[str, list[float]]]] = {t.name: {} for t in tests}
        for entry, settings in self.prepared.methods:
            at = method_folder(place, entry, settings)
            for i, seed in enumerate(self.study.seeds):
                context = FitContext(self.model, train, self._common(plan, seed), at / str(seed), self.bar)
                for test, found in method_predictions(context, entry, settings, tests).items():
                    if i == 0:
                        rows[test] |= found
                    add_scores(seeds[test], found)
            if entry.kind == "base":
                for one, asked in zip(tests, self.prepared.plan.tests, strict=True):
                    rows[one.name] |= (extra := self.without_shots(one, asked.part))
                    add_scores(seeds[one.name], extra)
        folder = folder or self.runs / file_name(plan.mixture.name)
        write_run(self._run(plan, tests, rows, place), folder)
        write_json(folder / "seeds.json", {"seeds": list(self.study.seeds), "scores": seeds})
        self._write_costs(place, folder)
        return folder

    def _write_costs(self, place: Path, folder: Path) -> None:
        """Write what each method took under the first seed."""
        scoring = {t.name: scoring_cost(self.states(t.part.source).folder) for t in self.prepared.plan.tests}
        rows = []
        for entry, settings in self.prepared.methods:
            steps = read_steps(method_folder(place, entry, settings) / str(self.study.seeds[0]) / COST_FILE)
            rows.append(method_cost(entry.row, steps, scoring, from_scores=METHODS[entry.kind].from_scores))
        write_costs(rows, folder)

    def _common(self, plan: MixturePlan, seed: int) -> FitSettings:
        return FitSettings(
            base=self.study.base,
            style=self._style,
            layers=self.study.layers,
            validation=plan.mixture.validation_of_rest,
            seed=seed,
        )

    def without_shots(self, test: QuestionSet, part: Selection) -> dict[str, Predictions]:
        """Return the row of the unsteered model on the same questions without worked examples, where they have some."""
        if not (self.study.zero_shot and part.source.shots):
            return {}
        ids = [q.id for q in test.states.questions]
        store = self._open_states(part.source.model_copy(update={"shots": 0}), only=frozenset(ids))
        if [q.id for q in store.questions] != ids:
            warnings.warn(
                f"{test.name}: no 0-shot row, because the model cannot score all of its questions so.", stacklevel=2
            )
            return {}
        return {ZERO_SHOT: predictions_of(ZERO_SHOT, store, base_probs(store.table, self.study.base))}

    # -------------------------------------------------------------------------------------------------- runs

    def _run(self, plan: MixturePlan, tests: Sequence[QuestionSet], rows: Rows, place: Path) -> Run:
        trained = {d.data for s in plan.mixture.sources for d in definitions_of(s)}
        sources = {t.name: t.part.source for t in self.prepared.plan.tests}
        evaluations = tuple(
            Evaluation(
                t.name,
                tuple(t.states.questions),
                rows[t.name],
                bool(trained & {d.data for d in definitions_of(sources[t.name])}),
            )
            for t in tests
        )
        record = self.prepared.record()
        provenance = {
            "study": self.study.name,
            "mixture": plan.mixture.name,
            "methods": {entry.row: described(entry, settings) for entry, settings in self.prepared.methods},
            "prompts": "the same for every method; base is the unsteered model on them (few-shot)",
            "training": record["mixtures"][plan.mixture.name],
            "tests": record["tests"],
            "seed": self.study.seed,
            "versions": versions(),
            **({"notes": notes} if (notes := self._notes(place)) else {}),
        }
        title = f"{self.study.name}: {self.name}, trained on {plan.mixture.name}"
        return Run(title, evaluations, self._lens(place, next(iter(rows.values())), tests[0]), provenance)

    def _notes(self, place: Path) -> dict[str, Any]:
        """Return what methods remarked under the first seed."""
        paths = {
            entry.row: method_folder(place, entry, settings) / str(self.study.seeds[0]) / NOTES
            for entry, settings in self.prepared.methods
        }
        return {row: read_json(path) for row, path in paths.items() if path.exists()}

    def _lens(self, place: Path, rows: dict[str, Predictions], test: QuestionSet) -> dict[str, Any]:
        """Return the record of the lens that the report is about; where no method is a lens, of the model alone."""
        subject = (subject_of(rows) or "").removesuffix(" tempered")
        for entry, settings in self.prepared.methods:
            record = method_folder(place, entry, settings) / str(self.study.seeds[0]) / "lens" / "lens.json"
            if entry.row == subject and record.exists():
                return {k: v for k, v in read_json(record).items() if k not in ("tensors", "digest")}
        return {"model": test.states.manifest["model"], "base": self.study.base}


def is_younger(model: str, mark: Path) -> bool:
    """Whether files of a model that is not on the hub were written after a mark was: it may have become another one."""
    path = Path(model).expanduser()
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else []
    return any(file.stat().st_mtime > mark.stat().st_mtime for file in files)


def add_scores(scores: dict[str, dict[str, list[float]]], found: dict[str, Predictions]) -> None:
    """Add the scores under one more seed to those of a test set."""
    for row, predictions in found.items():
        for metric in ABOUT_ALL.columns:
            scores.setdefault(row, {}).setdefault(metric, []).append(score(predictions, metric))
