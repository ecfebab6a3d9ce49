"""Counts, times, traces and logs each HTTP request. For calls of replicas see `service.engines`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import structlog
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvshelf.errors import Forbidden, RateLimited, Unauthorized
from kvshelf.service.observe.logs import collecting
from kvshelf.service.observe.questions import QuestionMetrics

log = structlog.get_logger("kvshelf.service")

NO_ROUTE = "unmatched"
"""The route label of requests for unknown paths, because such a path may be any text."""

MALFORMED = "malformed"
"""Replaces a malformed id in the log."""

_ID = re.compile(r"(kvs|req|file|batch)_[0-9a-f]{16,64}")
_QUESTION = re.compile(r"/v1/(caches/[^/]+/)?query|/v1/(chat/)?completions|/v1/(messages|responses)")
_OPERATIONS = (
    (re.compile(r"/v1/(chat/completions|messages|responses)"), "chat"),
    (re.compile(r"/v1/(caches/[^/]+/)?query|/v1/completions"), "text_completion"),
)
_AT_THE_DOOR = (Forbidden.code, RateLimited.code, Unauthorized.code)


class ObservedRequests:
    """ASGI middleware: counts, times and traces each request, and writes its log line.

    It is the outermost middleware, so that it also sees the answers of all other middleware.
    """

    def __init__(self, app: ASGIApp, metrics: QuestionMetrics, tracer: Tracer) -> None:
        self.app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with collecting() as facts, self._span(scope) as span:
            try:
                await self.app(scope, receive, send_watched)
            finally:
                seconds = time.monotonic() - started
                method, route = scope["method"], getattr(scope.get("route"), "path", NO_ROUTE)
                self._metrics.request(route, method, status, seconds)
                if method == "POST" and facts.get("code") in _AT_THE_DOOR and _QUESTION.fullmatch(scope["path"]):
                    self._metrics.turned_away(facts["code"])
                _describe(span, method, route, status, facts)
                about = _named(scope) | facts
                log.info("request", method=method, route=route, status=status, seconds=round(seconds, 4), **about)

    def _span(self, scope: Scope) -> AbstractContextManager[Span]:
        """The span of a request; a `traceparent` header names its parent (W3C Trace Context)."""
        parent = TraceContextTextMapPropagator().extract(Headers(scope=scope))
        return self._tracer.start_as_current_span(
            scope["method"], parent, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        )


def _named(scope: Scope) -> dict[str, str]:
    """The ids in the path, for the log. Malformed ones are replaced, because a caller may put a key or text there."""
    params = scope.get("path_params", {}).items() if "route" in scope else ()
    ids = {name: str(value) if _ID.fullmatch(str(value)) else MALFORMED for name, value in params}
    if "request_id" in ids:  # in the log, `request_id` is the id of the HTTP request
        ids["request"] = ids.pop("request_id")
    return ids


def _describe(span: Span, method: str, route: str, status: int, facts: Mapping[str, Any]) -> None:
    if not span.is_recording():
        return
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    about = {"request_id": structlog.contextvars.get_contextvars().get("request_id", ""), **facts}
    span.set_attributes({f"kvshelf.{name}": value for name, value in about.items()})
    if method == "POST":
        span.set_attributes(gen_ai(route, facts))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def gen_ai(route: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenTelemetry's conventions for generative AI ask of a question's span; nothing for other requests.

    Their `input_tokens` has all tokens that the model answers from, those of the cache among them.
    """
    operation = next((name for pattern, name in _OPERATIONS if pattern.fullmatch(route)), None)
    if operation is None:
        return {}
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvshelf"}
    if "model" in facts:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = facts["model"]
    if "conversation" in facts:
        attributes["gen_ai.conversation.id"] = facts["conversation"]
    if "completion_tokens" not in facts:  # the request was refused, or a stream's reader left
        return attributes
    return attributes | {
        "gen_ai.usage.input_tokens": facts["cache_read_tokens"] + facts["prefill_tokens"],
        "gen_ai.usage.cache_read.input_tokens": facts["cache_read_tokens"],
        "gen_ai.usage.output_tokens": facts["completion_tokens"],
    }
