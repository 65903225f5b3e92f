"""A matrix in a file behaves as one in memory, leaves nothing behind, and every kind of fit from files is the fit from memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.planted import PlantedStore, one_network

from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.probes.registry import LENSES
from coral_lens.lens.settings import FitSettings
from coral_lens.ragged import Options
from coral_lens.storage import arrays
from coral_lens.storage.arrays import (
    allocate,
    chunks,
    mapping_of,
    question_chunks,
    release,
    row_chunks,
    scratch_folder,
    side_by_side,
)


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """However small a matrix is, it goes to a file."""
    monkeypatch.setattr(arrays, "IN_MEMORY", 0)
    monkeypatch.setattr(arrays, "scratch_folder", lambda: tmp_path)
    return tmp_path


def test_a_small_matrix_is_in_memory_and_a_large_one_in_a_file_without_a_name(in_files: Path) -> None:
    z = allocate(5, 3)
    z[:] = np.arange(15).reshape(5, 3)
    assert mapping_of(z) is not None
    assert mapping_of(z[1:3]) is not None
    assert list(in_files.iterdir()) == []
    release(z, np.ones(3))
    assert z[4].tolist() == [12.0, 13.0, 14.0]  # what was released is read again
    arrays.IN_MEMORY = 60
    assert mapping_of(allocate(5, 3)) is None


def test_a_full_disk_is_one_sentence(in_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoralError, match=r"Cannot write .*: no space left on the disk"):
        allocate(5, 3)


def test_large_files_go_to_tmpdir_if_it_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert scratch_folder() == tmp_path


def test_chunks_cover_every_row_once() -> None:
    width = arrays.CHUNK_BYTES // 8 // 10  # ten rows a chunk
    assert [(c.start, c.stop) for c in row_chunks(25, width)] == [(0, 10), (10, 20), (20, 25)]
    assert [(c.start, c.stop) for c in row_chunks(2, 10**12)] == [(0, 1), (1, 2)]


def test_what_is_in_memory_is_one_piece_and_what_is_mapped_comes_in_chunks(
    in_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 8 * 3 * 2)  # two rows a chunk
    assert list(chunks(np.ones((5, 3)))) == [slice(0, 5)]
    assert list(chunks(allocate(5, 3))) == [slice(0, 2), slice(2, 4), slice(4, 5)]


@given(st.lists(st.integers(2, 6), min_size=1, max_size=30), st.integers(1, 12))
def test_chunks_of_questions_cover_them_in_order_and_divide_none(sizes: list[int], rows_a_chunk: int) -> None:
    options = Options.of_sizes(sizes)
    found = list(question_chunks(options, arrays.CHUNK_BYTES // 8 // rows_a_chunk))
    assert [q for questions, _ in found for q in range(questions.start, questions.stop)] == list(range(len(sizes)))
    for questions, rows in found:
        assert (rows.start, rows.stop) == (options.edges[questions.start], options.edges[questions.stop])
        assert rows.stop - rows.start <= max(rows_a_chunk, sizes[questions.start])


def test_layers_stand_side_by_side(in_files: Path) -> None:
    layers = {1: np.ones((4, 2), np.float32), 5: np.full((4, 2), 5.0, np.float32)}
    assert side_by_side(layers.__getitem__, [5]) is layers[5]
    assert side_by_side(layers.__getitem__, [1, 5]).tolist() == [[1.0, 1.0, 5.0, 5.0]] * 4


# ------------------------------------------------------------------------------------------------------ fits from files


def fitted(settings: FitSettings) -> Lens:
    """A lens of two tasks, joined from two stores."""
    one, two = (PlantedStore(60, signal={1: 2.0, 2: 1.0}, tasks={name: 1.0}, seed=i) for i, name in enumerate("ab"))
    for store in (one, two):
        store.manifest["style"] = {}
    every, some = np.ones(60, dtype=bool), np.arange(60) % 7 > 0
    lens: Lens = fit_store(JoinedStore([Subset(one, every), Subset(two, some)]), settings)
    return lens


@pytest.mark.parametrize(
    "settings",
    [
        FitSettings(lens="ridge", inputs=("centred", "rank")),
        FitSettings(lens="ridge", folds=3),
        FitSettings(lens="mlp", top_layers=2, network=one_network(epochs=2)),
        FitSettings(lens="listwise", learning_curve=True),
        FitSettings(lens="ensemble"),
        FitSettings(lens="listwise-mlp"),
    ],
    ids=lambda s: f"{s.lens}-{s.folds}",
)
def test_a_fit_whose_states_are_in_files_is_the_fit_from_memory_to_the_bit(
    settings: FitSettings, in_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(LENSES["listwise-mlp"], settings=({"weight_decay": 1.0, "max_epochs": 2},))
    monkeypatch.setitem(LENSES, "listwise-mlp", short)
    from_files = fitted(settings)
    monkeypatch.setattr(arrays, "IN_MEMORY", 2**30)
    from_memory = fitted(settings)
    assert from_files.record() == from_memory.record()
    for ours, theirs in ((from_files.correction, from_memory.correction), (from_files.shift, from_memory.shift)):
        assert all(torch.equal(t, theirs.tensors()[name]) for name, t in ours.tensors().items())
    store = PlantedStore(20, signal={1: 2.0}, seed=9)
    expected = from_memory.apply(store)
    monkeypatch.setattr(arrays, "IN_MEMORY", 0)
    for method, probs in from_memory.apply(store).items():
        assert probs.tobytes() == expected[method].tobytes()
    assert list(in_files.iterdir()) == []


def test_small_chunks_change_a_fit_by_rounding_only(in_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted(FitSettings(lens="listwise"))
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 8 * 8 * 10)  # ten rows a chunk
    chunked = fitted(FitSettings(lens="listwise"))
    store = PlantedStore(20, signal={1: 2.0}, seed=9)
    expected = whole.apply(store)
    for method, probs in chunked.apply(store).items():
        np.testing.assert_allclose(probs, expected[method], atol=2e-3)
