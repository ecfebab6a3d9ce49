"""The HTTP server: how it begins to serve, and how it hands its place over without losing a request."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress

import uvicorn

from kvshelf.service.process.supervisor import Place

READY = "kvshelf is ready at "
"""Begins the one line on standard output that says where the service listens."""

LEAVING = "leaving"
"""In the state of a request: set once the server accepts no more and finishes what is open."""

_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep theirs, which is 5 s in httpx and so in openai: else a
request now and then meets a connection that is being closed. (uvicorn's own value is 5 s, nginx's is 75.)"""


class HttpServer(uvicorn.Server):
    """uvicorn, which tells world and supervisor once it listens, and leaves when the supervisor's line ends.

    `grace_s` is how long what is open then, or at SIGTERM, may go on. The state of every request has an `asyncio.Event`
    by the name of `LEAVING`, for what only waits.
    """

    def __init__(self, app: object, place: Place, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]  # FastAPI is an ASGI application, uvicorn's own type is a union of Any
                loop="asyncio",
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
            host, port = sockets[0].getsockname()[:2]
            print(f"{READY}http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            with suppress(BrokenPipeError):  # then the line has ended, which is noticed next
                self._line.send(b".")
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
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
        """Accept no more, finish what is open, and close no connection on which a request may be on its way.

        uvicorn would close those at once on which it has answered everything, while another request comes in. Here
        they get their answer, which says that it is the last one, for as long as what is open may go on.
        """
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self._grace_s
        while self.server_state.connections and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.config.timeout_graceful_shutdown = 1  # what is open now has had its time


def cut_off_unread(listener: socket.socket, deadline_s: float) -> None:
    """Connections that will be accepted, and whose other side takes nothing for so long, are cut off."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        # Nothing above TCP can end a connection whose reader has stopped: closing it waits for what is unsent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(deadline_s * 1000))
