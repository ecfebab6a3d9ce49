"""Turns exceptions into error envelopes, and gives every response its `x-request-id`."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

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

from kvshelf import errors
from kvshelf.api import ErrorBody
from kvshelf.api.strict import refusal
from kvshelf.service.observe.logs import note, request_id
from kvshelf.service.observe.questions import miss_reason

log = structlog.get_logger("kvshelf.service")

LINGER_S = 2.0
"""How long the rest of a refused body is read and discarded, so that the caller can read the refusal."""

_LITTLE_BYTES = 64 << 10
_STOPPED_RETRY_S = 1.0  # during a restart the next service is already ready
_BEFORE_THE_BODY = (errors.BodyTooLarge, errors.Forbidden, errors.RateLimited, errors.ServiceBusy, errors.Unauthorized)
_MAY_PASS = (errors.RequestTimeout, errors.StateConflict)  # of the refusals: another try may come at a better time

MESSAGES: Final = "/v1/messages"
"""The path of Anthropic's API."""

MCP: Final = "/mcp"
"""The path of the server of MCP (`kvshelf mcp --http`)."""

_REFUSED: Final = -32600
_FAILED: Final = -32603
"""JSON-RPC's codes for a wrong request and for an error of the server."""

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}

SAFE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Defaults for every answer: nothing is cached by proxies, and no text runs as a script."""


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is to Anthropic's API or by its client, so that errors have another envelope."""
    path: str = scope["path"]
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or "anthropic-version" in Headers(scope=scope)


def wire(error: errors.KvshelfError, *, anthropic: bool) -> dict[str, Any]:
    """The error envelope as JSON: Anthropic's, or OpenAI's."""
    body = ErrorBody(
        message=error.message,
        type=error.type,
        param=error.param,
        code=error.code,
        miss_reason=miss_reason(error),
        details=error.details or None,
    )
    if not anthropic:
        return {"error": error_json(body)}
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": error_json(body) | {"type": kind}, "request_id": request_id()}


def error_json(body: ErrorBody) -> dict[str, Any]:
    """An error object as JSON. `param` is always present, `miss_reason` and `details` only if they are set."""
    silent = {name for name in ("miss_reason", "details") if getattr(body, name) is None}
    return body.model_dump(mode="json", exclude=silent)


def error_response(error: errors.KvshelfError, scope: Scope | None = None) -> Response:
    """scope: of a request that may be Anthropic's, or one of MCP."""
    note(code=error.code)
    headers = {}
    # An unavailable store is tried again about every second.
    retry_after_s = error.details.get("retry_after_s", 1.0 if isinstance(error, errors.StoreUnavailable) else None)
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))  # whole seconds: RFC 9110, section 10.2.3
    if error.is_final and not isinstance(error, _MAY_PASS):
        headers["x-should-retry"] = "false"  # read by OpenAI's and Anthropic's clients, which repeat 409 and 5xx
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="kvshelf"'
    if isinstance(error, errors.RequestTimeout):
        headers["connection"] = "close"  # nobody reads the rest of the body
    cls = _LingeringResponse if isinstance(error, _BEFORE_THE_BODY) else JSONResponse
    if scope is not None and scope["path"] == MCP:
        # An error of JSON-RPC, with that of the HTTP API as its data. Its request was not read, so it has no id.
        code = _REFUSED if error.status < 500 else _FAILED
        about = {"code": code, "message": error.message, "data": wire(error, anthropic=False)["error"]}
        content: dict[str, Any] = {"jsonrpc": "2.0", "id": None, "error": about}
    else:
        content = wire(error, anthropic=scope is not None and is_anthropic(scope))
    return cls(content, status_code=error.status, headers=headers)


class _LingeringResponse(JSONResponse):
    """Answers, discards the rest of the request body for a moment, then closes the connection.

    Closing a socket with unread bytes resets the connection, and the caller may never see the refusal. If little is
    still to come, uvicorn discards it and the connection stays usable.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = Headers(scope=scope)
        announced = received.get("content-length", "0")
        if "transfer-encoding" not in received and announced.isdecimal() and int(announced) <= _LITTLE_BYTES:
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


def translate(exc: BaseException) -> errors.KvshelfError:
    """Any exception as a kvshelf error. An unexpected one is logged in full and reported as `internal`."""
    if isinstance(exc, errors.KvshelfError):
        return exc
    if isinstance(exc, asyncio.CancelledError):
        # Not `NoWorker`, which promises that nothing was done.
        return errors.WorkerCrashed(
            "the service stopped or restarted before it answered; the request may have been carried out. Try again",
            retry_after_s=_STOPPED_RETRY_S,
        )
    if isinstance(exc, ValidationError):
        return refusal(exc)
    if isinstance(exc, RequestValidationError):
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return errors.InvalidRequest(f"{param}: {first['msg']}", param=param)
    log.error("bug", exc_info=exc)
    return errors.InternalError(f"this is a bug of kvshelf; please report it with the request id {request_id()}")


def install(app: FastAPI, routes: Sequence[BaseRoute], *, listed: str = "/openapi.json lists all routes") -> None:
    """Installs the error handlers and request ids. `routes` are the routes of the app. listed: where a caller finds
    them."""

    async def answer(request: Request, exc: Exception) -> Response:
        return error_response(translate(exc), request.scope)

    async def answer_framework(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        if exc.status_code == 404:
            return error_response(errors.NotFound(f"there is no {where}; {listed}"), request.scope)
        if exc.status_code == 405:
            allowed = _methods(request, routes)
            refused = errors.MethodNotAllowed(f"{where} is not possible; allowed: {allowed}")
            response = error_response(refused, request.scope)
            response.headers["allow"] = allowed
            return response
        return error_response(errors.InvalidRequest(str(exc.detail)), request.scope)

    for kind in (errors.KvshelfError, RequestValidationError, ValidationError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_framework)
    app.add_middleware(RequestIds)


def _methods(request: Request, routes: Sequence[BaseRoute]) -> str:
    """All methods of the request's path. Starlette names only those of the first matching route."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    # /v1/caches/import also matches /v1/caches/{cache_id}: the path with the fewest parameters counts.
    paths = [str(getattr(route, "path", "")) for route in matching]
    nearest = min(paths, key=lambda path: path.count("{"))
    nearest_routes = [route for route, path in zip(matching, paths, strict=True) if path == nearest]
    return ", ".join(sorted({method for route in nearest_routes for method in getattr(route, "methods", ())}))


class RequestIds:
    """Gives each request an id, on its response and on its log lines, adds `SAFE_HEADERS`, and catches all exceptions.

    It also catches the cancellation by a stopping server. The request ends here anyway, and uvicorn would treat the
    cancellation as a failed application: a bare 500 and a traceback in the log.

    Plain ASGI, because Starlette's `BaseHTTPMiddleware` would hide from a stream that its reader hung up.
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
                if is_anthropic(scope):
                    headers["request-id"] = request_id  # the name that Anthropic's clients read
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except (Exception, asyncio.CancelledError) as exc:
            error = translate(exc)
            if not begun:
                await error_response(error, scope)(scope, receive, send_named)
