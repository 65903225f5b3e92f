"""The states and fits of a study on a cluster: one store after another by all workers, then one fit for each free worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model, kind_of_device
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.lens.training_data import usable_device
from coral_lens.records import Question
from coral_lens.scale.cluster import Cluster
from coral_lens.scale.driver import Driver, Job, Tell
from coral_lens.scale.extract import Spread, extract_on_ray
from coral_lens.scale.worker import ModelSource, about, refuse_other, refuse_software
from coral_lens.storage.files import kept_record, versions
from coral_lens.storage.progress import Bar, Progress, note_beside, silent
from coral_lens.study.config import Study
from coral_lens.study.folders import Folders
from coral_lens.study.parts import Fit, fits_of
from coral_lens.study.run import Prepared, StudyRun, prepare_study
from coral_lens.study.states import Surroundings


@runtime_checkable
class SourceOf(Protocol):
    """Says how a model is loaded elsewhere."""

    def __call__(self, name: str, *, like: Mapping[str, Any] | None = None) -> ModelSource:
        """Return that; `like` is the record of a model whose precision is taken."""


@dataclass(frozen=True)
class RayHelpers:
    """Computes the states and fits of a study on a cluster."""

    cluster: Cluster
    source: SourceOf
    tell: Tell = lambda _: None
    bar: Bar = silent

    def extract(
        self, model: str, questions: list[Question], folder: Path, *, wanted: Wanted, progress: Progress
    ) -> ActivationStore:
        """Fill a store with what a model makes of questions, in the precision of what is there already."""
        spread = Spread(self.cluster, self.source(model, like=self._recorded(folder)), self.tell)
        return extract_on_ray(spread, questions, folder, wanted=wanted, progress=progress)

    def fit(self, study: Study, folders: Folders, model: str) -> None:
        """Fit all methods of a study on what a model made of its questions; results are left on the disk."""
        fits, kinds = fits_of(prepare_study(study, folders.data)), list[str]()
        manifests = sorted((folders.of_model(model) / "states").glob("*/manifest.json"))
        states = next((m for m in map(kept_record, manifests) if m and "model" in m), {})
        source = self.source(model, like=states.get("model"))
        work = FitWork(study, absolute(folders), source, Path.cwd(), states)

        def same_kind(kind: str) -> None:
            kinds.append(kind)
            if kind != kinds[0] and not folders.mixed:
                raise CoralError(
                    f"Workers have several kinds of devices ({kinds[0]} and {kind}), and each rounds in its own way; keep to one "
                    "kind, or add --mixed if that does not matter."
                )

        with self.bar(f"fitting on {model}", len(fits), "fits") as progress:
            job = Job(
                start=lambda: self.cluster.start(FitWorker, work, self.cluster.cpus),
                ready=lambda actor: actor.check.options(name="begin").remote(versions()),
                submit=lambda actor, number: actor.fit.options(name=f"fit {number}").remote(fits[number]),
                done=lambda *_: progress(1),
                named=lambda number: named(study, fits[number]),
                begun=same_kind,
                note=lambda text: note_beside(progress, text),
            )
            Driver(job, self.cluster.workers, self.tell).run(range(len(fits)))

    def _recorded(self, folder: Path) -> Mapping[str, Any] | None:
        """Return the record of the model that made what is in a folder, or beside it."""
        manifests = [folder / "manifest.json", *sorted(folder.parent.glob("*/manifest.json"))]
        return next((m["model"] for m in map(kept_record, manifests) if m and "model" in m), None)


@dataclass(frozen=True)
class FitWork:
    """What a worker needs to know of a study."""

    study: Study
    folders: Folders
    source: ModelSource
    cwd: Path
    """Where the driver stands: a study may name files from there."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """The manifest of states that are fitted on: a method that runs the model needs that one."""


def absolute(folders: Folders) -> Folders:
    """Return folders that mean the same wherever a worker stands."""
    data = folders.data.absolute() if folders.data else None
    return replace(folders, out=folders.out.absolute(), work=folders.work.absolute(), data=data)


def named(study: Study, fit: Fit) -> str:
    """Say what a fit is, for people."""
    return f"The fit of method {fit.method} with seed {fit.seed} on mixture {study.mixture[fit.mixture].name!r}"


class FitWorker:
    """A worker that fits methods of one study and one model, and keeps both while it lives."""

    def __init__(self, work: FitWork, threads: int) -> None:
        self.work = work
        torch.set_num_threads(threads)

    @cached_property
    def _prepared(self) -> Prepared:
        if self.work.cwd.is_dir():
            os.chdir(self.work.cwd)
        return prepare_study(self.work.study, self.work.folders.data)

    @cached_property
    def _run(self) -> StudyRun:
        around = Surroundings(self.work.folders, self._open, silent, self._device)
        return StudyRun(self._prepared, self.work.source.name, around)

    @property
    def _device(self) -> str:
        return usable_device(self.work.source.device)

    def _open(self, name: str, *, dtype: str | None = None) -> Model:
        """Load the model, which must be the one that made the states, on a device of the same kind."""
        model = self.work.source.load()
        if self.work.states:
            refuse_other(about(model), self.work.states, {}, mixed=self.work.folders.mixed)
        return model

    def there(self) -> None:
        """Say that the cluster had room."""

    def check(self, installed: Mapping[str, str]) -> str:
        """Refuse to fit with other software than the driver has, or without the states; return the kind of device."""
        refuse_software(versions(), installed)
        if not self.work.folders.work.is_dir():
            raise CoralError(
                f"A worker does not find {self.work.folders.work}: --work must be a folder that all machines share."
            )
        return kind_of_device(torch.device(self._device))

    def fit(self, fit: Fit) -> None:
        """Fit one method and keep its predictions, unless that was done before."""
        self._run.fit(self._prepared.plan.mixtures[fit.mixture], fit.method, fit.seed)
