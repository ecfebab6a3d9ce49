"""One replica: an engine, its scheduler and the store, behind asynchronous methods. Knows no HTTP and no Ray.

The event loop never computes: tokenization and the store run on threads, the model on the scheduler's. Keys and values
go from here to the store and back; only ids, text and numbers leave this process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import structlog

from kvshelf.api import CreateCache, Estimate, EstimateObject, Query, Usage
from kvshelf.api.inspect import KeptTokens
from kvshelf.errors import DeadlineExceeded, InternalError, KvshelfError
from kvshelf.store.base import Store
from kvshelf.workers.engine.attention.attachment import Attachment
from kvshelf.workers.engine.decode.generation import Answer, Sampling
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.inputs.encode import Document
from kvshelf.workers.engine.quality import QUESTIONS
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS, Attempts
from kvshelf.workers.replica.calls import Threads, log_as, named_errors
from kvshelf.workers.replica.create.creations import Creations
from kvshelf.workers.replica.inspect import kept_tokens
from kvshelf.workers.replica.residents import Resident, ResidentLimits, Residents
from kvshelf.workers.replica.results import Created, Phase, Reply, rounded
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import Ticket

log = structlog.get_logger("kvshelf.workers")

STUCK_S = 30.0
"""After its deadline, how long a document may hold the model before its replica is replaced. Between two layers it ends
by itself, so a layer that takes so long does not come to its end at all, or takes the replica from everyone else."""


class Replica:
    """See the module. `start` it on the event loop that will call it, `stop` it once.

    questions: see `Creations`. max_document_tokens: the longest document to compress, None for the model's limit.
    origin: the id under which the caller logs the request; log lines here carry it, too.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        scheduler: Scheduler,
        residents: ResidentLimits | None = None,
        *,
        questions: int = QUESTIONS,
        max_document_tokens: int | None = None,
    ) -> None:
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engine = engine
        self._store = store
        self._scheduler = scheduler
        self._threads = Threads(max_workers=8, thread_name_prefix="replica")
        self._creations = Creations(engine, store, scheduler, self._threads, questions, max_document_tokens)
        self._attempts = Attempts(store.requests, self.name, self._threads)
        self._residents = Residents(store, engine.attach, residents or ResidentLimits(), self._threads)
        self._evicting: asyncio.Task[NoReturn] | None = None

    def start(self) -> None:
        self._scheduler.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """End all work; its callers get `NoWorker`."""
        self._scheduler.stop(drain_s=drain_s)
        if self._evicting is not None:
            self._evicting.cancel()
        self._residents.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check_health(self) -> None:
        """Raise if this replica can no longer work and must be replaced."""
        if not self._scheduler.alive:
            raise InternalError(f"the scheduler thread of {self._engine.name!r} has ended")
        if self._scheduler.overdue_s > STUCK_S:
            raise InternalError(f"{self._engine.name!r} hangs in a document that should have ended {STUCK_S:g} s ago")

    async def describe(self) -> dict[str, Any]:
        """The model, for /v1/models, and its `ModelIdentity`. JSON types only."""
        engine = self._engine
        return {
            "id": engine.name,
            "max_tokens": engine.max_tokens,
            "default_layout": engine.default_layout,
            "fingerprint": engine.identity.fingerprint(),
            "tokenizer": engine.identity.tokenizer,
            "dtype": engine.identity.dtype,
            "device": str(engine.model.device),
            "identity": asdict(engine.identity),
        }

    async def create(
        self,
        spec: CreateCache,
        *,
        tenant: str,
        deadline_s: float | None = None,
        request_id: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        origin: str = "",
    ) -> Created:
        """Compress a document and store it, unless the shelf has it.

        With `request_id`, a request of the job table, the attempt is counted there before any work, and its end is
        recorded: the failure of the `max_attempts`th is final.
        """
        log_as(origin)
        if request_id is None:
            with named_errors():
                return await self._creations.create(spec, tenant, deadline_s)
        self._scheduler.require_room()  # a full queue is no attempt
        async with self._attempts.counted(request_id, tenant, max_attempts=max_attempts) as attempt:
            with named_errors():
                created = await self._creations.create(spec, tenant, deadline_s)
            ids = [cache.manifest.id for cache in created.caches]
            await self._threads.run(self._store.requests.finish, request_id, attempt, cache_ids=ids)
            return replace(created, worker=self.name)

    async def estimate(self, spec: Estimate, *, origin: str = "") -> EstimateObject:
        """What creating this would take, in seconds as this replica has measured them."""
        log_as(origin)
        with named_errors():
            return await self._threads.run(self._creations.estimate, spec)

    async def inspect(
        self, cache_id: str, document: Document | None, *, tenant: str, first_layer: int = 0, origin: str = ""
    ) -> KeptTokens:
        """Which tokens of its document a cache kept, see `kvshelf.workers.replica.inspect`."""
        log_as(origin)
        with named_errors():
            return await self._threads.run(
                kept_tokens, self._engine, self._store, cache_id, document, tenant=tenant, first_layer=first_layer
            )

    async def query(
        self, cache_id: str, query: Query, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> list[Reply]:
        """Answer every prompt, in their order. The first error ends all of them."""
        log_as(origin)
        with named_errors():
            async with self._loaded(cache_id, tenant, deadline_s) as loaded:
                sampling, tickets = _sampling(query), list[Ticket[Answer]]()
                try:
                    for ids in await self._encode(loaded.document, query):
                        ticket = self._scheduler.generate(loaded.document, ids, sampling, deadline_s=deadline_s)
                        tickets.append(ticket)
                    return [loaded.reply(await asyncio.wrap_future(ticket.future), ticket) for ticket in tickets]
                finally:
                    for ticket in tickets:
                        ticket.cancel()

    async def stream(
        self, cache_id: str, query: Query, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> AsyncIterator[str | Reply]:
        """The pieces of the answer to the one prompt as they become final, then the answer. Closing it cancels it."""
        log_as(origin)
        with named_errors():
            async with self._loaded(cache_id, tenant, deadline_s) as loaded:
                (ids,) = await self._encode(loaded.document, query)
                pieces: asyncio.Queue[str | None] = asyncio.Queue()
                loop = asyncio.get_running_loop()

                def put(piece: str | None) -> None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

                ticket = self._scheduler.generate(
                    loaded.document, ids, _sampling(query), on_text=put, deadline_s=deadline_s
                )
                ticket.future.add_done_callback(lambda _: put(None))
                try:
                    while (piece := await pieces.get()) is not None:
                        yield piece
                    yield loaded.reply(ticket.future.result(), ticket)
                finally:
                    ticket.cancel()

    @asynccontextmanager
    async def _loaded(self, cache_id: str, tenant: str, deadline_s: float | None) -> AsyncIterator[_Loaded]:
        if self._evicting is None:  # begun here: the event loop of the first question is the one that will run it
            self._evicting = asyncio.ensure_future(self._residents.evict_idle_forever())
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(deadline_s):
                    using = self._residents.using(cache_id, tenant)
                    resident, there = await stack.enter_async_context(using)
            except TimeoutError as exc:
                raise DeadlineExceeded(
                    f"the cache could not be had within {deadline_s} s: the store is slow, or the memory for caches is "
                    "full of others that are being asked; try again"
                ) from exc
            self._threads.submit(_touch, self._store, cache_id, tenant)
            yield _Loaded(cache_id, resident, there, started, time.monotonic() - started)

    async def _encode(self, document: Attachment, query: Query) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [self._engine.encode_query(document, prompt) for prompt in _prompts(query)]

        return await self._threads.run(encode)


@dataclass(frozen=True)
class _Loaded:
    """A cache to query. It may still be arriving; an answer has waited for all of it.

    started: the time of the request, of `time.monotonic`. found_s: seconds until the cache was there or began to
    arrive.
    """

    cache_id: str
    resident: Resident
    was_there: bool
    started: float
    found_s: float

    @property
    def document(self) -> Attachment:
        return self.resident.document

    def reply(self, answer: Answer, ticket: Ticket[Answer]) -> Reply:
        """The reply for an answer that has just ended."""
        identity = self.document.identity
        load_s = self.found_s + (0.0 if self.was_there else self.resident.read_s)
        asked_s = ticket.submitted - self.started
        begun_s, first_s = asked_s + ticket.queue_s, asked_s + ticket.first_s
        phases = (
            Phase("load", 0.0, load_s),
            Phase("queue", asked_s, ticket.queue_s),
            Phase("prefill", begun_s, first_s - begun_s),
            Phase("decode", first_s, time.monotonic() - self.started - first_s),
        )
        read_from = "memory" if self.was_there else self.resident.place
        log.info("answered", cache_id=self.cache_id, read_from=read_from, **asdict(answer.usage), **rounded(phases))
        return Reply(
            id="ans_" + secrets.token_hex(12),
            cache_id=self.cache_id,
            text=answer.text,
            finish_reason=answer.finish_reason,
            usage=Usage(**asdict(answer.usage)),
            load_ms=round(load_s * 1000, 3),
            policy=identity.policy,
            compression_ratio=identity.compression_ratio,
            token_ids=answer.token_ids,
            read_from=read_from,
            phases=phases,
        )


def _prompts(query: Query) -> list[str] | list[list[dict[str, str]]]:
    """The prompts to answer: texts, or one conversation."""
    if query.messages is not None:
        return [[message.model_dump() for message in query.messages]]
    assert query.prompt is not None  # the type asks for exactly one of the two
    return query.prompt if isinstance(query.prompt, list) else [query.prompt]


def _sampling(query: Query) -> Sampling:
    stop = (query.stop,) if isinstance(query.stop, str) else tuple(query.stop or ())
    return Sampling(query.max_tokens, query.temperature, query.top_p, query.seed, stop)


def _touch(store: Store, cache_id: str, tenant: str) -> None:
    try:
        store.touch(cache_id, tenant=tenant)
    except KvshelfError:
        log.warning("a use could not be recorded", cache_id=cache_id, exc_info=True)
