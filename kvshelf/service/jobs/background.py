"""Background creations, accepted with 202. The store has them before the answer is sent, so they survive a restart.

The queues here, one per model, hold only ids; the store holds the bodies. A worker records each attempt in the store
before it starts, so that a document that kills its workers is given up after `MAX_ATTEMPTS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import structlog

from kvshelf.api import CreateCache
from kvshelf.api.strict import parse_request
from kvshelf.errors import (
    CacheError,
    CacheNotFound,
    InternalError,
    InvalidRequest,
    KvshelfError,
    QueueFull,
    RequestNotFound,
    StateConflict,
    StoreError,
)
from kvshelf.service.engines import EngineClient
from kvshelf.service.fair_queue import Rounds
from kvshelf.service.observe.logs import note
from kvshelf.store.artifact.identity import canonical_json, digest
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestRecord
from kvshelf.workers.replica.attempts import LEASE_S, Standing, give_up

log = structlog.get_logger("kvshelf.service")

_PREFIX = "req_"
_RUNNERS_PER_MODEL = 2  # so that one document is prefilled while another is tokenized or stored
_POLL_S = 0.5
_STORE_PAUSE_S = 2.0
_STORE_PAUSE_LIMIT_S = 60.0  # a full disk may stay full all night, and each attempt may waste a prefill
_LOOK_S = 2.0
_MISHAP_PAUSE_S = 60.0  # the next try most likely meets the same bug and logs another traceback
_FULL_PAUSE_S = 5.0  # roughly the time until one of many documents is done


class Background:
    """Runs the background requests in the store. `start` it on the event loop of the service, `stop` it once."""

    def __init__(
        self,
        store: Store,
        engines: Mapping[str, EngineClient],
        *,
        deadline_s: float,
        max_unfinished: int,
        unclaimed_s: float = 86_400.0,
    ) -> None:
        """max_unfinished: limit on the unfinished requests of one tenant for one model.
        unclaimed_s: how long a request for a model that is not served here waits for another service before it fails.
        """
        self._store = store
        self._engines = engines
        self._deadline_s = deadline_s
        self._max_unfinished = max_unfinished
        self._unclaimed_s = unclaimed_s
        # Each model has its own runners: shared ones would all wait for a model without workers.
        self._waiting = {model: _Backlog() for model in engines}
        self._known: dict[str, _Key] = {}
        self._arriving: list[_Key] = []
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._paused: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start working, first on requests that an earlier process left unfinished."""
        runners = [self._run(waiting) for waiting in self._waiting.values() for _ in range(_RUNNERS_PER_MODEL)]
        self._tasks = [asyncio.ensure_future(work) for work in (self._take_up(), *runners)]

    async def stop(self) -> None:
        """Stop working. Unfinished requests stay in the store for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def counts(self) -> dict[str, int]:
        """Requests that this process knows of, by state."""
        queued = sum(waiting.qsize() for waiting in self._waiting.values())
        return {"queued": queued, "running": len(self._known) - queued}

    async def submit(self, spec: CreateCache, tenant: str) -> RequestRecord:
        """Record a creation durably and queue it. Equal creations have one id and are done once.

        Raises `QueueFull` and `QuotaExceeded` for a new request: without limits, waiting bodies would fill the store.
        """
        body = canonical_json(spec.model_dump(mode="json", exclude_defaults=True))
        key = _Key(_PREFIX + digest("kvshelf.request", tenant, body), tenant, spec.model or "")
        note(request=key.id)
        record = await asyncio.to_thread(self._there, key)
        if record is None:
            with self._place(key):
                record = await asyncio.to_thread(self._open, key, body.encode())
        if record.state in ("queued", "running"):
            self._enqueue(key)
        return record

    def _there(self, key: _Key) -> RequestRecord | None:
        """The request's record; None if the request is new or must be done again."""
        try:
            record = self._store.requests.get(key.id, tenant=key.tenant)
        except RequestNotFound:
            return None
        return record if record.state != "failed" and self._on_shelf(record) else None

    def _open(self, key: _Key, body: bytes) -> RequestRecord:
        self._store.admit(key.tenant)
        requests = self._store.requests
        record = requests.open(key.id, tenant=key.tenant, body=body)
        if not self._on_shelf(record):
            record = requests.open(key.id, tenant=key.tenant, body=body, again=True)
        return record

    def _on_shelf(self, record: RequestRecord) -> bool:
        """Whether all caches that the request made are on the shelf."""
        try:
            for cache_id in record.cache_ids:
                self._store.stat(cache_id, tenant=record.tenant)
        except (CacheNotFound, CacheError):
            return False
        return True

    @contextmanager
    def _place(self, key: _Key) -> Iterator[None]:
        """Reserve a place in the tenant's limit while a request is being recorded. Raises `QueueFull`.

        Counts in this process, not in the store; requests accepted by other services are known here within seconds.
        """
        others = {other for other in (*self._known.values(), *self._arriving) if other[1:] == key[1:]} - {key}
        if len(others) >= self._max_unfinished:
            raise QueueFull(
                f"{len(others)} creations for {key.model!r} were accepted and are not done yet, which is as many as a "
                "tenant may have; wait for some of them, or use a batch",
                retry_after_s=_FULL_PAUSE_S,
            )
        self._arriving.append(key)
        try:
            yield
        finally:
            self._arriving.remove(key)

    def _enqueue(self, key: _Key) -> None:
        if key.id not in self._known:
            self._known[key.id] = key
            self._waiting[key.model].put_nowait(key)

    async def _take_up(self) -> None:
        """Queue the requests that no process works on, because their process has ended or died.

        Looks repeatedly, not only at the start: a process that is being replaced accepts requests until its successor
        is ready.
        """
        while True:
            try:
                await self._look()
            except StoreError as error:
                log.warning("unfinished requests cannot be read yet", code=error.code, message=error.message)
            except Exception:
                # A bug of kvshelf must not stop this loop.
                log.exception("unfinished requests cannot be read")
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        unfinished = await asyncio.to_thread(self._store.requests.unfinished)
        requests = [record for record in unfinished if record.id.startswith(_PREFIX)]  # not rows of batches
        ids = {record.id for record in requests}
        self._elsewhere = {id_: seen for id_, seen in self._elsewhere.items() if id_ in ids}
        for record in requests:
            if record.id in self._known or record.id in self._paused or Standing.of(record) is Standing.HELD:
                continue
            try:
                await self._claim(record)
            except (RequestNotFound, StateConflict):
                continue  # it has ended meanwhile, or a worker holds it
            except StoreError:
                raise
            except Exception:
                self._set_aside(record.id)

    async def _claim(self, record: RequestRecord) -> None:
        """Queue a request if its model is served here; leave it to other services for up to `unclaimed_s`."""
        seen = self._elsewhere.get(record.id)
        if seen is None:
            model = (await asyncio.to_thread(self._spec, record)).model or ""
            if model in self._engines:
                self._enqueue(_Key(record.id, record.tenant, model))
                return
            seen = self._elsewhere[record.id] = _Elsewhere(model, time.time())
            log.warning("a request waits for a model that is not served here", request=record.id, model=model)
        if time.time() - max(seen.at, record.updated_at) > self._unclaimed_s:
            message = f"model {seen.model!r} is not served here, and no other service on this shelf took the request"
            await asyncio.to_thread(self._refuse, record, InvalidRequest(message, param="model"))

    def _spec(self, record: RequestRecord) -> CreateCache:
        """The request's body. Raises `StateConflict` if the request has ended; a lost body ends it."""
        try:
            return parse_request(CreateCache, self._store.requests.body(record.id))
        except InternalError as error:
            self._refuse(record, error)
            raise StateConflict(error.message) from error

    def _refuse(self, record: RequestRecord, error: KvshelfError) -> None:
        requests = self._store.requests
        attempt = requests.start(record.id, worker="front end", lease_s=LEASE_S)
        requests.fail(record.id, attempt, code=error.code, message=error.message, param=error.param, final=True)

    async def _run(self, waiting: _Backlog) -> None:
        while True:
            key = await waiting.get()
            structlog.contextvars.bind_contextvars(request_id=key.id)
            pauses = _growing(_STORE_PAUSE_S, _STORE_PAUSE_LIMIT_S)
            try:
                while (pause_s := await self._advance(key, pauses)) is not None:
                    await asyncio.sleep(pause_s)
            except RequestNotFound:
                log.warning("a request is gone from the store", request=key.id)
            except Exception:
                self._set_aside(key.id)
            del self._known[key.id]

    def _set_aside(self, request_id: str) -> None:
        """Handle an unexpected exception, so that one request cannot stop the others.

        The request stays in the store. It is queued again after a pause, or at once if it is submitted again.
        """
        log.exception("background request failed unexpectedly", request=request_id)
        self._paused.add(request_id)
        asyncio.get_running_loop().call_later(_MISHAP_PAUSE_S, self._paused.discard, request_id)

    async def _advance(self, key: _Key, pauses: Iterator[float]) -> float | None:
        """Try a request once, if it is due. Returns the seconds until the next try; None if there is none.

        pauses: seconds to wait, each time the store refuses a finished cache.
        """
        try:
            return await self._advance_in(key, pauses)
        except StoreError as error:
            # The request stays in the store, so keep it queued: the outage will end.
            log.warning("the store cannot be used for a background request", request=key.id, code=error.code)
            return _STORE_PAUSE_S

    async def _advance_in(self, key: _Key, pauses: Iterator[float]) -> float | None:
        record = await asyncio.to_thread(self._store.requests.get, key.id, tenant=key.tenant)
        match Standing.of(record):
            case Standing.ENDED | Standing.HELD:
                # If another process's worker holds it and dies, `_take_up` finds the request.
                return None
            case Standing.SPENT:
                with suppress(StateConflict):  # another front end has just done the same
                    await asyncio.to_thread(give_up, self._store.requests, record)
                return None
        try:
            await self._try(record, self._engines[key.model])
        except StoreError as error:
            pause_s = next(pauses)
            log.warning("a background request cannot be stored", request=key.id, code=error.code, pause_s=pause_s)
            return pause_s
        except KvshelfError as error:
            # The worker has recorded the failure; the store knows whether another attempt is due.
            log.info("background attempt failed", request=key.id, code=error.code)
            return float(error.details.get("retry_after_s", _POLL_S))
        return None

    async def _try(self, record: RequestRecord, engine: EngineClient) -> None:
        spec = await asyncio.to_thread(self._spec, record)
        created = await engine.create(spec, tenant=record.tenant, deadline_s=self._deadline_s, request_id=record.id)
        log.info("created", cache_ids=[cache.manifest.id for cache in created.caches], existing=created.existing)


def _growing(first_s: float, limit_s: float) -> Iterator[float]:
    """Pauses in seconds, each twice as long as the one before, up to `limit_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, limit_s)


class _Key(NamedTuple):
    id: str
    tenant: str
    model: str


class _Elsewhere(NamedTuple):
    """A model that is not served here, and the Unix time since when a request waits for it."""

    model: str
    at: float


class _Backlog(asyncio.Queue[_Key]):
    """A queue that serves tenants in turn. Overrides the three methods that `asyncio.Queue` offers for this."""

    def _init(self, _maxsize: int) -> None:
        self._queue: Rounds[_Key] = Rounds()

    def _put(self, item: _Key) -> None:
        self._queue.add(item.tenant, item)

    def _get(self) -> _Key:
        return self._queue.take()
