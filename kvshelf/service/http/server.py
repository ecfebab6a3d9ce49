"""The HTTP server: how it starts, which connections it takes, and how it hands over to its successor."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvshelf.service.http.place import ServerPlace
from kvshelf.service.settings import Settings

MAX_HEADER_BYTES: Final = 64 << 10
"""Request line and headers together. uvicorn's faster parser (httptools) has no such limit."""

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 27\r\n\r\ntoo many connections; retry"
)

READY = "kvshelf is ready at "
"""Start of the line on standard output with the service's address."""

LEAVING = "leaving"
"""Name of the event in a request's state, set once the server takes no more connections and finishes open requests."""

_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep theirs (5 s in httpx and openai), because a request may
otherwise meet a connection that is being closed. (uvicorn's default is 5 s, nginx's is 75.)"""


@dataclass
class ConnectionLimits:
    """At most `most` connections, and `most_per_address` from one address. Each must send the headers of its first
    request, and of any request that it has begun, within `headers_s` seconds."""

    most: int
    most_per_address: int
    headers_s: float
    by_address: Counter[str] = field(default_factory=Counter)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, within `ConnectionLimits`."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._address = ""
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        limits, self._address = self._limits, self.client[0] if self.client else ""
        limits.by_address[self._address] += 1
        if limits.by_address.total() > limits.most or limits.by_address[self._address] > limits.most_per_address:
            transport.write(_BUSY)
            transport.close()
            return
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._expect_nothing()
        elif self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._limits.by_address[self._address] -= 1
        if not self._limits.by_address[self._address]:
            del self._limits.by_address[self._address]
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._late = self.loop.call_later(self._limits.headers_s, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer(uvicorn.Server):
    """A uvicorn server that announces its address to standard output and the supervisor, and stops when told.

    It stops when the supervisor closes its end of the line, or at SIGTERM; open requests then have `grace_s` seconds.
    The state of every request has an `asyncio.Event` named `LEAVING`, so that waiting requests can end at once.
    """

    def __init__(self, app: object, place: ServerPlace, *, limits: ConnectionLimits, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]  # FastAPI is an ASGI application, uvicorn's own type is a union of Any
                loop="asyncio",
                http=partial(BoundedConnection, limits),  # type: ignore[arg-type]  # called as a class is
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(grace_s),
            )
        )
        self._line = place.line
        self._grace_s = grace_s
        self._leaving = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._replaced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[LEAVING] = self._leaving
        await super().startup(sockets)
        if self.started and sockets:
            # Connections inherit it, so that the port can be bound again while they wait for their end: see `bound`.
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            host, port = sockets[0].getsockname()[:2]
            print(f"{READY}http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            with suppress(BrokenPipeError):  # the line has ended, which `_follow` notices
                self._line.send(b".")
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        with suppress(ConnectionResetError):  # the supervisor died before it read that this server is ready
            await asyncio.get_running_loop().sock_recv(self._line, 1)
        self._replaced = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._leaving.set()
        if self._following is not None:
            self._following.cancel()
        if self._replaced:
            await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Accepts no more connections and finishes the open ones, within `grace_s`.

        uvicorn would close idle connections at once, although a request may be on its way. Here such a request still
        gets an answer, which announces the end of the connection.
        """
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self._grace_s
        while self.server_state.connections and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.config.timeout_graceful_shutdown = 1  # open requests have had their time


def run(app: object, place: ServerPlace, settings: Settings) -> None:
    """Serves an application until its server is told to stop, within the limits of the settings."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        # Cuts off clients that read nothing. Only TCP can do that: closing a connection would wait for unsent bytes.
        unread_ms = int(settings.unread_deadline_s * 1000)
        place.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    limits = ConnectionLimits(
        settings.max_connections, settings.max_connections_per_address, settings.headers_deadline_s
    )
    HttpServer(app, place, limits=limits, grace_s=settings.shutdown_grace_s).run(sockets=[place.listener])
