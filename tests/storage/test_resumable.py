"""Work that is stopped goes on with what is left to the bytes of an undisturbed run, and is never mixed with other work."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.storage.progress import Progress, shown
from coral_lens.storage.resumable import Resumable, each, locked, locked_file, open_manifest, thread_count
from coral_lens.storage.shards import Journal, shard_path

PIECES = ((1, 2), (3,), (4, 5, 6), (7,))


class Work:
    """Squares of numbers, which can be stopped in the middle of a piece."""

    def __init__(self, folder: Path, *, tells: bool = True) -> None:
        self.folder, self.tells = folder, tells
        self.computed: list[tuple[int, ...]] = []
        self.told: list[int] = []
        self.advance: Progress = self.told.append
        self.threads: set[int] = set()
        self.stop_at = 0

    def squares(self, piece: tuple[int, ...], progress: Progress) -> dict[str, Tensor]:
        if self.stop_at in piece:
            raise KeyboardInterrupt
        self.computed.append(piece)
        self.threads.add(torch.get_num_threads())
        if self.tells:
            for _ in piece[1:]:
                progress(1)
        return {"square": torch.tensor([n * n for n in piece])}

    def run(self, *, stop_at: int = 0, **changed: Any) -> Work:
        identity = {"what": "squares", "threads": torch.get_num_threads()} | changed
        self.stop_at = stop_at
        work = Resumable(
            self.folder,
            identity,
            PIECES,
            each(self.squares),
            size=len,
            form=Journal,
            other_files={"note.txt": b"squares\n"},
        )
        work.run(self.advance)
        return self


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run leaves."""
    return content(Work(tmp_path / "whole").run().folder)


def test_an_undisturbed_run_leaves_a_manifest_a_journal_and_a_shard_for_each_piece(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    shards = {f"shard-{i:05d}.safetensors" for i in range(4)}
    assert set(whole) == {"manifest.json", "journal.jsonl", "note.txt"} | shards
    journal = Journal(tmp_path / "whole")
    assert [journal.tensors(i)["square"].tolist() for i in range(4)] == [[1, 4], [9], [16, 25, 36], [49]]


@pytest.mark.parametrize("stops", [(1,), (3,), (5,), (7,), (3, 5), (2, 3, 4, 7)])
def test_work_that_is_stopped_goes_on_with_what_is_left_to_the_same_bytes(
    whole: dict[str, bytes], tmp_path: Path, stops: tuple[int, ...]
) -> None:
    work = Work(tmp_path / "stopped")
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            work.run(stop_at=stop)
    work.run()
    assert content(work.folder) == whole
    assert work.computed == list(PIECES), "every piece is computed once"
    work.run()
    assert work.computed == list(PIECES)


@given(st.sets(st.integers(0, 3)), st.sampled_from(["missing", "empty", "flipped"]))
def test_pieces_that_were_damaged_are_computed_again_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], damage: str
) -> None:
    work = Work(tmp_path_factory.mktemp("damaged")).run()
    before = content(work.folder)
    for number in numbers:
        path = shard_path(work.folder, number)
        raw = path.read_bytes()
        path.unlink() if damage == "missing" else path.write_bytes(raw[:-1] + b"\xff" if damage == "flipped" else b"")
    (work.folder / "note.txt").write_bytes(b"scrawl")
    work.computed.clear()
    work.run()
    assert work.computed == [PIECES[number] for number in sorted(numbers)]
    assert content(work.folder) == before


@pytest.mark.parametrize("tells", [True, False])
def test_progress_comes_to_the_size_of_all_pieces_whether_or_not_a_piece_tells_of_itself(
    tmp_path: Path, tells: bool
) -> None:
    work = Work(tmp_path, tells=tells)
    with pytest.raises(KeyboardInterrupt):
        work.run(stop_at=5)
    assert sum(work.told) == 3
    work.told.clear()
    work.run()
    assert work.told[0] == 3, "what is done already is told first"
    assert sum(work.told) == 7


def test_a_log_says_how_much_of_stopped_work_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(stop_at=5)
    with shown("squaring", 7, "numbers") as work.advance:
        work.run()
    assert capsys.readouterr().err.splitlines()[:2] == [
        "squaring: 7 numbers",
        "squaring: 3 of 7 numbers were done before",
    ]


def test_work_goes_on_with_the_number_of_threads_that_it_began_with(tmp_path: Path) -> None:
    work, before = Work(tmp_path), torch.get_num_threads()
    with thread_count(1), pytest.raises(KeyboardInterrupt):
        work.run(stop_at=4)
    with thread_count(2):
        work.run()
        assert torch.get_num_threads() == 2
    assert work.threads == {1}
    assert torch.get_num_threads() == before


def test_other_work_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    work = Work(tmp_path).run()
    before = content(tmp_path)
    with pytest.raises(CoralError, match=r'something else: what is "squares", not "cubes"') as error:
        work.run(what="cubes")
    assert str(tmp_path) in str(error.value)
    with pytest.raises(CoralError, match="something else: seed is null, not 1"):
        work.run(seed=1)
    assert content(tmp_path) == before
    assert work.computed == list(PIECES)


def test_a_second_process_is_kept_out_of_a_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CoralError, match="is being written by another process"):
            Work(tmp_path).run()
    assert not (tmp_path / "manifest.json").exists()
    assert Work(tmp_path).run().computed == list(PIECES)


def test_a_file_is_locked_by_itself(tmp_path: Path) -> None:
    with locked_file(tmp_path / "one.jsonl"), locked_file(tmp_path / "two.jsonl"), locked(tmp_path):
        for lock, place in (
            (locked_file(tmp_path / "one.jsonl"), tmp_path / "one.jsonl"),
            (locked(tmp_path), tmp_path),
        ):
            with pytest.raises(CoralError, match="another process") as error, lock:
                pass
            assert str(error.value).startswith(f"{place} is")
    with locked_file(tmp_path / "one.jsonl"):
        pass


def test_a_folder_with_files_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(CoralError, match=r"holds note\.txt and no manifest"):
        Work(tmp_path).run()
    assert content(tmp_path) == {"note.txt": b"mine"}


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"what": "squares", "threads": 1, "digest": "0"}'])
def test_a_damaged_manifest_is_one_sentence_that_says_what_to_do(tmp_path: Path, damage: bytes) -> None:
    Work(tmp_path).run()
    (tmp_path / "manifest.json").write_bytes(damage)
    with pytest.raises(CoralError, match=str(tmp_path)):
        Work(tmp_path).run()


def test_a_folder_that_mirrors_another_place_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    open_manifest(path, {"model": {"weights": "w"}})
    with pytest.warns(UserWarning, match=r"^s3://bucket/states was made by an earlier version"):
        open_manifest(path, {"model": {"weights": "w", "config": {"rope_theta": 1.0}}}, name="s3://bucket/states")
