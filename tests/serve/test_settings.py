"""A server that others can reach needs a key, or that everybody is let in by name."""

from __future__ import annotations

import pytest

from coral_lens.errors import CoralError
from coral_lens.serve.settings import Address, Batching, Limits, ServeSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.5.5.5"])
def test_this_machine_needs_no_key_and_has_names_of_its_own(host: str) -> None:
    address = Address(host=host, allow_host=("box.local",))
    assert address.is_loopback
    assert {"localhost", "127.0.0.1", "::1", host, "box.local"} == set(address.names or ())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_any_other_host_needs_a_key_or_an_explicit_word(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CoralError, match="can be reached by others: give --api-key-env NAME"):
        Address(host=host)
    assert Address(host=host, no_auth=True).key is None
    monkeypatch.setenv("K", " secret ")
    with_key = Address(host=host, api_key_env="K")
    assert (with_key.key, with_key.names) == ("secret", None)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_key_that_is_not_there_is_said(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K", raising=False)
    if value is not None:
        monkeypatch.setenv("K", value)
    with pytest.raises(CoralError, match="The environment variable K is not set"):
        _ = Address(api_key_env="K").key


@pytest.mark.parametrize("origin", ["*", "example.org", "https://example.org/", "null", "https://*.example.org", ""])
def test_what_is_no_origin_of_pages_is_said(origin: str) -> None:
    with pytest.raises(CoralError, match="is no origin of pages: give scheme, host and port alone"):
        Address(allow_origin=(origin,))
    assert Address(allow_origin=("https://example.org", "http://localhost:3000", "http://[::1]:3000")).allow_origin


def test_a_key_and_no_key_exclude_each_other() -> None:
    with pytest.raises(CoralError, match="exclude each other"):
        Address(api_key_env="K", no_auth=True)


def test_a_queue_has_room_for_the_largest_request() -> None:
    with pytest.raises(CoralError, match="--queue 10 is shorter than one request may be"):
        ServeSettings(batching=Batching(queue=10), limits=Limits(max_questions=11))
