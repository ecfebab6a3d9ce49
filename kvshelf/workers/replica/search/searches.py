"""Searching: which documents of a filter hold the words of a question, by the summaries of their caches alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import structlog

from kvshelf.api import SearchCaches, SearchHit, Skipped
from kvshelf.api.answers import in_sequence, rounded
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.engine.engine import Engine
from kvshelf.engine.summary import Block, Codes, scores, unpacked
from kvshelf.errors import CacheError, CacheNotFound, InvalidRequest, ModelMismatch
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.api import SearchResult
from kvshelf.workers.replica.calls import Caller, ReplicaThreads, called_by
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.search.summaries import Places, Record, Shelved, Shortlist, Summary
from kvshelf.workers.replica.ticket import Ticket

log = structlog.get_logger("kvshelf.workers")

MOST_CACHES: Final = 100_000
"""Caches that a search compares."""

MOST_TOKENS: Final = 1024
"""Of a question. The work of a search is this, times the codes of all documents."""

HELD_BYTES: Final = 512 << 20
"""What a replica remembers of the caches of all tenants: 0.7 KB of each, and 8 bytes for each code of those that were
compared. The tenants that searched last stay. Of one alone, as many summaries stay as there is room for, those of its
newest caches, and each search reads the others that it compares."""

_PAGE: Final = 1000
_READS: Final = 4
"""Portions of summaries read at once, so that other calls find a thread."""

_PORTION: Final = 16
"""Summaries read by one call of a thread, which then gives way to other tenants."""

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Searches:
    """The searches of one replica. shelved: what they know of tenants, those that searched last at the end."""

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: ReplicaThreads
    held_bytes: int = HELD_BYTES
    shelved: OrderedDict[str, Shelved] = field(default_factory=OrderedDict, init=False)

    def __post_init__(self) -> None:
        self._matches = lru_cache(maxsize=1024)(self._match)

    async def search(self, spec: SearchCaches, *, caller: Caller) -> SearchResult:
        """Rank the documents whose caches have the labels. A filter without caches gives an empty list.

        Of one tenant's searches one at a time lists, reads and compares; the model reads their questions beside that.
        Raises `InvalidRequest` for a question that is empty or too long and for a filter of too many caches,
        `PolicyUnsupported` for a model whose documents have no summaries; all before the model runs.
        """
        with called_by(caller):
            token_ids = await self.threads.compute(self._encoded, spec.query)
            ticket: Ticket[Any] = Ticket(caller.deadline_s)
            try:
                return await self._search(spec, token_ids, caller, ticket)
            finally:
                ticket.cancel()

    def _encoded(self, query: str) -> list[int]:
        token_ids = self.engine.searcher.encode(query)
        if len(token_ids) > MOST_TOKENS:
            raise InvalidRequest(
                f"query has {len(token_ids)} tokens, and a search takes {MOST_TOKENS}; ask a shorter question",
                param="query",
            )
        return token_ids

    async def _search(
        self, spec: SearchCaches, token_ids: Sequence[int], caller: Caller, ticket: Ticket[Any]
    ) -> SearchResult:
        tenant = caller.tenant
        shelved = self.shelved.setdefault(tenant, Shelved())
        self.shelved.move_to_end(tenant)
        async with shelved.lock:
            list_s, _ = await _timed(self._follow(shelved, tenant))
            choice = await self._chosen(shelved, spec)
        code_s, question = await _timed(self._codes(token_ids, caller) if choice.records else _nothing())
        async with shelved.lock:
            if shelved.version != choice.version:  # by another search, while the model read the question
                choice = await self._chosen(shelved, spec)
            skipped = Counter(choice.skipped)
            read_s, aside = await _timed(self._read_missing(shelved, choice.missing, tenant, skipped))
            compared, blocks, places = await self.threads.finished(_placed, shelved, choice, aside)
            skipped["without_summary"] = len(choice.records) - len(compared) - skipped["unreadable"]
            rank = partial(self._ranked, compared, question, blocks, places, spec, tenant, ticket.check)
            rank_s, best = await _timed(self.threads.compute(rank) if compared and question else _nothing())
            self._make_room(shelved)
        phases = in_sequence(list=list_s, read=read_s, code=code_s, rank=rank_s)
        log.info("searched", searched=len(compared), skipped=sum(skipped.values()), **rounded(phases))
        return SearchResult(
            data=best,
            searched=len(compared),
            skipped=Skipped(**skipped),
            phases=phases,
            prefill_tokens=len(token_ids) if question else 0,
        )

    async def _chosen(self, shelved: Shelved, spec: SearchCaches) -> Shortlist:
        """The caches to compare. Raises `InvalidRequest` for too many."""
        choice = await self.threads.finished(shelved.chosen, spec.labels, time.time())
        if len(choice.records) > MOST_CACHES:
            raise InvalidRequest(
                f"over {MOST_CACHES} caches have these labels, more than a search compares; add a label that fewer "
                "have",
                param="labels",
            )
        return choice

    async def _follow(self, shelved: Shelved, tenant: str) -> None:
        """Bring up to date what is known of a tenant's caches. A search that ends early leaves what it has learned."""
        while True:
            known = shelved.known
            changes = await self.threads.run(self.store.changes, known, tenant=tenant)
            if changes is None:  # of a shelf that lost everything, say
                shelved.place = None
            elif known is None:
                shelved.begin(changes.place)
            elif shelved.listed:
                await self.threads.finished(shelved.follow, changes, self._is_ours)
                if not changes.has_more:
                    return
            if shelved.place is not None and not shelved.listed:
                await self._list(shelved, tenant)

    async def _list(self, shelved: Shelved, tenant: str) -> None:
        """Learn which caches there are, page by page, from where the last search may have ended."""
        while not shelved.listed:
            try:
                page = await self.threads.run(self.store.list, tenant=tenant, limit=_PAGE, after=shelved.after)
            except InvalidRequest:  # the last cache of the page before is no longer known, not even as one that ended
                shelved.place = None
                return
            await self.threads.finished(shelved.take, page.data, self._is_ours)
            shelved.after = page.data[-1].id if page.data else None
            shelved.listed = not page.has_more
            if shelved.nbytes > self.held_bytes:
                known = len(shelved)
                shelved.begin(None)
                raise InvalidRequest(
                    f"this tenant has over {known} caches, more than a search can know; delete some, or keep some "
                    "under another tenant",
                    param="labels",
                )

    def _is_ours(self, manifest: Manifest) -> bool:
        return self._matches(tuple(manifest.identity["model"].items()))

    def _match(self, fields: tuple[tuple[str, str], ...]) -> bool:
        """Whether a model identity, as its fields, is this engine's."""
        with suppress(ModelMismatch):
            self.engine.identity.require_match(ModelIdentity(**dict(fields)))
            return True
        return False

    async def _read_missing(
        self, shelved: Shelved, missing: Sequence[Record], tenant: str, skipped: Counter[str]
    ) -> dict[str, Summary]:
        """Read summaries that are not in memory; counts caches that cannot be read. They stay in memory as far as there
        is room. Returns the others, by cache; empty ones of caches that have none."""
        aside: dict[str, Summary] = {}
        for at in range(0, len(missing), _PAGE):
            some = missing[at : at + _PAGE]
            pairs = list(zip(some, await self._summaries(some, tenant), strict=True))
            readable = [(record, summary) for record, summary in pairs if summary is not None]
            skipped["unreadable"] += len(some) - len(readable)
            if shelved.nbytes < self.held_bytes:
                shelved.keep(readable)
            else:
                aside.update({record.id: summary for record, summary in readable})
        return aside

    async def _summaries(self, records: Sequence[Record], tenant: str) -> list[Summary | None]:
        """The summaries of these caches, a few read at once."""
        gate = asyncio.Semaphore(_READS)

        async def read(some: Sequence[Record]) -> list[Summary | None]:
            async with gate:
                return await self.threads.run(lambda: [self._summary(record.id, tenant) for record in some])

        portions = (records[at : at + _PORTION] for at in range(0, len(records), _PORTION))
        return list(chain.from_iterable(await asyncio.gather(*map(read, portions))))

    def _summary(self, cache_id: str, tenant: str) -> Summary | None:
        """The summary of a cache from the store, empty where it has none; None if it cannot be read."""
        try:
            with self.store.open_cache(cache_id, tenant=tenant) as arriving:
                summary = unpacked(arriving.summary)
        except (CacheError, CacheNotFound):
            return None
        # An imported cache that another program made may have other layers.
        return summary if len(summary) == self.engine.searcher.summary_layers else []

    def _ranked(
        self,
        compared: Sequence[Record],
        question: Sequence[Codes],
        blocks: Sequence[Block],
        places: Places,
        spec: SearchCaches,
        tenant: str,
        checkpoint: Callable[[], None],
    ) -> list[SearchHit]:
        """The best of these caches, of equal ones the newest. Each is looked up once more: none is named that ended, or
        lost a label, since it was compared."""
        points = scores(question, blocks, places, checkpoint)
        best: list[SearchHit] = []
        for at in np.argsort(-points, kind="stable"):
            checkpoint()
            if (hit := self._hit(compared[at], float(points[at]), spec, tenant)) is not None:
                best.append(hit)
            if len(best) == spec.limit:
                break
        return best

    def _hit(self, record: Record, points: float, spec: SearchCaches, tenant: str) -> SearchHit | None:
        try:
            manifest = self.store.stat(record.id, tenant=tenant)
        except (CacheError, CacheNotFound):
            return None
        if manifest.blob_digest != record.digest or not spec.labels.items() <= manifest.labels.items():
            return None
        return SearchHit(cache_id=manifest.id, score=round(points, 4), name=manifest.name)

    def _make_room(self, shelved: Shelved) -> None:
        """Forget what is known of the tenants that searched longest ago, while all take too much."""
        nbytes = sum(other.nbytes for other in self.shelved.values())
        for tenant, other in list(self.shelved.items()):
            if nbytes <= self.held_bytes:
                return
            if other is not shelved and not other.lock.locked():
                nbytes -= other.nbytes
                del self.shelved[tenant]

    async def _codes(self, token_ids: Sequence[int], caller: Caller) -> list[Codes]:
        """The codes of the question, by the thread that owns the model."""
        run = partial(self.engine.searcher.codes, token_ids)
        ticket = self.scheduler.pass_of(run, tenant=caller.tenant, deadline_s=caller.deadline_s)
        try:
            return await asyncio.wrap_future(ticket.future)
        finally:
            ticket.cancel()


def _placed(
    shelved: Shelved, choice: Shortlist, aside: Mapping[str, Summary]
) -> tuple[list[Record], list[Block], Places]:
    """The caches of a choice that have summaries, in its order, the blocks that have these, and their places in the
    blocks. aside: the summaries that memory has no room for."""
    if choice.placed is not None:
        return choice.placed
    others = [record for record in choice.records if aside.get(record.id)]
    records = [record for record in choice.records if record.place >= 0]
    blocks, places = shelved.summaries.of(np.array([record.place for record in records], np.int64))
    if others:
        first = sum(len(block.starts[0]) for block in blocks)
        blocks.append(Block.of([aside[record.id] for record in others]))
        pairs = zip([*records, *others], [*places, *range(first, first + len(others))], strict=True)
        order = sorted(pairs, key=lambda pair: -pair[0].created_at)
        return [record for record, _ in order], blocks, np.array([place for _, place in order], np.int64)
    if not choice.missing:
        choice.placed = records, blocks, places
    return records, blocks, places


async def _timed(work: Awaitable[ResultT]) -> tuple[float, ResultT]:
    started = time.monotonic()
    result = await work
    return time.monotonic() - started, result


async def _nothing() -> list[Any]:
    """The result where there is no document to compare."""
    return []
