"""Fair queues: tenants take turns, so a tenant with many requests waits behind its own and delays nobody else."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvshelf.errors import DeadlineExceeded, QueueFull
from kvshelf.workers.replica.queues import Pace, Programs, Rounds


class FairQueue:
    """Slots for work of one kind. A request that finds none free waits; each free slot goes to the next tenant.

    At most `max_waiting` requests wait. Beyond that, the last request of the tenant with the most waiting requests
    is refused, so that a tenant whose many requests came first cannot keep other tenants out. Where that is the tenant
    that asks, it is the last of its own, which may be another program's.
    """

    def __init__(self, what: str, slots: int, max_waiting: int) -> None:
        self._what = what
        self.slots = slots
        self._max_waiting = max_waiting
        self._free = slots
        self._waiting: Rounds[asyncio.Future[None]] = Rounds()
        self._programs = Programs()
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tenant: str, deadline_s: float | None, program: str | None = None) -> AsyncIterator[float]:
        """Holds a slot for the block; gives the seconds that are left of the deadline. deadline_s None: the caller has
        its own. program: whose first request gives this one its place among those of the tenant.

        Raises `QueueFull`, and `DeadlineExceeded` if the turn does not come in time.
        """
        came, deadline_s = time.monotonic(), math.inf if deadline_s is None else deadline_s
        await self._enter(tenant, deadline_s, program)
        began = time.monotonic()
        try:
            yield max(0.0, deadline_s - (began - came))
        finally:
            self._pace.record(time.monotonic() - began)
            self._leave()

    async def _enter(self, tenant: str, deadline_s: float, program: str | None) -> None:
        if not self._free and len(self._waiting) >= self._max_waiting:
            self._shed(tenant, self._programs.first(tenant, program, time.monotonic()))
        since = self._programs.since(tenant, program, time.monotonic())
        if self._free:  # then nobody waits
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, place, since)
        try:
            async with asyncio.timeout(None if deadline_s == math.inf else deadline_s):
                await place
        except BaseException as exc:
            self._waiting.remove(tenant, place)
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave()  # the turn came after its caller had left
            if isinstance(exc, TimeoutError):
                raise DeadlineExceeded(f"no turn for {self._what} within {deadline_s:g} s; ask again later") from exc
            raise

    def _leave(self) -> None:
        while self._waiting:
            if _wake(self._waiting.take()):
                return
        self._free += 1

    def _shed(self, tenant: str, since: float) -> None:
        refusal = QueueFull(
            f"too many requests wait for {self._what}: {len(self._waiting)}",
            retry_after_s=round(max(0.5, self._pace.estimate(1 + len(self._waiting) / self.slots)), 3),
        )
        newest = self._waiting.take_newest_of_longest(against=tenant)
        newest = newest or self._waiting.take_later(tenant, since)
        if newest is None:
            raise refusal
        if not newest.done():
            newest.set_exception(refusal)


class LoopTurns:
    """Turns on an event loop: each of its rounds begins one task that waits here, the next tenant's. What one tenant's
    many requests do before they first wait for something is then one wait for the next tenant's."""

    def __init__(self) -> None:
        self._waiting: Rounds[asyncio.Future[None]] = Rounds()
        self._goes_on = False

    async def turn(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._waiting.add(tenant, place)
        if not self._goes_on:
            self._goes_on = True
            loop.call_soon(self._begin_next, loop)
        try:
            await place
        finally:
            self._waiting.remove(tenant, place)

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._goes_on = bool(self._waiting)
        if self._goes_on:
            _wake(self._waiting.take())
            loop.call_soon(self._begin_next, loop)  # in the next round: what has arrived meanwhile takes part


class FairCondition:
    """A lock, and waiting for what others change under it, as of `asyncio.Condition`: those who wait are woken in turns
    of their tenants, so that what one tenant's many wait for is not theirs before it is the next tenant's."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: Rounds[asyncio.Future[None]] = Rounds()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    async def wait(self, tenant: str) -> None:
        """Let go of the lock until `notify_all`, and take it again."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, place)
        self._lock.release()
        try:
            await place
        finally:
            self._waiting.remove(tenant, place)
            await _surely(self._lock.acquire())

    def notify_all(self) -> None:
        """Wake all who wait, who take the lock in the order of their turns."""
        while self._waiting:
            _wake(self._waiting.take())


def _wake(place: asyncio.Future[None]) -> bool:
    """Give a place its turn. False where it was cancelled just now."""
    if place.done():
        return False
    place.set_result(None)
    return True


async def _surely(work: Coroutine[Any, Any, Any]) -> None:
    """Wait for work, cancelled or not: who holds a lock in a block leaves it as a holder."""
    cancelled: asyncio.CancelledError | None = None
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
