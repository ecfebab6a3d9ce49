"""The HTTP server: how it starts, and how it hands over to its successor without losing a request."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from functools import partial

import uvicorn

from kvshelf.service.http.connections import MAX_HEADER_BYTES, BoundedConnection, ConnectionLimits
from kvshelf.service.http.place import ServerPlace
from kvshelf.service.settings import Settings

READY = "kvshelf is ready at "
"""Start of the line on standard output with the service's address."""

LEAVING = "leaving"
"""Name of the event in a request's state, set once the server takes no more connections and finishes open requests."""

_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep theirs (5 s in httpx and openai), because a request may
otherwise meet a connection that is being closed. (uvicorn's default is 5 s, nginx's is 75.)"""


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
