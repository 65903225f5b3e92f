"""Two lenses of a tiny model, in memory and on the disk, for all tests of this folder that name no lens of their own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.lenses import METHODS, TRAINING
from support.questions import toy_questions

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings


@pytest.fixture(scope="session", params=list(METHODS))
def lens(tiny: Model, request: pytest.FixtureRequest) -> Lens:
    """A lens that does something: on a random model, choosing gamma would mostly choose 0."""
    return replace(fit(tiny, toy_questions(TRAINING), FitSettings(lens=request.param, layers=(1, 2))), gamma=1.5)


@pytest.fixture(scope="session")
def saved(lens: Lens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lens") / "mine"
    lens.save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="session")
def fresh(tiny: Model, lens: Lens, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The states of questions that the lens has not seen."""
    folder = tmp_path_factory.mktemp("fresh")
    return extract(tiny, toy_questions(12, seed=5), folder, extraction=Extraction(layers=(1, 2), style=lens.style))
