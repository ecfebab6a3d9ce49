"""The one place where exceptions become error envelopes, and where every response gets its `x-request-id`."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvshelf.api import ErrorBody, ErrorEnvelope
from kvshelf.api.strict import MissReason, refusal
from kvshelf.errors import (
    BodyTooLarge,
    CacheCorrupt,
    CacheExpired,
    Forbidden,
    InternalError,
    InvalidRequest,
    KvshelfError,
    MethodNotAllowed,
    ModelMismatch,
    NotFound,
    RateLimited,
    RequestTimeout,
    StoreUnavailable,
    Unauthorized,
    WorkerCrashed,
)
from kvshelf.service.observe.logs import note

log = structlog.get_logger("kvshelf.service")

LINGER_S = 2.0
"""How long the rest of a refused body is read and thrown away, so that the caller gets to read the refusal."""

_LITTLE_BYTES = 64 << 10
_STOPPED_RETRY_S = 1.0  # where another takes the place of this service, it is ready already
_BEFORE_THE_BODY = (BodyTooLarge, Forbidden, RateLimited, Unauthorized)

SAFE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""On every answer that does not say otherwise: what is on a shelf is for its caller alone, and no text is a script."""


def envelope(error: KvshelfError) -> ErrorEnvelope:
    """An error as it is put on the wire."""
    return ErrorEnvelope(
        error=ErrorBody(
            message=error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            miss_reason=miss_reason(error),
            details=error.details or None,
        )
    )


def wire(error: KvshelfError) -> dict[str, Any]:
    """The envelope as JSON."""
    return {"error": error_json(envelope(error).error)}


def error_json(body: ErrorBody) -> dict[str, Any]:
    """An error object as JSON. `miss_reason` and `details` are there when they say something, `param` always."""
    silent = {name for name in ("miss_reason", "details") if getattr(body, name) is None}
    return body.model_dump(mode="json", exclude=silent)


def miss_reason(error: KvshelfError) -> MissReason | None:
    """Why a cache that is or was on the shelf could not be used."""
    reason = str(error.details.get("reason"))
    if isinstance(error, CacheCorrupt):
        return "version" if reason.startswith(("newer_", "unknown_")) else "corrupt"
    if isinstance(error, CacheExpired):
        return "evicted" if reason == "evicted" else "expired"
    return "model_changed" if isinstance(error, ModelMismatch) else None


def error_response(error: KvshelfError) -> Response:
    note(code=error.code)
    headers = {}
    # A store that is down says nothing of itself; it is tried again about every second.
    retry_after_s = error.details.get("retry_after_s", 1.0 if isinstance(error, StoreUnavailable) else None)
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))  # whole seconds: RFC 9110, section 10.2.3
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="kvshelf"'
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"  # the rest of the body may come, but nobody reads it
    cls = _LingeringResponse if isinstance(error, _BEFORE_THE_BODY) else JSONResponse
    return cls(wire(error), status_code=error.status, headers=headers)


class _LingeringResponse(JSONResponse):
    """Closing a socket on unread bytes resets the connection, and the caller may never see why it was refused. So the
    answer goes out first, then what still arrives is discarded for a moment, then the connection closes.

    Where little is to come, uvicorn discards it, and the connection can be used again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _little_follows(Headers(scope=scope)):
            await super().__call__(scope, receive, send)
            return
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        end = time.monotonic() + LINGER_S
        try:
            async with asyncio.timeout(LINGER_S):
                while time.monotonic() < end:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _little_follows(headers: Headers) -> bool:
    announced = headers.get("content-length", "0")
    return "transfer-encoding" not in headers and announced.isdecimal() and int(announced) <= _LITTLE_BYTES


def translate(exc: BaseException) -> KvshelfError:
    """Any exception that reached the edge, as one of ours. What nobody expected is logged in full and told in short."""
    if isinstance(exc, KvshelfError):
        return exc
    if isinstance(exc, asyncio.CancelledError):
        # Not `NoWorker`, which says that nothing was done.
        return WorkerCrashed(
            "the service was stopped or restarted before it had answered; what was asked may have been done. Ask again",
            retry_after_s=_STOPPED_RETRY_S,
        )
    if isinstance(exc, ValidationError):
        return refusal(exc)
    if isinstance(exc, RequestValidationError):
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return InvalidRequest(f"{param}: {first['msg']}", param=param)
    log.error("bug", exc_info=exc)
    request_id = structlog.contextvars.get_contextvars().get("request_id", "unknown")
    return InternalError(f"this is a bug of kvshelf; please report it with the request id {request_id}")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Give the app, which has these routes, its error handlers and the request ids."""

    async def ours(_: Request, exc: Exception) -> Response:
        return error_response(translate(exc))

    async def framework(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        if exc.status_code == 404:
            return error_response(NotFound(f"there is no {where}; /openapi.json lists what there is"))
        if exc.status_code == 405:
            allowed = _methods(request, routes)
            response = error_response(MethodNotAllowed(f"{where} is not possible; allowed are {allowed}"))
            response.headers["allow"] = allowed
            return response
        return error_response(InvalidRequest(str(exc.detail)))

    app.add_exception_handler(KvshelfError, ours)
    app.add_exception_handler(RequestValidationError, ours)
    app.add_exception_handler(ValidationError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_middleware(RequestIds)


def _methods(request: Request, routes: Sequence[BaseRoute]) -> str:
    """What the path of a request can do, over all its routes; Starlette names the methods of the first one only."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    # /v1/caches/import is a /v1/caches/{cache_id}, too, with an id that nothing has: the most definite path counts.
    paths = [str(getattr(route, "path", "")) for route in matching]
    nearest = min(paths, key=lambda path: path.count("{"))
    found = [route for route, path in zip(matching, paths, strict=True) if path == nearest]
    return ", ".join(sorted({method for route in found for method in getattr(route, "methods", ())}))


class RequestIds:
    """Names each request, puts the name on its response and on every line in the log, and lets no exception through.
    Every response gets the `SAFE_HEADERS` here, too.

    Not even the cancellation, which says that the server stops and waits no longer. The request's task ends here in any
    case; passed on, it would be a failure of the application to uvicorn: a bare 500, and a traceback in the log.

    Plain ASGI: Starlette's `BaseHTTPMiddleware` would stand between a stream and the news that its reader hung up.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = secrets.token_hex(12)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except (Exception, asyncio.CancelledError) as exc:
            error = translate(exc)
            if not begun:
                await error_response(error)(scope, receive, send_named)
