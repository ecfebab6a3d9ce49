"""One replica: an engine, its scheduler and the store, behind asynchronous methods. Knows no HTTP and no Ray.

The event loop never computes: tokenization and the store run on threads, the model on the scheduler's. Keys and values
go from here to the store and back; only ids, text and numbers leave this process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import structlog
import torch

from kvshelf.errors import (
    CacheError,
    CacheNotFound,
    CallerError,
    Cancelled,
    DeadlineExceeded,
    DocumentTooLong,
    InternalError,
    KvshelfError,
    QuotaExceeded,
    RequestTimeout,
    StateConflict,
    StoreError,
)
from kvshelf.store.base import Store
from kvshelf.store.identity import canonical_json
from kvshelf.store.manifest import Manifest, Timings
from kvshelf.workers.attachment import Attachment
from kvshelf.workers.engine import Engine
from kvshelf.workers.estimates import Rates, estimate
from kvshelf.workers.flights import Flights
from kvshelf.workers.generation import Answer, Sampling
from kvshelf.workers.intake import Document
from kvshelf.workers.job import Job
from kvshelf.workers.phases import Phase, in_sequence
from kvshelf.workers.residents import Resident, ResidentLimits, Residents
from kvshelf.workers.scheduler import Scheduler
from kvshelf.workers.ticket import Ticket

log = structlog.get_logger("kvshelf.workers")

ResultT = TypeVar("ResultT")

MAX_ATTEMPTS = 3
"""How often a request is tried before its failure is final."""

MAX_UNREAD_PIECES = 1024
"""Pieces of a streamed answer that may wait for a slow client before it is cut off. No answer waits for its client."""

LEASE_S = 10.0
"""How long after its last sign of life a worker's request may be taken over by another."""


@dataclass(frozen=True)
class Created:
    """A stored cache, and whether it was on the shelf already. `manifest` has JSON types only.

    phases: of the work, where there was any: queue, prefill, compress, store, told one after the other although prefill
    and compress take turns.
    """

    manifest: dict[str, Any]
    existing: bool
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What a query asks of each of its prompts. A prompt is text, or messages of which the first is the user's."""

    prompts: tuple[str | list[dict[str, str]], ...]
    sampling: Sampling


@dataclass(frozen=True)
class Replied:
    """One answer, with what is known about the cache it came from.

    load_ms: finding the cache, and reading and checking its blob where it was not in memory. read_from: "memory", or
    where the blob was read, as `ArrivingCache.place`. phases: load, queue, prefill (up to the first token), decode;
    the others may begin before the last layer is loaded.
    """

    answer: Answer
    load_ms: float
    policy: str
    compression_ratio: float
    read_from: str
    phases: tuple[Phase, ...]

    @property
    def first_token_s(self) -> float:
        """Seconds from the question's arrival at the replica to the first token of the answer."""
        return self.phases[-1].start_s


class Replica:
    """See the module. `start` it on the event loop that will call it, `stop` it once.

    `origin` is the id under which the caller logs what it asks for; the lines that are logged here carry it, too.
    """

    def __init__(
        self, engine: Engine, store: Store, scheduler: Scheduler, residents: ResidentLimits | None = None
    ) -> None:
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engine = engine
        self._store = store
        self._scheduler = scheduler
        self._flights: Flights[Created] = Flights()
        self._rates = Rates()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="replica")
        self._residents = Residents(store, engine.attach, residents or ResidentLimits(), self._threads)
        self._evicting: asyncio.Task[NoReturn] | None = None

    def start(self) -> None:
        self._scheduler.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """End all work; whoever waits for it gets `NoWorker`."""
        self._scheduler.stop(drain_s=drain_s)
        if self._evicting is not None:
            self._evicting.cancel()
        self._residents.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check_health(self) -> None:
        """Raise if this replica can no longer work and must be replaced."""
        if not self._scheduler.alive:
            raise InternalError(f"the scheduler thread of {self._engine.name!r} has ended")

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
        spec: Mapping[str, Any],
        *,
        tenant: str,
        deadline_s: float | None = None,
        request_id: str | None = None,
        origin: str = "",
    ) -> Created:
        """Compress what `spec` describes (the fields of `CreateCache`) and store it, unless the shelf has it.

        With `request_id`, a request of the ledger, the attempt is counted there before any work, and its end recorded.
        """
        _log_as(origin)
        if request_id is None:
            with _named_errors():
                return await self._create(spec, tenant, deadline_s)
        self._scheduler.require_room()  # a full queue is no attempt
        async with self._attempt(request_id, tenant) as attempt:
            with _named_errors():
                created = await self._create(spec, tenant, deadline_s)
            finish = self._store.ledger.finish
            await self._off_loop(finish, request_id, attempt, cache_ids=[created.manifest["id"]])
            return created

    async def estimate(self, spec: Mapping[str, Any], *, origin: str = "") -> dict[str, Any]:
        """What creating this would take, see `estimates.estimate`: in seconds as this replica has measured them."""
        _log_as(origin)
        with _named_errors():
            return await self._off_loop(estimate, self._engine, self._rates, _document(spec), spec)

    async def query(
        self, cache_id: str, asked: Asked, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> list[Replied]:
        """Answer every prompt, in their order. The first error ends all of them."""
        _log_as(origin)
        with _named_errors():
            async with self._loaded(cache_id, tenant, deadline_s) as loaded:
                queries = await self._encode(loaded.document, asked)
                tickets: list[Ticket[Answer]] = []
                try:
                    for query in queries:
                        ticket = self._scheduler.generate(loaded.document, query, asked.sampling, deadline_s=deadline_s)
                        tickets.append(ticket)
                    return [loaded.reply(await asyncio.wrap_future(ticket.future), ticket) for ticket in tickets]
                finally:
                    for ticket in tickets:
                        ticket.cancel()

    async def stream(
        self, cache_id: str, asked: Asked, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> AsyncIterator[str | Replied]:
        """The pieces of the answer to the one prompt as they become final, then the answer. Closing it cancels it."""
        _log_as(origin)
        with _named_errors():
            async with self._loaded(cache_id, tenant, deadline_s) as loaded:
                (query,) = await self._encode(loaded.document, asked)
                pieces: asyncio.Queue[str | None] = asyncio.Queue()
                loop = asyncio.get_running_loop()

                def put(piece: str | None) -> None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

                def hand_over(piece: str) -> None:
                    if pieces.qsize() >= MAX_UNREAD_PIECES:
                        raise RequestTimeout(
                            f"{MAX_UNREAD_PIECES} pieces of the answer wait to be read, as many as may; read the "
                            "stream faster, or ask without streaming"
                        )
                    put(piece)

                ticket = self._scheduler.generate(
                    loaded.document, query, asked.sampling, on_text=hand_over, deadline_s=deadline_s
                )
                ticket.future.add_done_callback(lambda _: put(None))
                try:
                    while (piece := await pieces.get()) is not None:
                        yield piece
                    yield loaded.reply(ticket.future.result(), ticket)
                finally:
                    ticket.cancel()

    async def _create(self, spec: Mapping[str, Any], tenant: str, deadline_s: float | None) -> Created:
        job = await self._off_loop(_prepare, self._engine, spec)
        cache_id = self._store.cache_id(job.identity, tenant=tenant, codec=spec["codec"])
        created, began = await self._flights.join(
            cache_id, lambda: self._compress(cache_id, job, spec, tenant, deadline_s)
        )
        if created.existing or not began:
            manifest = await self._off_loop(_as_asked, self._store, created.manifest, spec)
            return Created(manifest, existing=True)
        return created

    async def _compress(
        self, cache_id: str, job: Job, spec: Mapping[str, Any], tenant: str, deadline_s: float | None
    ) -> Created:
        try:
            manifest = await self._off_loop(self._store.stat, cache_id, tenant=tenant)
            return Created(_plain(manifest), existing=True)
        except (CacheNotFound, CacheError):
            pass  # not there, or there and of no use any more: `put` replaces it
        await self._off_loop(self._store.admit, tenant)
        ticket = self._scheduler.compress(job, deadline_s=deadline_s)
        try:
            compression = await asyncio.wrap_future(ticket.future)
        finally:
            ticket.cancel()
        manifest = await self._off_loop(
            self._store.put,
            compression.cache,
            codec=spec["codec"],
            tenant=tenant,
            ttl_s=spec["ttl_s"],
            expires_at=spec["expires_at"],
            labels=spec["labels"],
            name=spec["name"],
            timings=Timings(queue_s=ticket.queue_s, prefill_s=compression.prefill_s, compress_s=compression.compress_s),
            source=_source(spec),
        )
        took = manifest.timings
        self._rates.add(manifest.policy, manifest.num_tokens, took)
        phases = in_sequence(queue=took.queue_s, prefill=took.prefill_s, compress=took.compress_s, store=took.store_s)
        log.info(
            "compressed", cache_id=cache_id, tokens=manifest.num_tokens, kept=manifest.kept_tokens, **_rounded(phases)
        )
        return Created(_plain(manifest), existing=False, phases=phases)

    @asynccontextmanager
    async def _attempt(self, request_id: str, tenant: str) -> AsyncIterator[int]:
        """Count an attempt in the ledger, keep its lease alive, and record it if the work inside fails."""
        ledger = self._store.ledger
        attempt = await self._off_loop(ledger.start_attempt, request_id, worker=self.name, lease_s=LEASE_S)
        renewing = asyncio.ensure_future(self._renew(request_id, attempt))
        try:
            yield attempt
        except asyncio.CancelledError:
            # The service is stopping. Nobody is to blame, so it is never final; the write outlives the cancellation.
            stopped = Cancelled("the service stopped")
            await asyncio.shield(self._record_failure(request_id, attempt, stopped, final=False))
            raise
        except KvshelfError as error:
            record = await self._off_loop(ledger.get_request, request_id, tenant=tenant)
            final = isinstance(error, CallerError | QuotaExceeded) or record.tries >= MAX_ATTEMPTS
            await self._record_failure(request_id, attempt, error, final=final)
            raise
        finally:
            renewing.cancel()

    async def _renew(self, request_id: str, attempt: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._off_loop(self._store.ledger.renew, request_id, attempt, lease_s=LEASE_S)
            except StoreError:
                log.warning("a lease could not be renewed; it is tried again", request=request_id, exc_info=True)

    async def _record_failure(self, request_id: str, attempt: int, error: KvshelfError, *, final: bool) -> None:
        fail = self._store.ledger.fail
        try:
            await self._off_loop(
                fail, request_id, attempt, code=error.code, message=error.message, param=error.param, final=final
            )
        except StateConflict:
            log.warning("an attempt was taken over by another worker", request=request_id, attempt=attempt)

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

    async def _encode(self, document: Attachment, asked: Asked) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [self._engine.encode_query(document, prompt) for prompt in asked.prompts]

        return await self._off_loop(encode)

    async def _off_loop(self, call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        # What is logged on the thread is logged for the same request.
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(run, call, *args, **kwargs))


@dataclass(frozen=True)
class _Loaded:
    """A cache that questions can be put to. It may still be arriving; an answer has waited for all of it.

    started: when it was asked for, of `time.monotonic`; found_s: how long it took to be there or to begin to arrive.
    """

    cache_id: str
    resident: Resident
    was_there: bool
    started: float
    found_s: float

    @property
    def document(self) -> Attachment:
        return self.resident.document

    def reply(self, answer: Answer, ticket: Ticket[Answer]) -> Replied:
        """The answer that has just ended, with what it took."""
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
        log.info("answered", cache_id=self.cache_id, read_from=read_from, **asdict(answer.usage), **_rounded(phases))
        return Replied(answer, load_s * 1000, identity.policy, identity.compression_ratio, read_from, phases)


def _prepare(engine: Engine, spec: Mapping[str, Any]) -> Job:
    return engine.prepare(
        _document(spec),
        layout=spec["layout"],
        policy=spec["policy"],
        compression_ratio=spec["compression_ratio"],
        budget_tokens=spec["budget_tokens"],
        policy_params=spec["policy_params"],
        expected_questions=spec["expected_questions"],
    )


def _document(spec: Mapping[str, Any]) -> Document:
    found: Document = next(spec[name] for name in ("document", "messages", "token_ids") if spec[name] is not None)
    return found


def prolonged(store: Store, manifest: Manifest, ttl_s: float | None, expires_at: float | None) -> Manifest:
    """A cache that is there already lives at least as long as its newest request asks; never shorter."""
    have, want = manifest.expires_at, store.expiry(ttl_s, expires_at)
    if have is None or (want is not None and want <= have):
        return manifest
    return store.update(manifest.id, tenant=manifest.tenant, expires_at=want)


def _as_asked(store: Store, plain: dict[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A cache that is there already, with what its newest request wants besides: more time, its source kept."""
    manifest = prolonged(store, Manifest.model_validate(plain), spec["ttl_s"], spec["expires_at"])
    source = _source(spec)
    if source is not None and not manifest.has_source:
        manifest = store.keep_source(manifest.id, source, tenant=manifest.tenant)
    return _plain(manifest)


def _source(spec: Mapping[str, Any]) -> str | None:
    """What is kept beside the cache as its document: the text, or the messages as JSON. None: nothing is to be kept."""
    if not spec["keep_source"]:
        return None
    document: str | None = spec["document"]
    return document if document is not None else canonical_json(spec["messages"])


def _touch(store: Store, cache_id: str, tenant: str) -> None:
    try:
        store.touch(cache_id, tenant=tenant)
    except KvshelfError:
        log.warning("a use could not be recorded", cache_id=cache_id, exc_info=True)


def _log_as(origin: str) -> None:
    """Every line of this call carries the caller's id. Each call is a task of its own, so nothing is to be undone."""
    structlog.contextvars.bind_contextvars(request_id=origin)


def _rounded(phases: tuple[Phase, ...]) -> dict[str, float]:
    return {f"{phase.name}_s": round(phase.seconds, 4) for phase in phases}


def _plain(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")


@contextmanager
def _named_errors() -> Iterator[None]:
    """What leaves a replica is an error of kvshelf: foreign ones may not survive the trip to another process."""
    try:
        yield
    except KvshelfError:
        raise
    except torch.OutOfMemoryError as exc:
        raise DocumentTooLong(f"this does not fit into the memory of the device: {str(exc)[:200]}") from exc
    except Exception as exc:
        log.exception("a bug in a replica")
        raise InternalError(f"the worker failed unexpectedly ({type(exc).__name__}); its log has the details") from exc
