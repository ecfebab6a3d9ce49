"""Equal work asked for at the same time runs once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Flight(Generic[ResultT]):
    task: asyncio.Task[ResultT]
    passengers: int = 0


class SingleFlight(Generic[ResultT]):
    """Work in progress by key, for the callers of one event loop."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[ResultT]] = {}

    async def join(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> tuple[ResultT, bool]:
        """The result of `work`, and whether this caller began it or joined an earlier one with the same key.

        A caller that is cancelled leaves alone; the work is cancelled when the last one has left.
        """
        flight = self._flights.get(key)
        began = flight is None
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_run(work)))
            self._flights[key] = flight
            # Removed the moment it ends: nobody joins work that has ended, and its result is on the shelf by then.
            flight.task.add_done_callback(partial(self._forget, key, flight))
        flight.passengers += 1
        try:
            return await asyncio.shield(flight.task), began
        finally:
            flight.passengers -= 1
            if flight.passengers == 0:
                flight.task.cancel()
                self._forget(key, flight)

    def _forget(self, key: str, flight: _Flight[ResultT], _: object = None) -> None:
        # A cancelled flight takes a moment to end, and whoever comes in that moment has begun a new one.
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _run(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    return await work()
