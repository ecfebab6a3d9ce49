"""Attempts at a request of the ledger: counted there before any work, so that what kills its worker is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from kvshelf.errors import CallerError, Cancelled, KvshelfError, QuotaExceeded, StateConflict, StoreError
from kvshelf.store.ledger import Ledger
from kvshelf.workers.calls import Threads

log = structlog.get_logger("kvshelf.workers")

MAX_ATTEMPTS = 3
"""How often a request is tried before its failure is final."""

LEASE_S = 10.0
"""How long after its last sign of life a worker's request may be taken over by another."""


class Attempts:
    """What one worker, known in the ledger by its name, tries."""

    def __init__(self, ledger: Ledger, worker: str, threads: Threads) -> None:
        self._ledger = ledger
        self._worker = worker
        self._threads = threads

    @asynccontextmanager
    async def counted(self, request_id: str, tenant: str) -> AsyncIterator[int]:
        """Count an attempt in the ledger, keep its lease alive, and record it if the work inside fails."""
        start = self._ledger.start_attempt
        attempt = await self._threads.run(start, request_id, worker=self._worker, lease_s=LEASE_S)
        renewing = asyncio.ensure_future(self._renew(request_id, attempt))
        try:
            yield attempt
        except asyncio.CancelledError:
            # The service is stopping. Nobody is to blame, so it is never final; the write outlives the cancellation.
            stopped = Cancelled("the service stopped")
            await asyncio.shield(self._record_failure(request_id, attempt, stopped, final=False))
            raise
        except KvshelfError as error:
            record = await self._threads.run(self._ledger.get_request, request_id, tenant=tenant)
            final = isinstance(error, CallerError | QuotaExceeded) or record.tries >= MAX_ATTEMPTS
            await self._record_failure(request_id, attempt, error, final=final)
            raise
        finally:
            renewing.cancel()

    async def _renew(self, request_id: str, attempt: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._threads.run(self._ledger.renew, request_id, attempt, lease_s=LEASE_S)
            except StoreError:
                log.warning("a lease could not be renewed; it is tried again", request=request_id, exc_info=True)

    async def _record_failure(self, request_id: str, attempt: int, error: KvshelfError, *, final: bool) -> None:
        fail = self._ledger.fail
        try:
            await self._threads.run(
                fail, request_id, attempt, code=error.code, message=error.message, param=error.param, final=final
            )
        except StateConflict:
            log.warning("an attempt was taken over by another worker", request=request_id, attempt=attempt)
