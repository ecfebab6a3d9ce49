"""Counters and timers of the service, for Prometheus.

Labels are few and have known values: route templates, names of models and policies, error codes. They never contain an
id or a tenant, because readers of the metrics must not learn about tenants.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvshelf.corpus.run.progress import Progress
from kvshelf.errors import CacheNotFound, KvshelfError, StoreUnavailable
from kvshelf.service.http.errors import miss_reason
from kvshelf.store.base import Store
from kvshelf.workers.replica.results import Created, Phase, Reply

USAGE_AGE_S: Final = 5.0
"""Maximum age of the shelf's numbers, so that frequent scrapes do not load the store."""

_USAGE_PATIENCE_S = 2.0
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_AGREEMENTS = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1)
_PLACES = ("memory", "ram", "disk", "home")
_REASONS = ("not_found", "expired", "evicted", "corrupt", "version", "model_changed", "store_unavailable")
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class Metrics:
    """The instruments of one front end, in their own registry, so that two apps in one process do not mix numbers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"kvshelf_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"kvshelf_{name}", about, labels, registry=registry)

        def seconds(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(f"kvshelf_{name}_seconds", about, labels, registry=registry, buckets=_SECONDS)

        self._requests = counter("http_requests", "HTTP requests answered", "route", "method", "status")
        self._request_s = seconds("http_request", "from a request's head to the end of its answer", "route", "method")

        self._creations = counter(
            "creations", "creations by result: new, existing, or an error's code", "model", "policy", "result"
        )
        self._creation_s = seconds(
            "creation_phase", "of new caches: queue, prefill, compress, measure, store", "model", "phase"
        )
        self._document_tokens = counter("document_tokens", "tokens of the documents that were compressed", "model")
        self._kept_tokens = counter("kept_tokens", "tokens per layer and head that new caches keep", "model")
        self._full_bytes = counter("full_bytes", "bytes of new caches before compression", "model")
        self._stored_bytes = counter("stored_bytes", "bytes of new caches as stored", "model")

        self._agreement = Histogram(
            "kvshelf_quality_agreement",
            "agreement of new caches with the full cache",
            ("model", "policy"),
            registry=registry,
            buckets=_AGREEMENTS,
        )

        self._queries = counter("queries", "queries by result: answered, or an error's code", "result")
        self._hits = counter("cache_hits", "queries answered from a cache, by where it was", "read_from")
        self._misses = counter("cache_misses", "queries whose cache could not be used", "reason")
        self._tokens_saved = counter("tokens_saved", "document tokens read from caches, not prefilled again", "model")
        self._prefill_tokens = counter("prefill_tokens", "tokens of questions", "model")
        self._completion_tokens = counter("completion_tokens", "tokens of answers", "model")
        self._answer_s = seconds("answer_phase", "of answers: load, queue, prefill, decode", "model", "phase")
        self._first_token_s = seconds(
            "first_token", "from the question's arrival at a replica to its first token", "model"
        )

        self.in_flight = gauge("calls_in_flight", "calls that workers were asked and have not ended", "model", "call")
        self._replicas = gauge("replicas", "replicas: running, wanted", "model", "state")
        self._waiting = gauge("waiting_requests", "requests in the queues before the workers", "model", "kind")
        self._background = gauge("background_requests", "creations in the background: queued, running", "state")
        self._batches = gauge("batches", "batches that have not ended: run here, waiting", "state")
        self._batch_rows = counter("batch_rows", "rows of batches by result: new, reused, failed", "result")
        self._batch_tokens = counter("batch_tokens", "document tokens of rows that have a cache")
        self._store_up = gauge("store_up", "1 if the store answered when it was last asked")
        self._caches = gauge("caches", "caches on the shelf; NaN if the store does not say")
        self._shelf_bytes = gauge("shelf_bytes", "bytes of all caches on the shelf; NaN if the store does not say")
        self._usage_until = -math.inf
        # Create these labels at once: a counter that first appears with its first count has no rate then.
        for place in _PLACES:
            self._hits.labels(place)
        for reason in _REASONS:
            self._misses.labels(reason)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Records a finished HTTP request. `route` is a path template; `method` may be any text."""
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, status).inc()
        self._request_s.labels(route, method).observe(seconds)

    @contextmanager
    def creating(self, model: str, policy: str) -> Iterator[None]:
        """Wraps a creation and counts it if it fails."""
        try:
            yield
        except BaseException as exc:
            self._creations.labels(model, policy, result_of(exc)).inc()
            raise

    def created(self, model: str, policy: str, created: Created) -> None:
        """Records a successful creation. It counts once, its document once if any cache is new, and each new cache."""
        self._creations.labels(model, policy, "existing" if created.existing else "new").inc()
        if not created.existing:
            self._document_tokens.labels(model).inc(created.manifest.num_tokens)
        for manifest in (cache.manifest for cache in created.caches if not cache.existing):
            self._kept_tokens.labels(model).inc(manifest.kept_tokens)
            self._full_bytes.labels(model).inc(manifest.bytes_full)
            self._stored_bytes.labels(model).inc(manifest.bytes_stored)
            if manifest.quality is not None:
                self._agreement.labels(model, manifest.policy).observe(manifest.quality.agreement)
        _observe(self._creation_s, model, created.phases)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wraps a query. If it fails, counts it, and counts a miss if the cache could not be used."""
        try:
            yield
        except BaseException as exc:
            self._queries.labels(result_of(exc)).inc()
            reason = _miss(exc)
            if reason is not None:
                self._misses.labels(reason).inc()
            raise

    def turned_away(self, code: str) -> None:
        """Records a question that was refused before its route, by access control or limits."""
        self._queries.labels(code).inc()

    def answered(self, model: str, replies: Sequence[Reply]) -> None:
        """Records an answered query of one or several prompts on one cache."""
        self._queries.labels("answered").inc()
        self._hits.labels(replies[0].read_from).inc()
        for reply in replies:
            usage = reply.usage
            self._tokens_saved.labels(model).inc(usage.cache_read_tokens)
            self._prefill_tokens.labels(model).inc(usage.prefill_tokens)
            self._completion_tokens.labels(model).inc(usage.completion_tokens)
            self._first_token_s.labels(model).observe(reply.first_token_s)
            _observe(self._answer_s, model, reply.phases)

    def read_queues(self, queues: Mapping[str, Mapping[str, int]], background: Mapping[str, int]) -> None:
        """Sets the numbers of waiting requests: `queues` by model and kind of work, `background` by state."""
        for model, waiting in queues.items():
            for kind, count in waiting.items():
                self._waiting.labels(model, kind).set(count)
        for state, count in background.items():
            self._background.labels(state).set(count)

    def read_batches(self, batches: Mapping[str, int]) -> None:
        """Sets the number of batches by state."""
        for state, count in batches.items():
            self._batches.labels(state).set(count)

    def batch_advanced(self, before: Progress, now: Progress) -> None:
        """Records the progress of a batch between two snapshots of one run."""
        new = (now.done - now.reused) - (before.done - before.reused)
        counts = {"new": new, "reused": now.reused - before.reused, "failed": now.failed - before.failed}
        for result, count in counts.items():
            self._batch_rows.labels(result).inc(max(0, count))
        self._batch_tokens.inc(max(0, now.tokens - before.tokens))

    def read_workers(self, running: Mapping[str, int], wanted: int) -> None:
        """Sets the numbers of running and wanted replicas, as far as known."""
        for model, count in running.items():
            self._replicas.labels(model, "running").set(count)
            self._replicas.labels(model, "wanted").set(wanted)

    async def read_shelf(self, store: Store) -> None:
        """Reads the store's usage unless it was read a moment ago. Waits for at most two seconds."""
        if time.monotonic() < self._usage_until:
            return
        self._usage_until = time.monotonic() + USAGE_AGE_S  # before the call, so that others do not ask meanwhile
        try:
            async with asyncio.timeout(_USAGE_PATIENCE_S):
                usage = await asyncio.to_thread(store.usage)
        except (KvshelfError, TimeoutError):
            up, caches, nbytes = 0, math.nan, math.nan
        else:
            up, caches, nbytes = 1, usage.caches, usage.bytes
        self._store_up.set(up)
        self._caches.set(caches)
        self._shelf_bytes.set(nbytes)


def result_of(exc: BaseException) -> str:
    """The result of failed work as a label: an error code, `internal` or `cancelled`."""
    if isinstance(exc, KvshelfError):
        return exc.code
    return "internal" if isinstance(exc, Exception) else "cancelled"  # its task or its stream was cancelled


def _miss(exc: BaseException) -> str | None:
    """Why a cache could not be used; None for other errors."""
    if isinstance(exc, CacheNotFound):
        return "not_found"
    if isinstance(exc, StoreUnavailable):
        return "store_unavailable"
    return miss_reason(exc) if isinstance(exc, KvshelfError) else None


def _observe(histogram: Histogram, model: str, phases: Sequence[Phase]) -> None:
    for phase in phases:
        histogram.labels(model, phase.name).observe(phase.seconds)
