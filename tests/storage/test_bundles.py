"""Files that belong together are there together at every moment, and a folder of another library is known to be whole."""

from __future__ import annotations

from pathlib import Path

from coral_lens.storage.bundles import SEALED, bundled, is_intact, seal_files, settle, waiting, write_bundle
from coral_lens.storage.files import digest_bytes


def test_a_bundle_replaces_its_own_files_and_leaves_all_others(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    write_bundle(folder, ("record", b"1"), {"a": b"old", "b": b"old"})
    (folder / "mine").write_text("mine")
    write_bundle(folder, ("record", b"2"), {"a": b"new"}, gone=("b",))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"record": b"2", "a": b"new", "mine": b"mine"}


def test_a_file_is_found_by_its_digest_until_it_has_its_name(tmp_path: Path) -> None:
    wanted = digest_bytes(b"new")
    (tmp_path / "a").write_bytes(b"old")
    waiting(tmp_path, "a", wanted).write_bytes(b"new")
    waiting(tmp_path, "a", digest_bytes(b"never finished")).write_bytes(b"never finished")
    assert bundled(tmp_path, "a", wanted) == waiting(tmp_path, "a", wanted)
    settle(tmp_path, {"a": wanted})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"new"}
    assert bundled(tmp_path, "a", wanted) == tmp_path / "a"
    assert bundled(tmp_path, "a", digest_bytes(b"other")) is None


def test_a_folder_of_another_library_is_intact_while_every_file_is_as_it_was(tmp_path: Path) -> None:
    assert not is_intact(tmp_path / "model")
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "weights").write_bytes(b"w")
    assert is_intact(tmp_path / "model")  # as an earlier version left it
    seal_files(tmp_path / "model")
    assert is_intact(tmp_path / "model")
    for name, data in (("deep/weights", b"x"), (SEALED, b"{}")):
        before = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name).write_bytes(data)
        assert not is_intact(tmp_path / "model")
        (tmp_path / "model" / name).write_bytes(before)
