"""Texts of different prompts, settings, stops and precisions never share a folder, and only our own files are removed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from support.models import rewrapped

from coral_lens.engine.model import Model
from coral_lens.engine.precision import set_precision
from coral_lens.engine.settings import GenerationSettings
from coral_lens.engine.texts import kept_answers, remove_texts

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_way_to_write_has_a_folder_of_its_own_and_removing_leaves_what_is_not_ours(
    tiny: Model, tmp_path: Path
) -> None:
    place, settings = tmp_path / "texts", GenerationSettings(max_new_tokens=4)
    told: list[int] = []
    plain = kept_answers(tiny, ["One", "Two"], place, settings=settings, progress=told.append)
    assert sum(told) == 2
    assert kept_answers(tiny, ["One", "Two"], place, settings=settings) == plain
    kept_answers(tiny, ["One", "Two"], place, settings=settings, stop=("\n",))
    kept_answers(tiny, ["One"], place, settings=settings)
    hf = deepcopy(tiny.hf)
    set_precision(hf, "mixed", [])
    mixed = rewrapped(Model(**{**vars(tiny), "hf": hf}))
    assert mixed.fingerprint == tiny.fingerprint
    kept_answers(mixed, ["One"], place, settings=settings)
    folders = sorted(tmp_path.glob("texts-*"))
    assert len(folders) == 4
    (folders[0] / "mine.txt").write_text("kept")
    for folder in folders:
        remove_texts(folder)
    assert [path.name for path in tmp_path.rglob("*")] == [folders[0].name, "mine.txt"]
