"""Counters and timers of whatever answers questions to caches over HTTP: the service, and the proxy before vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from kvshelf.api.strict import MissReason
from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, KvshelfError, ModelMismatch, StoreUnavailable

_SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REASONS = ("not_found", "expired", "evicted", "corrupt", "version", "model_changed", "store_unavailable")
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class QuestionMetrics:
    """The instruments of one process, in their own registry, so that two apps in one process do not mix numbers.

    Labels never contain an id or a tenant, because readers of the metrics must not learn about tenants.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("http_requests", "answered HTTP requests", "route", "method", "status")
        about = "from a request's head to its answer's end"
        self._request_s = self._histogram("http_request_seconds", about, "route", "method")
        self._queries = self._counter("queries", "queries by result: answered or an error code", "result")
        self._misses = self._counter("cache_misses", "queries whose cache could not be used", "reason")
        about = "document tokens read from caches instead of prefilled"
        self._tokens_saved = self._counter("tokens_saved", about, "model")
        self._prefill_tokens = self._counter("prefill_tokens", "tokens of questions", "model")
        # Create these labels at once: a counter that only appears with its first count shows no rate for that count.
        for reason in _REASONS:
            self._misses.labels(reason)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvshelf_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"kvshelf_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"kvshelf_{name}", about, labels, registry=self.registry, buckets=buckets)

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """All metrics and their media type: Prometheus' text format, or OpenMetrics if `accept` takes it."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Records a finished HTTP request. `route` is a path template; `method` may be any text."""
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, status).inc()
        self._request_s.labels(route, method).observe(seconds)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wraps a query. If it fails, counts it, and counts a miss if the cache could not be used."""
        try:
            yield
        except BaseException as exc:
            self._queries.labels(result_of(exc)).inc()
            reason: str | None = miss_reason(exc) if isinstance(exc, KvshelfError) else None
            if isinstance(exc, CacheNotFound):
                reason = "not_found"
            elif isinstance(exc, StoreUnavailable):
                reason = "store_unavailable"
            if reason is not None:
                self._misses.labels(reason).inc()
            raise

    def turned_away(self, code: str) -> None:
        """Records a question that was refused before its route, by access control or limits."""
        self._queries.labels(code).inc()


def result_of(exc: BaseException) -> str:
    """The result of failed work as a label: an error code, `internal` or `cancelled`."""
    if isinstance(exc, KvshelfError):
        return exc.code
    return "internal" if isinstance(exc, Exception) else "cancelled"  # its task or its stream was cancelled


def miss_reason(error: KvshelfError) -> MissReason | None:
    """Why a stored cache could not be used; None for other errors."""
    reason = str(error.details.get("reason"))
    if isinstance(error, CacheCorrupt):
        return "version" if reason.startswith(("newer_", "unknown_")) else "corrupt"
    if isinstance(error, CacheExpired):
        return "evicted" if reason == "evicted" else "expired"
    return "model_changed" if isinstance(error, ModelMismatch) else None
