"""The command as a process: it is ready within seconds, and a signal ends it when what it has taken is answered."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from support.servers import PATIENCE, Shop

from coral_lens.errors import CoralError
from coral_lens.serve.server import listen
from coral_lens.serve.settings import Address


@contextmanager
def command(shop: Shop, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`coral serve` in a process of its own, and its address."""
    words = [
        "serve",
        "--lens",
        str(shop.folder / "first"),
        "--model",
        str(shop.folder / "model"),
        "--port",
        "0",
        *options,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "coral_lens", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+) serves first\n", process.stdout.readline())
        assert found, process.communicate(timeout=PATIENCE)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def test_a_signal_ends_the_command_well_once_what_waits_is_answered(shop: Shop) -> None:
    body = {"questions": [{"question": f"{i} + 2?", "options": ["3", "4"]} for i in range(400)]}
    replies: list[Any] = []
    # one by one they take so long that the signal comes while most of them wait
    with command(shop, "--one-by-one") as (process, address):

        def ask() -> None:
            replies.append(httpx2.post(f"{address}/v1/predict", json=body, timeout=PATIENCE))

        thread = threading.Thread(target=ask)
        thread.start()
        while "coral_queue_questions 0.0" in httpx2.get(f"{address}/metrics", timeout=PATIENCE).text:
            assert thread.is_alive()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        thread.join(PATIENCE)
        out, err = process.communicate(timeout=PATIENCE)
    (reply,) = replies
    assert reply.status_code == 200
    assert len(reply.json()["answers"]) == 400
    assert process.returncode == 0, (out, err)
    assert "Traceback" not in err
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{address}/health")


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CoralError, match=f"Nothing can listen on 127.0.0.1, port {port}: Address already in use"):
            listen(Address(port=port))


@pytest.mark.parametrize("host", ["nowhere.invalid", "x" * 300, "a\x00b"])
def test_a_host_that_is_none_is_one_sentence(host: str) -> None:
    with pytest.raises(CoralError, match="Nothing can listen on"):
        listen(Address(host=host, no_auth=True))
