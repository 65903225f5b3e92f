"""Artefacts are whole or absent: digests do not depend on the order of keys, and a failed write leaves the old file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.storage.files import (
    TRACED_PACKAGES,
    canonical,
    digest,
    digest_bytes,
    digest_file,
    fresh_folder,
    kept_record,
    read_json,
    read_record,
    versions,
    write_atomic,
    write_json,
    write_record,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_the_digest_is_that_of_json_with_sorted_keys_and_no_spaces() -> None:
    assert canonical({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'
    assert digest({"b": [1, 2.5], "a": "é"}) == hashlib.sha256('{"a":"é","b":[1,2.5]}'.encode()).hexdigest()


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5))
def test_the_digest_does_not_depend_on_the_order_of_keys_and_survives_json(record: dict[str, Any]) -> None:
    backwards = dict(reversed(record.items()))
    assert digest(backwards) == digest(record) == digest(json.loads(canonical(record)))


def test_a_value_that_is_not_a_number_has_no_digest() -> None:
    with pytest.raises(ValueError, match="float"):
        digest({"r2": float("nan")})


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "data").write_bytes(data)
    assert digest_file(tmp_path / "data") == digest_bytes(data) == hashlib.sha256(data).hexdigest()


def test_versions_name_every_package_that_can_change_a_result() -> None:
    found = versions()
    assert tuple(found) == TRACED_PACKAGES
    assert all(v[0].isdigit() for v in found.values())


def test_json_is_written_readably_and_read_back(tmp_path: Path) -> None:
    record = {"b": 1, "a": ["ü", None, 0.1]}
    write_json(tmp_path / "deep" / "record.json", record)
    assert list(read_json(tmp_path / "deep" / "record.json").items()) == list(record.items())
    assert (tmp_path / "deep" / "record.json").read_text("utf-8").startswith('{\n  "b": 1,\n  "a": [\n    "ü"')
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"a": 1', "damaged"), (b'{"a": "\xff"}', "damaged"), (b"", "damaged"), (b"[1, 2]", "list"), (None, "exist")],
)
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CoralError, match=said) as error:
        read_json(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no space left on the disk"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    path = tmp_path / "kept"
    write_atomic(path, b"old")

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CoralError, match=said) as error:
        write_atomic(path, b"new and longer")
    assert str(path) in str(error.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"kept": b"old"}


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    write_atomic(path, b"old")

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"kept": b"old"}


def test_a_file_in_place_of_a_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CoralError, match="Cannot write"):
        write_atomic(tmp_path / "file" / "inner", b"x")
    with pytest.raises(CoralError, match="Cannot write"), fresh_folder(tmp_path / "file" / "inner"):
        pass


def test_a_fresh_folder_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(ZeroDivisionError), fresh_folder(target) as folder:  # noqa: PT012
        (folder / "one").write_text("1")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with fresh_folder(target) as folder:
        (folder / "one").write_text("1")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["one"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_fresh_folder_never_takes_the_place_of_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("1")
    with pytest.raises(CoralError, match="Cannot write"), fresh_folder(tmp_path / "model"):
        pass
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# ------------------------------------------------------------------------------------------------------ sealed records


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5), st.data())
def test_any_changed_byte_of_a_record_is_noticed_or_changes_nothing(
    record: dict[str, Any], data: st.DataObject
) -> None:
    record.pop("digest", None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        write_record(path, record)
        assert read_record(path) == json.loads(json.dumps(record))
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        found, complaint = None, ""
        try:
            found = read_record(path)
        except CoralError as error:
            complaint = str(error)
        # else another key in place of the digest's own: all values are as they were
        unchanged = found is not None and {k: found[k] for k in found if k in record} == json.loads(json.dumps(record))
        assert str(path) in complaint or unchanged


def test_numbers_for_keys_and_scores_that_do_not_exist_keep_their_seal(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", {"layers": {9: 1, 10: 2}, "auroc": float("nan")})
    assert read_record(tmp_path / "r.json")["layers"] == {"9": 1, "10": 2}


def test_a_record_of_an_earlier_version_has_no_digest_and_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"a": 1})
    assert read_record(tmp_path / "r.json") == {"a": 1} == kept_record(tmp_path / "r.json")
    with pytest.raises(CoralError, match="says nothing of b; do it again"):
        read_record(tmp_path / "r.json", remedy="do it again", needs=("a", "b"))


def test_what_can_be_done_again_is_none_where_it_is_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert kept_record(path) is None
    write_record(path, {"a": 1})
    path.write_bytes(path.read_bytes().replace(b"1,", b"2,"))
    assert kept_record(path) is None
    with pytest.raises(CoralError, match="does not match its digest; make it again"):
        read_record(path)


def test_a_pipe_in_place_of_a_record_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.json")
    with pytest.raises(CoralError, match="not a plain file"):
        read_json(tmp_path / "r.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "{", "\ud800"])
def test_a_record_that_is_no_json_or_nested_too_deep_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CoralError, match="is not readable as JSON"):
        read_json(path)
