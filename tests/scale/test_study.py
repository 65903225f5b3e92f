"""A study whose states and fits are computed by workers elsewhere ends with the bytes of one process.

The workers are those of a cluster, here without one: `python tests/faults/cluster.py study` has the cluster.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults.workshop import content
from support.commands import furnish, quiet

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.scale.study import FitWork, FitWorker, absolute, named
from coral_lens.scale.worker import ModelSource
from coral_lens.storage.files import installed_version
from coral_lens.storage.progress import Progress
from coral_lens.study.config import Study, load_study
from coral_lens.study.folders import Folders
from coral_lens.study.parts import Fit, fits_of
from coral_lens.study.run import prepare_study, run_prepared


@dataclass
class InTurn:
    """Two workers of a cluster that take turns in this process."""

    fits: list[Fit] = field(default_factory=list)

    def extract(
        self, model: str, questions: list[Question], folder: Path, *, wanted: Wanted, progress: Progress
    ) -> ActivationStore:
        loaded = load_model(model)
        return extract(loaded, questions, folder, extraction=wanted.of(loaded), progress=progress)

    def fit(self, study: Study, folders: Folders, model: str) -> None:
        work = FitWork(study, absolute(folders), ModelSource(model), Path.cwd())
        workers = [FitWorker(work, 1), FitWorker(work, 1)]
        self.fits = fits_of(prepare_study(study, folders.data))
        for i, fit in enumerate(self.fits):
            workers[i % 2].check(installed_version("coral-lens"))
            workers[i % 2].fit(fit)


def results(folder: Path) -> dict[str, bytes]:
    files = content(folder)
    return {n: d for n, d in files.items() if n.startswith(("study/", "states/")) and not n.endswith("cost.json")}


OTHERWISE = 'read = ["answer", "context"]\nbase = "pmi"\n'
"""What a study may ask for that changes what is scored and kept."""


@pytest.mark.parametrize("more", ["", OTHERWISE])
def test_helpers_leave_what_one_process_leaves(tmp_path: Path, more: str) -> None:
    helpers, found = InTurn(), []
    for name, who in (("alone", None), ("helped", helpers)):
        with quiet(), contextlib.chdir(furnish(tmp_path / name, large=False)):
            text = Path("study.toml").read_text("utf-8")
            Path("study.toml").write_text(text.replace("layers =", f"{more}layers ="), "utf-8")
            study = load_study("study.toml")
            folders = Folders(Path("study"), Path("states"))
            run_prepared(prepare_study(study, None), folders, open_model=load_model, helpers=who)
        found.append(results(tmp_path / name))
    assert len(helpers.fits) == 4
    assert found[0] == found[1]
    assert named(study, helpers.fits[0]) == "The fit of method 0 with seed 0 on mixture 'mine'"


def test_a_worker_with_other_software_or_another_disk_is_refused(tmp_path: Path) -> None:
    study = Study.model_construct()
    there = FitWorker(FitWork(study, Folders(tmp_path, tmp_path), ModelSource("model"), tmp_path), 1)
    there.check(installed_version("coral-lens"))
    with pytest.raises(CoralError, match=r"A worker has coral-lens .*, and this process has 0\.0\.9"):
        there.check("0.0.9")
    nowhere = FitWorker(FitWork(study, Folders(tmp_path, tmp_path / "none"), ModelSource("model"), tmp_path), 1)
    with pytest.raises(CoralError, match="--work must be a folder that all machines share"):
        nowhere.check(installed_version("coral-lens"))
