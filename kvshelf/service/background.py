"""Creations that were accepted with 202. They are in the ledger before the answer goes out, and survive a restart.

The queue here holds ids only; the ledger has the bodies. An attempt is counted in the ledger by the worker before it
begins, so that a document that kills its worker is known after `MAX_ATTEMPTS` and given up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from kvshelf.errors import (
    CacheError,
    CacheNotFound,
    InvalidRequest,
    KvshelfError,
    RequestNotFound,
    StoreError,
)
from kvshelf.service.logs import note
from kvshelf.service.turns import Rounds
from kvshelf.store.base import Store
from kvshelf.store.identity import canonical_json, digest
from kvshelf.store.ledger import RequestRecord
from kvshelf.workers.attempts import LEASE_S, Standing, give_up
from kvshelf.workers.remote import RemoteEngine

log = structlog.get_logger("kvshelf.service")

_PREFIX = "req_"
_RUNNERS_PER_MODEL = 2  # one document is being prefilled while the next is tokenized and the last one stored
_POLL_S = 0.5
_STORE_PAUSE_S = 2.0
_LOOK_S = 2.0


class Background:
    """Works off the ledger's requests. `start` it on the event loop of the service, `stop` it once."""

    def __init__(
        self,
        store: Store,
        engines: Mapping[str, RemoteEngine],
        *,
        deadline_s: float,
        spend: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """spend: is told a tenant and how many tokens were prefilled for it."""
        self._store = store
        self._engines = engines
        self._deadline_s = deadline_s
        self._spend = spend
        self._waiting = _Backlog()
        self._known: set[_Key] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to work, with what an earlier process left unfinished."""
        runners = [self._run() for _ in range(_RUNNERS_PER_MODEL * len(self._engines))]
        self._tasks = [asyncio.ensure_future(work) for work in (self._take_up(), *runners)]

    async def stop(self) -> None:
        """Leave the rest to the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def counts(self) -> dict[str, int]:
        """Requests that this process knows of, by state."""
        queued = self._waiting.qsize()
        return {"queued": queued, "running": len(self._known) - queued}

    async def submit(self, spec: Mapping[str, Any], tenant: str) -> RequestRecord:
        """Write a creation down, durably, and queue it. The same creation has the same id and is done once."""
        body = canonical_json(dict(spec))
        request_id = _PREFIX + digest("kvshelf.request", tenant, body)
        note(request=request_id)
        record = await asyncio.to_thread(self._open, request_id, tenant, body.encode())
        if record.state in ("queued", "running"):
            self._enqueue(_Key(request_id, tenant))
        return record

    def _open(self, request_id: str, tenant: str, body: bytes) -> RequestRecord:
        ledger = self._store.ledger
        record = ledger.open_request(request_id, tenant=tenant, body=body)
        try:
            for cache_id in record.cache_ids:
                self._store.stat(cache_id, tenant=tenant)
        except (CacheNotFound, CacheError):
            record = ledger.open_request(request_id, tenant=tenant, body=body, again=True)
        return record

    def _enqueue(self, key: _Key) -> None:
        if key not in self._known:
            self._known.add(key)
            self._waiting.put_nowait(key)

    async def _take_up(self) -> None:
        """Queue what nobody works on: an earlier process left it, or another one on this shelf that ends or dies.

        Looked for now and then, not at the start alone: a process that is being replaced accepts requests until the
        one in its place is ready.
        """
        while True:
            try:
                unfinished = await asyncio.to_thread(self._store.ledger.unfinished)
            except StoreError as error:
                log.warning("unfinished requests cannot be read yet", code=error.code, message=error.message)
                unfinished = []
            for record in unfinished:
                if not record.id.startswith(_PREFIX):  # the ledger has rows of batches, too
                    continue
                if record.lease_until is None or record.lease_until < time.time():
                    self._enqueue(_Key(record.id, record.tenant))
            await asyncio.sleep(_LOOK_S)

    async def _run(self) -> None:
        while True:
            key = await self._waiting.get()
            structlog.contextvars.bind_contextvars(request_id=key.id)
            try:
                while (pause_s := await self._advance(key)) is not None:
                    await asyncio.sleep(pause_s)
            except RequestNotFound:
                log.warning("a request is gone from the ledger", request=key.id)
            except Exception:
                # One request must not end the runner. It stays in the ledger, for the next start: here it is known.
                log.exception("background request failed unexpectedly", request=key.id)
                continue
            self._known.discard(key)

    async def _advance(self, key: _Key) -> float | None:
        """Try a request once, if it is time. Returns the seconds until the next try, None when it has ended."""
        try:
            return await self._advance_in(key)
        except StoreError as error:
            # It stays in the ledger, and so in the queue: an outage ends.
            log.warning("the store cannot be used for a background request", request=key.id, code=error.code)
            return _STORE_PAUSE_S

    async def _advance_in(self, key: _Key) -> float | None:
        record = await asyncio.to_thread(self._store.ledger.get_request, key.id, tenant=key.tenant)
        match Standing.of(record):
            case Standing.ENDED | Standing.HELD:
                # Held by a worker that this process did not ask, or by one that died: then `_take_up` will find it.
                return None
            case Standing.SPENT:
                await asyncio.to_thread(give_up, self._store.ledger, record)
                return None
        try:
            await self._try(record)
        except StoreError:
            raise
        except KvshelfError as error:
            # What the work itself met, the worker has recorded; the ledger says whether to go on.
            log.info("background attempt failed", request=key.id, code=error.code)
            return float(error.details.get("retry_after_s", _POLL_S))
        return None

    async def _try(self, record: RequestRecord) -> None:
        spec = json.loads(await asyncio.to_thread(self._store.ledger.body, record.id))
        engine = self._engines.get(spec["model"])
        if engine is None:
            await asyncio.to_thread(self._refuse, record, f"model {spec['model']!r} is no longer served here")
            return
        created = await engine.create(spec, tenant=record.tenant, deadline_s=self._deadline_s, request_id=record.id)
        self._spend(record.tenant, created.prefilled_tokens)
        log.info("created", cache_ids=[cache.manifest["id"] for cache in created.caches], existing=created.existing)

    def _refuse(self, record: RequestRecord, message: str) -> None:
        ledger = self._store.ledger
        attempt = ledger.start_attempt(record.id, worker="front end", lease_s=LEASE_S)
        ledger.fail(record.id, attempt, code=InvalidRequest.code, message=message, param="model", final=True)


class _Key(NamedTuple):
    id: str
    tenant: str


class _Backlog(asyncio.Queue[_Key]):
    """Gives out requests of tenants in turn, by the three methods that `asyncio.Queue` has for being overridden."""

    def _init(self, _maxsize: int) -> None:
        self._queue: Rounds[_Key] = Rounds()

    def _put(self, item: _Key) -> None:
        self._queue.add(item.tenant, item)

    def _get(self) -> _Key:
        return self._queue.take()
