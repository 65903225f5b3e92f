"""A store that many processes fill has the bytes of one that a single process fills, whatever happens to them on the way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import make_model
from support.stores import WHAT, store_questions

from coral_lens.engine import extract as extract_module
from coral_lens.engine import planned as planned_module
from coral_lens.engine import shard_work
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.parts import extract_part, finish_store
from coral_lens.errors import CoralError
from coral_lens.storage import temporary
from coral_lens.storage.parts import Part
from coral_lens.storage.shards import Journal, part_journals, shard_path


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is a shard of its own."""
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store that one process has filled."""
    folder = tmp_path_factory.mktemp("store") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "SHARD_BYTES", 1)
        extract(make_model("llama"), store_questions(), folder, extraction=WHAT)
    return content(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def part_of(model: Model, folder: Path, text: str, **changed: Any) -> tuple[int, ...]:
    """Compute a part and return what is missing then."""
    number, of = map(int, text.split("/"))
    done = extract_part(model, store_questions(), folder, Part(number, of), extraction=replace(WHAT, **changed))
    return done.missing


def test_parts_in_any_order_leave_the_files_of_one_process(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    n_shards = sum(name.startswith("shard") for name in undisturbed)
    left = [len(part_of(tiny, tmp_path, part)) for part in ("3/4", "1/4", "4/4", "2/4")]
    assert left[0] == n_shards - len(range(2, n_shards, 4))
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert content(tmp_path) == undisturbed


def test_work_that_was_begun_in_parts_is_finished_by_one_process_and_the_other_way_round(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of(tiny, tmp_path / "parts", "2/3")
    with pytest.raises(CoralError, match="not finished"):
        ActivationStore(tmp_path / "parts")
    extract(tiny, store_questions(), tmp_path / "parts", extraction=WHAT)
    assert content(tmp_path / "parts") == undisturbed

    def stop(n: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(tiny, store_questions(), tmp_path / "one", extraction=WHAT, progress=stop)
    for part in ("1/2", "2/2"):
        part_of(tiny, tmp_path / "one", part)
    assert content(tmp_path / "one") == undisturbed


def test_parts_of_different_divisions_overlap_without_harm(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    for part in ("1/2", "2/3", "1/3", "3/3"):
        part_of(tiny, tmp_path, part)
    assert content(tmp_path) == undisturbed


def test_a_part_computes_nothing_that_it_has_computed_before(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of(tiny, tmp_path, "1/2")
    monkeypatch.setattr(shard_work, "gather_shard", None)
    part_of(tiny, tmp_path, "1/2")


def test_finishing_names_the_shards_that_are_missing_or_damaged_and_whose_they_are(tiny: Model, tmp_path: Path) -> None:
    part_of(tiny, tmp_path, "2/3")
    shard_path(tmp_path, 4).write_bytes(b"scrawl")
    with pytest.raises(CoralError, match=r"damaged: 0, 2, 3, 4, 5, .*\(of part 1/3, 2/3, 3/3\); compute them"):
        finish_store(tmp_path)
    part_of(tiny, tmp_path, "2/3")
    part_of(tiny, tmp_path, "3/3")
    with pytest.raises(CoralError, match=r"damaged: 0, 3, .*\(of part 1/3\)"):
        finish_store(tmp_path)
    part_of(tiny, tmp_path, "1/3")
    shard_path(tmp_path, 1).unlink()
    with pytest.raises(CoralError, match="damaged: 1; compute"):
        finish_store(tmp_path)
    part_of(tiny, tmp_path, "2/3")
    assert len(finish_store(tmp_path).questions) == len(store_questions())
    with pytest.raises(CoralError, match=r"manifest.json does not exist"):
        finish_store(tmp_path / "nowhere")


def test_more_parts_than_shards_are_refused(tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    n_shards = sum(name.startswith("shard") for name in undisturbed)
    with pytest.raises(CoralError, match=f"more parts than shards.*use at most {n_shards} parts"):
        part_of(tiny, tmp_path, f"1/{n_shards + 1}")


def test_a_process_that_comes_second_takes_the_budget_of_the_first(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_budget = replace(WHAT, token_budget=None)
    monkeypatch.setattr(planned_module, "choose_budget", lambda *_: WHAT.token_budget or 1024)
    part_of(tiny, tmp_path, "1/2", token_budget=None)

    def slow(*_: Any) -> int:  # while it was timed, the other process has written the manifest
        return 77

    real = extract_module.read_manifest
    looks: list[dict[str, Any]] = [{}, {}]
    monkeypatch.setattr(planned_module, "choose_budget", slow)
    for module in (extract_module, planned_module):
        monkeypatch.setattr(module, "read_manifest", lambda path: looks.pop() if looks else real(path))
    extract_part(tiny, store_questions(), tmp_path, Part(2, 2), extraction=open_budget)
    assert not looks
    assert ActivationStore(tmp_path).manifest["token_budget"] != 77


def test_another_kind_of_device_may_not_go_on_but_may_read_what_is_finished(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of(tiny, tmp_path, "1/2")
    with monkeypatch.context() as patch:
        patch.setattr(Model, "device_kind", "cuda: NVIDIA H100")
        with pytest.raises(CoralError, match=r"another kind of device \(cpu: .*, not cuda: NVIDIA H100\).*--mixed"):
            part_of(tiny, tmp_path, "2/2")
        with pytest.raises(CoralError, match="another kind of device"):
            extract(tiny, store_questions(), tmp_path, extraction=WHAT)
        part_of(tiny, tmp_path, "2/2", mixed=True)
        extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    assert content(tmp_path) == undisturbed, "the manifest is that of the first"


# ------------------------------------------------------------------------------------------------- without locks


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(temporary.fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
def test_where_files_cannot_be_locked_a_second_whole_run_is_noticed_and_nothing_is_lost(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, inner = shard_work.gather_shard, []

    def beside_itself(*arguments: Any) -> Any:
        if len(inner) == 2:
            inner.append(0)
            extract(tiny, store_questions(), tmp_path, extraction=WHAT)
        inner.append(1)
        return real(*arguments)

    monkeypatch.setattr(shard_work, "gather_shard", beside_itself)
    with pytest.raises(CoralError, match=r"is being written by another process, which has changed journal\.jsonl"):
        extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    assert {n: c for n, c in content(tmp_path).items() if not n.endswith(".lock")} == undisturbed


@pytest.mark.usefixtures("without_locks")
def test_where_files_cannot_be_locked_the_same_part_twice_at_once_is_harmless(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, inner = shard_work.gather_shard, []

    def beside_itself(*arguments: Any) -> Any:
        if not inner:
            inner.append(True)
            part_of(tiny, tmp_path, "1/2")
        return real(*arguments)

    monkeypatch.setattr(shard_work, "gather_shard", beside_itself)
    part_of(tiny, tmp_path, "1/2")
    assert len(part_journals(tmp_path)) == 2, "each process has a journal of its own"
    part_of(tiny, tmp_path, "2/2")
    assert {n: c for n, c in content(tmp_path).items() if not n.endswith(".lock")} == undisturbed


def test_a_part_that_is_being_computed_is_refused_a_second_time(tiny: Model, tmp_path: Path) -> None:
    with (
        temporary.lock_file(tmp_path / ".part-1-of-2.lock"),
        pytest.raises(CoralError, match=r"Part 1/2 of .* is being written by another process"),
    ):
        part_of(tiny, tmp_path, "1/2")


def test_a_part_whose_journal_is_merged_away_while_another_one_reads_it_is_no_error(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract_part(tiny, store_questions(), tmp_path, Part(1, 2), extraction=WHAT)
    (journal,), read = part_journals(tmp_path), Path.read_bytes

    def too_late(path: Path) -> bytes:
        if path.name == journal.name and path.exists():
            path.rename(tmp_path / "journal.jsonl")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", too_late)
    assert set(Journal(tmp_path).entries) == {0, 2, 4, 6, 8}


def test_of_two_lines_for_one_shard_the_one_counts_that_fits_the_file(tiny: Model, tmp_path: Path) -> None:
    part_of(tiny, tmp_path, "1/2")
    (own,) = part_journals(tmp_path)
    before = Journal(tmp_path).entries
    lie = own.read_bytes().replace(b'"logprob":"', b'"logprob":"00')
    for name in ("journal-1-of-9-00000000.jsonl", "journal-3-of-9-ffffffff.jsonl"):  # read before it, and after
        (tmp_path / name).write_bytes(lie)
    assert Journal(tmp_path).entries == before


# -------------------------------------------------------------------------------------------------- killed

FORKED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from support.models import make_model
from support.stores import WHAT, store_questions
from coral_lens.engine import extract
from coral_lens.engine.parts import extract_part
from coral_lens.storage.parts import Part

def work(number, of, left):
    def see(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.link", "open") and "store" in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(see)
    extract_part(model, questions, Path(sys.argv[2]), Part(number, of), extraction=WHAT)

extract.SHARD_BYTES = 1
torch.set_num_threads(1)
model, questions, kills = make_model("llama"), store_questions(), list(map(int, sys.argv[3:]))
children = []
for number, left in enumerate(kills, start=1):  # nothing was computed yet: a fork is as good as a new process, and quicker
    child = os.fork()
    if child == 0:
        try:
            work(number, len(kills), left)
        except BaseException:
            os._exit(1)
        os._exit(0)
    children.append(child)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_four_processes_at_once_of_which_three_are_killed_lose_nothing(
    tiny: Model, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    folder = tmp_path / "store"
    # each ends by SIGKILL at its n-th file operation in the store; 0: not at all
    command = [sys.executable, "-c", FORKED, str(Path(__file__).parents[1]), str(folder), "3", "11", "15", "0"]
    codes = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    assert list(map(int, codes)) == [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGKILL, 0]
    shutil.copytree(folder, tmp_path / "by one")
    for part in ("2/4", "1/4", "3/4"):
        part_of(tiny, folder, part)
    extract(tiny, store_questions(), tmp_path / "by one", extraction=WHAT)
    for place in (folder, tmp_path / "by one"):
        assert {n: c for n, c in content(place).items() if not n.endswith(".lock")} == undisturbed
