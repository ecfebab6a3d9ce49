"""Decides when the next attempt at a recorded request begins, which failures are retried, and when it is given up.

A replica counts each attempt in the store before the attempt starts, and holds a lease during it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import structlog

from kvshelf import errors
from kvshelf.api import CreateCache
from kvshelf.backoff import backoff_s
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestRecord, RequestTable
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.attempts import LEASE_S, MAX_ATTEMPTS, Standing, give_up
from kvshelf.workers.replica.calls import Caller

log = structlog.get_logger("kvshelf.corpus")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Pauses:
    """Seconds: between two looks at a request; between two tries while the store is down, at first and at most."""

    poll_s: float = 0.5
    first_s: float = 2.0
    most_s: float = 30.0


PAUSES: Final = Pauses()

_NOT_BEGUN: Final = (errors.NoWorker, errors.QueueFull, errors.StateConflict, errors.Cancelled)
"""Nothing was tried: no replica runs, the queue is full, or another worker has the request or was stopped."""


@dataclass(eq=False, kw_only=True)
class RequestJob:
    """One recorded request at work. spec: gives the creation; blocks. create: `create` of an engine, which makes one
    attempt. leaves_held: leave a request that a worker holds, instead of waiting for its end.

    attempts: the number that count, including the current one. unrecorded: failed ones that the store has not recorded.
    lost: the number of an attempt whose end the store may not know. spent_s: seconds in failed attempts.
    """

    id: str
    tenant: str
    requests: RequestTable
    spec: Callable[[], CreateCache]
    create: Callable[..., Awaitable[Created]]
    deadline_s: float
    max_attempts: int = MAX_ATTEMPTS
    leaves_held: bool = False
    attempts: int = field(default=0, init=False)
    unrecorded: int = field(default=0, init=False)
    lost: int | None = field(default=None, init=False)
    spent_s: float = field(default=0.0, init=False)

    def record(self) -> RequestRecord:
        """The request in the store. Blocks. Raises `RequestNotFound`."""
        return self.requests.get(self.id, tenant=self.tenant)


class Breaker:
    """A circuit breaker. Errors of the kinds `trips` open it: one job at a time tries, after a growing pause, until one
    ends. A document that finds the store full was computed in vain, so other jobs wait. trouble: the error that opened
    it."""

    def __init__(self, *trips: type[errors.KvshelfError], pauses: Pauses = PAUSES) -> None:
        self.trips = trips
        self._pauses = pauses
        self.trouble: errors.KvshelfError | None = None
        self._tries = 0
        self._probe = asyncio.Lock()

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        async with self._probe if self.trouble else nullcontext():
            trying = self.trouble is not None
            if trying:
                await asyncio.sleep(backoff_s(self._tries, self._pauses.first_s, self._pauses.most_s))
            try:
                yield
            except self.trips as error:
                self.trouble = error
                self._tries += trying  # jobs under way at the start fail together, and do not count
                raise

    def close(self) -> None:
        """A job has ended: the store works."""
        self.trouble, self._tries = None, 0


class Runner:
    """Runs jobs to their end on one event loop. going: set while attempts may begin.

    Errors of the kinds `trouble` blame no document: the store is down or full. They cost no attempt, and open the
    circuit breaker. Jobs with a failed attempt are tried one at a time: otherwise documents that died together would
    die together again, and one that kills its worker would take innocent ones with it.
    """

    def __init__(self, *trouble: type[errors.KvshelfError], pauses: Pauses = PAUSES) -> None:
        self.breaker = Breaker(*trouble, pauses=pauses)
        self._poll_s = pauses.poll_s
        self.going = asyncio.Event()
        self._suspects = asyncio.Lock()

    async def run(self, job: RequestJob) -> Created | RequestRecord:
        """The last attempt's result, or the request if it ended otherwise. Raises `RequestNotFound` if it is gone."""
        return await self._until_end(partial(self._step, job), "the store keeps a request waiting", request=job.id)

    async def tried(
        self, call: Callable[[], Awaitable[ResultT]], max_attempts: int
    ) -> tuple[ResultT | errors.KvshelfError, int]:
        """The result of a call that nothing records, or the error of its last attempt; and how many attempts counted.
        Attempts count and wait as those of jobs do."""
        failed = 0

        async def attempt() -> tuple[ResultT | errors.KvshelfError, int] | float:
            nonlocal failed
            try:
                async with self._suspects if failed else nullcontext():
                    return await call(), failed + 1
            except self.breaker.trips:
                raise
            except (errors.NoWorker, errors.QueueFull, errors.Cancelled) as error:
                return self._pause_s(error)
            except errors.KvshelfError as error:
                if error.details.get("begun") is not False:
                    failed += 1
                    log.info("an attempt failed", code=error.code)
                    if failed >= max_attempts or error.is_final or isinstance(error, errors.CacheError):
                        return error, failed
                return self._pause_s(error)

        return await self._until_end(attempt, "the store keeps a question waiting")

    async def _until_end(self, step: Callable[[], Awaitable[ResultT | float]], waiting: str, **about: str) -> ResultT:
        """Take steps until one gives an end; the others give seconds until the next one. waiting: for the log."""
        while True:
            await self.going.wait()
            try:
                async with self.breaker.attempt():
                    end = await step()
            except self.breaker.trips as error:
                log.warning(waiting, **about, code=error.code, message=error.message)
                continue
            except errors.StateConflict:  # another worker has it, or has just released it
                end = self._poll_s
            if not isinstance(end, float):
                if not isinstance(end, RequestRecord) or end.ended:
                    self.breaker.close()
                return end
            await asyncio.sleep(end)

    async def _step(self, job: RequestJob) -> Created | RequestRecord | float:
        """One step towards the end: the end, or seconds until the next step."""
        record = await asyncio.to_thread(_record, job)
        match Standing.of(record, job.requests.now(), max_attempts=job.max_attempts):
            case Standing.ENDED:
                return record
            case Standing.HELD:
                return record if job.leaves_held else self._poll_s
            case Standing.SPENT:
                await asyncio.to_thread(give_up, job.requests, record)
                return 0.0
            case Standing.DUE:
                return await self._attempt(job, record)

    async def _attempt(self, job: RequestJob, record: RequestRecord) -> Created | float:
        started, job.lost, job.attempts = time.monotonic(), None, record.tries + 1
        try:
            async with self._suspects if record.tries else nullcontext():
                spec = await asyncio.to_thread(job.spec)
                about = {"request_id": job.id, "max_attempts": job.max_attempts}
                return await job.create(spec, caller=Caller(job.tenant, job.deadline_s), **about)
        except self.breaker.trips as error:
            if error.is_final:  # the document is to blame, and recorded so
                return 0.0
            job.lost = record.attempts + 1
            raise
        except _NOT_BEGUN as error:
            return self._pause_s(error)
        except errors.KvshelfError as error:
            if error.details.get("begun") is False:  # the deadline passed before the attempt began
                return self._poll_s
            job.spent_s += time.monotonic() - started
            log.info("an attempt failed", request=job.id, code=error.code)
            # Without "begun" the replica said nothing.
            silent = isinstance(error, errors.DeadlineExceeded) and "begun" not in error.details
            now = await asyncio.to_thread(_record, job)
            if not silent and now.tries != record.tries:
                return 0.0
            job.unrecorded += 1
            if job.unrecorded < job.max_attempts:
                return self._pause_s(error)
            await asyncio.to_thread(refuse, job.requests, job.id, error)
            return 0.0

    def _pause_s(self, error: errors.KvshelfError) -> float:
        return float(error.details.get("retry_after_s", self._poll_s))


def stored_caches(store: Store, record: RequestRecord) -> list[Manifest] | None:
    """The manifests of the caches that a request made; None unless all are on the shelf. Blocks."""
    try:
        return [store.stat(cache_id, tenant=record.tenant) for cache_id in record.cache_ids]
    except (errors.CacheNotFound, errors.CacheError):
        return None


def refuse(requests: RequestTable, request_id: str, error: errors.KvshelfError, *, counted: bool = True) -> None:
    """Fail a request for good. Raises `StateConflict` if a worker holds it or it has ended."""
    attempt = requests.start(request_id, worker="runner", lease_s=LEASE_S)
    code, message, param = error.code, error.message, error.param
    requests.fail(request_id, attempt, code=code, message=message, param=param, final=True, counted=counted)


def _record(job: RequestJob) -> RequestRecord:
    """The request. An attempt whose end the store missed is ended here, uncounted: no worker holds it any more."""
    record = job.record()
    if record.state != "running" or record.attempts != job.lost:
        return record
    lost = errors.StoreUnavailable("the store was gone when this attempt ended")
    job.requests.fail(record.id, record.attempts, code=lost.code, message=lost.message, final=False, counted=False)
    return job.record()
