"""A study whose states and fits are computed by workers elsewhere ends with the bytes of one process.

The workers are those of a cluster, here without one: `tests/faults/cluster.py` has the cluster.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from faults.workshop import content
from support.commands import GOLDEN, furnish, quiet

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.scale.study import FitWork, FitWorker, absolute, named
from coral_lens.scale.worker import ModelSource
from coral_lens.storage.files import versions
from coral_lens.storage.progress import Progress
from coral_lens.study.config import Study, load_study
from coral_lens.study.folders import Folders
from coral_lens.study.parts import Fit, fits_of, needed
from coral_lens.study.run import prepare_study, run_prepared
from coral_lens.study.states import StudyStates, Surroundings


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
            workers[i % 2].check(versions())
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


def test_states_that_were_begun_on_another_kind_of_device_are_gone_on_with_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet(), contextlib.chdir(furnish(tmp_path / "here", large=False)):
        prepared, folders = prepare_study(load_study("study.toml"), None), Folders(Path("study"), Path("states"))
        states = StudyStates(prepared.study, prepared.load, "model", Surroundings(folders, load_model))
        store = states.store(needed(prepared)[0]).folder
        (store / "finished.json").unlink()
        (store / "shard-00000.safetensors").unlink()
        monkeypatch.setattr(Model, "device_kind", "cuda: NVIDIA H100")
        again = StudyStates(prepared.study, prepared.load, "model", Surroundings(folders, load_model))
        with pytest.raises(CoralError, match=r"begun on another kind of device.* `run` or `reproduce` --mixed"):
            again.store(needed(prepared)[0])
        mixed = Surroundings(replace(folders, mixed=True), load_model)
        assert StudyStates(prepared.study, prepared.load, "model", mixed).store(needed(prepared)[0]).n_questions


def fit_worker(work: Path, states: dict[str, Any], *, mixed: bool = False) -> FitWorker:
    folders = Folders(work, work, mixed=mixed)
    source = ModelSource("model", str(GOLDEN / "model"))
    return FitWorker(FitWork(Study.model_construct(), folders, source, work, states), 1)


def test_a_worker_with_other_software_or_another_disk_is_refused(tmp_path: Path) -> None:
    there = fit_worker(tmp_path, {})
    assert there.check(versions()).startswith("cpu: ")
    with pytest.raises(CoralError, match=r"A worker has coral-lens .*, and this process has 0\.0\.9"):
        there.check(versions() | {"coral-lens": "0.0.9"})
    with pytest.raises(CoralError, match="--work must be a folder that all machines share"):
        fit_worker(tmp_path / "none", {}).check(versions())


def test_a_worker_fits_with_the_model_and_the_kind_of_device_of_the_states(tmp_path: Path) -> None:
    model = load_model(str(GOLDEN / "model"))
    here = {"model": {**model.identity, "dtype": model.precision_record}, "device": model.device_kind}
    assert fit_worker(tmp_path, here)._open("model").fingerprint == model.fingerprint
    other = here | {"model": here["model"] | {"dtype": "torch.bfloat16"}}
    with pytest.raises(CoralError, match="A worker has another model under the same name"):
        fit_worker(tmp_path, other)._open("model")
    elsewhere = here | {"device": "cuda: NVIDIA H100"}
    with pytest.raises(CoralError, match="another kind of device than the store was begun on"):
        fit_worker(tmp_path, elsewhere)._open("model")
    assert fit_worker(tmp_path, elsewhere, mixed=True)._open("model")
