"""Takes batches from the store under a lease and runs them on the replicas that also answer queries."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvshelf.artifact.identity import ModelIdentity
from kvshelf.service.jobs.batch_questions import BatchAsker
from kvshelf.service.jobs.batch_work import LEASE_S, BatchWork, outranked, rest_reason
from kvshelf.service.loops import repeat
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from kvshelf.store.base import Store
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.workers.cluster.remote import RemoteEngine

_LOOK_S: Final = 1.0
_PLACES_OF_OTHERS: Final = 4
"""So many times `max_running_batches` may run, if each one more is the only one of its tenant."""


@dataclass(eq=False)
class BatchRunner:
    """Runs the batches of the store. `start` it on the event loop of the service, `stop` it once.

    The store holds the whole state of a batch. If this front end dies, its lease expires, and another one continues
    where the journal ends. engines: without observers, because they are sent to the processes that call replicas.
    identities: of their models.
    """

    store: Store
    engines: Mapping[str, RemoteEngine]
    settings: Settings
    metrics: Metrics
    identities: Mapping[str, ModelIdentity]
    _running: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict, init=False)  # by id, with tenant
    _unfinished: list[BatchRecord] = field(default_factory=list, init=False)
    _idle: list[BatchRecord] = field(default_factory=list, init=False)
    _nudged: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _looking: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self) -> None:
        """Take up idle batches, now and whenever a place is free."""
        self._looking = asyncio.create_task(repeat("look for batches", self._take_up, self._pause))

    async def stop(self) -> None:
        """Stop working. Unfinished batches stay in the store for the next start or another front end."""
        tasks = [task for task in (self._looking, *(task for _, task in self._running.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def nudge(self) -> None:
        self._nudged.set()

    @property
    def counts(self) -> dict[str, int]:
        """Batches that this process runs, and idle ones in the store that may run."""
        return {"running": len(self._running), "waiting": len(self._idle)}

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._nudged.wait()

    async def _take_up(self) -> None:
        """Start as many idle batches as may run, those of the tenant with the fewest running ones first."""
        self._nudged.clear()
        self._unfinished = await asyncio.to_thread(self.store.batches.unfinished)
        now = self.store.now()
        awake = [batch for batch in self._unfinished if batch.id not in self._running and not rest_reason(batch, now)]
        idle = [batch for batch in awake if not outranked(batch, self._unfinished, now)]
        while idle:
            busy = Counter(tenant for tenant, _ in self._running.values())
            batch = min(idle, key=lambda batch: (busy[batch.tenant], batch.created_at))
            # The rows of all running batches take turns, so a place for each tenant costs the others little.
            places = self.settings.max_running_batches * (1 if busy[batch.tenant] else _PLACES_OF_OTHERS)
            if len(self._running) >= places:
                break
            idle.remove(batch)
            term = await asyncio.to_thread(self.store.batches.table.take, batch.id, lease_s=LEASE_S)
            if term is not None:  # None: another front end runs it
                self._begin(batch, term)
        self._idle = idle

    def _begin(self, record: BatchRecord, term: int) -> None:
        work = BatchWork(
            record,
            term,
            self.store,
            self.engines,
            self.settings,
            self.metrics,
            BatchAsker(self.identities),
            others_wait=lambda: any(idle.tenant != record.tenant for idle in self._idle),
            outranked=lambda: outranked(record, self._unfinished, self.store.now()),
        )
        task = asyncio.create_task(work.run())
        self._running[record.id] = record.tenant, task

        def end(_: asyncio.Task[None]) -> None:
            del self._running[record.id]
            self.nudge()

        task.add_done_callback(end)
