"""What the release 0.1 saved loads, resumes and is made again as it was: store, lens, run and study of a tiny model.

`tests/golden` was written by release 0.1. Where this machine computes the very same states as the one that wrote it, all that
follows must be equal to the bit; on another processor, equal up to rounding. Versions are no part of it, nor digests of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.engine.activations import ActivationStore
from coral_lens.lens.folder import load_lens
from coral_lens.report.figures.style import Picture
from coral_lens.report.runs import load_run
from coral_lens.storage.files import digest_bytes

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
INPUTS = ("model", "train.jsonl", "test.jsonl", "study.toml")
PROVENANCE = {"versions", "digest", "store", "sha256", "tensors", "leak guard", "config", "threads", "token_budget",
              "device", "open"}  # fmt: skip
"""Keys whose values hold versions, or digests of what holds them; the digests of states are compared by the states. Release 0.1
did not count leaks by reason, nor record the configuration or the kind of device; it had larger batches and no open questions,
and its bytes depended on the threads."""
OF_TRUST = {"tempering", "trust", "adaptation", "exits", "simulated", "answers", "trained_on", "side by side"}
"""Release 0.1 weakened a lens by the shift alone, and took every file for the same task: what follows from that is other now, and
so are the rows of a tempered lens. Saved lenses keep their tempering (`READ`)."""
READ = {
    "log-probabilities": "7152ae0e",
    "layer 2": "57d459b1",
    "probe": "11ba9481",
    "steered": "1ad33086",
}
"""Digests of what is read of the golden files, without any arithmetic of a model."""
OLDER = "made by an earlier version, which did not record the model's configuration"


@pytest.fixture(autouse=True, scope="module")
def quiet(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Figures are no part of this, and the cache is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "png", lambda self: b"\x89PNG")
        patch.setattr(Picture, "svg", lambda self: "<svg></svg>")
        patch.setenv("CORAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def coral(folder: Path, *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def copied(folder: Path, *names: str) -> Path:
    for name in (*INPUTS, *names):
        source = GOLDEN / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same commands as those that wrote the golden files."""
    folder = copied(tmp_path_factory.mktemp("again"))
    layers = ("--layers", "1-2")
    coral(folder, "extract", "train.jsonl", "--model", "model", "--out", "store")
    coral(folder, "fit", "--model", "model", "--train", "train.jsonl", "--out", "lens", *layers)
    coral(
        folder, "fit", "--model", "model", "--train", "train.jsonl", "--out", "lens-ridge", "--lens", "ridge", *layers
    )
    coral(folder, "eval", "--lens", "lens", "--lens", "lens-ridge", "--task", "test.jsonl", "--out", "run")
    coral(folder, "run", "study.toml", "--out", "study", "--work", "states")
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/shard-*.safetensors"))


def pinned(name: str) -> bool:
    """Whether a package that fits and measures has the version of constraints.txt."""
    return f"{name}=={version(name)}" in (ROOT / "constraints.txt").read_text("utf-8").splitlines()


ROUND_OTHERWISE = {"bd2e65fe": "AMD EPYC, family 26"}
"""By what `canary` gives: processors seen to compute the same states, but to fit lenses that differ in their last digits."""


def canary() -> str:
    """Return a digest of what this processor makes of a small system of equations, whose order of sums is the library's."""
    states = ActivationStore(GOLDEN / "store").layer(2).astype(np.float64)
    solved = np.linalg.solve(states.T @ states + np.eye(states.shape[1]), states.T @ np.arange(len(states)))
    return digest_bytes(np.ascontiguousarray(solved).data)[:8]


def rounds_alike(folder: Path) -> bool:
    """Whether this machine rounds as the one that wrote the golden files; older versions of what fits a lens do not."""
    shard = "store/shard-00000.safetensors"
    same_states = (folder / shard).read_bytes() == (GOLDEN / shard).read_bytes()
    return same_states and all(map(pinned, ("numpy", "scipy", "scikit-learn"))) and canary() not in ROUND_OTHERWISE


def values_of(path: Path) -> Any:
    """The content of a JSON or JSON-lines file without what holds versions."""

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if k not in PROVENANCE | OF_TRUST and not is_tempered(k)}
            return {k: stripped(v) for k, v in kept.items() if isinstance(v, dict) or not is_tempered(v)}
        return [stripped(v) for v in value if not is_tempered(v)] if isinstance(value, list) else value

    def is_tempered(value: Any) -> bool:
        names = value.values() if isinstance(value, dict) else [value]
        return any(isinstance(name, str) and "tempered" in name for name in names)

    text = path.read_text("utf-8")
    if path.parent.name == "mine":  # of several stores: a digest of their manifests
        text = re.sub(r'"questions": "\w{64}"', '"questions": ""', text)
    return stripped([json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text))


def assert_close(one: Any, other: Any, *, exact: bool, where: str) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_close(one[key], other[key], exact=exact, where=f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close(a, b, exact=exact, where=f"{where} {i}")
    elif isinstance(one, float) and not exact:
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4), where
    else:
        assert one == other, where


RECORDS = [
    "store/manifest.json",
    "store/questions.jsonl",
    "lens/lens.json",
    "lens-ridge/lens.json",
    "run/run.json",
    "run/predictions/test.jsonl.jsonl",
    "study/runs/model/mine/run.json",
    "study/runs/model/mine/predictions/test.jsonl.jsonl",
    "study/tables.json",
]


@pytest.mark.parametrize("name", RECORDS)
def test_the_same_commands_write_the_same_records(again: Path, name: str) -> None:
    assert_close(values_of(again / name), values_of(GOLDEN / name), exact=rounds_alike(again), where=name)


@pytest.mark.parametrize(
    "name", ["store/shard-00000.safetensors", "lens/lens.safetensors", "lens-ridge/lens.safetensors"]
)
def test_the_same_commands_write_the_same_tensors(again: Path, name: str) -> None:
    made, golden = load_file(again / name), load_file(GOLDEN / name)
    assert list(made) == list(golden)
    for key, tensor in golden.items():
        assert made[key].dtype == tensor.dtype
        if rounds_alike(again):
            assert torch.equal(made[key], tensor), key
        else:
            torch.testing.assert_close(made[key], tensor, rtol=1e-2, atol=1e-3)


def test_the_states_of_a_study_are_found_again_in_the_same_folders(again: Path) -> None:
    assert [p.relative_to(again) for p in shards(again / "states")] == [
        p.relative_to(GOLDEN) for p in shards(GOLDEN / "states")
    ]


def test_what_was_saved_reads_as_it_did() -> None:
    store, lens = ActivationStore(GOLDEN / "store"), load_lens(GOLDEN / "lens")
    run = load_run(GOLDEN / "run")
    values = {
        "log-probabilities": store.table.logprobs,
        "layer 2": store.layer(2),
        "probe": np.concatenate([t.numpy().ravel() for t in lens.correction.probe.tensors().values()]),
        "steered": next(reversed(run.evaluations[0].predictions.values())).probs,
    }
    assert {name: digest_bytes(np.ascontiguousarray(v).data)[:8] for name, v in values.items()} == READ


def test_a_store_of_which_a_shard_was_lost_is_completed(tmp_path: Path) -> None:
    folder = copied(tmp_path, "store")
    (lost,) = shards(folder / "store")
    lost.unlink()
    with pytest.warns(UserWarning, match=OLDER):
        coral(folder, "extract", "train.jsonl", "--model", "model", "--out", "store")
    made, golden = load_file(lost), load_file(GOLDEN / "store" / lost.name)
    assert made["question"].tolist() == golden["question"].tolist()
    torch.testing.assert_close(made["logprob"], golden["logprob"], rtol=1e-4, atol=1e-4)


def test_a_finished_store_is_left_as_it_is(tmp_path: Path) -> None:
    folder = copied(tmp_path, "store")
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "store").iterdir()}
    with pytest.warns(UserWarning, match=OLDER):
        coral(folder, "extract", "train.jsonl", "--model", "model", "--out", "store")
    assert {p.name: p.stat().st_mtime_ns for p in (folder / "store").iterdir() if p.name != ".lock"} == before


def test_a_finished_study_goes_on_from_its_states(tmp_path: Path) -> None:
    folder = copied(tmp_path, "study", "states")
    before = {p: p.stat().st_mtime_ns for p in shards(folder / "states")}
    assert before
    coral(folder, "run", "study.toml", "--out", "study", "--work", "states")
    assert {p: p.stat().st_mtime_ns for p in shards(folder / "states")} == before
    name = "study/runs/model/mine/predictions/test.jsonl.jsonl"
    assert_close(values_of(folder / name), values_of(GOLDEN / name), exact=False, where=name)
