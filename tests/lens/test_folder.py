"""A lens on the disk is the lens that was fitted, bit for bit; a damaged one is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lenses import METHODS, TRAINING
from support.planted import one_network
from support.questions import toy_questions

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_saved_lens_gives_the_same_predictions_to_the_bit(lens: Lens, saved: Path, fresh: ActivationStore) -> None:
    before, after = lens.apply(fresh), load_lens(saved).apply(fresh)
    assert tuple(before) == tuple(after) == METHODS[lens.kind]
    assert all(before[method].tobytes() == after[method].tobytes() for method in METHODS[lens.kind])
    assert not np.allclose(before[lens.plain_method], before["base"])


def test_an_mlp_lens_gives_the_same_predictions_to_the_bit(tiny: Model, fresh: ActivationStore, tmp_path: Path) -> None:
    settings = FitSettings(lens="mlp", layers=(1,), network=one_network())
    fitted = replace(fit(tiny, toy_questions(TRAINING), settings), gamma=2.0)
    fitted.save(tmp_path / "lens")
    again = load_lens(str(tmp_path / "lens"))
    assert again.name == fitted.name == "mlp probe, layer 1, gamma 2"
    assert again.apply(fresh)["coral"].tobytes() == fitted.apply(fresh)["coral"].tobytes()


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"lens": "ridge", "temper": True}, "ridge probe, layer 1, gamma 0.5, tempered"),
        ({"lens": "ensemble"}, "ensemble lens, layers 1, 2, gamma 0.5, tempered"),
        ({"top_layers": 2, "inputs": ("rank",), "temper": False}, "listwise lens, layers 1, 2, gamma 0.5"),
    ],
    ids=str,
)
def test_lenses_of_several_layers_and_inputs_give_the_same_predictions_to_the_bit(
    tiny: Model, fresh: ActivationStore, tmp_path: Path, wanted: dict[str, Any], name: str
) -> None:
    layers = (1,) if wanted.get("lens") == "ridge" else (1, 2)
    fitted = replace(fit(tiny, toy_questions(TRAINING), FitSettings(layers=layers, **wanted)), gamma=0.5)
    fitted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.name == fitted.name == name
    before, after = fitted.apply(fresh), again.apply(fresh)
    assert {method: p.tobytes() for method, p in before.items()} == {m: p.tobytes() for m, p in after.items()}


def test_saving_again_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    load_lens(saved).save(tmp_path / "again")
    assert content(tmp_path / "again") == content(saved)


def test_the_folder_holds_json_safetensors_and_a_card_and_nothing_else(saved: Path, lens: Lens) -> None:
    assert sorted(content(saved)) == ["README.md", "layers.safetensors", "lens.json", "lens.safetensors"]
    header = (saved / "lens.safetensors").read_bytes()[8:9]
    assert header == b"{"  # safetensors, not a pickle
    card = (saved / "README.md").read_text("utf-8")
    assert lens.name in card
    assert "tiny-llama" in card
    assert "| questions | 40 | not known |" in card
    for method, kept in lens.trace.validation.items():
        brier = kept["brier"]
        shown = f"{100 * brier.value:.1f} ({100 * brier.low:.1f} to {100 * brier.high:.1f})"
        assert any(line.startswith(f"| {method} |") and shown in line for line in card.splitlines())
    assert ("It weakens them there by itself" in card) == (lens.tempering is not None)


def test_an_older_lens_is_replaced_and_all_else_in_its_folder_stays(lens: Lens, copy: Path) -> None:
    (copy / "notes.txt").write_text("x")
    (copy / ".git").mkdir()
    replace(lens, gamma=0.25).save(copy)
    assert load_lens(copy).gamma == 0.25
    assert "gamma 0.25" in (copy / "README.md").read_text("utf-8")
    names = [".git", "README.md", "layers.safetensors", "lens.json", "lens.safetensors", "notes.txt"]
    assert sorted(p.name for p in copy.iterdir()) == names


def test_a_card_that_somebody_has_edited_is_kept_with_a_word(lens: Lens, copy: Path) -> None:
    (copy / "README.md").write_text("mine", "utf-8")
    for gamma in (0.25, 0.5):
        with pytest.warns(UserWarning, match="README.md was edited, so it is kept"):
            replace(lens, gamma=gamma).save(copy)
    assert load_lens(copy).gamma == 0.5
    assert (copy / "README.md").read_text("utf-8") == "mine"


def test_the_same_lens_again_after_its_record_was_lost_leaves_the_same_bytes(lens: Lens, copy: Path) -> None:
    whole = {p.name: p.read_bytes() for p in copy.iterdir()}
    (copy / "lens.json").unlink()
    lens.save(copy)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == whole


def test_a_card_that_is_a_link_is_neither_followed_nor_replaced(lens: Lens, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("mine", "utf-8")
    (copy / "README.md").unlink()
    (copy / "README.md").symlink_to(tmp_path / "diary")
    with pytest.warns(UserWarning, match="is kept"):
        replace(lens, gamma=0.25).save(copy)
    assert (copy / "README.md").is_symlink()
    assert (tmp_path / "diary").read_text("utf-8") == "mine"


@pytest.mark.parametrize("n_renames", range(8))
def test_a_lens_is_under_its_name_whenever_a_second_save_is_killed(
    lens: Lens, copy: Path, monkeypatch: pytest.MonkeyPatch, n_renames: int
) -> None:
    other = replace(lens, gamma=0.25, view=None if n_renames % 2 else lens.view)
    real, left = Path.replace, [n_renames]

    def killed(self: Path, target: Path) -> Path:
        if not left[0]:
            raise SystemExit
        left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(Path, "replace", killed)
        other.save(copy)
    assert load_lens(copy).gamma in (lens.gamma, 0.25)
    other.save(copy)
    assert load_lens(copy).gamma == 0.25
    assert "gamma 0.25" in (copy / "README.md").read_text("utf-8")
    expected = {"README.md", "lens.json", "lens.safetensors"} | ({"layers.safetensors"} if other.view else set())
    assert {p.name for p in copy.iterdir()} == expected


def test_a_folder_that_is_not_a_lens_is_never_deleted(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CoralError, match="not a lens"):
        lens.save(tmp_path)
    with pytest.raises(CoralError, match="not a lens"):
        lens.save(tmp_path / "thesis.tex")
    assert content(tmp_path) == {"thesis.tex": b"years of work"}


def test_an_empty_folder_may_become_a_lens(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    lens.save(tmp_path / "empty")
    assert load_lens(tmp_path / "empty").gamma == lens.gamma


def test_a_full_disk_keeps_the_older_lens(lens: Lens, copy: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CoralError, match="no space left"):
        replace(lens, gamma=0.25).save(copy)
    assert content(copy) == content(saved)
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


# -------------------------------------------------------------------------------------------------------------- damaged


def test_a_changed_number_in_the_record_is_refused(copy: Path) -> None:
    record = json.loads((copy / "lens.json").read_text("utf-8"))
    record["gamma"] = 3.0
    (copy / "lens.json").write_text(json.dumps(record))
    with pytest.raises(CoralError, match="damaged"):
        load_lens(copy)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_refused_or_harmless(saved: Path, tmp_path: Path, lens: Lens, data: st.DataObject) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    path = folder / data.draw(st.sampled_from(["lens.json", "lens.safetensors", "layers.safetensors"]))
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    record, complaint = None, ""
    try:
        record = load_lens(folder).record()
    except CoralError as error:
        complaint = str(error)
    assert str(folder) in complaint or json.dumps(record) == json.dumps(load_lens(saved).record())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("lens.json", b'{"a":' * 100_000),
        ("lens.json", b'{"format": ' + b"9" * 5000 + b"}"),
        ("lens.json", b"{}"),
        ("lens.json", b"[1]"),
        ("lens.json", b'{"format": 1}'),
        ("lens.json", b'{"format": 7}'),
        ("lens.json", b'{"format": 2}'),
        ("lens.json", b'{"format": 2, "gamma": NaN, "digest": ""}'),
        ("lens.json", b"\xff\xfe"),
        ("lens.json", None),
        ("lens.safetensors", b""),
        ("lens.safetensors", None),
    ],
)
def test_a_lens_that_cannot_be_read_is_one_sentence_with_its_folder(
    copy: Path, name: str, damage: bytes | None
) -> None:
    if damage is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(damage)
    with pytest.raises(CoralError) as error:
        load_lens(copy)
    assert str(copy) in str(error.value)


def test_a_folder_without_a_lens_says_that_coral_fit_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"it has no lens\.json; give a folder that `coral fit` made"):
        load_lens(tmp_path)
