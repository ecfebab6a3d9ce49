"""A model's workers as the routes see them: tenants take turns, and nobody's reading holds a worker up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import Any

from kvshelf.errors import RequestTimeout
from kvshelf.service.fair_queue import FairQueue
from kvshelf.service.settings import Settings
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.engine.inputs.encode import Document
from kvshelf.workers.replica.create.created import Created
from kvshelf.workers.replica.replica import MAX_UNREAD_PIECES, Asked, Replied

CREATIONS_PER_REPLICA = 2
"""One document is being prefilled while the next is tokenized and the last one stored."""

ESTIMATES_PER_REPLICA = 2
"""One document is being tokenized while the next is on its way."""


class FairEngine:
    """A `RemoteEngine` behind queues for questions, creations and estimates; `deadline_s` includes the waiting.

    There are as many slots as the replicas can work on at once. What waits, waits here: a replica knows no tenants and
    takes everything in its order.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        settings: Settings,
        counting: Callable[[], AbstractContextManager[None]] = nullcontext,
        spend: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """counting: a block for what can refuse a question before the engine counts it. spend: is told a tenant and how
        many tokens were prefilled and generated for it."""
        self._counting = counting
        self._spend = spend
        self._engine = engine
        self.model = engine.model
        questions = settings.replicas * min(settings.max_open_generations, settings.max_ongoing_requests)
        waiting = settings.max_queued_requests
        self._questions = FairQueue(f"questions to {self.model!r}", questions, waiting)
        self._creations = FairQueue(f"creations by {self.model!r}", CREATIONS_PER_REPLICA * settings.replicas, waiting)
        self._estimates = FairQueue(f"estimates by {self.model!r}", ESTIMATES_PER_REPLICA * settings.replicas, waiting)

    @property
    def waiting(self) -> dict[str, int]:
        """How many wait, by kind of work."""
        return {
            "question": self._questions.waiting,
            "creation": self._creations.waiting,
            "estimate": self._estimates.waiting,
        }

    async def estimate(self, spec: Mapping[str, Any], *, tenant: str, deadline_s: float) -> dict[str, Any]:
        async with self._estimates.turn(tenant, deadline_s) as left_s:
            return await self._engine.estimate(spec, deadline_s=left_s)

    async def kept(
        self, cache_id: str, document: Document | None, *, tenant: str, first_layer: int, deadline_s: float
    ) -> dict[str, Any]:
        return await self._engine.kept(
            cache_id, document, tenant=tenant, first_layer=first_layer, deadline_s=deadline_s
        )

    async def create(self, spec: Mapping[str, Any], *, tenant: str, deadline_s: float) -> Created:
        async with self._creations.turn(tenant, deadline_s) as left_s:
            created = await self._engine.create(spec, tenant=tenant, deadline_s=left_s)
        self._spend(tenant, created.prefilled_tokens)
        return created

    @asynccontextmanager
    async def _turn(self, tenant: str, deadline_s: float) -> AsyncIterator[float]:
        """A slot for a question. One that gets none is counted here; what happens in the block is not."""
        async with AsyncExitStack() as stack:
            with self._counting():
                left_s = await stack.enter_async_context(self._questions.turn(tenant, deadline_s))
            yield left_s

    async def query(self, cache_id: str, asked: Asked, *, tenant: str, deadline_s: float) -> list[Replied]:
        async with self._turn(tenant, deadline_s) as left_s:
            replies = await self._engine.query(cache_id, asked, tenant=tenant, deadline_s=left_s)
        self._spend(tenant, sum(map(_used, replies)))
        return replies

    async def stream(
        self, cache_id: str, asked: Asked, *, tenant: str, deadline_s: float
    ) -> AsyncGenerator[str | Replied, None]:
        """The pieces as they come. A reader that leaves too many of them gets `RequestTimeout`, and holds no slot."""
        pieces: asyncio.Queue[str | Replied | None] = asyncio.Queue()

        async def fetch() -> None:
            async with (
                self._turn(tenant, deadline_s) as left_s,
                aclosing(self._engine.stream(cache_id, asked, tenant=tenant, deadline_s=left_s)) as answer,
                aclosing(self._counted(tenant, answer)) as arriving,
            ):
                async for piece in arriving:
                    if pieces.qsize() >= MAX_UNREAD_PIECES:
                        raise RequestTimeout(
                            f"{MAX_UNREAD_PIECES} pieces of the answer wait to be read, as many as may; read the "
                            "stream faster, or ask without streaming"
                        )
                    pieces.put_nowait(piece)

        fetching = asyncio.create_task(fetch())
        fetching.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await fetching
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _counted(
        self, tenant: str, answer: AsyncGenerator[str | Replied, None]
    ) -> AsyncGenerator[str | Replied, None]:
        """The pieces of an answer. Who leaves before its end has used a token for each piece, as far as is known."""
        used = 0
        try:
            async for piece in answer:
                used = used + 1 if isinstance(piece, str) else _used(piece)
                yield piece
        finally:
            self._spend(tenant, used)


def _used(reply: Replied) -> int:
    """Tokens that went through the model for an answer, and those that came out."""
    return reply.answer.usage.prefill_tokens + reply.answer.usage.completion_tokens
