"""The two places where everything is measured: each HTTP request on its way in, each call on its way to a worker."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import structlog
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvshelf.errors import Forbidden, RateLimited, Unauthorized
from kvshelf.service.observe.logs import collecting, note
from kvshelf.service.observe.metrics import Metrics, result_of
from kvshelf.service.observe.tracing import add_phases
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.create.created import Created
from kvshelf.workers.replica.replica import Asked, Replied

log = structlog.get_logger("kvshelf.service")

NO_ROUTE = "unmatched"
"""The route of requests for paths that do not exist: what they ask for is any text, and no label."""

MALFORMED = "malformed"
"""In the log, in place of an id that is none."""

_ID = re.compile(r"(kvs|req|file|batch)_[0-9a-f]{16,64}")
_QUESTION = re.compile(r"/v1/caches/[^/]+/query|/v1/chat/completions")
_AT_THE_DOOR = (Forbidden.code, RateLimited.code, Unauthorized.code)


class ObservedRequests:
    """ASGI middleware: counts, times and traces each request, and writes its one line in the log.

    Outside of all others, so that what they answer themselves counts as well.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer) -> None:
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

    @contextmanager
    def _span(self, scope: Scope) -> Iterator[Span]:
        """The span of a request, below the caller's where a `traceparent` names that (W3C Trace Context)."""
        parent = TraceContextTextMapPropagator().extract(Headers(scope=scope))
        with self._tracer.start_as_current_span(
            scope["method"], parent, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            yield span


def _named(scope: Scope) -> dict[str, str]:
    """The ids in the path, for the log. Nothing else of it: who mistakes a path may have put a key or a text there."""
    params = scope.get("path_params", {}).items() if "route" in scope else ()
    ids = {name: str(value) if _ID.fullmatch(str(value)) else MALFORMED for name, value in params}
    if "request_id" in ids:  # of the ledger: in the log that name is the HTTP request's own
        ids["request"] = ids.pop("request_id")
    return ids


def _describe(span: Span, method: str, route: str, status: int, facts: Mapping[str, Any]) -> None:
    if not span.is_recording():
        return
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    about = {"request_id": structlog.contextvars.get_contextvars().get("request_id", ""), **facts}
    span.set_attributes({f"kvshelf.{name}": value for name, value in about.items()})
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


class ObservedEngine(RemoteEngine):
    """A `RemoteEngine` whose calls are counted, timed and traced, and noted for the log."""

    def __init__(self, engine: RemoteEngine, metrics: Metrics, tracer: Tracer) -> None:
        super().__init__(engine.model, engine.app, engine.handle, engine.wanted)
        self._metrics = metrics
        self._tracer = tracer

    async def create(self, spec: Mapping[str, Any], **call: Any) -> Created:
        policy = spec["policy"]
        with self._metrics.creating(self.model, policy), self._observed("create") as span:
            began_ns = time.time_ns()
            created = await super().create(spec, **call)
            add_phases(self._tracer, span, began_ns, created.phases)
        self._metrics.created(self.model, policy, created)
        manifest = created.manifest
        note(cache_id=manifest["id"], tokens=manifest["num_tokens"], existing=created.existing)
        if len(created.caches) > 1:
            note(caches=len(created.caches))
        return created

    async def query(self, cache_id: str, asked: Asked, **call: Any) -> list[Replied]:
        with self._metrics.asking(), self._observed("query") as span:
            began_ns = time.time_ns()
            replies = await super().query(cache_id, asked, **call)
            self._answered(cache_id, replies, span, began_ns)
        return replies

    async def stream(self, cache_id: str, asked: Asked, **call: Any) -> AsyncGenerator[str | Replied, None]:
        with self._metrics.asking(), self._observed("stream") as span:
            began_ns = time.time_ns()
            replies: list[Replied] = []
            async with aclosing(super().stream(cache_id, asked, **call)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Replied):
                        replies.append(piece)
                    yield piece
            self._answered(cache_id, replies, span, began_ns)

    def _answered(self, cache_id: str, replies: Sequence[Replied], span: Span, began_ns: int) -> None:
        self._metrics.answered(self.model, replies)
        for reply in replies:
            add_phases(self._tracer, span, began_ns, reply.phases)
        usages = [reply.answer.usage for reply in replies]
        note(
            cache_id=cache_id,
            read_from=replies[0].read_from,
            cache_read_tokens=sum(usage.cache_read_tokens for usage in usages),
            prefill_tokens=sum(usage.prefill_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )

    @contextmanager
    def _observed(self, name: str) -> Iterator[Span]:
        """One call, in flight for the length of the block.

        Its span is not made the current one: a stream may end in another context than it began in.
        """
        span = self._tracer.start_span(name, attributes={"kvshelf.model": self.model})
        with self._metrics.in_flight.labels(self.model, name).track_inprogress():
            try:
                yield span
            except BaseException as exc:
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", result_of(exc))
                raise
            finally:
                span.end()
