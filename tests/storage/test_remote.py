"""Objects at a URL are read, put whole and listed; what goes wrong there is one sentence, within seconds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support.s3 import s3_server

from coral_lens.errors import CoralError
from coral_lens.storage import remote
from coral_lens.storage.remote import Objects, is_flattened, is_url, local_folder


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> Objects:
    home = "memory://" if request.param == "memory" else f"{request.getfixturevalue('s3')}/"
    return Objects(f"{home}{secrets.token_hex(4)}/states")


def test_what_was_put_is_read_listed_and_removed(objects: Objects, tmp_path: Path) -> None:
    assert objects.read("a") is None
    assert objects.sizes() == {}
    assert not objects.copy("a", tmp_path / "copy")
    (tmp_path / "file").write_bytes(b"0123456789")
    objects.put("a", tmp_path / "file")
    assert objects.read("a") == b"0123456789"
    assert objects.read("a", 2, 5) == b"234"
    assert objects.copy("a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"0123456789"
    assert objects.sizes() == {"a": 10}
    assert objects.holds("a")
    objects.remove("a")
    objects.remove("a")
    assert not objects.holds("a")


def test_of_two_that_create_an_object_one_succeeds(objects: Objects) -> None:
    assert objects.create("a", b"first")
    assert not objects.create("a", b"second")
    assert objects.create("a", b"first"), "whoever put these bytes there"
    assert objects.read("a") == b"first"


def test_a_server_that_knows_no_conditions_is_written_to_and_read_back(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, _ = objects._opened
    put = system.pipe_file

    def plain(path: str, data: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError("If-None-Match")
        put(path, data)

    monkeypatch.setattr(system, "pipe_file", plain)
    assert objects.create("a", b"first")
    assert not objects.create("a", b"second")


def test_only_what_has_a_protocol_is_an_address(tmp_path: Path) -> None:
    assert is_url("s3://bucket/states")
    assert is_url("memory://states")
    assert not is_url("states/mine")
    assert not is_url("C:/states")
    assert not is_url(tmp_path)
    assert not is_url(f"file://{tmp_path}")
    assert local_folder(f"file://{tmp_path}") == tmp_path
    assert is_flattened(Path("s3://bucket/states"))
    assert not is_flattened(Path("states/s3:/x"))
    with pytest.raises(CoralError, match="was an address before it became a Path"):
        local_folder(Path("s3://bucket/states"))


# --------------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nothing://a/b", r"Cannot open nothing://a/b: Protocol not known: nothing\."),
        ("memory://", "names no folder"),
    ],
)
def test_an_address_that_means_nothing_is_refused(url: str, said: str) -> None:
    with pytest.raises(CoralError, match=said):
        Objects(url).sizes()


def test_a_bucket_that_is_not_there_is_named(s3: str) -> None:
    with pytest.raises(CoralError, match=r"s3://nowhere/states cannot be used: there is no such bucket"):
        Objects("s3://nowhere/states").read("a")


def test_missing_keys_are_one_sentence(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(
        CoralError, match=r"Cannot open s3://states/x: Unable to locate credentials\. Check .* the keys"
    ):
        Objects(f"{s3}/x").read("a")


def test_a_server_that_forbids_it_is_one_sentence(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(f"{s3}/forbidden")
    system, _ = objects._opened

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied.")

    monkeypatch.setattr(system, "cat_file", refuse)
    with pytest.raises(CoralError, match=r"Cannot read a of s3://states/forbidden: Access Denied\. Check"):
        objects.read("a")


def test_a_host_that_does_not_answer_is_given_up(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SECONDS", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(CoralError, match=r"s3://states/x does not answer within|Could not connect"):
        Objects(f"{s3}/x").read("a")
    assert time.monotonic() - begun < 20


def test_a_full_bucket_is_one_sentence(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, _ = objects._opened

    def full(*_: object, **__: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(system, "put_file", full)
    with pytest.raises(
        CoralError, match=rf"Cannot write a to {objects.url}: .*Disk quota exceeded.*finished work is kept"
    ):
        objects.put("a", tmp_path / "a")


def test_the_file_system_keeps_no_listing_of_its_own(s3: str) -> None:
    objects = Objects(f"{s3}/fresh")
    assert objects.sizes() == {}
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file("states/fresh/b", b"1")
    assert objects.sizes() == {"b": 1}
