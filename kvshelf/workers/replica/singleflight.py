"""Single flight: equal work that is requested at the same time runs once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Call(Generic[ResultT]):
    task: asyncio.Task[ResultT]
    callers: int = 0


class SingleFlight(Generic[ResultT]):
    """Work in progress by key, for the callers of one event loop."""

    def __init__(self) -> None:
        self.calls: dict[str, _Call[ResultT]] = {}

    def __len__(self) -> int:
        return len(self.calls)

    async def join(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> tuple[ResultT, bool]:
        """The result of `work`, and whether this caller started it or joined an earlier call with the same key.

        A cancelled caller leaves alone; the work is cancelled when its last caller has left.
        """
        call = self.calls.get(key)
        if call is not None and call.task.done():
            # It is removed in a moment, and its result is on the shelf. A caller that joined would get it without
            # giving way to the event loop, and one that then asks again would do so for ever.
            call = None
        began = call is None
        if call is None:
            call = _Call(asyncio.ensure_future(work()))
            self.calls[key] = call
            call.task.add_done_callback(partial(self._forget, key, call))
        call.callers += 1
        try:
            return await asyncio.shield(call.task), began
        finally:
            call.callers -= 1
            if call.callers == 0:
                call.task.cancel()
                self._forget(key, call)

    def _forget(self, key: str, call: _Call[ResultT], _: object = None) -> None:
        # A cancelled call takes a moment to end; a caller that arrives in that moment has started a new one.
        if self.calls.get(key) is call:
            del self.calls[key]
