"""Authentication: the tenant and scopes of each request, from its API key alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Protocol

import structlog
from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from kvshelf.errors import Forbidden, InvalidRequest, RateLimited, Unauthorized
from kvshelf.service.access.keyfile import SCOPES, KeyFile, Keys, Scope
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.http.errors import error_response
from kvshelf.service.settings import is_loopback
from kvshelf.workers.replica import calls
from kvshelf.workers.replica.fair_queue import LoopTurns

log = structlog.get_logger("kvshelf.service")

OPEN_PATHS: Final = frozenset({"/", "/livez", "/readyz", "/health", "/openapi.json", "/docs"})
"""Paths without a key, besides the files of the page; /health is of `kvshelf vllm-proxy`. Every other path needs one,
also if its route forgets to ask."""

PAGE_FILES: Final = "/page/"

REREAD_S: Final = 0.5


@dataclass(frozen=True)
class KeyCaller:
    """The tenant of a request and its scopes."""

    tenant: str
    scopes: frozenset[Scope]
    key_id: str | None

    def within(self, deadline_s: float | None) -> calls.Caller:
        """As replicas know it, with so many seconds for a call."""
        return calls.Caller(self.tenant, deadline_s)

    def require(self, scope: Scope) -> None:
        """Raises `Forbidden` without the scope."""
        if scope not in self.scopes:
            raise Forbidden(
                f"this needs a key with the scope {scope!r}; the key {self.key_id} has "
                f"{', '.join(scope for scope in SCOPES if scope in self.scopes)}"
            )


ANYONE: Final = KeyCaller("default", frozenset(SCOPES), None)
"""Every caller of a service without keys, see `require_local`. All have one tenant; Authorization is ignored."""


def _caller(request: Request) -> KeyCaller:
    caller: KeyCaller = request.state.caller
    return caller


def _with_scope(scope: Scope) -> Callable[[Request], KeyCaller]:
    def with_scope(request: Request) -> KeyCaller:
        caller = _caller(request)
        caller.require(scope)
        return caller

    return with_scope


AnyCaller = Annotated[KeyCaller, Depends(_caller)]
"""The caller of a route that asks for a scope itself."""

Reader = Annotated[KeyCaller, Depends(_with_scope("read"))]
"""The caller of a route that needs the scope `read`."""

Writer = Annotated[KeyCaller, Depends(_with_scope("write"))]
"""The caller of a route that needs the scope `write`."""

Admin = Annotated[KeyCaller, Depends(_with_scope("admin"))]
"""The caller of a route that needs the scope `admin`."""


class KeyHolders(Protocol):
    """Who knows whose a key is."""

    async def identified(self, headers: Headers) -> KeyCaller:
        """The caller who sent these headers. Raises `Unauthorized`."""


class LiveKeys:
    """The keys of a file, reloaded when it changes. While the file is broken, the last valid keys apply."""

    def __init__(self, file: KeyFile) -> None:
        """Raises `InvalidRequest` if the file cannot be used."""
        self._file = file
        self._records = file.read()
        self._keys = Keys(self._records)
        self._problem = ""

    @property
    def tenants(self) -> list[str]:
        """All tenants that have a key."""
        return sorted({record.tenant for record in self._records})

    def caller(self, headers: Headers) -> KeyCaller:
        """The caller who sent these headers. Raises `Unauthorized`."""
        values = [*headers.getlist("authorization"), *(f"Bearer {key}" for key in headers.getlist("x-api-key"))]
        if not values:
            raise Unauthorized("this service needs an API key in the header: Authorization: Bearer kvsk_...")
        scheme, _, key = values[0].partition(" ")
        if len(values) > 1 or scheme.lower() != "bearer":
            raise Unauthorized("send one key, as Authorization: Bearer kvsk_... or as X-Api-Key: kvsk_...")
        return self.holder(key.strip())

    async def identified(self, headers: Headers) -> KeyCaller:
        """As `caller`."""
        return self.caller(headers)

    def holder(self, key: str) -> KeyCaller:
        """The caller whose key this is. Raises `Unauthorized`."""
        record = self._keys.identify(key)
        return KeyCaller(record.tenant, frozenset(record.scopes), record.id)

    def reread(self) -> None:
        """Read the file again; repeated every `REREAD_S`, so that a revoked key stops working within a second."""
        # Always read the whole (small) file: within one clock tick, modification times prove nothing.
        try:
            records = self._file.read()
        except InvalidRequest as error:
            if error.message != self._problem:
                log.error("the API keys stay as they were", problem=error.message, keys=len(self._records))
            self._problem = error.message
            return
        self._problem = ""
        if records != self._records:
            log.info("API keys read", keys=len(records), file=str(self._file.path))
            self._records, self._keys = records, Keys(records)


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?")


def require_local(headers: Headers, allowed_hosts: Collection[str]) -> None:
    """Raises `Forbidden` for a host that is neither loopback nor allowed, and for a web page of another origin.

    A browser runs pages of all sites on this machine. By DNS rebinding such a page reaches the service under the page's
    own host name; with a form, or a fetch without CORS, it can send a request whose answer it may not read.
    """
    host = headers.get("host", "").lower()
    name = match[1] or match[2] if (match := _HOST.fullmatch(host)) else host
    if not (is_loopback(name) or name in map(str.lower, allowed_hosts)):
        raise Forbidden(
            f"the host {name!r:.80} is not this machine, and this service has no API keys; call 127.0.0.1 or "
            "localhost, list the host in KVSHELF_ALLOWED_HOSTS, or start the service with keys"
        )
    origin = headers.get("origin", "").lower()
    if (origin and origin.partition("://")[2] != host) or headers.get("sec-fetch-site") == "cross-site":
        raise Forbidden(
            f"a web page of another origin ({origin or 'cross-site'!r:.80}) may not call a service without API keys; "
            "start the service with keys, or call it from a program"
        )


class Access:
    """Admits requests, tenants in turn: identifies the caller and applies the tenant's limits. Plain ASGI, like
    `RequestIds`."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyHolders | None, allowed_hosts: Collection[str], limits: TenantLimits
    ) -> None:
        self._app = app
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._limits = limits
        self._turns = LoopTurns()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(PAGE_FILES):
            await self._app(scope, receive, send)
            return
        caller = ANYONE
        if self._keys is None:
            require_local(Headers(scope=scope), self._allowed_hosts)
        else:
            caller = await self._keys.identified(Headers(scope=scope))
            structlog.contextvars.bind_contextvars(tenant=caller.tenant, key=caller.key_id)
        scope.setdefault("state", {})["caller"] = caller
        calls.tenant_at_work.set(caller.tenant)

        async def send_with_rate(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._limits.headers(caller.tenant))
            await send(message)

        try:
            with self._limits.request(caller.tenant) as hold:
                scope["state"]["hold"] = hold
                scope["state"]["turn"] = turn = partial(self._turns.turn, caller.tenant)
                await turn()
                await self._app(scope, receive, send_with_rate)
        except RateLimited as error:  # raised by these limits; errors of routes are already answered
            await error_response(error, scope)(scope, receive, send_with_rate)
