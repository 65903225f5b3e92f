"""A mirror has what is at its URL, fetches of a shard only what is read, and shows whole files alone."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
from support.s3 import objects_at, put_at

from coral_lens.errors import CoralError
from coral_lens.storage.parts import Part
from coral_lens.storage.places import Mirror, header_length, places_in, reading_place, working_place
from coral_lens.storage.remote import Objects
from coral_lens.storage.shards import LINES, Journal, PartJournal, bring_column, read_tensor, shard_path, write_shard

TENSORS = {"small": torch.arange(6), "large": torch.randn(64, 512, generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/states"


@pytest.fixture
def mirror(url: str, tmp_path: Path) -> Mirror:
    """A mirror whose work has begun."""
    mirror = Mirror(url, tmp_path / "mirror")
    mirror.folder.mkdir()
    (mirror.folder / "manifest.json").write_bytes(b"{}")
    assert mirror.begin()
    return mirror


def test_a_shard_is_seen_whole_and_is_not_kept_here(mirror: Mirror, url: str, tmp_path: Path) -> None:
    write_shard(mirror, 0, TENSORS)
    write_shard(tmp_path, 0, TENSORS)
    name = "shard-00000.safetensors"
    assert objects_at(url)[name] == (tmp_path / name).read_bytes()
    assert {path.name for path in mirror.folder.iterdir()} == {"manifest.json"}
    assert mirror.holds(mirror.folder / name)


def test_a_reader_fetches_the_tensor_that_it_reads_and_no_other(
    mirror: Mirror, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = write_shard(mirror, 0, TENSORS)
    fetched = list[int]()
    read = Objects.read

    def counted(self: Objects, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        data = read(self, name, start, stop)
        fetched.append(len(data or b""))
        return data

    monkeypatch.setattr("coral_lens.storage.places.HEADER", 64)  # the rest of the header is fetched too
    place = reading_place(url, tmp_path / "cache")
    monkeypatch.setattr(Objects, "read", counted)
    bring_column(place, "small", {0: digests})
    path = shard_path(place.folder, 0)
    small = read_tensor(path, "small", digests["small"])
    assert small is not None
    assert small.tolist() == [0, 1, 2, 3, 4, 5]
    assert sum(fetched) < 1000
    assert read_tensor(path, "large", digests["large"]) is None
    bring_column(place, "large", {0: digests})
    assert read_tensor(path, "large", digests["large"]) is not None
    fetched.clear()
    bring_column(reading_place(url, tmp_path / "cache"), "large", {0: digests})
    assert max(fetched, default=0) < 1000, "it is there already"


def test_a_shard_that_was_written_anew_is_fetched_anew(mirror: Mirror, url: str, tmp_path: Path) -> None:
    place = reading_place(url, tmp_path / "cache")
    for tensors in (TENSORS, {"other": torch.ones(3), **TENSORS, "small": torch.zeros(9)}):
        digests = write_shard(mirror, 0, tensors)
        place.refresh()
        bring_column(place, "small", {0: digests})
        assert read_tensor(shard_path(place.folder, 0), "small", digests["small"]) is not None


@pytest.mark.parametrize("damage", [b"", b"\xff" * 20, b"\x08\0\0\0\0\0\0\0[1, 2]  ", None])
def test_a_damaged_or_missing_shard_is_not_taken_for_one(
    mirror: Mirror, url: str, tmp_path: Path, damage: bytes | None
) -> None:
    digests = write_shard(mirror, 0, TENSORS)
    put_at(url, "shard-00000.safetensors", damage)
    place = reading_place(url, tmp_path / "cache")
    bring_column(place, "small", {0: digests})
    assert read_tensor(shard_path(place.folder, 0), "small", digests["small"]) is None


def test_the_header_of_a_shard_says_where_its_tensors_are(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, TENSORS)
    data = shard_path(tmp_path, 0).read_bytes()
    header = data[: header_length(data)]
    start, stop = places_in(header)["small"]
    assert data[start:stop] == TENSORS["small"].numpy().tobytes()
    assert header_length(b"\xff" * 20) == 0
    assert places_in(b"12345678 scrawl") == {}


def test_other_objects_without_a_manifest_are_refused(url: str, tmp_path: Path) -> None:
    put_at(url, "holiday.jpg", b"beach")
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CoralError, match=rf"{url} holds holiday.jpg and no manifest"):
        Mirror(url, tmp_path).begin()


def test_of_two_that_begin_the_second_takes_the_manifest_of_the_first(mirror: Mirror, url: str, tmp_path: Path) -> None:
    second = Mirror(url, tmp_path / "second")
    second.folder.mkdir()
    (second.folder / "manifest.json").write_bytes(b'{"other": 1}')
    assert not second.begin()
    assert (second.folder / "manifest.json").read_bytes() == b"{}"
    (second.folder / "manifest.json").write_bytes(b'{"other": 1}')
    with pytest.raises(CoralError, match="was begun by another process at the same moment, in another way"):
        second.publish()


def test_nothing_is_written_to_a_store_that_was_deleted_or_begun_anew(mirror: Mirror, url: str) -> None:
    for manifest in (b'{"other": 1}', None):
        put_at(url, "manifest.json", manifest)
        with pytest.raises(CoralError, match=rf"{url} was deleted, or begun anew"):
            write_shard(mirror, 0, TENSORS)
    assert objects_at(url) == {}


def test_a_long_journal_is_divided_and_merged_at_the_end(mirror: Mirror, url: str) -> None:
    journal, n = PartJournal(mirror, Part(1, 1), LINES + 2), LINES + 2
    journal.flush_seconds = 60.0
    for number in range(n):
        journal.note(number, {"small": "00"})
    assert sum(data.count(b"sha256") for data in objects_at(url).values()) == LINES, "the last lines are not shown yet"
    journal.finish(n)
    assert list(objects_at(url)) == ["journal.jsonl", "manifest.json"]
    assert list(Journal(mirror).entries) == list(range(n))


def test_errors_call_a_place_by_its_url(url: str, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=rf"^{url}/x is wrong$"), working_place(url) as place:
        raise CoralError(f"{place.folder}/x is wrong")
    with pytest.raises(CoralError, match=rf"^{tmp_path} is wrong$"), working_place(tmp_path) as place:
        raise CoralError(f"{place.folder} is wrong")
