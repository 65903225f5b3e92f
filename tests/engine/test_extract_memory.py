"""Few questions are scored in memory: what is read of them is what a folder would have held, and no file is written."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import make_model, rewrapped
from support.questions import toy_questions
from support.stores import WHAT, store_questions

from coral_lens.engine import extract as extract_module
from coral_lens.engine.activations import ActivationStore, MemoryStore, ScoredShards
from coral_lens.engine.extract import extract, is_small, score_questions
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction, head_outputs
from coral_lens.errors import CoralError
from coral_lens.records import Question, Rendered, Scored

TOO_LONG = Question("too long", "g", "Which?", ("no", "y" * 300), 0)
BREAKS = Question("breaks", "g", "Why ~?", ("a", "b"), 0)

_written: list[str] | None = None


def note_writing(event: str, arguments: tuple[Any, ...]) -> None:
    if _written is None:
        return
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _written.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "tempfile.mkdtemp", "tempfile.mkstemp"):
        _written.append(f"{event} {arguments[0]}")


sys.addaudithook(note_writing)


@pytest.fixture
def written() -> Iterator[list[str]]:
    """The files that the interpreter opens for writing, makes or removes."""
    global _written  # an audit hook cannot be taken away again
    _written = []
    yield _written
    _written = None


def same(one: ScoredShards, other: ScoredShards) -> None:
    """Assert that two stores read alike, to the bit."""
    assert one.manifest == other.manifest
    assert list(one.questions) == list(other.questions)
    assert one.broken == other.broken
    assert one.layers == other.layers
    for name in ("logprobs", "n_tokens", "n_chars", "n_bytes", "offsets", "answers"):
        ours, theirs = getattr(one.table, name), getattr(other.table, name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes(), name
    for layer in one.layers:
        assert one.layer(layer).dtype == np.float32
        assert one.layer(layer).tobytes() == other.layer(layer).tobytes()
    assert one.blocks == other.blocks
    for block in one.blocks:
        assert one.heads(block).tobytes() == other.heads(block).tobytes()


@pytest.mark.parametrize("changed", [{}, {"packing": "plain"}, {"token_budget": None, "packing": None}])
def test_few_questions_in_memory_read_as_from_a_folder(tiny: Model, tmp_path: Path, changed: dict[str, Any]) -> None:
    extraction = replace(WHAT, **changed)
    stored = extract(tiny, store_questions(), tmp_path, extraction=extraction)
    told: list[int] = []
    with score_questions(tiny, store_questions(), extraction, progress=told.append) as scored:
        assert isinstance(scored, MemoryStore)
        assert isinstance(scored, Scored)
        same(scored, stored)
    assert sum(told) == len(store_questions())


def test_heads_and_massive_states_in_memory_read_as_from_a_folder(tmp_path: Path) -> None:
    model = make_model("llama", seed=3)
    with torch.no_grad():
        model.hf.get_input_embeddings().weight.mul_(1e6)
    model = rewrapped(model)
    extraction = replace(WHAT, readings=head_outputs(model, (1, 3)))
    stored = extract(model, toy_questions(6), tmp_path, extraction=extraction)
    assert np.abs(stored.layer(0)).max() > 1e5
    with score_questions(model, toy_questions(6), extraction) as scored:
        assert scored.blocks == (1, 3)
        same(scored, stored)


def test_no_file_is_written_for_few_questions(tiny: Model, written: list[str]) -> None:
    with score_questions(tiny, store_questions(), WHAT) as scored:
        scored.layer(1)
        assert len(scored.table) == len(store_questions())
    assert written == []


def test_many_questions_are_in_a_temporary_folder_while_the_block_lasts(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 2000)
    stored = extract(tiny, store_questions(), tmp_path / "kept", extraction=WHAT)
    with score_questions(tiny, store_questions(), WHAT) as scored:
        assert isinstance(scored, ActivationStore)
        assert len(list(scored.folder.glob("shard-*"))) > 2
        same(scored, stored)
    assert not scored.folder.exists()
    assert written


def test_with_a_folder_few_questions_are_kept_there_too(tiny: Model, tmp_path: Path) -> None:
    with score_questions(tiny, toy_questions(3), WHAT, folder=tmp_path / "kept") as scored:
        pass
    assert isinstance(scored, ActivationStore)
    same(scored, ActivationStore(tmp_path / "kept"))


def test_few_are_those_that_one_shard_holds(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three questions of 2, 3 and 4 options, at two layers of 32 columns and 2 bytes: 9 * 2 * 32 * 2 = 1,152 bytes."""
    questions = [Question(str(n), str(n), "Which?", tuple("abcd"[:n])) for n in (2, 3, 4)]
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1153)
    assert is_small(tiny, questions, Extraction(layers=(0, 2)))
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1152)
    assert not is_small(tiny, questions, Extraction(layers=(0, 2)))
    assert not is_small(tiny, questions, Extraction(layers=())), "scores alone are small, but take as long"


# -------------------------------------------------------------------------------------------- questions that are left out


def broken_model() -> Model:
    model = make_model("llama")
    model.hf.get_input_embeddings().weight[model.tokenizer.encode("~")[0]] = float("nan")
    return rewrapped(model)


def test_the_same_questions_are_left_out_with_the_same_warnings(tmp_path: Path) -> None:
    model, questions = broken_model(), [TOO_LONG, *toy_questions(5), BREAKS]
    with warnings.catch_warnings(record=True) as of_folder:
        warnings.simplefilter("always")
        stored = extract(model, questions, tmp_path, extraction=WHAT)
    with warnings.catch_warnings(record=True) as of_memory:
        warnings.simplefilter("always")
        with score_questions(model, questions, WHAT) as scored:
            same(scored, stored)
    assert [str(w.message) for w in of_memory] == [str(w.message) for w in of_folder]
    assert [str(w.message)[:45] for w in of_memory] == [
        "1 question(s) left out. Question 'too long': ",
        "1 question(s) left out. Question 'breaks': 't",
    ]
    assert scored.broken == ["breaks"]
    assert list(scored.questions) == toy_questions(5)


def test_a_model_that_breaks_at_every_question_is_refused_without_naming_a_folder() -> None:
    with (
        pytest.raises(CoralError, match=r"not finite for every question, first 'breaks': .* try --dtype float32\.$"),
        score_questions(broken_model(), [BREAKS], WHAT),
    ):
        pass


def test_what_cannot_be_scored_is_refused_as_by_a_folder(tiny: Model) -> None:
    for questions, extraction, said in (
        ([], WHAT, "no questions"),
        ([TOO_LONG], WHAT, "no questions to score: Question 'too long'"),
        (toy_questions(2), replace(WHAT, layers=(1, 4)), "Layer 4 does not exist"),
    ):
        with pytest.raises(CoralError, match=said), score_questions(tiny, questions, extraction):
            pass
    with (
        score_questions(tiny, toy_questions(2), replace(WHAT, layers=(1, 3))) as scored,
        pytest.raises(CoralError, match=r"holds layers \[1, 3\], not 2"),
    ):
        scored.layer(2)


def test_prompts_are_not_kept(tiny: Model, tmp_path: Path) -> None:
    question = toy_questions(1)[0]
    n = len(question.options)
    rendered = replace(
        question, rendered=Rendered(("Which?",) * n, tuple(f" {o}" for o in question.options), ("x",) * n)
    )
    with score_questions(tiny, [rendered], WHAT) as scored:
        same(scored, extract(tiny, [rendered], tmp_path, extraction=WHAT))
        assert scored.questions == [question]
