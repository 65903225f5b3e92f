"""A lens that was saved knows all that it knew, also one of an earlier version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.lenses import TRAINING
from support.questions import toy_questions

from coral_lens.data.leaks import question_keys
from coral_lens.engine.activations import ActivationStore
from coral_lens.lens.artefact import Lens
from coral_lens.lens.folder import load_lens
from coral_lens.storage.files import digest, write_json


def test_a_saved_lens_keeps_all_it_knows(lens: Lens, saved: Path, fresh: ActivationStore) -> None:
    again = load_lens(saved)
    assert json.loads(json.dumps(again.record())) == json.loads(json.dumps(lens.record()))
    assert again.seen.tolist() == lens.seen.tolist()
    assert again.style == lens.style
    assert again.control_temperature == lens.control_temperature
    assert again.trust == lens.trust
    assert (again.trust is None) == (lens.correction.rule == "residual")
    assert again.shifts(fresh).tobytes() == lens.shifts(fresh).tobytes()


def test_a_lens_with_keys_of_the_first_version_still_recognises_its_questions(lens: Lens, tmp_path: Path) -> None:
    known = toy_questions(TRAINING)
    replace(lens, seen=np.unique(question_keys(known, version=1)), keys=1).save(tmp_path / "lens")
    record = json.loads((tmp_path / "lens/lens.json").read_text("utf-8"))
    del record["keys"], record["digest"]  # as it was written then
    write_json(tmp_path / "lens/lens.json", record | {"digest": digest(record)})
    old = load_lens(tmp_path / "lens")
    assert old.is_seen(known).all()
    assert not old.is_seen(toy_questions(10, seed=5)).any()
