"""Counters and timers of the service, for Prometheus."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import Histogram

from kvshelf.api.answers import Answer, Guarded, Phase
from kvshelf.corpus.run.progress import Progress
from kvshelf.errors import KvshelfError
from kvshelf.service.observe.questions import QuestionMetrics, result_of
from kvshelf.store.base import Store
from kvshelf.workers.replica.api import Created, SearchResult

USAGE_AGE_S: Final = 5.0
"""Maximum age of the shelf's numbers, so that frequent scrapes do not load the store."""

_USAGE_PATIENCE_S = 2.0
_AGREEMENTS = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1)
_SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1)
_NATS = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_PLACES = ("memory", "ram", "disk", "home")
_EVENTS = ("pinned", "released", "read_ahead", "read_ahead_used")


class Metrics(QuestionMetrics):
    """The instruments of one front end."""

    def __init__(self) -> None:
        super().__init__()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self._creations = counter("creations", "by result: new, existing or an error code", "model", "policy", "result")
        self._creation_s = histogram(
            "creation_phase_seconds", "phases of creations that made a cache", "model", "phase"
        )
        self._document_tokens = counter("document_tokens", "tokens of compressed documents", "model")
        self._kept_tokens = counter("kept_tokens", "tokens that new caches keep, per layer and KV head", "model")
        self._full_bytes = counter("full_bytes", "bytes of new caches before compression", "model")
        self._full_16bit_bytes = counter("full_16bit_bytes", "the same in 16-bit numbers", "model")
        self._stored_bytes = counter("stored_bytes", "bytes of new caches as stored", "model")
        about = "share of the cues on which new caches agree with the full cache"
        self._agreement = histogram("quality_agreement", about, "model", "policy", buckets=_AGREEMENTS)
        self._hits = counter("cache_hits", "queries by the place of their cache", "read_from")
        about = "share of the tokens of conversations' turns that was read from the shelf"
        self._turn_hits = histogram("turn_hit_share", about, "model", buckets=_SHARES)
        about = "caches in the memory of replicas that were pinned after a tool's call, released early, read by a hint"
        self._retention = counter("cache_retention", about, "model", "event")
        of = "model", "policy", "group"
        about = "answers that were asked again of the full cache, by result: same or differs"
        self._guarded = counter("guarded_answers", about, *of, "result")
        about = "divergence of these answers' tokens from the full cache's, in nats"
        self._guard_kl = histogram("guarded_kl", about, *of, buckets=_NATS)
        self._guard_below = counter("guard_caches_below", "caches found below the guard's floor", *of)
        about = "alarms that answers differ more often than the guard's floor allows"
        self._guard_alarms = counter("guard_alarms", about, *of)
        self._completion_tokens = counter("completion_tokens", "tokens of answers", "model")
        about = "stored entries of a KV head that the last token of each answer read, summed over answers"
        self._read_tokens = counter("read_tokens", about, "model")
        about = "entries of a KV head that answers held beside their documents at their end, summed over answers"
        self._suffix_tokens = counter("suffix_tokens", about, "model")
        about = "bytes of all open questions and answers beside their documents, in the worker that answered last"
        self._suffix_bytes = gauge("suffix_bytes", about, "model")
        self._answer_s = histogram("answer_phase_seconds", "phases of answers", "model", "phase")
        self._first_token_s = histogram("first_token_seconds", "from a question's arrival to its first token", "model")
        self._searches = counter("searches", "searches by result: found or an error code", "model", "result")
        self._search_s = histogram("search_phase_seconds", "phases of searches", "model", "phase")
        self.in_flight = gauge("calls_in_flight", "unfinished calls of replicas", "model", "call")
        self._replicas = gauge("replicas", "replicas by state", "model", "state")
        self._waiting = gauge("waiting_requests", "requests that wait for a replica", "model", "kind")
        self._background = gauge("background_requests", "unfinished background creations", "state")
        self._batches = gauge("batches", "unfinished batches", "state")
        self._batch_rows = counter("batch_rows", "rows of batches by result", "result")
        self._batch_tokens = counter("batch_tokens", "document tokens of batch rows that have a cache")
        self._store_up = gauge("store_up", "1 if the store answered the last request for its usage, else 0")
        self._caches = gauge("caches", "caches on the shelf; NaN if unknown")
        self._shelf_bytes = gauge("shelf_bytes", "bytes of all caches on the shelf; NaN if unknown")
        self._usage_until = -math.inf
        for place in _PLACES:  # at once, as those of the misses
            self._hits.labels(place)

    @contextmanager
    def creating(self, model: str, policy: str) -> Iterator[None]:
        """Wraps a creation and counts it if it fails."""
        try:
            yield
        except BaseException as exc:
            self._creations.labels(model, policy, result_of(exc)).inc()
            raise

    def created(self, model: str, policy: str, created: Created) -> None:
        """Records a successful creation: counts it once, its prefilled tokens, and each new cache."""
        self._creations.labels(model, policy, "existing" if created.existing else "new").inc()
        self._document_tokens.labels(model).inc(created.prefilled_tokens)
        for manifest in (cache.manifest for cache in created.caches if not cache.existing):
            self._kept_tokens.labels(model).inc(manifest.kept_tokens)
            self._full_bytes.labels(model).inc(manifest.bytes_full)
            self._full_16bit_bytes.labels(model).inc(manifest.bytes["full_16bit"])
            self._stored_bytes.labels(model).inc(manifest.bytes_stored)
            if manifest.quality is not None and manifest.quality.agreement is not None:
                self._agreement.labels(model, manifest.policy).observe(manifest.quality.agreement)
        _observe(self._creation_s, model, created.phases)

    def answered(self, model: str, answers: Sequence[Answer], *, of_conversation: bool = False) -> None:
        """Records an answered query of one or several prompts. of_conversation: whether it named its conversation."""
        self._queries.labels("answered").inc()
        self._hits.labels(answers[0].served.read_from).inc()
        for answer in answers:
            usage = answer.usage
            self._tokens_saved.labels(model).inc(usage.cache_read_tokens)
            self._prefill_tokens.labels(model).inc(usage.prefill_tokens)
            self._read_tokens.labels(model).inc(usage.read_tokens)
            self._suffix_tokens.labels(model).inc(usage.suffix_tokens or 0)
            self._suffix_bytes.labels(model).set(answer.served.suffix_bytes)
            self._completion_tokens.labels(model).inc(usage.completion_tokens)
            self._first_token_s.labels(model).observe(answer.served.first_token_s)
            if of_conversation:
                read = usage.cache_read_tokens
                self._turn_hits.labels(model).observe(read / max(1, read + usage.prefill_tokens))
            _observe(self._answer_s, model, answer.served.phases)
            self.remembered(model, answer.served.memory)
            self.guarded(model, answer.served.guarded)

    def remembered(self, model: str, counts: Mapping[str, int]) -> None:
        """Records what happened in a replica's memory for caches, as `Residents.take_counts`."""
        for event in _EVENTS:
            self._retention.labels(model, event).inc(counts.get(event, 0))

    def guarded(self, model: str, results: Sequence[Guarded]) -> None:
        for result in results:
            of = model, result.policy, result.group
            self._guarded.labels(*of, "differs" if result.differs else "same").inc()
            self._guard_kl.labels(*of).observe(result.kl)
            self._guard_below.labels(*of).inc(result.below)
            self._guard_alarms.labels(*of).inc(result.drifts)

    @contextmanager
    def searching(self, model: str) -> Iterator[None]:
        """Wraps a search and counts it if it fails."""
        try:
            yield
        except BaseException as exc:
            self._searches.labels(model, result_of(exc)).inc()
            raise

    def searched(self, model: str, hits: SearchResult) -> None:
        """Records a search that has a result, if an empty one."""
        self._searches.labels(model, "found").inc()
        _observe(self._search_s, model, hits.phases)

    def batch_advanced(self, before: Progress, now: Progress) -> None:
        """Records the progress of a batch between two snapshots of one run."""
        new = (now.done - now.reused) - (before.done - before.reused)
        counts = {"new": new, "reused": now.reused - before.reused, "failed": now.failed - before.failed}
        for result, count in counts.items():
            self._batch_rows.labels(result).inc(max(0, count))
        self._batch_tokens.inc(max(0, now.tokens - before.tokens))

    def read_queues(self, model: str, running: int, deployed: int, waiting: Mapping[str, int]) -> None:
        """Sets the numbers of a model's replicas, and of the requests that wait for them, by kind of work."""
        self._replicas.labels(model, "running").set(running)
        self._replicas.labels(model, "wanted").set(deployed)
        for kind, count in waiting.items():
            self._waiting.labels(model, kind).set(count)

    def read_jobs(self, background: Mapping[str, int], batches: Mapping[str, int]) -> None:
        """Sets the numbers of background creations and of batches, by state."""
        for gauge, counts in ((self._background, background), (self._batches, batches)):
            for state, count in counts.items():
                gauge.labels(state).set(count)

    async def read_shelf(self, store: Store) -> None:
        """Reads the store's usage unless it was read a moment ago. Waits for at most two seconds."""
        if time.monotonic() < self._usage_until:
            return
        self._usage_until = time.monotonic() + USAGE_AGE_S  # before the call, so that other scrapes do not ask too
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


def _observe(histogram: Histogram, model: str, phases: Sequence[Phase]) -> None:
    for phase in phases:
        histogram.labels(model, phase.name).observe(phase.seconds)
