"""A store ends with the same bytes whatever happened on the way, and never returns a value that was damaged on the disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model, toy_questions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from coral_lens import store as store_module
from coral_lens.engine import choose_packing
from coral_lens.errors import CoralError
from coral_lens.models import Model
from coral_lens.records import Question, Style
from coral_lens.store import (
    ActivationStore,
    Extraction,
    Journal,
    all_layers,
    compact,
    digest_tensor,
    extract,
    parse_entry,
    shard_path,
)

WHAT = Extraction(layers=(0, 1, 2, 3), token_budget=200, packing="tree")
N = 24


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is a shard of its own."""
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("store") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "SHARD_BYTES", 1)
        extract(make_model("llama"), toy_questions(N), folder, what=WHAT)
    assert len(shards(folder)) >= 8
    return folder


@pytest.fixture
def copy(undisturbed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "copy"))


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def tensor_range(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes lie in a safetensors file: eight bytes of length, the header, the tensors."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    first, last = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    return 8 + size + first, 8 + size + last


def everything(folder: Path) -> tuple[Any, ...]:
    store = ActivationStore(folder)
    table = store.table
    return (
        store.questions,
        *(a.tobytes() for a in (table.logprobs, table.n_tokens, table.n_chars, table.n_bytes, table.answers)),
        *(store.layer(layer).tobytes() for layer in store.layers),
    )


class Stop:
    """A progress function that raises after so many questions."""

    def __init__(self, after: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.error = after, error

    def __call__(self, n: int) -> None:
        self.left -= n
        if self.left <= 0:
            raise self.error


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of questions of each shard that is computed from here on."""
    counts: list[int] = []
    real = store_module.compute_shard

    def counting(model: Model, prompts: Any, shard: Any, **rest: Any) -> Any:
        counts.append(store_module.count_questions(shard))
        return real(model, prompts, shard, **rest)

    monkeypatch.setattr(store_module, "compute_shard", counting)
    return counts


# ------------------------------------------------------------------------------------------------- what is in a store


def test_rows_are_the_scores_of_each_question_alone_in_the_order_of_the_questions(
    undisturbed: Path, tiny: Model, tmp_path: Path
) -> None:
    whole = ActivationStore(undisturbed)
    table = whole.table
    for i in (0, 7, N - 1):
        alone = extract(tiny, toy_questions(N)[i : i + 1], tmp_path / str(i), what=WHAT)
        rows = slice(table.offsets[i], table.offsets[i + 1])
        np.testing.assert_allclose(table.logprobs[rows], alone.table.logprobs, atol=1e-4)
        assert table.n_tokens[rows].tolist() == alone.table.n_tokens.tolist()
        for layer in WHAT.layers:
            np.testing.assert_allclose(whole.layer(layer)[rows], alone.layer(layer), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("changed", [{"token_budget": 5000}, {"packing": "plain"}])
def test_the_order_of_rows_does_not_depend_on_the_packing(
    undisturbed: Path, tiny: Model, tmp_path: Path, changed: dict[str, Any]
) -> None:
    first, second = (
        ActivationStore(undisturbed),
        extract(tiny, toy_questions(N), tmp_path, what=replace(WHAT, **changed)),
    )
    np.testing.assert_allclose(first.table.logprobs, second.table.logprobs, atol=1e-4)
    np.testing.assert_allclose(first.layer(2), second.layer(2), rtol=2e-3, atol=2e-3)


def test_other_order_of_questions_other_order_of_rows(undisturbed: Path, tiny: Model, tmp_path: Path) -> None:
    forward, backward = ActivationStore(undisturbed), extract(tiny, toy_questions(N)[::-1], tmp_path, what=WHAT)
    a, b = forward.table, backward.table
    for i in range(N):
        j = N - 1 - i
        of_a, of_b = slice(a.offsets[i], a.offsets[i + 1]), slice(b.offsets[j], b.offsets[j + 1])
        np.testing.assert_allclose(a.logprobs[of_a], b.logprobs[of_b], atol=1e-4)
        np.testing.assert_allclose(forward.layer(3)[of_a], backward.layer(3)[of_b], rtol=2e-3, atol=2e-3)


def test_the_table_counts_tokens_characters_and_bytes_of_each_option(tiny: Model, tmp_path: Path) -> None:
    question = Question("q", "q", "Which?", ("né", "word"), 1)
    table = extract(tiny, [question], tmp_path, what=WHAT).table
    assert table.n_chars.tolist() == [2, 4]
    assert table.n_bytes.tolist() == [3, 4]
    assert table.n_tokens.tolist() == [4, 5]  # a token a byte, and the space before the option
    assert table.answers.tolist() == [1]
    assert table.offsets.tolist() == [0, 2]


def test_questions_come_back_as_they_were_even_with_odd_line_breaks(tiny: Model, tmp_path: Path) -> None:
    odd = [
        Question("a", "g", "line\u2028separator\u2029and\x85next\r\nline", ("y\u2028es", "no"), 0, passage="p\x0b\x1c"),
        Question("b", "g", "ümlaut 漢字", ("1", "2"), task="t", version="3", split="s"),
    ]
    assert extract(tiny, odd, tmp_path, what=WHAT).questions == odd


def test_large_values_stay_float32_and_others_become_float16() -> None:
    fits, large = torch.tensor([65504.0, -1.5]), torch.tensor([65505.0, -1.5])
    assert compact(fits).dtype == torch.float16
    assert compact(fits).tolist() == [65504.0, -1.5]
    assert compact(large).dtype == torch.float32
    assert compact(-large).tolist() == [-65505.0, 1.5]
    assert compact(torch.tensor([1])).dtype == torch.int64
    assert compact(torch.tensor([0.1], dtype=torch.float64)).dtype == torch.float64


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_compacting_never_makes_an_infinity_and_is_as_exact_as_float16(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    kept = compact(tensor)
    assert torch.isfinite(kept).all()
    torch.testing.assert_close(kept.float(), tensor, rtol=2**-10, atol=2**-24)


def test_massive_activations_are_stored_as_they_are(tmp_path: Path) -> None:
    model = make_model("llama", seed=3)
    with torch.no_grad():
        model.hf.get_input_embeddings().weight.mul_(1e6)
    store = extract(model, toy_questions(4), tmp_path, what=WHAT)
    assert 1e5 < np.abs(store.layer(0)).max() < np.inf
    for path in shards(tmp_path):
        with safe_open(path, framework="pt") as file:
            assert file.get_tensor("layer.0").dtype == torch.float32
            assert torch.isfinite(file.get_tensor("layer.3")).all()


def test_ordinary_states_are_stored_as_float16(undisturbed: Path) -> None:
    for path in shards(undisturbed):
        with safe_open(path, framework="pt") as file:
            assert {file.get_tensor(f"layer.{layer}").dtype for layer in WHAT.layers} == {torch.float16}
            assert file.get_tensor("logprob").dtype == torch.float64


def test_a_layer_that_was_not_extracted_is_refused_with_those_that_were(tiny: Model, tmp_path: Path) -> None:
    store = extract(tiny, toy_questions(3), tmp_path, what=replace(WHAT, layers=(1, 3)))
    assert store.layers == (1, 3)
    with pytest.raises(CoralError, match=r"\[1, 3\], not 2"):
        store.layer(2)


def test_all_layers_are_the_embeddings_and_every_block(tiny: Model) -> None:
    assert all_layers(tiny) == (0, 1, 2, 3)


# ------------------------------------------------------------------------------------------------------------- killed

KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from conftest import make_model, toy_questions
from test_store import N, WHAT
from coral_lens import store

store.SHARD_BYTES = 1
calls, real = 0, os.fsync

def fsync(fd):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        Path(sys.argv[4]).touch()
        time.sleep(600)
    real(fd)

os.fsync = fsync
torch.set_num_threads(int(sys.argv[5]))
store.extract(make_model("llama"), toy_questions(N), Path(sys.argv[2]), what=WHAT)
"""


def kill_at_write(folder: Path, n: int, tmp_path: Path) -> None:
    """Extract in another process, and kill it while it is in its n-th write to the disk."""
    flag = tmp_path / f"in write {n}"
    arguments = [str(Path(__file__).parent), str(folder), str(n), str(flag), str(torch.get_num_threads())]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments]) as process:
        try:
            deadline = time.monotonic() + 120
            while not flag.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert flag.exists(), "the process never came to that write"
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_run_killed_twice_ends_with_the_bytes_of_an_undisturbed_one(
    undisturbed: Path, tiny: Model, tmp_path: Path, computed: list[int]
) -> None:
    folder = tmp_path / "store"
    # manifest, questions, shard 0, its line, shard 1, its line, shard 2: not renamed yet
    kill_at_write(folder, 7, tmp_path)
    assert (folder / "journal.jsonl").read_bytes().count(b"\n") == 2
    assert (folder / ".shard-00002.safetensors.tmp").exists()
    assert not shard_path(folder, 2).exists()
    with pytest.raises(CoralError, match="not finished"):
        ActivationStore(folder)
    # shard 2, its line, shard 3, its line: written, but not yet sure to be on the disk
    kill_at_write(folder, 4, tmp_path)
    assert (folder / "journal.jsonl").read_bytes().count(b"\n") == 4
    finished = [p.stat().st_mtime_ns for p in shards(folder)]
    extract(tiny, toy_questions(N), folder, what=WHAT)
    assert len(computed) == len(shards(folder)) - 4
    assert [p.stat().st_mtime_ns for p in shards(folder)][:4] == finished
    assert content(folder) == content(undisturbed)


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_torn_last_line_of_the_journal_costs_its_shard_only(
    copy: Path, undisturbed: Path, tiny: Model, computed: list[int], cut: int
) -> None:
    journal = copy / "journal.jsonl"
    last = journal.read_bytes().splitlines(keepends=True)[-1]
    journal.write_bytes(journal.read_bytes()[: -min(cut, len(last) - 1)])
    extract(tiny, toy_questions(N), copy, what=WHAT)
    assert len(computed) == 1
    assert content(copy) == content(undisturbed)


def test_a_line_of_the_journal_is_read_only_if_it_is_whole() -> None:
    assert parse_entry(b'{"shard":3,"sha256":{"logprob":"ab"}}\n') == (3, {"logprob": "ab"})
    for torn in (b'{"shard":3,"sha256":{"logprob":"ab"}}', b'{"shard":3', b"\n", b'{"shard":3}\n', b"[]\n", b"\xff\n"):
        assert parse_entry(torn) is None


def test_ctrl_c_keeps_the_finished_shards(undisturbed: Path, tiny: Model, tmp_path: Path, computed: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, toy_questions(N), tmp_path, what=WHAT, progress=Stop(after=10))
    kept = shards(tmp_path)
    assert 0 < len(kept) < len(shards(undisturbed))
    assert len(computed) == len(kept) + 1
    extract(tiny, toy_questions(N), tmp_path, what=WHAT)
    assert len(computed) == len(shards(undisturbed)) + 1
    assert content(tmp_path) == content(undisturbed)


@pytest.mark.parametrize("write", [1, 2, 7, 8])
def test_a_full_disk_is_one_sentence_and_keeps_the_finished_shards(
    undisturbed: Path, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    calls, real = 0, os.fsync

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CoralError, match="no space left on the disk"):
            extract(tiny, toy_questions(N), tmp_path, what=WHAT)
    assert len(shards(tmp_path)) == {1: 0, 2: 0, 7: 2, 8: 3}[write]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))
    extract(tiny, toy_questions(N), tmp_path, what=WHAT)
    assert content(tmp_path) == content(undisturbed)


def test_a_resumed_run_computes_with_the_number_of_threads_it_began_with(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    real = store_module.compute_shard

    def noting(*args: Any, **rest: Any) -> Any:
        seen.append(torch.get_num_threads())
        return real(*args, **rest)

    monkeypatch.setattr(store_module, "compute_shard", noting)
    try:
        torch.set_num_threads(1)
        with pytest.raises(KeyboardInterrupt):
            extract(tiny, toy_questions(N), tmp_path, what=WHAT, progress=Stop(after=10))
        torch.set_num_threads(2)
        store = extract(tiny, toy_questions(N), tmp_path, what=WHAT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert store.manifest["threads"] == 1


def test_a_resumed_run_keeps_the_packing_it_began_with(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, toy_questions(N), tmp_path, what=replace(WHAT, packing="plain"), progress=Stop(after=10))
    assert choose_packing(tiny) == "tree"
    store = extract(tiny, toy_questions(N), tmp_path, what=replace(WHAT, packing=None))
    assert store.manifest["packing"] == "plain"


def test_progress_counts_every_question_once_also_after_an_interruption(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, toy_questions(N), tmp_path, what=WHAT, progress=Stop(after=10))
    steps: list[int] = []
    extract(tiny, toy_questions(N), tmp_path, what=WHAT, progress=steps.append)
    assert steps[0] > 0
    assert sum(steps) == N


# ------------------------------------------------------------------------------------------------------------ damaged


def test_a_flipped_byte_is_detected_on_reading_and_only_its_shard_is_computed_again(
    copy: Path, undisturbed: Path, tiny: Model, computed: list[int]
) -> None:
    damaged = shards(copy)[3]
    first, _ = tensor_range(damaged, "layer.2")
    flip(damaged, first + 5)
    with pytest.raises(CoralError, match=r"layer\.2 does not match") as error:
        ActivationStore(copy).layer(2)
    assert str(damaged) in str(error.value)
    before = {p.name: p.stat().st_mtime_ns for p in shards(copy)}
    extract(tiny, toy_questions(N), copy, what=WHAT)
    assert len(computed) == 1
    assert {p.name for p in shards(copy) if p.stat().st_mtime_ns != before[p.name]} == {damaged.name}
    assert content(copy) == content(undisturbed)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(p.read_bytes()[:-9])]
)
def test_a_shard_that_is_missing_or_cut_is_named_and_computed_again(
    copy: Path, undisturbed: Path, tiny: Model, computed: list[int], damage: Callable[[Path], Any]
) -> None:
    damage(shards(copy)[2])
    with pytest.raises(CoralError, match=r"shard-00002\.safetensors"):
        everything(copy)
    extract(tiny, toy_questions(N), copy, what=WHAT)
    assert len(computed) == 1
    assert content(copy) == content(undisturbed)


def test_reading_one_layer_does_not_look_at_the_others(copy: Path, undisturbed: Path) -> None:
    for path in shards(copy):
        for layer in (0, 2, 3):
            flip(path, tensor_range(path, f"layer.{layer}")[0])
    store = ActivationStore(copy)
    assert store.layer(1).tobytes() == ActivationStore(undisturbed).layer(1).tobytes()
    assert store.table.logprobs.tobytes() == ActivationStore(undisturbed).table.logprobs.tobytes()
    for layer in (0, 2, 3):
        with pytest.raises(CoralError, match=f"layer.{layer} does not match"):
            store.layer(layer)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_refused_or_harmless_and_a_rerun_repairs_it(
    undisturbed: Path, tiny: Model, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(undisturbed, folder)
    name = data.draw(st.sampled_from(["journal.jsonl", "questions.jsonl", "shard-00001.safetensors"]))
    # a shard's header is a small part of it, and must be as safe as its numbers
    end = len((folder / name).read_bytes())
    at = data.draw(st.integers(0, min(end, 700) - 1) | st.integers(0, end - 1))
    flip(folder / name, at, data.draw(st.integers(1, 255)))
    read, complaint = None, ""
    try:
        read = everything(folder)
    except CoralError as error:
        complaint = str(error)
    assert str(folder) in complaint or read == everything(undisturbed)
    extract(tiny, toy_questions(N), folder, what=WHAT)
    assert content(folder) == content(undisturbed)


def test_the_digest_of_a_tensor_knows_its_type_and_shape() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    others = [zeros.float(), zeros.reshape(3, 2), zeros.reshape(6), zeros + 1]
    assert digest_tensor(zeros) == digest_tensor(zeros.clone())
    assert len({digest_tensor(t) for t in [zeros, *others]}) == 5


def test_a_question_file_that_was_edited_is_refused_and_written_anew_by_a_rerun(
    copy: Path, undisturbed: Path, tiny: Model, computed: list[int]
) -> None:
    path = copy / "questions.jsonl"
    path.write_text(path.read_text("utf-8").replace("Toy question 3", "Toy question 4"), "utf-8")
    with pytest.raises(CoralError, match="changed after"):
        _ = ActivationStore(copy).questions
    extract(tiny, toy_questions(N), copy, what=WHAT)
    assert computed == []
    assert content(copy) == content(undisturbed)


def test_a_folder_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"manifest\.json does not exist"):
        ActivationStore(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CoralError, match="format 99"):
        ActivationStore(tmp_path)


# --------------------------------------------------------------------------------------------------- same store or not


def test_a_finished_store_is_returned_without_running_the_model(
    copy: Path, undisturbed: Path, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was run")

    monkeypatch.setattr(Model, "body", refuses)
    before = {p.name: p.stat().st_mtime_ns for p in copy.iterdir() if p.name != ".lock"}
    for packing in ("tree", None):
        store = extract(tiny, toy_questions(N), copy, what=replace(WHAT, packing=packing))
        assert len(store.table) == N
    assert {p.name: p.stat().st_mtime_ns for p in copy.iterdir() if p.name != ".lock"} == before


def test_another_model_is_refused_with_both_fingerprints(copy: Path, tiny: Model) -> None:
    other = make_model("llama", seed=1)
    with pytest.raises(CoralError, match=r"model\.weights") as error:
        extract(other, toy_questions(N), copy, what=WHAT)
    assert tiny.fingerprint["weights"] in str(error.value)
    assert other.fingerprint["weights"] in str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": (1, 2)}, r"layers is \[0,1,2,3\], not \[1,2\]"),
        ({"token_budget": 300}, "token_budget is 200, not 300"),
        ({"packing": "plain"}, 'packing is "tree", not "plain"'),
        ({"style": Style("letters")}, "prompts is"),
    ],
)
def test_another_way_to_extract_is_refused_with_both_values(
    copy: Path, undisturbed: Path, tiny: Model, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(CoralError, match=said):
        extract(tiny, toy_questions(N), copy, what=replace(WHAT, **changed))
    assert content(copy) == content(undisturbed)


@pytest.mark.parametrize("other", [toy_questions(N, seed=1), toy_questions(N - 1), toy_questions(N)[::-1]])
def test_other_questions_are_refused_and_the_store_stays(
    copy: Path, undisturbed: Path, tiny: Model, other: list[Question]
) -> None:
    recorded = json.loads((copy / "manifest.json").read_text())["questions"]
    with pytest.raises(CoralError, match="questions is") as error:
        extract(tiny, other, copy, what=WHAT)
    assert recorded in str(error.value)
    assert content(copy) == content(undisturbed)


def test_the_same_questions_with_other_answers_are_other_questions(copy: Path, tiny: Model) -> None:
    relabelled = [replace(q, answer=(q.answer + 1) % len(q.options)) for q in toy_questions(N)]
    with pytest.raises(CoralError, match="questions is"):
        extract(tiny, relabelled, copy, what=WHAT)


def test_a_layer_that_the_model_does_not_have_is_refused_before_anything_is_written(
    tiny: Model, tmp_path: Path
) -> None:
    with pytest.raises(CoralError, match=r"Layer 4 does not exist.* 0 to 3"):
        extract(tiny, toy_questions(3), tmp_path / "new", what=replace(WHAT, layers=(1, 4)))
    assert not (tmp_path / "new").exists()


def test_no_questions_are_refused(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="no questions"):
        extract(tiny, [], tmp_path / "new", what=WHAT)


LOCK = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_may_not_write_to_the_same_store(tiny: Model, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCK, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(CoralError, match="another process") as error:
            extract(tiny, toy_questions(3), tmp_path, what=WHAT)
        first.communicate("")
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "manifest.json").exists()
    assert len(extract(tiny, toy_questions(3), tmp_path, what=WHAT).table) == 3


def test_the_journal_lists_the_shards_in_order_with_a_digest_for_each_tensor(undisturbed: Path) -> None:
    entries = Journal(undisturbed).entries
    assert list(entries) == list(range(len(shards(undisturbed))))
    names = {"question", "logprob", "n_tokens", "n_chars", "n_bytes", "layer.0", "layer.1", "layer.2", "layer.3"}
    assert all(set(digests) == names for digests in entries.values())
