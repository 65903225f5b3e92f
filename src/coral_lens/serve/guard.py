"""What stands before every route: the key, the names of the host, the size of a body, headers, and the count of requests.

It is a plain ASGI application around another, and imports nothing of a web framework.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from coral_lens.serve.complaints import Complaint
from coral_lens.serve.encodings import decoded, too_long
from coral_lens.serve.metrics import ServeMetrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_ROUTES = ("/health", "/ready")
"""What answers without a key: they say nothing but that the server is there."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
"""Of every answer. There is none that lets pages of other sites read answers, unless these are named."""
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Max-Age": "600",
}
"""What a browser is told that asks before a page of a named site does."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a page of ours may do: run and ask what comes from here, nothing that stands inside of it, and nothing of others."""


@dataclass(frozen=True)
class Doors:
    """Who may ask for what."""

    routes: frozenset[str]
    """Paths that are counted under their own names."""
    pages: frozenset[str]
    """Those of them that are parts of pages: they say nothing of anybody, and are given without a key."""
    key: str | None
    """What clients must send; None lets everybody in."""
    names: tuple[str, ...] | None
    """What clients may call the server; None lets them call it anything."""
    origins: tuple[str, ...] = ()
    """Sites whose pages may ask and read answers."""

    def shared(self, scope: Message) -> dict[str, str]:
        """Return the headers that let a page of another site read an answer, if it is of one of these."""
        origin = headers_of(scope).get(b"origin", b"").decode("latin-1")
        if not self.origins:
            return {}
        return {"Vary": "Origin"} | ({"Access-Control-Allow-Origin": origin} if origin in self.origins else {})


@dataclass(frozen=True)
class Guard:
    """An application behind its checks."""

    app: App
    metrics: ServeMetrics
    doors: Doors
    max_body: int
    """Bytes of a body at most."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, seen = time.perf_counter(), {"status": 500, "begun": 0}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.update(status=message["status"], begun=1)
                policy = {"Content-Security-Policy": PAGE_POLICY} if scope["path"] in self.doors.pages else {}
                added = HEADERS | policy | self.doors.shared(scope)
                own = [(name.lower().encode(), value.encode()) for name, value in added.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            if is_preflight(scope) and "Access-Control-Allow-Origin" in self.doors.shared(scope):
                raw = [(name.lower().encode(), value.encode()) for name, value in PREFLIGHT.items()]
                await sending({"type": "http.response.start", "status": 204, "headers": raw})
                await sending({"type": "http.response.body", "body": b""})
                return
            self._check(scope)
            await self.app(scope, await whole_body(scope, receive, self.max_body), sending)
        except Complaint as complaint:
            await complain(complaint, sending)
        except Exception:
            if not seen["begun"]:
                raise
            # the application has answered and has told of it, and raises it again: a server would print what it says, texts too
        finally:
            path = scope["path"]
            route = path if path in self.doors.routes else "other"
            self.metrics.request(route, seen["status"], time.perf_counter() - start)

    def _check(self, scope: Message) -> None:
        """Refuse a request by its headers alone."""
        headers, doors = headers_of(scope), self.doors
        if doors.names is not None and host_name(headers.get(b"host", b"").decode("latin-1")) not in doors.names:
            raise Complaint(
                421, "This server answers to the names of its own machine only; start it with --allow-host NAME."
            )
        if doors.key is not None and scope["path"] not in (*OPEN_ROUTES, *doors.pages):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + doors.key.encode()):
                raise Complaint(401, "The key is missing or wrong; send it as `Authorization: Bearer KEY`.")


def is_preflight(scope: Message) -> bool:
    """Whether a browser asks, before a page of another site does, if it may; it sends no key."""
    return bool(scope["method"] == "OPTIONS" and b"access-control-request-method" in headers_of(scope))


def headers_of(scope: Message) -> dict[bytes, bytes]:
    """Return the headers of a request by their names in small letters."""
    return {name.lower(): value for name, value in scope["headers"]}


def host_name(host: str) -> str:
    """Return the name in a header `Host`, without its port and in small letters."""
    return (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower()


async def whole_body(scope: Message, receive: Receive, most: int) -> Receive:
    """Read the body of a request, and return what gives it on in one piece, and after it whether the client has gone."""
    parts: list[bytes] = []
    size, more = 0, scope["method"] not in ("GET", "HEAD")
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Complaint(400, "The body ended before it was whole.")
        size += len(message.get("body", b""))
        if size > most:
            raise too_long(most)
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    encoding = headers_of(scope).get(b"content-encoding", b"").decode("latin-1").strip().lower()
    body = decoded(b"".join(parts), encoding, most)
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return first.pop() if first else await receive()

    return given


async def complain(complaint: Complaint, send: Send) -> None:
    """Send a complaint."""
    body = json.dumps(complaint.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **complaint.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": complaint.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
