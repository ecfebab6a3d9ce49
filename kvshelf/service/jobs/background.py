"""Background creations, accepted with 202: the store has them before the answer is sent, so they survive a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgpack
import structlog

from kvshelf import errors
from kvshelf.api import CreateCache
from kvshelf.api.strict import parse_request
from kvshelf.artifact.identity import canonical_msgpack
from kvshelf.corpus.run.runner import RequestJob, Runner, refuse, stored_caches
from kvshelf.service.engines import EngineClient
from kvshelf.service.loops import repeat
from kvshelf.service.observe.logs import note
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import REQUEST_ID, RequestRecord, RequestTable
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.attempts import Standing
from kvshelf.workers.replica.create.existing import as_requested
from kvshelf.workers.replica.queues import Rounds

log = structlog.get_logger("kvshelf.service")

_JOBS_PER_MODEL = 2  # so that one document is prefilled while another is tokenized or stored
_LOOK_S = 2.0
_MISHAP_PAUSE_S = 60.0  # the next try most likely meets the same bug and logs another traceback
_FULL_PAUSE_S = 5.0  # roughly the time until one of many documents is done


@dataclass(eq=False)
class Background:
    """Runs the background requests in the store. `start` it on the event loop of the service, `stop` it once.

    max_unfinished: limit on the unfinished requests of one tenant for one model. unclaimed_s: how long a request for a
    model that is not served here waits for another service before it fails.
    """

    store: Store
    engines: Mapping[str, EngineClient]
    deadline_s: float
    max_unfinished: int
    unclaimed_s: float = 86_400.0

    def __post_init__(self) -> None:
        self._waiting = {model: _Backlog() for model in self.engines}
        self._known: dict[str, _Key] = {}
        self._arriving: list[_Key] = []
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._paused: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start working, first on requests that an earlier process left unfinished."""
        looking = repeat("look for unfinished requests", self._take_up, partial(asyncio.sleep, _LOOK_S))
        self._tasks = [asyncio.ensure_future(looking)]
        for waiting in self._waiting.values():
            # Each model has its own queue and runner: with shared ones, all would wait for a model without workers.
            runner = Runner(errors.StoreError)
            runner.going.set()
            self._tasks += [asyncio.ensure_future(self._run(waiting, runner)) for _ in range(_JOBS_PER_MODEL)]

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
        body, key = await asyncio.to_thread(self._name, spec, tenant)
        note(request=key.id)
        record = await asyncio.to_thread(self._known_record, key, spec)
        if record is None:
            with self._place(key):
                record = await asyncio.to_thread(self._record_new, key, body)
        if record.state in ("queued", "running"):
            self._enqueue(key)
        return record

    def _name(self, spec: CreateCache, tenant: str) -> tuple[bytes, _Key]:
        body = canonical_msgpack(spec.model_dump(mode="json", exclude_defaults=True))
        return body, _Key(self.store.requests.request_id(body, tenant=tenant), tenant, spec.model or "")

    def _known_record(self, key: _Key, spec: CreateCache) -> RequestRecord | None:
        """The request's record; None if the request is new or must be done again. Caches that it made have what it says
        about them, as those of any creation that finds its cache on the shelf."""
        try:
            record = self.store.requests.get(key.id, tenant=key.tenant)
            caches = stored_caches(self.store, record)
            if record.state == "failed" or caches is None:
                return None
            for cache in caches:
                as_requested(self.store, cache, labels=spec.labels, name=spec.name, lifetime=spec)
        except (errors.RequestNotFound, errors.CacheNotFound, errors.CacheError):  # a cache may go while this looks
            return None
        return record

    def _record_new(self, key: _Key, body: bytes) -> RequestRecord:
        self.store.admit(key.tenant)
        requests = self.store.requests
        record = requests.open(key.id, tenant=key.tenant, body=body)
        if stored_caches(self.store, record) is None:
            record = requests.open(key.id, tenant=key.tenant, body=body, again=True)
        return record

    @contextmanager
    def _place(self, key: _Key) -> Iterator[None]:
        """Reserve a place in the tenant's limit while a request is being recorded. Raises `QueueFull`.

        Counts in this process, not in the store; requests accepted by other services are known here within seconds.
        """
        others = {other for other in (*self._known.values(), *self._arriving) if other[1:] == key[1:]} - {key}
        if len(others) >= self.max_unfinished:
            raise errors.QueueFull(
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

        Repeated, not only done at the start: a process that is being replaced accepts requests until its successor is
        ready.
        """
        unfinished = await asyncio.to_thread(self.store.requests.unfinished)
        requests = [record for record in unfinished if record.id.startswith(REQUEST_ID)]  # not rows of batches
        ids = {record.id for record in requests}
        self._elsewhere = {id_: waiting for id_, waiting in self._elsewhere.items() if id_ in ids}
        for record in requests:
            if (
                record.id in self._known
                or record.id in self._paused
                or Standing.of(record, self.store.now()) is Standing.HELD
            ):
                continue
            try:
                await self._claim(record)
            except (errors.RequestNotFound, errors.StateConflict):
                continue  # it has ended meanwhile, or a worker holds it
            except errors.StoreError:
                raise
            except Exception:
                self._set_aside(record.id)

    async def _claim(self, record: RequestRecord) -> None:
        """Queue a request if its model is served here; leave it to other services for up to `unclaimed_s`."""
        waiting = self._elsewhere.get(record.id)
        if waiting is None:
            model = (await asyncio.to_thread(_spec, self.store.requests, record.id)).model or ""
            if model in self.engines:
                self._enqueue(_Key(record.id, record.tenant, model))
                return
            waiting = self._elsewhere[record.id] = _Elsewhere(model, self.store.now())
            log.warning("a request waits for a model that is not served here", request=record.id, model=model)
        if self.store.now() - max(waiting.since, record.updated_at) > self.unclaimed_s:
            message = f"model {waiting.model!r} is not served here, and no other service on this shelf took the request"
            refusal = errors.InvalidRequest(message, param="model")
            await asyncio.to_thread(refuse, self.store.requests, record.id, refusal)

    async def _run(self, waiting: _Backlog, runner: Runner) -> None:
        while True:
            key = await waiting.get()
            structlog.contextvars.bind_contextvars(request_id=key.id)
            try:
                end = await runner.run(self._job(key))
                if isinstance(end, Created):
                    log.info("created", cache_ids=[cache.manifest.id for cache in end.caches], existing=end.existing)
            except errors.RequestNotFound:
                log.warning("a request is gone from the store", request=key.id)
            except Exception:
                self._set_aside(key.id)
            del self._known[key.id]

    def _job(self, key: _Key) -> RequestJob:
        requests = self.store.requests
        return RequestJob(
            id=key.id,
            tenant=key.tenant,
            requests=requests,
            spec=partial(_spec, requests, key.id),
            create=self.engines[key.model].create,
            deadline_s=self.deadline_s,
            leaves_held=True,  # if that worker dies, `_take_up` finds the request
        )

    def _set_aside(self, request_id: str) -> None:
        """Handle an unexpected exception, so that one request cannot stop the others.

        The request stays in the store. It is queued again after a pause, or at once if it is submitted again.
        """
        log.exception("background request failed unexpectedly", request=request_id)
        self._paused.add(request_id)
        asyncio.get_running_loop().call_later(_MISHAP_PAUSE_S, self._paused.discard, request_id)


def _spec(requests: RequestTable, request_id: str) -> CreateCache:
    """A request's body. Raises `StateConflict` if the request has ended; a lost or invalid body ends it."""
    try:
        body = requests.body(request_id)
        try:
            fields: dict[str, Any] = msgpack.unpackb(body)
        except ValueError as error:
            raise errors.InternalError(
                "the body was written by another version of kvshelf; send the request again"
            ) from error
        return parse_request(CreateCache, fields)
    except (errors.InternalError, errors.InvalidRequest) as error:
        refuse(requests, request_id, error)
        raise errors.StateConflict(error.message) from error


class _Key(NamedTuple):
    id: str
    tenant: str
    model: str


class _Elsewhere(NamedTuple):
    """A model that is not served here, and the Unix time since when a request waits for it."""

    model: str
    since: float


class _Backlog(asyncio.Queue[_Key]):
    """A queue that serves tenants in turn. Overrides the three methods that `asyncio.Queue` offers for this."""

    def _init(self, _maxsize: int) -> None:
        self._queue: Rounds[_Key] = Rounds()

    def _put(self, item: _Key) -> None:
        self._queue.add(item.tenant, item)

    def _get(self) -> _Key:
        return self._queue.take()
