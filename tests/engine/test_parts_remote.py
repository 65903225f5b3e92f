"""A store at a URL has the bytes of one in a folder, whoever fills it and wherever they were stopped, and reads the same."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import make_model
from support.s3 import objects_at, put_at, s3_server
from support.stores import WHAT, store_questions

from coral_lens.engine import extract as extract_module
from coral_lens.engine import shard_work
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.parts import extract_part, finish_store
from coral_lens.errors import CoralError
from coral_lens.storage.parts import Part
from coral_lens.storage.remote import Objects


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every batch is a shard of its own, and temporary files and the cache can be looked at."""
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1)
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in a folder that one process has filled."""
    folder = tmp_path_factory.mktemp("store") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "SHARD_BYTES", 1)
        extract(make_model("llama"), store_questions(), folder, extraction=WHAT)
    return folder


@pytest.fixture(scope="module")
def undisturbed(alone: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in alone.iterdir()}


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/states"


def part_of(model: Model, url: str, text: str) -> tuple[int, ...]:
    """Compute a part and return what is missing then."""
    number, of = map(int, text.split("/"))
    return extract_part(model, store_questions(), url, Part(number, of), extraction=WHAT).missing


def test_one_process_leaves_at_a_url_what_it_leaves_in_a_folder_and_it_reads_the_same(
    tiny: Model, url: str, alone: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = extract(tiny, store_questions(), f"{url}/", extraction=WHAT), ActivationStore(alone)
    assert objects_at(url) == undisturbed
    assert there.name == url
    assert there.questions == here.questions
    np.testing.assert_array_equal(there.table.logprobs, here.table.logprobs)
    np.testing.assert_array_equal(there.layer(2), here.layer(2))
    monkeypatch.setattr(shard_work, "gather_shard", None)
    extract(tiny, store_questions(), url, extraction=WHAT)  # what is finished is not computed again


def test_parts_at_a_url_leave_what_one_process_leaves_in_a_folder(
    tiny: Model, url: str, undisturbed: dict[str, bytes]
) -> None:
    left = [len(part_of(tiny, url, part)) for part in ("3/3", "1/3")]
    assert left == sorted(left, reverse=True)
    with pytest.raises(CoralError, match=rf"^{url} is not finished"):
        ActivationStore(url)
    with pytest.raises(CoralError, match=rf"^{url} is not finished: .* damaged: 1, 4, .*\(of part 2/3\)"):
        finish_store(url)
    assert part_of(tiny, url, "2/3") == ()
    assert objects_at(url) == undisturbed
    finish_store(url)
    assert objects_at(url) == undisturbed


def test_what_parts_began_is_finished_by_one_process(tiny: Model, url: str, undisturbed: dict[str, bytes]) -> None:
    part_of(tiny, url, "2/3")
    extract(tiny, store_questions(), url, extraction=WHAT)
    assert objects_at(url) == undisturbed


def test_stopped_after_any_write_it_goes_on_to_the_same_bytes(
    tiny: Model, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = {name: getattr(Objects, name) for name in ("put", "create", "remove")}
    writes = 0

    def stopping(name: str, before: int, *, early: bool) -> Any:
        def write(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == before and early:
                raise KeyboardInterrupt
            result = real[name](*arguments)
            if writes == before:
                raise KeyboardInterrupt
            return result

        return write

    n_writes = 2 * sum(name.startswith("shard") for name in undisturbed) + 4
    for n in (1, 2, 3, 4, n_writes // 2, n_writes - 1, n_writes):
        url, writes = f"memory://{secrets.token_hex(4)}/states", 0
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(Objects, name, stopping(name, n, early=n % 2 == 0))
            with pytest.raises(KeyboardInterrupt):
                extract(tiny, store_questions(), url, extraction=WHAT)
        extract(tiny, store_questions(), url, extraction=WHAT)
        assert objects_at(url) == undisturbed, f"stopped at write {n}"


def test_damaged_and_missing_shards_are_named_and_computed_again(
    tiny: Model, url: str, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(tiny, store_questions(), url, extraction=WHAT)
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "another"))
    shard = undisturbed["shard-00002.safetensors"]
    put_at(url, "shard-00002.safetensors", shard[:-1] + bytes([shard[-1] ^ 1]))
    put_at(url, "shard-00003.safetensors", None)
    with pytest.raises(CoralError, match=rf"^{url} is not finished: .* missing or damaged: 2, 3; compute"):
        finish_store(url)
    with pytest.raises(CoralError, match=rf"^{url}/shard-00003.safetensors is damaged"):
        ActivationStore(f"{url}/")
    extract(tiny, store_questions(), url, extraction=WHAT)
    assert objects_at(url) == undisturbed


def test_a_reader_names_the_shard_whose_states_are_damaged(tiny: Model, url: str, tmp_path: Path) -> None:
    extract(tiny, store_questions(), url, extraction=WHAT)
    data = bytearray(objects_at(url)["shard-00001.safetensors"])
    for place in range(len(data) // 2, len(data)):
        data[place] ^= 255
    put_at(url, "shard-00001.safetensors", bytes(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_CACHE", str(tmp_path / "another"))
        with pytest.raises(CoralError, match=rf"^{url}/shard-00001.safetensors is damaged \(.* does not match"):
            read_all(url)


def read_all(url: str) -> None:
    store = ActivationStore(url)
    for layer in store.layers:
        store.layer(layer)


def test_other_questions_are_refused_by_the_name_of_the_url(tiny: Model, url: str) -> None:
    part_of(tiny, url, "1/2")
    with pytest.raises(CoralError, match=rf"^{url} holds the states of other questions"):
        extract(tiny, store_questions(seed=1), url, extraction=WHAT)
    with pytest.raises(CoralError, match=rf"^{url}-not/manifest.json does not exist"):
        finish_store(f"{url}-not")


def test_of_two_lines_for_one_shard_the_one_counts_that_fits_the_object(
    tiny: Model, url: str, undisturbed: dict[str, bytes]
) -> None:
    part_of(tiny, url, "1/2")
    (own,) = (data for name, data in objects_at(url).items() if name.startswith("journal-"))
    for name in ("journal-1-of-9-00000000.jsonl", "journal-3-of-9-ffffffff.jsonl"):
        put_at(url, name, own.replace(b'"logprob":"', b'"logprob":"00'))
    part_of(tiny, url, "2/2")
    assert objects_at(url) == undisturbed


# ------------------------------------------------------------------------------------------------------ a real server

KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from support.models import make_model
from support.stores import WHAT, store_questions
from coral_lens.engine import extract
from coral_lens.storage.remote import Objects

def put(self, name, path, real=Objects.put):
    real(self, name, path)
    if name.startswith("shard-00002"):  # it is there, and no journal tells of it
        os.kill(os.getpid(), signal.SIGKILL)

extract.SHARD_BYTES, Objects.put = 1, put
torch.set_num_threads(1)
extract.extract(make_model("llama"), store_questions(), sys.argv[2], extraction=WHAT)
"""


def test_a_process_that_is_killed_on_s3_is_followed_by_parts_to_the_same_bytes(
    tiny: Model, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    with s3_server() as bucket:
        url = f"{bucket}/a/b"
        command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), url]
        assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
        there = objects_at(url)
        assert "shard-00002.safetensors" in there
        assert sum(data.count(b"sha256") for data in there.values() if data[:1] == b"{") == 2
        part_of(tiny, url, "1/2")
        part_of(tiny, url, "2/2")
        assert objects_at(url) == undisturbed
        assert len(finish_store(url).questions) == len(store_questions())
