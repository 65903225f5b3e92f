"""A lens folder from a stranger is a lens or one sentence: never a traceback, and never an answer that is no number."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.planted import PlantedStore

from coral_lens.errors import CoralError
from coral_lens.lens import checks
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.publish import card
from coral_lens.lens.settings import FitSettings
from coral_lens.storage.files import digest_file, read_record, write_record

HUGE = 10**30


@pytest.fixture(scope="module")
def store() -> PlantedStore:
    return PlantedStore(60, signal={1: 2.0, 2: 1.0}, seed=3)


@pytest.fixture(scope="module")
def lens(store: PlantedStore) -> Lens:
    fitted: Lens = fit_store(store, FitSettings(lens="listwise", layers=(1, 2)))
    return fitted


@pytest.fixture
def folder(lens: Lens, tmp_path: Path) -> Path:
    lens.save(tmp_path / "lens")
    return tmp_path / "lens"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the record as its author could: with digests that fit."""
    record = read_record(folder / "lens.json")
    change(record)
    record["tensors"] = digest_file(folder / "lens.safetensors") if "tensors" in record else None
    write_record(folder / "lens.json", {k: v for k, v in record.items() if v is not None or k != "tensors"})


def rewrite_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / "lens.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "lens.safetensors")
    rewrite(folder, lambda record: None)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a record, the first of a list."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(place for key, v in entries for place in places(v, (*path, key)))]


def put(record: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        record = record[key]
    if value is ...:
        del record[place[-1]]
    else:
        record[place[-1]] = value


def test_places_that_are_not_those_of_the_shift_are_one_sentence(folder: Path) -> None:
    rewrite(folder, lambda record: record["trust"].update(places=["questions (a.jsonl)"] * 17))
    with pytest.raises(CoralError, match="names 17 places of"):
        load_lens(folder)


WRONG = [..., None, "text", -1, HUGE, float("nan"), [[]], {"a": {}}]


@pytest.mark.parametrize("value", WRONG, ids=lambda v: str(v)[:8])
def test_a_wrong_value_anywhere_in_the_record_is_one_sentence_or_gives_numbers(
    folder: Path, store: PlantedStore, value: Any
) -> None:
    whole = (folder / "lens.json").read_bytes()
    asked = [place for place in places(read_record(folder / "lens.json")) if place]
    said: list[str] = []
    for place in asked:
        (folder / "lens.json").write_bytes(whole)
        rewrite(folder, lambda record, place=place: put(record, place, value))
        try:
            found = load_lens(folder)
            assert repr(found)
            assert card(found)
            answers = found.answers(store) if place[0] not in ("trace", "training", "model") else []
        except CoralError as error:
            said.append(str(error))
        else:
            assert all(np.isfinite([a.confidence, a.shift, *a.probs]).all() for a in answers)
    assert len(said) > len(asked) / 20
    assert not any("\n" in sentence for sentence in said)


TENSORS = {
    "one is missing": lambda t, name: t.pop(name),
    "none has numbers": lambda t, name: t.update({name: torch.full_like(t[name], float("nan"))}),
    "infinite": lambda t, name: t.update({name: torch.full_like(t[name], float("inf"))}),
    "too large": lambda t, name: t.update({name: torch.full_like(t[name], 3e38)}),
    "zero": lambda t, name: t.update({name: torch.zeros_like(t[name])}),
    "negative": lambda t, name: t.update({name: -t[name].abs() - 1}),
    "whole numbers": lambda t, name: t.update({name: torch.ones(t[name].shape, dtype=torch.int32)}),
    "one more": lambda t, name: t.update({name: torch.cat([t[name], t[name][:1]])}),
    "empty": lambda t, name: t.update({name: t[name][:0]}),
    "no axis": lambda t, name: t.update({name: torch.tensor(1.0)}),
    "one axis more": lambda t, name: t.update({name: t[name][None].contiguous()}),
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide)")
@pytest.mark.parametrize("kind", TENSORS)
def test_wrong_tensors_are_one_sentence_or_give_numbers(folder: Path, store: PlantedStore, kind: str) -> None:
    whole, record = (folder / "lens.safetensors").read_bytes(), (folder / "lens.json").read_bytes()
    names = [name for name in load_file(folder / "lens.safetensors") if not name.startswith("training")]
    said: list[str] = []
    for name in names:
        (folder / "lens.safetensors").write_bytes(whole)
        (folder / "lens.json").write_bytes(record)
        rewrite_tensors(folder, lambda tensors, name=name: TENSORS[kind](tensors, name))
        try:
            answers = load_lens(folder).answers(store)
        except CoralError as error:
            said.append(str(error))
        else:
            assert all(np.isfinite([a.confidence, a.shift, *a.probs]).all() for a in answers)
    assert said
    assert not any("\n" in sentence for sentence in said)


def test_a_network_whose_layers_do_not_follow_each_other_is_one_sentence(folder: Path, lens: Lens) -> None:
    width = len(lens.correction.standardiser.mean)

    def network(tensors: dict[str, torch.Tensor], *shapes: tuple[int, int]) -> None:
        for name in [name for name in tensors if name.startswith("probe.")]:
            del tensors[name]
        for i, (n_outputs, n_inputs) in enumerate(shapes):
            tensors[f"probe.{3 * i}.weight"] = torch.ones(n_outputs, n_inputs)
            tensors[f"probe.{3 * i}.bias"] = torch.ones(n_outputs)

    rewrite(folder, lambda record: record.update(probe="mlp"))
    for shapes in ([(4, width), (1, 5)], [(4, width + 1), (1, 4)], [(4, width), (2, 4)], []):
        rewrite_tensors(folder, lambda tensors, shapes=shapes: network(tensors, *shapes))
        with pytest.raises(CoralError, match=r"lens\.safetensors"):
            load_lens(folder)


def test_a_file_too_large_for_a_lens_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LARGEST_TENSORS", 100)
    with pytest.raises(CoralError, match="too large for a lens"):
        load_lens(folder)
    os.truncate(folder / "lens.json", 2**27)  # a hole: it takes no room on the disk
    with pytest.raises(CoralError, match="134,217,728 bytes, which is too large"):
        load_lens(folder)


def test_a_pipe_in_place_of_the_record_is_one_sentence(folder: Path) -> None:
    (folder / "lens.json").unlink()
    os.mkfifo(folder / "lens.json")
    with pytest.raises(CoralError, match="not a plain file"):
        load_lens(folder)


def test_a_layer_view_of_other_shapes_is_one_sentence(folder: Path) -> None:
    path = folder / "layers.safetensors"
    tensors = load_file(path)
    view = json.dumps({"rule": "listwise", "inputs": ["centred"]})
    for name, tensor in tensors.items():
        changed = {**tensors, name: torch.cat([tensor, tensor])}
        save_file(changed, path, metadata={"view": view})
        rewrite(folder, lambda record: record["sha256"].update({path.name: digest_file(path)}))
        with pytest.raises(CoralError, match="the lens works without it"):
            load_lens(folder)
