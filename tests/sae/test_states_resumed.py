"""Token states, codes, ablations and sweeps alike: a killed run ends with the same bytes, and no question is lost in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.autoencoders import make_sae
from support.questions import toy_questions

from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.sae import codes
from coral_lens.sae.ablate import Ablation, feature_tensor, run_ablation
from coral_lens.sae.codes import Encoding, collect_codes
from coral_lens.sae.settings import Sampling
from coral_lens.sae.states import collect
from coral_lens.sae.steer import SteerFeatures, Steering
from coral_lens.sae.sweep import Sweep, run_sweep
from coral_lens.storage.files import read_json
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import locked

pytestmark = pytest.mark.usefixtures("one_thread")

Loop = Callable[[Model, list[Question], Path, Progress], object]
N = 24
TOO_LONG = Question("too long", "g", "Which?", ("no", "y" * 300), 0)


def nobody(_: int) -> None:
    """Is told, and does nothing."""


def collecting(model: Model, questions: list[Question], folder: Path, progress: Progress) -> object:
    @contextmanager
    def bar(_: str, __: int, ___: str) -> Iterator[Progress]:
        yield progress

    return collect(model, questions, folder, Sampling(layer=1, tokens=0, shard_tokens=300), bar=bar)


def encoding(model: Model, questions: list[Question], folder: Path, progress: Progress) -> object:
    return collect_codes(model, questions, folder, Encoding(make_sae(1)), progress=progress)


def ablation(model: Model, questions: list[Question], folder: Path, progress: Progress) -> object:
    return run_ablation(
        model, questions, folder, Ablation(make_sae(1), feature_tensor([7, 3]), "answer"), progress=progress
    )


def sweeping(model: Model, questions: list[Question], folder: Path, progress: Progress) -> object:
    steering = Steering(torch.tensor([3, 7]), torch.tensor([0.5, 0.5]))
    edits = [SteerFeatures(make_sae(1), steering, gamma) for gamma in (0.0, 2.0)]
    return run_sweep(model, questions, folder, Sweep(1, edits, [e.about for e in edits]), progress=progress)


@pytest.fixture(params=[collecting, encoding, ablation, sweeping])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Every loop in turn, in batches of 300 tokens, without timing the machine for the best size."""
    monkeypatch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 300)
    monkeypatch.setattr(codes, "SHARD_BATCHES", 1)
    found: Loop = request.param
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(loop: Loop, tiny: Model, tmp_path: Path) -> None:
    questions, told = toy_questions(N), list[int]()
    loop(tiny, questions, tmp_path / "whole", nobody)
    assert len(list((tmp_path / "whole").glob("shard-*"))) >= 4

    def kill(n: int) -> None:
        told.append(n)
        if len(told) == 3:  # nothing was done before; two pieces are
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(tiny, questions, tmp_path / "killed", kill)
    kept = sorted((tmp_path / "killed").glob("shard-*"))
    assert len(kept) == 2
    times = [path.stat().st_mtime_ns for path in kept]
    again: list[int] = []
    loop(tiny, questions, tmp_path / "killed", again.append)
    assert [path.stat().st_mtime_ns for path in kept] == times, "what was finished is not computed again"
    assert again[0] == sum(told)
    assert sum(again) == N
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_questions_that_cannot_be_asked_are_named(loop: Loop, tiny: Model, tmp_path: Path) -> None:
    questions = [*toy_questions(8), TOO_LONG]
    with pytest.warns(
        UserWarning, match=r"^1 question\(s\) left out\. Question 'too long': option 2 has 301"
    ) as caught:
        loop(tiny, questions, tmp_path, nobody)
    assert len(caught) == 1
    assert list(read_json(tmp_path / "manifest.json")["left_out"]) == ["too long"]


def test_a_second_process_may_not_write_to_the_same_folder(loop: Loop, tiny: Model, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CoralError, match="is being written by another process"):
        loop(tiny, toy_questions(8), tmp_path, nobody)
    assert list(tmp_path.iterdir()) == []


def test_another_layer_than_the_model_has_is_refused_before_anything_is_written(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="Layer 9 does not exist"):
        run_sweep(tiny, toy_questions(3), tmp_path / "new", Sweep(9, [], []))
    assert not (tmp_path / "new").exists()
