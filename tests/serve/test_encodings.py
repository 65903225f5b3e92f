"""A compressed body is read as what it was, no further than a body may be long, and a broken one is a sentence."""

from __future__ import annotations

import gzip
import json

import pytest
import typesafe_sdk as typesafe
from backports import zstd
from support.servers import Running

from coral_lens.serve import encodings
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.encodings import decoded

COMPRESS = {"gzip": gzip.compress, "zstd": zstd.compress}
MOST = 10_000


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_is_read_as_it_was_and_no_further_than_it_may_be_long(encoding: str) -> None:
    compress = COMPRESS[encoding]
    assert decoded(compress(b"x" * MOST), encoding, MOST) == b"x" * MOST
    bomb = compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    for content, status in (
        (bomb, 413),
        (compress(b"x" * (MOST + 1)), 413),
        (b"\x28\xb5", 400),
        (b"", 400),
        (compress(b"some words")[:-3], 400),
        (compress(b"some words") + compress(b"and more"), 400),
        (compress(b"some words") + b"and more", 400),
    ):
        with pytest.raises(Complaint) as raised:
            decoded(content, encoding, MOST)
        assert raised.value.status == status


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "zstd"])
def test_a_body_that_cannot_be_read_here_is_refused_in_words(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "ZSTD_MODULES", ("no.such.module",))
    with pytest.raises(Complaint, match="compression=False") as raised:
        decoded(b"x", encoding, MOST)
    assert raised.value.status == 415


def test_typesafes_client_may_compress_what_it_sends(server: Running) -> None:
    """As it does by itself with bodies from 1,024 bytes on."""
    questions = {f"q{i}": typesafe.Noul(instructions="Is it about billing? " * 15) for i in range(3)}
    never = typesafe.RetryPolicy(max_retries=0)
    with typesafe.TypeSafeClient(api_key="none", base_url=server.address, compression="zstd", retry=never) as client:
        found = client.system_one(state="I was charged twice. " * 15, questions=questions, model="first")
    assert [0 < found.nouls[name].noul < 1 for name in questions] == [True] * 3


def test_a_compressed_body_is_answered(server: Running) -> None:
    body = {"lens": "first", "questions": {"question": "2 + 2?", "options": ["3", "4"]}}
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with server.client() as client:
        plain = client.post("/v1/predict", json=body)
        reply = client.post("/v1/predict", content=gzip.compress(json.dumps(body).encode()), headers=headers)
    assert reply.json()["answers"] == plain.json()["answers"]
