"""The states and fits of a study on a cluster: one store after another by all workers, then one fit for each free worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.lens.training_data import usable_device
from coral_lens.records import Question
from coral_lens.scale.cluster import Cluster
from coral_lens.scale.driver import Driver, Job, Tell
from coral_lens.scale.extract import Spread, extract_on_ray
from coral_lens.scale.worker import ModelSource
from coral_lens.storage.files import installed_version, kept_record
from coral_lens.storage.progress import Progress, silent
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

    def extract(
        self, model: str, questions: list[Question], folder: Path, *, wanted: Wanted, progress: Progress
    ) -> ActivationStore:
        """Fill a store with what a model makes of questions, in the precision of what is there already."""
        spread = Spread(self.cluster, self.source(model, like=self._recorded(folder)), self.tell)
        return extract_on_ray(spread, questions, folder, wanted=wanted, progress=progress)

    def fit(self, study: Study, folders: Folders, model: str) -> None:
        """Fit all methods of a study on what a model made of its questions; results are left on the disk."""
        fits = fits_of(prepare_study(study, folders.data))
        manifests = sorted((folders.of_model(model) / "states").glob("*/manifest.json"))
        like = next((m["model"] for m in map(kept_record, manifests) if m and "model" in m), None)
        work = FitWork(study, absolute(folders), self.source(model, like=like), Path.cwd())
        version = installed_version("coral-lens")
        job = Job(
            start=lambda: self.cluster.start(FitWorker, work, self.cluster.cpus),
            ready=lambda actor: actor.check.options(name="begin").remote(version),
            submit=lambda actor, number: actor.fit.options(name=f"fit {number}").remote(fits[number]),
            done=lambda number, _: None,
            named=lambda number: named(study, fits[number]),
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


def absolute(folders: Folders) -> Folders:
    """Return folders that mean the same wherever a worker stands."""
    data = folders.data.absolute() if folders.data else None
    return Folders(folders.out.absolute(), folders.work.absolute(), data, folders.dtype)


def named(study: Study, fit: Fit) -> str:
    """Say what a fit is, for people."""
    return f"The fit of method {fit.method} with seed {fit.seed} on mixture {study.mixture[fit.mixture].name!r}"


class FitWorker:
    """A worker that fits methods of one study and one model, and keeps both while it lives."""

    def __init__(self, work: FitWork, threads: int) -> None:
        import torch

        self.work = work
        torch.set_num_threads(threads)

    @cached_property
    def _prepared(self) -> Prepared:
        if self.work.cwd.is_dir():
            os.chdir(self.work.cwd)
        return prepare_study(self.work.study, self.work.folders.data)

    @cached_property
    def _run(self) -> StudyRun:
        around = Surroundings(self.work.folders, self._open, silent, usable_device(self.work.source.device))
        return StudyRun(self._prepared, self.work.source.name, around)

    def _open(self, name: str, *, dtype: str | None = None) -> Model:
        return self.work.source.load()

    def there(self) -> None:
        """Say that the cluster had room."""

    def check(self, version: str) -> None:
        """Refuse to fit with other software than the driver has, or without the states."""
        here = installed_version("coral-lens")
        if here != version:
            raise CoralError(
                f"A worker has coral-lens {here}, and this process has {version}; install the same version on all machines."
            )
        if not self.work.folders.work.is_dir():
            raise CoralError(
                f"A worker does not find {self.work.folders.work}: --work must be a folder that all machines share."
            )

    def fit(self, fit: Fit) -> None:
        """Fit one method and keep its predictions, unless that was done before."""
        self._run.fit(self._prepared.plan.mixtures[fit.mixture], fit.method, fit.seed)
