"""Searching: which documents of a filter hold the words of a question, by the summaries of their caches alone."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import structlog

from kvshelf.api import SearchCaches, SearchHit, Skipped
from kvshelf.errors import CacheError, CacheNotFound, InvalidRequest, ModelMismatch
from kvshelf.store.artifact.identity import ModelIdentity
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.summary import Codes, score, unpacked
from kvshelf.workers.replica.calls import Threads, called_as
from kvshelf.workers.replica.results import Found, in_sequence, rounded
from kvshelf.workers.replica.scheduler import Scheduler

log = structlog.get_logger("kvshelf.workers")

MOST_CACHES: Final = 10_000
"""Caches of one filter. More would take seconds of listing, and gigabytes of summaries."""

_PAGE: Final = 1000
_READS: Final = 4
"""Summaries read at once, so that other calls find a thread."""

_HELD_BYTES: Final = 256 << 20

Summary = list[Codes]
ResultT = TypeVar("ResultT")


class HeldSummaries:
    """The summaries used last, in memory, up to a number of bytes; by the root digest of the blob, which fixes them.
    A cache without one has an empty one. Any number of threads at once."""

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._held: OrderedDict[str, Summary] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: str) -> Summary | None:
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
            return self._held.get(digest)

    def keep(self, digest: str, summary: Summary) -> None:
        with self._lock:
            if digest in self._held:
                return
            self._held[digest] = summary
            self._nbytes += _nbytes(summary)
            while self._nbytes > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self._nbytes -= _nbytes(oldest)


def _nbytes(summary: Summary) -> int:
    return 1000 + sum(codes.nbytes for codes in summary)  # with what Python takes


@dataclass(eq=False)
class Searches:
    """The searches of one replica."""

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: Threads
    held: HeldSummaries = field(default_factory=HeldSummaries)

    async def search(
        self, spec: SearchCaches, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> Found:
        """Rank the documents whose caches have the labels. A filter without caches gives an empty list.

        Raises `InvalidRequest` for a question that is empty or too long and for a filter of too many caches,
        `PolicyUnsupported` for a model whose documents have no summaries; all before the model runs.
        """
        with called_as(origin, tenant):
            token_ids = await self.threads.run(self.engine.encode_search, spec.query)
            skipped: Counter[str] = Counter()
            list_s, manifests = await _timed(self.threads.run(self._comparable, spec, tenant, skipped))
            read_s, documents = await _timed(self._documents(manifests, tenant, skipped))
            code_s, question = await _timed(self._codes(token_ids, tenant, deadline_s) if documents else _nothing())
            summaries = [summary for _, summary in documents]
            rank_s, scores = await _timed(self.threads.run(score, question, summaries) if documents else _nothing())
            phases = in_sequence(list=list_s, read=read_s, code=code_s, rank=rank_s)
            log.info("searched", searched=len(documents), skipped=sum(skipped.values()), **rounded(phases))
            hits = [
                SearchHit(cache_id=manifest.id, score=round(points, 4), name=manifest.name)
                for (manifest, _), points in zip(documents, scores, strict=True)
            ]
            best = heapq.nlargest(spec.limit, hits, key=lambda hit: hit.score)  # of equal ones, the newest
            return Found(
                data=best,
                searched=len(documents),
                skipped=Skipped(**skipped),
                phases=phases,
                prefill_tokens=len(token_ids) if documents else 0,
            )

    def _comparable(self, spec: SearchCaches, tenant: str, skipped: Counter[str]) -> list[Manifest]:
        """The newest cache of each document of this model; counts the others."""
        own = lru_cache(maxsize=None)(self._is_own)
        found: dict[str, Manifest] = {}
        for manifest in self._listed(spec, tenant):
            if not own(tuple(manifest.identity["model"].items())):
                skipped["other_model"] += 1
            elif manifest.document_id in found:
                skipped["same_document"] += 1
            else:
                found[manifest.document_id] = manifest
        return list(found.values())

    def _is_own(self, fields: tuple[tuple[str, str], ...]) -> bool:
        """Whether a model identity, as its fields, is this engine's."""
        with suppress(ModelMismatch):
            self.engine.identity.require_match(ModelIdentity(**dict(fields)))
            return True
        return False

    def _listed(self, spec: SearchCaches, tenant: str) -> Iterator[Manifest]:
        """All caches of the filter, newest first. Raises `InvalidRequest` for more than `MOST_CACHES`."""
        after = None
        for _ in range(MOST_CACHES // _PAGE):
            page = self.store.list(tenant=tenant, labels=spec.labels, limit=_PAGE, after=after)
            yield from page.data
            if not page.has_more:
                return
            after = page.data[-1].id
        raise InvalidRequest(
            f"over {MOST_CACHES} caches have these labels, more than a search compares; add a label that fewer have",
            param="labels",
        )

    async def _documents(
        self, manifests: Sequence[Manifest], tenant: str, skipped: Counter[str]
    ) -> list[tuple[Manifest, Summary]]:
        """The caches that have a summary, each with it; counts the others."""
        places = asyncio.Semaphore(_READS)

        async def summary_of(manifest: Manifest) -> Summary | None:
            if (held := self.held.find(manifest.blob_digest)) is not None:
                return held
            async with places:
                return await self.threads.run(self._read, manifest, tenant)

        summaries = await asyncio.gather(*map(summary_of, manifests))
        skipped["unreadable"] += sum(summary is None for summary in summaries)
        skipped["without_summary"] += sum(summary == [] for summary in summaries)
        return [(manifest, summary) for manifest, summary in zip(manifests, summaries, strict=True) if summary]

    def _read(self, manifest: Manifest, tenant: str) -> Summary | None:
        """A cache's summary from the store, empty if it has none; None if the cache cannot be read."""
        try:
            with self.store.open_cache(manifest.id, tenant=tenant) as arriving:
                summary = unpacked(arriving.summary)
        except (CacheError, CacheNotFound):
            return None
        if len(summary) != self.engine.summary_layers:  # of an imported cache that another program made
            summary = []
        self.held.keep(manifest.blob_digest, summary)
        return summary

    async def _codes(self, token_ids: Sequence[int], tenant: str, deadline_s: float | None) -> list[Codes]:
        """The codes of the question, by the thread that owns the model."""
        run = partial(self.engine.search_codes, token_ids)
        ticket = self.scheduler.pass_of(run, tenant=tenant, deadline_s=deadline_s)
        try:
            return await asyncio.wrap_future(ticket.future)
        finally:
            ticket.cancel()


async def _timed(work: Awaitable[ResultT]) -> tuple[float, ResultT]:
    """The seconds that work took, and its result."""
    started = time.monotonic()
    result = await work
    return time.monotonic() - started, result


async def _nothing() -> list[Any]:
    """Where there is no document to compare."""
    return []
