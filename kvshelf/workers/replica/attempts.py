"""Attempts at recorded requests: counted before any work, so that a document that kills its worker is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

import structlog

from kvshelf import errors
from kvshelf.store.jobs.requests import RequestRecord, RequestTable
from kvshelf.workers.replica.calls import Threads

log = structlog.get_logger("kvshelf.workers")

MAX_ATTEMPTS = 3
"""Attempts at a request before its failure is final."""

LEASE_S = 10.0
"""Seconds after a worker's last renewal until another worker may take its request over."""


class Standing(Enum):
    """Whether a recorded request can be attempted now."""

    DUE = "due"
    """An attempt can begin."""
    HELD = "held"
    """A worker holds its lease, though it may have died meanwhile."""
    SPENT = "spent"
    """All its attempts ended without a report."""
    ENDED = "ended"

    @classmethod
    def of(cls, record: RequestRecord, now: float, *, max_attempts: int = MAX_ATTEMPTS) -> Standing:
        """now: see `RequestTable.now`."""
        if record.state in ("done", "failed"):
            return cls.ENDED
        if record.state == "queued":
            return cls.DUE
        if record.lease_until is not None and record.lease_until > now:
            return cls.HELD
        return cls.SPENT if record.tries >= max_attempts else cls.DUE


def give_up(requests: RequestTable, record: RequestRecord) -> None:
    """Fail a request that is `SPENT`. Raises `StateConflict` if it no longer is."""
    message = (
        f"each of {record.tries} attempts ended without a word: the worker died, or lost the store. This document may "
        "be the cause"
    )
    requests.fail(record.id, record.attempts, code=errors.WorkerCrashed.code, message=message, final=True)


class Attempts:
    """The attempts of one worker, recorded under its name."""

    def __init__(self, requests: RequestTable, worker: str, threads: Threads) -> None:
        self._requests = requests
        self.worker = worker
        self._threads = threads

    @asynccontextmanager
    async def counted(self, request_id: str, tenant: str, *, max_attempts: int = MAX_ATTEMPTS) -> AsyncIterator[int]:
        """Count an attempt in the store, keep its lease alive, and record the failure if the work inside fails.

        An attempt does not count if it was stopped, did not begin in time, or met a store that is broken or full. If
        the store is healthy but did not keep the document, the document may be to blame, so the attempt counts.
        """
        start = self._requests.start
        attempt = await self._threads.run(start, request_id, worker=self.worker, lease_s=LEASE_S)
        renewing = asyncio.ensure_future(self._renew(request_id, attempt))
        try:
            yield attempt
        except asyncio.CancelledError:
            # The service or the batch is stopping. The write outlives the cancellation.
            stopped = errors.Cancelled("the service stopped")
            await asyncio.shield(self._record_failure(request_id, attempt, stopped, final=False, counted=False))
            raise
        except errors.KvshelfError as error:
            record = await self._threads.run(self._requests.get, request_id, tenant=tenant)
            if isinstance(error, errors.StoreError | errors.NoWorker | errors.QueueFull | errors.Cancelled):
                counted = error.is_final or error.details.get("stored") is False
            else:
                counted = error.details.get("begun") is not False
            spent = record.tries >= max_attempts
            final = counted and (error.is_final or isinstance(error, errors.QuotaExceeded) or spent)
            await self._record_failure(request_id, attempt, error, final=final, counted=counted)
            raise
        finally:
            renewing.cancel()

    async def _renew(self, request_id: str, attempt: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._threads.run(self._requests.renew, request_id, attempt, lease_s=LEASE_S)
            except errors.StoreError:
                log.warning("a lease could not be renewed; it is tried again", request=request_id, exc_info=True)

    async def _record_failure(
        self, request_id: str, attempt: int, error: errors.KvshelfError, *, final: bool, counted: bool = True
    ) -> None:
        fields = {"code": error.code, "message": error.message, "param": error.param, "details": error.details}
        try:
            await self._threads.run(self._requests.fail, request_id, attempt, **fields, final=final, counted=counted)
        except errors.StateConflict:
            log.warning("an attempt was taken over by another worker", request=request_id, attempt=attempt)
