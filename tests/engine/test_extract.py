"""A store ends with the same bytes whatever happened on the way, and never returns a value that was damaged on the disk."""

from __future__ import annotations

import errno
import json
import os
import re
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.models import make_model, rewrapped
from support.questions import toy_questions
from support.stores import WHAT, N, store_questions
from transformers import LlamaConfig, LlamaForCausalLM

from coral_lens.data.settings import Style
from coral_lens.engine import extract as store_module
from coral_lens.engine import packing as packing_module
from coral_lens.engine import shard_work
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.packing import plan_for
from coral_lens.engine.planned import Readings, all_layers
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import HeadInputs
from coral_lens.engine.self_check import choose_packing
from coral_lens.engine.trees import PrefixGroup
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.storage.shards import Journal, compact, digest_tensor, parse_entry, shard_path


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
        extract(make_model("llama"), store_questions(), folder, extraction=WHAT)
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
    real = shard_work.gather_shard

    def counting(*arguments: Any) -> Any:
        counts.append(0)
        tensors = real(*arguments)
        counts[-1] = len(tensors["question"]) + len(tensors.get("broken", ()))
        return tensors

    monkeypatch.setattr(shard_work, "gather_shard", counting)
    return counts


# ------------------------------------------------------------------------------------------------- what is in a store


def test_rows_are_the_scores_of_each_question_alone_in_the_order_of_the_questions(
    undisturbed: Path, tiny: Model, tmp_path: Path
) -> None:
    whole = ActivationStore(undisturbed)
    table = whole.table
    for i in (0, 7, N - 1):
        alone = extract(tiny, store_questions()[i : i + 1], tmp_path / str(i), extraction=WHAT)
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
        extract(tiny, store_questions(), tmp_path, extraction=replace(WHAT, **changed)),
    )
    np.testing.assert_allclose(first.table.logprobs, second.table.logprobs, atol=1e-4)
    np.testing.assert_allclose(first.layer(2), second.layer(2), rtol=2e-3, atol=2e-3)


def test_passages_that_are_computed_once_give_the_rows_of_passages_that_are_not(
    undisturbed: Path, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prepare(store_questions(), WHAT.style, tiny).prompts
    shared = [batch.prefixes[0] for batch in plan_for(prompts, token_budget=WHAT.token_budget).batches]
    assert shared.count(0) >= 3
    assert len({n for n in shared if n}) == 2
    assert min(shared.count(n) for n in shared) >= 2, "every passage goes over several shards"
    monkeypatch.setattr(packing_module, "find_prefixes", lambda contexts: [PrefixGroup(0, tuple(range(len(contexts))))])
    first, second = ActivationStore(undisturbed), extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    np.testing.assert_allclose(first.table.logprobs, second.table.logprobs, atol=1e-4)
    for layer in WHAT.layers:
        np.testing.assert_allclose(first.layer(layer), second.layer(layer), rtol=2e-3, atol=2e-3)


def test_other_order_of_questions_other_order_of_rows(undisturbed: Path, tiny: Model, tmp_path: Path) -> None:
    forward, backward = ActivationStore(undisturbed), extract(tiny, store_questions()[::-1], tmp_path, extraction=WHAT)
    a, b = forward.table, backward.table
    for i in range(N):
        j = N - 1 - i
        of_a, of_b = slice(a.offsets[i], a.offsets[i + 1]), slice(b.offsets[j], b.offsets[j + 1])
        np.testing.assert_allclose(a.logprobs[of_a], b.logprobs[of_b], atol=1e-4)
        np.testing.assert_allclose(forward.layer(3)[of_a], backward.layer(3)[of_b], rtol=2e-3, atol=2e-3)


def test_the_table_counts_tokens_characters_and_bytes_of_each_option(tiny: Model, tmp_path: Path) -> None:
    question = Question("q", "q", "Which?", ("né", "word"), 1)
    table = extract(tiny, [question], tmp_path, extraction=WHAT).table
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
    assert extract(tiny, odd, tmp_path, extraction=WHAT).questions == odd


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
    store = extract(rewrapped(model), toy_questions(4), tmp_path, extraction=WHAT)
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
    store = extract(tiny, toy_questions(3), tmp_path, extraction=replace(WHAT, layers=(1, 3)))
    assert store.layers == (1, 3)
    with pytest.raises(CoralError, match=r"\[1, 3\], not 2"):
        store.layer(2)


def test_what_else_is_read_of_each_option_is_kept_in_the_order_of_the_questions(tiny: Model, tmp_path: Path) -> None:
    def reading(*layers: int) -> Readings:
        return Readings((HeadInputs(layers, 4),), {"heads": list(layers)}, row_bytes=2**20)

    extraction = replace(WHAT, layers=(), readings=reading(1, 3))
    store = extract(tiny, store_questions(), tmp_path / "heads", extraction=extraction)
    assert len(list((tmp_path / "heads").glob("shard-*"))) > 1
    heads = store.reading("heads.3")
    assert heads.shape == (len(store.table.logprobs), 4, 8)
    alone = extract(tiny, store_questions()[5:6], tmp_path / "alone", extraction=extraction)
    rows = slice(*store.table.offsets[5:7])
    np.testing.assert_allclose(heads[rows], alone.reading("heads.3"), rtol=2e-3, atol=2e-3)
    for other in (None, reading(1)):
        with pytest.raises(CoralError, match=r"holds results of something else: readings is"):
            extract(tiny, store_questions(), tmp_path / "heads", extraction=replace(extraction, readings=other))


def test_all_layers_are_the_embeddings_and_every_block(tiny: Model) -> None:
    assert all_layers(tiny) == (0, 1, 2, 3)


def test_a_family_that_takes_no_tree_is_extracted_plain_with_one_warning(plain_tiny: Model, tmp_path: Path) -> None:
    questions = store_questions()[:6]
    with pytest.warns(UserWarning, match="in a row of its own") as caught:
        store = extract(plain_tiny, questions, tmp_path / "chosen", extraction=replace(WHAT, packing=None))
    assert len(caught) == 1
    assert store.manifest["packing"] == "plain"
    asked = extract(plain_tiny, questions, tmp_path / "asked", extraction=replace(WHAT, packing="plain"))
    assert content(store.folder) == content(asked.folder)


# ------------------------------------------------------------------------------------- questions that cannot be asked

TOO_LONG = Question("too long", "g", "Which?", ("no", "y" * 300), 0)


def test_questions_that_cannot_be_asked_are_named_once_and_the_rest_is_scored(
    undisturbed: Path, tiny: Model, tmp_path: Path
) -> None:
    questions = store_questions()
    mixed = [questions[0], TOO_LONG, *questions[1:], replace(TOO_LONG, id="too long too")]
    with pytest.warns(
        UserWarning, match=r"^2 question\(s\) left out\. Question 'too long': option 2 has 301"
    ) as caught:
        store = extract(tiny, mixed, tmp_path, extraction=WHAT)
    assert len(caught) == 1
    assert "Question 'too long too': option 2 has 301 tokens" in str(caught[0].message)
    assert store.questions == questions
    assert list(store.manifest["left_out"]) == ["too long", "too long too"]
    assert store.manifest["n_questions"] == N
    assert everything(tmp_path) == everything(undisturbed)


def test_only_the_first_three_of_many_are_named(tiny: Model, tmp_path: Path) -> None:
    bad = [replace(TOO_LONG, id=f"bad {i}") for i in range(5)]
    with pytest.warns(UserWarning, match=r"^5 question\(s\) left out\. .*'bad 2'.*\(and 2 more\)$") as caught:
        extract(tiny, [*bad, *toy_questions(1)], tmp_path, extraction=WHAT)
    assert "bad 3" not in str(caught[0].message)


def test_if_no_question_can_be_asked_nothing_is_written(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="no questions to score: Question 'too long'"):
        extract(tiny, [TOO_LONG], tmp_path / "new", extraction=WHAT)
    assert not (tmp_path / "new").exists()


def test_prompts_that_are_too_long_are_counted_in_one_warning(tiny: Model, tmp_path: Path) -> None:
    questions = toy_questions(5)
    for i in (1, 3):
        questions[i] = replace(questions[i], passage="word " * 60)
    with pytest.warns(UserWarning, match=r"^2 of 5 prompts were longer than the model reads and were cut") as caught:
        store = extract(tiny, questions, tmp_path, extraction=WHAT)
    assert len(caught) == 1
    assert store.manifest["n_truncated"] == 2
    assert store.questions == questions


# ------------------------------------------------------------------------------- questions at which the model breaks

BREAKS = (Question("breaks", "g", "Why ~?", ("a", "b"), 0), Question("ends", "g", "Why?", ("ab", "b~"), 0))
"""The first breaks in what is asked, the second in one option."""


def broken_model() -> Model:
    """A model that breaks at one letter, which only the questions above have."""
    model = make_model("llama")
    model.hf.get_input_embeddings().weight[model.tokenizer.encode("~")[0]] = float("nan")
    return rewrapped(model)


def with_broken() -> list[Question]:
    questions = store_questions()
    return [questions[0], BREAKS[0], *questions[1:12], BREAKS[1], *questions[12:]]


NAMES_BOTH = (
    r"^2 question\(s\) left out\. Question 'breaks': 'tiny-llama' gives scores or states that are not finite\. "
    r"Question 'ends': 'tiny-llama' gives scores or states that are not finite\.$"
)


@pytest.mark.parametrize("changed", [{}, {"token_budget": 5000}, {"packing": "plain"}])
def test_questions_at_which_the_model_breaks_are_named_and_the_others_are_kept(
    undisturbed: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=NAMES_BOTH) as caught:
        store = extract(broken_model(), with_broken(), tmp_path, extraction=replace(WHAT, **changed))
    assert len(caught) == 1
    assert store.broken == ["breaks", "ends"]
    assert store.questions == store_questions()
    sound = ActivationStore(undisturbed)
    assert store.table.answers.tolist() == sound.table.answers.tolist()
    assert store.table.n_tokens.tolist() == sound.table.n_tokens.tolist()
    np.testing.assert_allclose(store.table.logprobs, sound.table.logprobs, atol=1e-4)
    for layer in WHAT.layers:
        np.testing.assert_allclose(store.layer(layer), sound.layer(layer), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:2 question")
@pytest.mark.parametrize("shard_bytes", [1, 10_000])
def test_a_stopped_run_with_broken_questions_ends_with_the_same_bytes(
    tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SHARD_BYTES", shard_bytes)
    model, questions, told = broken_model(), with_broken(), []
    extract(model, questions, tmp_path / "whole", extraction=WHAT, progress=told.append)
    assert sum(told) == len(questions)
    for after in range(1, len(questions), 4):
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            extract(model, questions, folder, extraction=WHAT, progress=Stop(after))
        extract(model, questions, folder, extraction=WHAT)
        assert content(folder) == content(tmp_path / "whole")


def test_a_finished_store_with_broken_questions_is_returned_at_once_and_names_them_again(
    tmp_path: Path, computed: list[int]
) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match=NAMES_BOTH):
            extract(broken_model(), with_broken(), tmp_path, extraction=WHAT)
        assert sum(computed) == N + 2


def test_a_model_that_breaks_at_every_question_is_refused(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(
            CoralError, match=r"'tiny-llama' gives .* not finite for every question, first 'breaks': its"
        ):
            extract(broken_model(), BREAKS, tmp_path, extraction=WHAT)


def test_a_sound_store_has_no_list_of_broken_questions(undisturbed: Path) -> None:
    assert ActivationStore(undisturbed).broken == []
    for path in shards(undisturbed):
        with safe_open(path, framework="pt") as file:
            assert "broken" not in file.keys()  # noqa: SIM118 (no dict)


# ------------------------------------------------------------------------------------------------------------- killed

KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from support.models import make_model
from support.stores import WHAT, store_questions
from coral_lens.engine import extract

extract.SHARD_BYTES = 1
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
extract.extract(make_model("llama"), store_questions(), Path(sys.argv[2]), extraction=WHAT)
"""


def kill_at_write(folder: Path, n: int, tmp_path: Path) -> None:
    """Extract in another process, and kill it while it is in its n-th write to the disk."""
    flag = tmp_path / f"in write {n}"
    arguments = [str(Path(__file__).parents[1]), str(folder), str(n), str(flag), str(torch.get_num_threads())]
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
    assert len(list(folder.glob(".shard-00002.safetensors.*.tmp"))) == 1
    assert not shard_path(folder, 2).exists()
    with pytest.raises(CoralError, match="not finished"):
        ActivationStore(folder)
    # shard 2, its line, shard 3, its line: written, but not yet sure to be on the disk
    kill_at_write(folder, 4, tmp_path)
    assert (folder / "journal.jsonl").read_bytes().count(b"\n") == 4
    finished = [p.stat().st_mtime_ns for p in shards(folder)]
    extract(tiny, store_questions(), folder, extraction=WHAT)
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
    extract(tiny, store_questions(), copy, extraction=WHAT)
    assert len(computed) == 1
    assert content(copy) == content(undisturbed)


def test_a_line_of_the_journal_is_read_only_if_it_is_whole() -> None:
    assert parse_entry(b'{"shard":3,"sha256":{"logprob":"ab"}}\n') == (3, {"logprob": "ab"})
    for torn in (b'{"shard":3,"sha256":{"logprob":"ab"}}', b'{"shard":3', b"\n", b'{"shard":3}\n', b"[]\n", b"\xff\n"):
        assert parse_entry(torn) is None


# in the middle of the first passage's questions, of the second's, and of those without a passage
@pytest.mark.parametrize("after", [7, 12, 20])
def test_ctrl_c_keeps_the_finished_shards(
    undisturbed: Path, tiny: Model, tmp_path: Path, computed: list[int], after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, store_questions(), tmp_path, extraction=WHAT, progress=Stop(after=after))
    kept = shards(tmp_path)
    assert 0 < len(kept) < len(shards(undisturbed))
    assert len(computed) == len(kept) + 1
    extract(tiny, store_questions(), tmp_path, extraction=WHAT)
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
            extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    assert len(shards(tmp_path)) == {1: 0, 2: 0, 7: 2, 8: 3}[write]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))
    extract(tiny, store_questions(), tmp_path, extraction=WHAT)
    assert content(tmp_path) == content(undisturbed)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 3)])
def test_the_number_of_threads_changes_no_byte_and_may_change_in_between(
    tiny: Model, undisturbed: Path, tmp_path: Path, first: int, then: int
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(first)
        with pytest.raises(KeyboardInterrupt):
            extract(tiny, store_questions(), tmp_path, extraction=WHAT, progress=Stop(after=10))
        torch.set_num_threads(then)
        extract(tiny, store_questions(), tmp_path, extraction=WHAT)
        assert torch.get_num_threads() == then
    finally:
        torch.set_num_threads(before)
    assert content(tmp_path) == content(undisturbed)


def test_a_resumed_run_keeps_the_packing_it_began_with(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, store_questions(), tmp_path, extraction=replace(WHAT, packing="plain"), progress=Stop(after=10))
    assert choose_packing(tiny) == "tree"
    store = extract(tiny, store_questions(), tmp_path, extraction=replace(WHAT, packing=None))
    assert store.manifest["packing"] == "plain"


def test_progress_counts_every_question_once_also_after_an_interruption(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, store_questions(), tmp_path, extraction=WHAT, progress=Stop(after=10))
    steps: list[int] = []
    extract(tiny, store_questions(), tmp_path, extraction=WHAT, progress=steps.append)
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
    extract(tiny, store_questions(), copy, extraction=WHAT)
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
    extract(tiny, store_questions(), copy, extraction=WHAT)
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    extract(tiny, store_questions(), folder, extraction=WHAT)
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
    extract(tiny, store_questions(), copy, extraction=WHAT)
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

    for body in ("plain_body", "tree_body", "prefill"):
        monkeypatch.setattr(Model, body, refuses)
    before = {p.name: p.stat().st_mtime_ns for p in copy.iterdir() if p.name != ".lock"}
    for packing in ("tree", None):
        store = extract(tiny, store_questions(), copy, extraction=replace(WHAT, packing=packing))
        assert len(store.table) == N
    assert {p.name: p.stat().st_mtime_ns for p in copy.iterdir() if p.name != ".lock"} == before


def test_the_same_model_under_another_name_goes_on_with_the_store(
    copy: Path, undisturbed: Path, tiny: Model, computed: list[int]
) -> None:
    shards(copy)[4].unlink()
    extract(replace(tiny, name="elsewhere/tiny"), store_questions(), copy, extraction=WHAT)
    assert len(computed) == 1
    assert content(copy) == content(undisturbed)


def test_a_store_that_left_other_questions_out_is_refused(tiny: Model, tmp_path: Path) -> None:
    bad = [replace(TOO_LONG, id=f"bad {i}") for i in range(2)]
    with pytest.warns(UserWarning, match="'bad 0'"):
        extract(tiny, [bad[0], *toy_questions(3)], tmp_path, extraction=WHAT)
    with pytest.warns(UserWarning, match="'bad 1'"), pytest.raises(CoralError, match=r"left_out\.bad 1 is null, not"):
        extract(tiny, [bad[1], *toy_questions(3)], tmp_path, extraction=WHAT)


def test_another_model_is_refused_with_both_fingerprints(copy: Path, tiny: Model) -> None:
    other = make_model("llama", seed=1)
    with pytest.raises(CoralError, match=r"model\.weights") as error:
        extract(other, store_questions(), copy, extraction=WHAT)
    assert "holds the states of another model" in str(error.value)
    assert tiny.fingerprint["weights"][:12] in str(error.value)
    assert other.fingerprint["weights"][:12] in str(error.value)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
            "rope_parameters.rope_theta is 10000.0",
        ),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 1e-06"),
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, "head_dim is 8"),
        ({"hidden_act": "gelu"}, 'hidden_act is "silu"'),
    ],
)
def test_a_store_that_is_half_done_is_not_gone_on_with_by_the_same_weights_under_another_configuration(
    tiny: Model, tmp_path: Path, computed: list[int], changed: dict[str, Any], key: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract(tiny, store_questions(), tmp_path, extraction=WHAT, progress=Stop(after=10))
    before, n_computed = content(tmp_path), len(computed)
    other = LlamaForCausalLM(LlamaConfig(**(tiny.hf.config.to_dict() | changed))).eval().requires_grad_(False)
    other.load_state_dict(tiny.hf.state_dict())
    with pytest.raises(CoralError, match=rf"holds results of something else: model\.config\..*{re.escape(key)}"):
        extract(wrap(other, tiny.tokenizer, name=tiny.name), store_questions(), tmp_path, extraction=WHAT)
    assert len(computed) == n_computed
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token_budget": 300}, "token_budget is 200, not 300"),
        ({"packing": "plain"}, 'packing is "tree", not "plain"'),
        ({"style": Style("letters")}, 'in another style: .* "text" there, "letters" now'),
    ],
)
def test_another_way_to_extract_is_refused_with_both_values(
    copy: Path, undisturbed: Path, tiny: Model, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(CoralError, match=said):
        extract(tiny, store_questions(), copy, extraction=replace(WHAT, **changed))
    assert content(copy) == content(undisturbed)


def test_fewer_layers_than_are_stored_are_read_from_the_store(copy: Path, undisturbed: Path, tiny: Model) -> None:
    store = extract(tiny, store_questions(), copy, extraction=replace(WHAT, layers=(1, 2)))
    assert store.layers == (1, 2)
    assert (store.layer(2) == ActivationStore(undisturbed).layer(2)).all()
    with pytest.raises(CoralError, match=r"holds layers \[1, 2\], not 3"):
        store.layer(3)
    assert content(copy) == content(undisturbed)


def test_layers_that_are_not_stored_are_refused(tiny: Model, tmp_path: Path) -> None:
    extract(tiny, toy_questions(3), tmp_path, extraction=replace(WHAT, layers=(1, 3)))
    with pytest.raises(
        CoralError, match=r"of other layers than are asked for: .* \(layers: \[1,3\] there, \[1,2\] now\)"
    ):
        extract(tiny, toy_questions(3), tmp_path, extraction=replace(WHAT, layers=(1, 2)))


@pytest.mark.parametrize("other", [store_questions(seed=1), store_questions()[:-1], store_questions()[::-1]])
def test_other_questions_are_refused_and_the_store_stays(
    copy: Path, undisturbed: Path, tiny: Model, other: list[Question]
) -> None:
    recorded = json.loads((copy / "manifest.json").read_text())["questions"]
    with pytest.raises(CoralError, match="holds the states of other questions") as error:
        extract(tiny, other, copy, extraction=WHAT)
    assert recorded[:12] in str(error.value)
    assert content(copy) == content(undisturbed)


def test_the_same_questions_with_other_answers_are_other_questions(copy: Path, tiny: Model) -> None:
    relabelled = [replace(q, answer=(q.answer + 1) % len(q.options)) for q in store_questions()]
    with pytest.raises(CoralError, match="holds the states of other questions"):
        extract(tiny, relabelled, copy, extraction=WHAT)


def test_a_layer_that_the_model_does_not_have_is_refused_before_anything_is_written(
    tiny: Model, tmp_path: Path
) -> None:
    with pytest.raises(CoralError, match=r"Layer 4 does not exist.* 0 to 3"):
        extract(tiny, toy_questions(3), tmp_path / "new", extraction=replace(WHAT, layers=(1, 4)))
    assert not (tmp_path / "new").exists()


def test_no_questions_are_refused(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="no questions"):
        extract(tiny, [], tmp_path / "new", extraction=WHAT)


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
            extract(tiny, toy_questions(3), tmp_path, extraction=WHAT)
        first.communicate("")
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "manifest.json").exists()
    assert len(extract(tiny, toy_questions(3), tmp_path, extraction=WHAT).table) == 3


def test_the_journal_lists_the_shards_in_order_with_a_digest_for_each_tensor(undisturbed: Path) -> None:
    entries = Journal(undisturbed).entries
    assert list(entries) == list(range(len(shards(undisturbed))))
    names = {"question", "logprob", "n_tokens", "n_chars", "n_bytes", "layer.0", "layer.1", "layer.2", "layer.3"}
    assert all(set(digests) == names for digests in entries.values())
