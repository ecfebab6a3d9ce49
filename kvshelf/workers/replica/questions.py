"""Answering questions from stored caches, several at once, whole or piece by piece."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import structlog

from kvshelf.api import Asking, JointQuery, ReadShares, Source
from kvshelf.errors import DeadlineExceeded, KvshelfError
from kvshelf.store.base import Store
from kvshelf.workers.engine.attention.attachment import Attached
from kvshelf.workers.engine.decode.generation import Answer, Sampling
from kvshelf.workers.engine.decode.selection import Selection
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.replica.calls import Threads, called_as
from kvshelf.workers.replica.residents import Resident, Residents
from kvshelf.workers.replica.results import Phase, Reply, rounded
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import Ticket
from kvshelf.workers.selectors.registry import reads_by_index

log = structlog.get_logger("kvshelf.workers")


@dataclass(eq=False)
class Questions:
    """The questions to one replica."""

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: Threads
    residents: Residents
    _evicting: asyncio.Task[NoReturn] | None = field(default=None, init=False)

    def stop(self) -> None:
        if self._evicting is not None:
            self._evicting.cancel()
        self.residents.close()

    async def query(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> Reply:
        """Answer the one prompt of a query about a cache, or about several together: callers ask several prompts one by
        one, so that tenants take turns."""
        with called_as(origin):
            async with self._loaded(caches, query, tenant, deadline_s) as loaded:
                ticket = await self._begun(loaded.document, query, tenant=tenant, deadline_s=deadline_s)
                try:
                    return loaded.reply(await asyncio.wrap_future(ticket.future), ticket)
                finally:
                    ticket.cancel()

    async def stream(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> AsyncIterator[str | Reply]:
        """Pieces of the answer to the prompt as they become final, then the answer. Closing the iterator cancels it."""
        with called_as(origin):
            async with self._loaded(caches, query, tenant, deadline_s) as loaded:
                pieces: asyncio.Queue[str | None] = asyncio.Queue()
                loop = asyncio.get_running_loop()

                def put(piece: str | None) -> None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

                ticket = await self._begun(loaded.document, query, on_text=put, tenant=tenant, deadline_s=deadline_s)
                ticket.future.add_done_callback(lambda _: put(None))
                try:
                    while (piece := await pieces.get()) is not None:
                        yield piece
                    yield loaded.reply(ticket.future.result(), ticket)
                finally:
                    ticket.cancel()

    @asynccontextmanager
    async def _loaded(
        self, caches: str | Sequence[str], query: Asking, tenant: str, deadline_s: float | None
    ) -> AsyncIterator[_Loaded]:
        if self._evicting is None:  # begun here: the event loop of the first question is the one that will run it
            self._evicting = asyncio.ensure_future(self.residents.evict_idle_forever())
        started = time.monotonic()
        asked = [caches] if isinstance(caches, str) else caches
        routed = isinstance(query, JointQuery) and query.route is not None
        cache_ids = [await self._nearest(asked, query, tenant)] if routed else asked
        part = query.select is not None and reads_by_index(query.select.method)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(deadline_s):
                    held = await stack.enter_async_context(self.residents.using_all(cache_ids, tenant, part=part))
            except TimeoutError as exc:
                raise DeadlineExceeded(
                    f"the cache could not be had within {deadline_s} s: the store is slow, or the memory for caches is "
                    "full of others that are being asked; try again"
                ) from exc
            except KvshelfError as error:
                if routed:
                    error.details["cache_id"] = cache_ids[0]
                raise
            for cache_id in cache_ids:
                self.threads.submit(_touch, self.store, cache_id, tenant)
            document = self.engine.joined([resident.document for resident, _ in held])
            found_s = time.monotonic() - started
            loaded = _Loaded(asked, dict(zip(cache_ids, held, strict=True)), document, started, found_s)
            try:
                yield loaded
            except KvshelfError as error:
                if (failed := loaded.failed) is not None:
                    error.details["cache_id"] = failed
                raise

    async def _nearest(self, cache_ids: Sequence[str], query: Asking, tenant: str) -> str:
        """Of these caches of episodes the one that the question is about. Errors of the store name their cache."""

        def params(cache_id: str) -> dict[str, Any]:
            try:
                return self.store.stat(cache_id, tenant=tenant).policy_params
            except KvshelfError as error:
                error.details["cache_id"] = cache_id
                raise

        def nearest() -> str:
            return cache_ids[self.engine.nearest(list(map(params, cache_ids)), _prompt(query))]

        return await self.threads.run(nearest)

    async def _begun(self, document: Attached, query: Asking, **options: Any) -> Ticket[Answer]:
        """The queued answer. options: of `Scheduler.generate`."""
        ids = await self._encode(document, query)
        selection, passages = await self._selected(document, query, ids), _asks_passages(query)
        return self.scheduler.generate(document, ids, _sampling(query), selection, passages=passages, **options)

    async def _encode(self, document: Attached, query: Asking) -> list[int]:
        return await self.threads.run(self.engine.encode_query, document, _prompt(query))

    async def _selected(self, document: Attached, query: Asking, ids: Sequence[int]) -> Selection | None:
        """What the answer reads, on a thread: it waits for all layers of a cache that is arriving."""
        if query.select is None:
            return None
        chosen = query.select
        return await self.threads.run(
            lambda: self.engine.select(
                document, chosen.method, question_tokens=len(ids), tokens=chosen.tokens, params=chosen.params
            )
        )


@dataclass(frozen=True)
class _Loaded:
    """The caches to query, by id, each with whether it was in memory. They may still be arriving; every answer waits
    for all of them.

    asked: the ids in the question, of which a route may have chosen one to hold. document: they, as the question sees
    them. started: the time of the request, of `time.monotonic`. found_s: seconds until the caches were found in memory
    or began to arrive.
    """

    asked: Sequence[str]
    held: dict[str, tuple[Resident, bool]]
    document: Attached
    started: float
    found_s: float

    @property
    def failed(self) -> str | None:
        """Of several caches, one that could not be read."""
        unread = (cache_id for cache_id, (resident, _) in self.held.items() if resident.document.failed)
        return next(unread, None) if len(self.asked) > 1 else None

    def reply(self, answer: Answer, ticket: Ticket[Answer]) -> Reply:
        """The reply for an answer that has just ended."""
        identity = self.document.identity
        read = [resident for resident, was_there in self.held.values() if not was_there]
        slowest = max(read, key=lambda resident: resident.read_s, default=None)
        read_from, read_s = ("memory", 0.0) if slowest is None else (slowest.place, slowest.read_s)
        load_s = self.found_s + read_s
        asked_s = ticket.submitted - self.started
        begun_s, first_s = asked_s + ticket.queue_s, asked_s + ticket.first_s
        phases = (
            Phase("load", 0.0, load_s),
            Phase("queue", asked_s, ticket.queue_s),
            Phase("prefill", begun_s, first_s - begun_s),
            Phase("decode", first_s, time.monotonic() - self.started - first_s),
        )
        shares = dict(zip(self.held, answer.sources, strict=True))
        longest = next(id for id, (resident, _) in self.held.items() if resident.document.identity is identity)
        several = {"caches": len(shares)} if len(shares) > 1 else {}
        log.info("answered", cache_id=longest, read_from=read_from, **several, **dict(answer.usage), **rounded(phases))
        return Reply(
            id="ans_" + secrets.token_hex(12),
            cache_id=longest,
            text=answer.text,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            load_ms=round(load_s * 1000, 3),
            policy=identity.policy,
            compression_ratio=identity.compression_ratio,
            token_ids=answer.token_ids,
            read_from=read_from,
            phases=phases,
            sources=tuple(Source(cache_id=id, share=shares.get(id, 0.0)) for id in self.asked),
            passages=None if answer.passages is None else list(map(ReadShares.of, self.held, answer.passages)),
        )


def _prompt(query: Asking) -> str | list[dict[str, str]]:
    """The prompt to answer: a text, or a conversation."""
    if query.messages is not None:
        return [message.model_dump() for message in query.messages]
    assert query.prompt is not None  # the type asks for exactly one of the two
    (prompt,) = query.prompt if isinstance(query.prompt, list) else [query.prompt]
    return prompt


def _sampling(query: Asking) -> Sampling:
    stop = (query.stop,) if isinstance(query.stop, str) else tuple(query.stop or ())
    return Sampling(query.max_tokens, query.temperature, query.top_p, query.seed, stop)


def _asks_passages(query: Asking) -> bool:
    return query.select is not None and query.select.passages


def _touch(store: Store, cache_id: str, tenant: str) -> None:
    try:
        store.touch(cache_id, tenant=tenant)
    except KvshelfError:
        log.warning("a use could not be recorded", cache_id=cache_id, exc_info=True)
