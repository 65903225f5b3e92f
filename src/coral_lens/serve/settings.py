"""How lenses are served, as settings. Light: they are the options of `coral serve`."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from coral_lens.errors import CoralError
from coral_lens.storage.settings import Count, CountOrZero, Range, Settings

ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")
"""As browsers send it: no path, no star."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""What a client on the same machine may call the server."""


@dataclass(frozen=True)
class Address(Settings):
    """Where the server listens, and who may ask it."""

    host: str = "127.0.0.1"
    """Address to listen on. Any that others can reach needs --api-key-env or --no-auth."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0 takes one that is free."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key which clients must send (`Authorization: Bearer KEY`)."""
    no_auth: bool = False
    """Let everybody who can reach the address ask, without a key."""
    allow_host: tuple[str, ...] = ()
    """Without a key on this machine only, a further name that clients may call the server by; may be given several times."""

    allow_origin: tuple[str, ...] = ()
    """Site whose pages may ask from a browser and read answers, such as https://example.org; may be given several times. By
    default none may (CORS)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.allow_origin:
            if not ORIGIN.fullmatch(origin):
                raise CoralError(
                    f"--allow-origin {origin} is no origin of pages: give scheme, host and port alone, as in "
                    "https://example.org or http://localhost:3000."
                )
        if self.api_key_env is not None and self.no_auth:
            raise CoralError("--api-key-env and --no-auth exclude each other; give one of them.")
        if not self.is_loopback and self.api_key_env is None and not self.no_auth:
            raise CoralError(
                f"--host {self.host} can be reached by others: give --api-key-env NAME, the environment variable that holds a "
                "key, or --no-auth if everybody may ask."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def key(self) -> str | None:
        """The key that clients must send, if any."""
        if self.api_key_env is None:
            return None
        try:
            key = os.environ.get(self.api_key_env, "").strip()
        except UnicodeError:  # no name of a variable
            key = ""
        if not key:
            raise CoralError(f"The environment variable {self.api_key_env} is not set; put the key of clients there.")
        return key

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names that a request may call the server by, in small letters; None where any will do.

        Without a key, a page in a browser on this machine could have its own name lead here, and read the answers.
        """
        if not self.is_loopback or self.api_key_env is not None or self.no_auth:
            return None
        return (*LOOPBACK_NAMES, *map(str.lower, (self.host, *self.allow_host)))


@dataclass(frozen=True)
class Limits(Settings):
    """What a request may hold."""

    max_body: Count = 2**20
    """Bytes of a request."""
    max_questions: Count = 400
    """Questions of a request."""
    max_options: Annotated[int, Range(2, 10_000)] = 255
    """Options of a question."""
    max_tokens: Count = 8192
    """Tokens of a question with its input and all its options; a longer one is refused by itself."""


@dataclass(frozen=True)
class Batching(Settings):
    """How requests wait and share batches."""

    queue: Count = 512
    """Questions that may wait; beyond that, clients are asked to come again later (429)."""
    deadline: Annotated[float, Range(above=0, most=86_400)] = 120.0
    """Seconds after which a request is given up."""
    max_wait_ms: Annotated[float, Range(0, 10_000)] = 5.0
    """Milliseconds that a question waits for others to share its batch, where others ask too."""
    batch_tokens: Count | None = None
    """Tokens at which a batch is full. By default what keeps all threads busy."""
    cache_mb: CountOrZero = 512
    """Megabytes for texts that recur from request to request, such as a document: they are computed once. 0 keeps none."""
    one_by_one: bool = False
    """Score every question by itself, without caches: slower, and answers equal those of `coral predict` for that question to
    the bit."""


@dataclass(frozen=True)
class Answering(Settings):
    """What is made of answers."""

    refuse_abstained: bool = False
    """Answer with a refusal where the lens abstains; by default its answer is given, and marked."""
    log: Path | None = None
    """File to which every question and its answer are added, one JSON line each. By default no text is written anywhere."""


@dataclass(frozen=True)
class ServeSettings(Settings):
    """How lenses are served."""

    address: Address = Address()
    """Where the server listens, and who may ask it."""
    limits: Limits = Limits()
    """What a request may hold."""
    batching: Batching = Batching()
    """How requests wait and share batches."""
    answering: Answering = Answering()
    """What is made of answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batching.queue < self.limits.max_questions:
            raise CoralError(
                f"--queue {self.batching.queue} is shorter than one request may be (--max-questions "
                f"{self.limits.max_questions}); raise the one or lower the other."
            )
