"""Run the application until a signal ends it: no new work is then taken, what waits is answered, and the command ends well."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from coral_lens.errors import CoralError
from coral_lens.serve.app import make_app
from coral_lens.serve.service import Service

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.serve.lenses import ServedLenses
    from coral_lens.serve.settings import Address, ServeSettings

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the server."""
IDLE_SECONDS = 75
"""How long a connection may be idle: longer than clients and proxies keep theirs (5 to 60 s). One that the server closes first
may be closed just when a request is sent on it, which is then lost."""
LOOK = 0.05
"""Seconds between two looks at whether it is ready, or has failed."""


class LensServer:
    """Serves lenses at an address, which is taken when it is made."""

    def __init__(self, model: Model, lenses: ServedLenses, settings: ServeSettings) -> None:
        import uvicorn

        self._listener = listen(settings.address)
        self.service = Service(model, lenses, settings)
        app = make_app(self.service)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        # uvicorn would raise a signal again once it has ended, and the command would not end well
        self._server.capture_signals = lambda: ending(self._server)  # type: ignore[method-assign]

    @property
    def address(self) -> str:
        """Where it is found."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, announce: Callable[[str], None] = print) -> None:
        """Serve until a signal comes, or `stop`; `announce` is told the address once questions can be answered."""
        threading.Thread(target=self._watch, args=(announce,), daemon=True).start()
        with self._listener:
            self._server.run(sockets=[self._listener])
        if self.service.failure is not None:
            raise self.service.failure

    def stop(self) -> None:
        """End as a signal would: what waits is answered first."""
        self._server.should_exit = True

    def _watch(self, announce: Callable[[str], None]) -> None:
        """Announce the address when all is ready; end where the thread that owns the model has failed."""
        is_announced = False
        while not self._server.should_exit:
            if self.service.failure is not None:
                self.stop()
            elif self._server.started and self.service.is_ready and not is_announced:
                is_announced = True
                announce(self.address)
            time.sleep(LOOK)


def listen(address: Address) -> socket.socket:
    """Return a socket that has an address, or say why it cannot."""
    try:
        family, *_, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise CoralError(
            f"Nothing can listen on {address.host}, port {address.port}: {reason}; choose another --port or --host."
        ) from None
    return listener


@contextmanager
def ending(server: Any) -> Iterator[None]:
    """Have signals end a server of uvicorn, and do nothing else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, server.handle_exit) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
