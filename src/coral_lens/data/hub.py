"""Ask the hub only where it can be reached: its client would retry for a minute before it says that it cannot."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

OFFLINE = "no network, or HF_HUB_OFFLINE is set"
"""Why the hub cannot be asked."""


@contextmanager
def hub_session() -> Iterator[bool]:
    """Have the hub's client look into its cache only where there is no network; yields whether it asks the hub."""
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets")
    settings: list[Any] = [constants, datasets.config] if datasets else [constants]
    before = [part.HF_HUB_OFFLINE for part in settings]
    asks = not constants.HF_HUB_OFFLINE and is_reachable(urlsplit(constants.ENDPOINT).hostname or "")
    for part in settings:
        part.HF_HUB_OFFLINE = part.HF_HUB_OFFLINE or not asks
    try:
        yield asks
    finally:
        for part, value in zip(settings, before, strict=True):
            part.HF_HUB_OFFLINE = value


def is_reachable(host: str) -> bool:
    """Whether a name can be looked up; behind a proxy, names need not resolve here."""
    if getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
