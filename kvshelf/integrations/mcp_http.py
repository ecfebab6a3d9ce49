"""MCP over HTTP, behind what bounds the requests of a service: key before body, connections, deadlines, held bytes, and
a process of its own for what is large. Needs no Ray."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any, Final

from mcp.server.mcpserver import MCPServer
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvshelf.api.strict import JsonBounds
from kvshelf.client import AsyncClient, Retries
from kvshelf.errors import BodyTooLarge, ConnectionFailed, NoWorker
from kvshelf.integrations.mcp_request import PutMessage, bearer
from kvshelf.service.access.keys import ANYONE, REREAD_S, Access, KeyCaller, require_local
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.http import errors, server
from kvshelf.service.http.parsing import LARGE_BYTES, Parser
from kvshelf.service.http.receiving import read_body
from kvshelf.service.observe import logs
from kvshelf.service.process.supervisor import alone
from kvshelf.service.settings import Settings, is_loopback, load_settings
from kvshelf.workers.replica.calls import Computing

_MOST_KNOWN: Final = 4096


@dataclass
class ServiceKeys:
    """The keys of the service at `url`, which is asked whose a key is; its answer holds for `REREAD_S`. local: whether
    only this machine's programs and pages may call."""

    url: str | None
    local: bool
    _known: dict[str, tuple[float, KeyCaller]] = field(default_factory=dict)

    async def identified(self, headers: Headers) -> KeyCaller:
        """The caller who sent these headers. Raises `Unauthorized`, `Forbidden`, and `NoWorker` without a service."""
        if self.local:
            require_local(headers, ())
        key = bearer(headers)
        name = hashlib.sha256(key.encode()).hexdigest()
        until, caller = self._known.get(name, (0.0, ANYONE))
        if time.monotonic() < until:
            return caller
        try:
            async with AsyncClient(self.url, api_key=key, retries=Retries(max_retries=0)) as client:
                scopes = (await client.limits()).scopes
        except ConnectionFailed as error:
            raise NoWorker(f"the service does not answer: {error.message}") from error
        if scopes is not None:  # the service does not name the tenant, so that each key has limits of its own
            caller = KeyCaller(name, frozenset(scopes), name[:16])  # type: ignore[arg-type]  # a newer one may have more
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[name] = (time.monotonic() + REREAD_S, caller)
        return caller


class BoundedMessages:
    """Gives the application of the package messages whose JSON is within the bounds of a body, and not large. The text
    of a large one is in the request's state, as `text`: bytes in UTF-8."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._computing = Computing()
        self._parser = Parser(settings, self._computing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        data = bytes(await self._bounded(request))
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": data, "more_body": False}

        await self._app(scope, replay, send)

    async def _bounded(self, request: Request) -> bytes | bytearray:
        body = await read_body(request, self._settings)
        if len(body) <= LARGE_BYTES:
            await self._computing.run(JsonBounds().take, body)
            return body
        apart = await self._parser.parsed(PutMessage, body, request.state.caller.tenant)
        if len(apart.message) > LARGE_BYTES:
            raise BodyTooLarge(
                f"beside its text this call of put has {len(apart.message)} bytes; at most {LARGE_BYTES} are taken"
            )
        request.state.text = apart.text
        return apart.message


def bounded(app: ASGIApp, settings: Settings, keys: ServiceKeys) -> ASGIApp:
    """The application behind the limits of a service with these settings."""
    limits = TenantLimits(
        settings.tenant_max_concurrent, settings.tenant_requests_per_minute, max_held_bytes=settings.max_held_bytes
    )
    admitted = Access(BoundedMessages(app, settings), keys=keys, allowed_hosts=(), limits=limits)
    return errors.RequestIds(admitted)


async def _alive(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def run(mcp: MCPServer[Any], url: str | None, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM, with the limits of a service with the settings of the environment."""
    settings = load_settings()
    logs.configure(settings.log_level)
    AsyncClient(url)  # a bad URL is refused now, and the authorities of TLS are read before there is a loop to hold up

    app = mcp.streamable_http_app(
        streamable_http_path=errors.MCP,
        stateless_http=True,
        max_request_body_size=settings.max_body_bytes,
        host=host,
    )
    app.router.add_route("/livez", _alive)
    with alone(host, port) as place:
        server.run(bounded(app, settings, ServiceKeys(url, is_loopback(host))), place, settings)
