"""What one model makes of the questions of a study: each source is scored once, whoever asks for it. Fits nothing.

    WORK/MODEL/states/SOURCE/       a store for each source; in a dtype that was asked for by name, in a folder beside MODEL

A store that was finished before is opened without the model, also one of more layers than the study names; whatever two
different models have made is never mixed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from coral_lens.data.own_files import tasks_of
from coral_lens.data.settings import Style
from coral_lens.data.sources import is_file
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.engine.parts import extract_part
from coral_lens.engine.planned import Extraction
from coral_lens.engine.precision import Precision, recorded_precision
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.methods.interface import QuestionSet, prompts_digest
from coral_lens.records import Question
from coral_lens.storage.files import digest, file_name, kept_record, write_record
from coral_lens.storage.parts import Part
from coral_lens.storage.progress import Bar, Progress, silent
from coral_lens.study.config import Source, Study
from coral_lens.study.costs import Stopwatch, add_scoring
from coral_lens.study.folders import Folders
from coral_lens.study.plan import Load, Selection, TestPlan, loader, selected

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@runtime_checkable
class OpenModel(Protocol):
    """Loads a model by its name."""

    def __call__(self, name: str, *, dtype: str | None = None) -> Model:
        """Return the model; `dtype` is what its states have that are there already."""


@runtime_checkable
class Helpers(Protocol):
    """Others that compute the states and fits of a study, on machines of their own."""

    def extract(
        self, model: str, questions: list[Question], folder: Path, *, wanted: Wanted, progress: Progress
    ) -> ActivationStore:
        """Fill a store with what a model makes of questions, in the precision of what is there already."""

    def fit(self, study: Study, folders: Folders, model: str) -> None:
        """Fit all methods of a study on what a model made of its questions; results are left on the disk."""


@dataclass(frozen=True)
class Surroundings:
    """What the models of a study share: its folders, how a model is opened, how progress is shown."""

    folders: Folders
    open_model: OpenModel
    bar: Bar = silent
    device: str = "cpu"
    """Where networks are trained."""
    helpers: Helpers | None = None
    """Who computes in place of this process."""


@dataclass(frozen=True)
class StorePlace:
    """Where a store of a study is, and of what."""

    label: str
    folder: Path
    key: str
    """Tells whether it is finished: what was asked, and how."""
    questions: Callable[[], list[Question]]
    states: bool
    """Whether it has states beside scores."""

    @property
    def mark(self) -> Path:
        """The file that says that it is finished."""
        return self.folder / "finished.json"

    @property
    def is_finished(self) -> bool:
        """Whether it was finished before."""
        return bool((kept_record(self.mark) or {}).get("key") == self.key)


class StudyStates:
    """Scores and states of one model on the sources of a study."""

    def __init__(self, study: Study, load: Load, name: str, around: Surroundings) -> None:
        self.study, self.name, self.bar = study, name, around.bar
        self.folder = around.folders.of_model(name)
        self._around, self._load = around, load
        self._stores: dict[Source, ActivationStore] = {}
        self._first: tuple[Mapping[str, Any], str] | None = None

    @property
    def style(self) -> Style:
        """How questions from files are asked."""
        return Style(self.study.style, self.study.chat)

    @cached_property
    def _model(self) -> Model:
        model = self._around.open_model(self.name, dtype=self._stored_precision())
        self._check_same({**model.identity, "dtype": model.precision_record}, "the model as it is now")
        return model

    def _stored_precision(self) -> Precision | None:
        """Return the precision of what is there already: a study goes on as it was begun, whatever is faster today."""
        manifests = (kept_record(path) for path in sorted((self.folder / "states").glob("*/manifest.json")))
        return next((recorded_precision(m["model"]) for m in manifests if m and "model" in m), None)

    def model(self) -> Model:
        """Return the model, loaded when it is first needed."""
        return self._model

    @cached_property
    def _asked(self) -> Load:
        # the chat template is the model's own: prompts with it cannot be made before the model is loaded
        data = self._around.folders.data
        return loader(self.study, data, self._model.chat_template) if self.study.chat else self._load

    def _check_same(self, about: Mapping[str, Any], where: str) -> None:
        """Refuse to mix what different models, or one in different dtypes, have made."""
        self._first = self._first or (about, where)
        known, elsewhere = self._first
        if difference := identity_difference(known, about):
            raise CoralError(
                f"{elsewhere} and {where} are of different models called {self.name!r} ({difference}); delete what the other "
                "one made, choose another --work, or ask for its --dtype."
            )

    # ------------------------------------------------------------------------------------------------- stores

    def store(self, source: Source) -> ActivationStore:
        """Return what the model made of a source: from the disk if it was finished before, else extracted now."""
        if source not in self._stores:
            self._stores[source] = self._open(source)
        return self._stores[source]

    def _open(self, source: Source, *, only: frozenset[str] | None = None) -> ActivationStore:
        """Return the store of a source; with `only`, of these questions alone, and their scores without states."""
        place = self._place(source, only)
        if place.is_finished:
            if any(is_younger(part, place.mark) for part in (self.name, self._around.folders.adapter) if part):
                self.model()  # which is compared with the store
            store = ActivationStore(place.folder, layers=self.study.layers if place.states else None)
        else:
            store = self._extract(place)
            write_record(place.mark, {"key": place.key})
        self._check_same(store.manifest["model"], str(place.folder))
        return store

    def _place(self, source: Source, only: frozenset[str] | None = None) -> StorePlace:
        """Return where the store of a source is: its own place, or that of a finished store with more layers."""
        own = self._place_of(source, self.study.layers, only)
        if own.is_finished or only is not None:
            return own
        return next((wider for wider in self._wider_places(source) if wider.is_finished), own)

    def _wider_places(self, source: Source) -> Iterator[StorePlace]:
        """Yield the places of stores of the same questions, asked and read alike, that hold all layers of the study."""
        for folder, held in self._wide_enough.items():
            for layers in (None, held):  # whoever wanted all of them named them, or named none
                if self._folder(source, self._identity(source, layers)) == folder:
                    yield self._place_of(source, layers)

    @cached_property
    def _wide_enough(self) -> dict[Path, tuple[int, ...]]:
        """The stores that hold all layers that the study names, each with all that it holds."""
        if (named := self.study.layers) is None:
            return {}
        manifests = {
            path.parent: kept_record(path) for path in sorted((self.folder / "states").glob("*/manifest.json"))
        }
        held = {folder: tuple(manifest["layers"]) for folder, manifest in manifests.items() if manifest}
        return {folder: layers for folder, layers in held.items() if set(named) <= set(layers)}

    def _folder(self, source: Source, identity: dict[str, Any]) -> Path:
        name = f"{file_name(source.label)}-{source.n or 'all'}-{source.shots}shot-{digest(identity)[:8]}"
        return self.folder / "states" / name

    def _place_of(
        self, source: Source, layers: tuple[int, ...] | None, only: frozenset[str] | None = None
    ) -> StorePlace:
        identity = self._identity(source, layers)
        identity |= {} if only is None else {"layers": [], "only": digest(sorted(only))}

        def wanted(load: Load) -> list[Question]:
            return [q for q in load(source) if only is None or q.id in only]

        key = digest([identity, prompts_digest(wanted(self._load))])
        folder = self._folder(source, identity)
        return StorePlace(source.label, folder, key, lambda: wanted(self._asked), states=only is None)

    def extract_part(self, source: Source, part: Part) -> bool:
        """Compute a part of what the model makes of a source, and return whether all parts of it are there."""
        place = self._place(source)
        if not place.is_finished:
            questions, model = place.questions(), self.model()
            with self._measured(place, model) as bar:
                done = extract_part(
                    model, questions, place.folder, part, extraction=self._extraction(place), bar=bar, strict=False
                )
            if done.missing:
                return False
            write_record(place.mark, {"key": place.key})
        return True

    def _extract(self, place: StorePlace) -> ActivationStore:
        """Score questions, and measure what that took; what it takes others is not known."""
        if helpers := self._around.helpers:
            asked = place.questions()
            with self.bar(place.label, len(asked), "questions") as progress:
                return helpers.extract(self.name, asked, place.folder, wanted=self._wanted(place), progress=progress)
        questions, model = place.questions(), self.model()
        with self._measured(place, model) as bar, bar(place.label, len(questions), "questions") as progress:
            return extract(model, questions, place.folder, extraction=self._extraction(place), progress=progress)

    def _extraction(self, place: StorePlace) -> Extraction:
        return self._wanted(place).of(self.model())

    def _wanted(self, place: StorePlace) -> Wanted:
        layers, read = (self.study.layers, self.study.read) if place.states else ((), ("answer",))
        mixed = self._around.folders.mixed
        return Wanted(layers, read=read, neutral=self.study.scores_neutral, style=self.style, mixed=mixed)

    @contextmanager
    def _measured(self, place: StorePlace, model: Model) -> Iterator[Bar]:
        """Yield a bar, and add what it counts while the block runs to the costs of a store; loading a model is no part of it."""
        done: list[int] = []
        watch = Stopwatch()

        @contextmanager
        def counting(label: str, total: int, unit: str) -> Iterator[Progress]:
            with self.bar(label, total, unit) as advance:

                def progress(n: int) -> None:
                    done.append(n)
                    advance(n)

                yield progress

        yield counting
        # the first number is of questions that were scored before
        add_scoring(place.folder, watch.read(sum(done[1:]), model.device.type))

    def _identity(self, source: Source, layers: tuple[int, ...] | None) -> dict[str, Any]:
        study = self.study
        asking = {"style": study.style, "chat": study.chat, "layers": layers, "fixed_shots": study.fixed_shots}
        more: dict[str, Any] = {} if study.read == ("answer",) else {"read": study.read}
        more |= {"neutral": True} if study.scores_neutral else {}
        return source.model_dump(mode="json") | asking | more | {"seed": study.seed if source.n else None}

    # --------------------------------------------------------------------------------------------------- sets

    def question_set(self, name: str, parts: Iterable[Selection]) -> QuestionSet:
        """Return selected questions with their states; those of several files are of a task each."""
        chosen = [part for part in parts if part.ids]
        tasks = tasks_of([part.source.task for part in chosen if is_file(part.source.task)])
        joined = JoinedStore([self._subset(part, tasks.get(part.source.task, "")) for part in chosen])

        def asked() -> tuple[Question, ...]:
            known = {q.id: q for part in chosen for q in self._asked(part.source)}
            return tuple(replace(known[q.id], task=q.task) for q in joined.questions)

        return QuestionSet(name, joined, asked)

    def _subset(self, part: Selection, task: str) -> Subset:
        store = self.store(part.source)
        return Subset(store, np.array([q.id in part.ids for q in store.questions]), task)

    def test_set(self, plan: TestPlan) -> QuestionSet:
        """Return the questions of a test with their states, and those that methods may adapt on."""
        test, part = self.question_set(plan.name, [plan.part]), plan.adapt
        return test if part is None else replace(test, adapt=lambda: tuple(selected(part, self._asked)))

    def without_shots(self, test: QuestionSet, part: Selection) -> ActivationStore | None:
        """Return scores of the questions of a test without worked examples; None where it has none, or not all can be asked."""
        if not part.source.shots:
            return None
        ids = [q.id for q in test.states.questions]
        store = self._open(part.source.model_copy(update={"shots": 0}), only=frozenset(ids))
        if [q.id for q in store.questions] != ids:
            warnings.warn(
                f"{test.name}: no 0-shot row, because the model cannot score all of its questions so.", stacklevel=2
            )
            return None
        return store


def is_younger(model: str, mark: Path) -> bool:
    """Whether files of a model that is not on the hub were written after a mark was: it may have become another one."""
    path = Path(model).expanduser()
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else []
    return any(file.stat().st_mtime > mark.stat().st_mtime for file in files)
