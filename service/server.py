"""The server around the service: its socket, its signals, and its parent process."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from cpsr.errors import ConfigError
from cpsr.service.access import Access, is_loopback

__all__ = ["bind", "serve"]

DRAIN_SECONDS = 5.0  # requests take milliseconds
PARENT_LOOK_SECONDS = 1.0
CONNECTIONS_MAX = 256  # requests beyond are answered 503: enough for some hundred polling pages
IDLE_SECONDS = 5  # after which a connection that has brought no complete request is closed
RETRY_SECONDS = 0.2
PORT_SECONDS = 15.0  # how long a job's service waits for the service of the previous life to end
CHILD_NICENESS = 10  # never more, beside training


def bind(host: str, port: int, access: Access, patience_seconds: float = 0.0) -> socket.socket:
    """Open the listening socket; port 0 takes a free one.

    Args:
        host: to listen on.
        port: to listen on.
        access: who may ask: without a token only this machine's loopback can be listened on.
        patience_seconds: how long a port that is in use is waited for.

    Raises:
        ConfigError: other machines could ask without a token, or the address cannot be used.
    """
    if access.token is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} would let other machines read this run without a token; use 127.0.0.1 (and an SSH tunnel), "
            "or give a token: --token-file, or the environment variable CPSR_SERVICE_TOKEN"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    until = time.monotonic() + patience_seconds
    while True:
        try:
            listener = socket.create_server((host, port), family=family)
            # Connections inherit it. asyncio sets it only on sockets that name their protocol, as these do not: an
            # answer's body then waited 40 ms for the client to acknowledge its head.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listener
        except (OSError, OverflowError) as error:
            if time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            raise ConfigError(
                f"cannot serve on {host} port {port}: {error}; choose another with --host or --port"
            ) from error


def serve(app: FastAPI, listener: socket.socket, parent: int | None = None) -> None:
    """Answer on `listener` until SIGTERM or SIGINT; requests under way are finished first.

    Args:
        app: the service.
        listener: its socket.
        parent: process that this one belongs to: it ends with it.
    """
    config = uvicorn.Config(
        app,
        http=_Connection,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=IDLE_SECONDS,
        log_level="error",  # clients cause warnings: no client may fill the log
        access_log=False,
        proxy_headers=False,  # the address of a client is that of its connection, whatever its headers
        server_header=False,
        timeout_graceful_shutdown=round(DRAIN_SECONDS),
    )
    server = uvicorn.Server(config)

    # uvicorn raises the signal again after its clean shutdown; that one must not kill this process.
    def stop(*_: object) -> None:
        server.should_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    if parent is not None:
        os.nice(CHILD_NICENESS)
        threading.Thread(target=_end_with, args=(parent, stop), name="cpsr-parent", daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Connection(H11Protocol):
    """A connection that is closed also if it never sends a whole request: the server's own limit begins later."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """A client has connected."""
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        """A request was answered."""
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        self.loop.call_later(self.timeout_keep_alive, self._end_idle, self.cycle)

    def _end_idle(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last:  # none has begun since
            self.transport.close()


def _end_with(parent: int, end: Callable[[], None]) -> None:
    """Call `end` when the parent process has died; a killed parent cannot do so itself."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_SECONDS)
    end()
