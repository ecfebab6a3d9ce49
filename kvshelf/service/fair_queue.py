"""Tenants take turns: who asks for much waits behind their own requests, not in front of those of others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kvshelf.errors import DeadlineExceeded, QueueFull

ItemT = TypeVar("ItemT")


class Rounds(Generic[ItemT]):
    """What waits, in a line for each tenant; taken from the lines in turn, one at a time. Not for several threads."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[ItemT]] = {}  # the one whose turn is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, tenant: str, item: ItemT) -> None:
        self._lines.setdefault(tenant, deque()).append(item)

    def take(self) -> ItemT:
        """The next one. Raises `IndexError` when nothing waits."""
        if not self._lines:
            raise IndexError("nothing waits")
        tenant = next(iter(self._lines))
        line = self._lines.pop(tenant)
        item = line.popleft()
        if line:
            self._lines[tenant] = line
        return item

    def remove(self, tenant: str, item: ItemT) -> None:
        """Take out an item wherever it waits, if it does."""
        line = self._lines.get(tenant, deque())
        if item in line:
            line.remove(item)
        if not line:
            self._lines.pop(tenant, None)

    def take_newest_of_longest(self, against: str) -> ItemT | None:
        """The last item of the longest line, if the line of the tenant `against` is shorter by more than one."""
        longest = max(self._lines, key=lambda tenant: len(self._lines[tenant]))
        if len(self._lines[longest]) <= len(self._lines.get(against, ())) + 1:
            return None
        return self._lines[longest].pop()


class FairQueue:
    """Slots for work of one kind. Who finds none free waits; each slot that gets free goes to the next tenant.

    At most `max_waiting` wait. Beyond that the tenant with most of them is refused, be it the one that comes or the
    newest one that waits: else who came first in large numbers would keep all others out.
    """

    def __init__(self, what: str, slots: int, max_waiting: int) -> None:
        self._what = what
        self._slots = slots
        self._max_waiting = max_waiting
        self._free = slots
        self._waiting: Rounds[asyncio.Future[None]] = Rounds()
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tenant: str, deadline_s: float) -> AsyncIterator[float]:
        """A slot for the time of the block, and the seconds that are left of the deadline once it is there.

        Raises `QueueFull`, and `DeadlineExceeded` if the turn does not come in time.
        """
        asked = time.monotonic()
        await self._enter(tenant, deadline_s)
        began = time.monotonic()
        try:
            yield max(0.0, deadline_s - (began - asked))
        finally:
            self._mean_s = 0.8 * self._mean_s + 0.2 * (time.monotonic() - began)
            self._leave()

    async def _enter(self, tenant: str, deadline_s: float) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        if len(self._waiting) >= self._max_waiting:
            self._make_room(tenant)
        place = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, place)
        try:
            async with asyncio.timeout(deadline_s):
                await place
        except BaseException as exc:
            self._waiting.remove(tenant, place)
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave()  # the turn came, and nobody was there any more
            if isinstance(exc, TimeoutError):
                raise DeadlineExceeded(f"no turn for {self._what} within {deadline_s:g} s; ask again later") from exc
            raise

    def _leave(self) -> None:
        while self._waiting:
            place = self._waiting.take()
            if not place.done():  # else it was cancelled just now
                place.set_result(None)
                return
        self._free += 1

    def _make_room(self, tenant: str) -> None:
        refusal = QueueFull(
            f"too many requests wait for {self._what}: {len(self._waiting)}",
            retry_after_s=round(max(0.5, self._mean_s * (1 + len(self._waiting) / self._slots)), 3),
        )
        newest = self._waiting.take_newest_of_longest(against=tenant)
        if newest is None:
            raise refusal
        if not newest.done():
            newest.set_exception(refusal)
