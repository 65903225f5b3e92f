"""A folder of an autoencoder is whole or refused, whoever else keeps files in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.autoencoders import make_sae

from coral_lens.errors import CoralError
from coral_lens.sae.autoencoder import CONFIG, STATISTICS, WEIGHTS, load_autoencoder

SAE = replace(make_sae(2), statistics={"mean": torch.zeros(32), "scale": torch.ones(32)}, about={"expansion": 4})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SAE.save(tmp_path / "4x")
    return tmp_path / "4x"


def test_an_autoencoder_comes_back_and_its_digests_are_no_part_of_it(folder: Path) -> None:
    again = load_autoencoder(folder)
    assert torch.equal(again.w_dec, SAE.w_dec)
    assert again.about == SAE.about


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, STATISTICS])
def test_a_changed_or_missing_file_is_one_sentence_with_its_name(folder: Path, name: str) -> None:
    raw = bytearray((folder / name).read_bytes())
    for at in range(0, len(raw), max(1, len(raw) // 20)):
        changed = raw.copy()
        changed[at] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(CoralError, match=name):
            load_autoencoder(folder)
    (folder / name).unlink()
    with pytest.raises(CoralError, match=name):
        load_autoencoder(folder)


def test_one_of_an_earlier_version_or_of_saelens_has_no_digests_and_is_read(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    for key in ("digest", "sha256"):
        del config["metadata"]["coral"][key]
    (folder / CONFIG).write_text(json.dumps(config))
    assert torch.equal(load_autoencoder(folder).w_enc, SAE.w_enc)
    (folder / STATISTICS).unlink()
    assert load_autoencoder(folder).statistics == {}


def test_a_second_one_replaces_the_first_and_nothing_else(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    replace(make_sae(3), statistics={}).save(folder)
    assert load_autoencoder(folder).layer == 3
    assert {p.name for p in folder.iterdir()} == {CONFIG, WEIGHTS, "notes.txt"}
