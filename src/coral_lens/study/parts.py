"""A study by many processes at once: each computes its share of the states, then its share of the fits.

A fit needs all states of its mixture and its tests. So a process computes what can be computed when it comes, and says what
waits for others; the study without a part then finds everything on the disk and writes the report.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

from coral_lens.errors import need
from coral_lens.lens.training_data import usable_device
from coral_lens.storage.parts import Part
from coral_lens.storage.progress import Bar, silent
from coral_lens.storage.resumable import hold_lock
from coral_lens.study.config import Source
from coral_lens.study.folders import Folders, check_folders, claim
from coral_lens.study.run import Prepared, StudyRun
from coral_lens.study.states import OpenModel, Surroundings


@dataclass(frozen=True)
class Fit:
    """One fit of a study: what can be computed apart from all others."""

    mixture: int
    method: int
    seed: int


@dataclass(frozen=True)
class StudyPartDone:
    """How far a study is when one of its parts is finished."""

    part: Part
    n_fits: int
    """That were this part's, and are there."""
    waiting: tuple[str, ...]
    """Models whose states are not all there, so that nothing was fitted on them."""

    @property
    def words(self) -> str:
        """What to tell a person."""
        if self.waiting:
            return (
                f"part {self.part}: its states are there; fits wait for the other parts of {', '.join(self.waiting)}: run all "
                "parts once more when they have ended"
            )
        return f"part {self.part} is finished, {self.n_fits} fit(s); when all are, the study without --part writes the report"


def run_study_part(
    prepared: Prepared,
    folders: Folders,
    part: Part,
    *,
    open_model: OpenModel,
    bar: Bar = silent,
    device: str | None = None,
) -> StudyPartDone:
    """Compute what one part of a study can compute now, as `run_prepared` computes all of it."""
    need("report", by="A study")
    check_folders(folders, holds="study.json", kind="study")
    claim(folders.out, prepared.record())
    around = Surroundings(folders, open_model, bar, usable_device(device))
    waiting, n_fits, dealt = [], 0, 0
    with hold_lock(folders.work / f".part-{part.name}.lock", f"Part {part} of {folders.work}"):
        for name in prepared.study.models:
            run = StudyRun(prepared, name, around)
            sources = needed(prepared)
            # not all(): every store is worked on, also where an earlier one waits for others
            there = [run.states.extract_part(s, replace(part, shift=i)) for i, s in enumerate(sources)]
            if all(there):
                n_fits += fit_share(run, replace(part, shift=dealt))
            else:
                waiting.append(name)
            dealt += len(fits_of(prepared))
            del run
            gc.collect()  # one model in memory at a time
    return StudyPartDone(part, n_fits, tuple(waiting))


def needed(prepared: Prepared) -> list[Source]:
    """Return the sources that a study scores, each once."""
    plan = prepared.plan
    trained = [part.source for mixture in plan.mixtures for part in mixture.parts if part.ids]
    return list(dict.fromkeys([*trained, *(test.part.source for test in plan.tests)]))


def fits_of(prepared: Prepared) -> list[Fit]:
    """Return the fits of each model of a study."""
    return list(iter_fits(prepared))


def iter_fits(prepared: Prepared) -> Iterator[Fit]:
    """Yield the fits of each model of a study, in the order in which one process does them."""
    for mixture in range(len(prepared.plan.mixtures)):
        for method in range(len(prepared.methods)):
            for seed in prepared.study.seeds:
                yield Fit(mixture, method, seed)


def fit_share(run: StudyRun, part: Part) -> int:
    """Do the fits of a part, and return how many they are."""
    fits = fits_of(run.prepared)
    share = [fits[i] for i in part.share(len(fits))]
    for fit in share:
        run.fit(run.prepared.plan.mixtures[fit.mixture], fit.method, fit.seed)
    return len(share)
