"""A circuit breaker: while the store is down or full, one row at a time tries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from kvshelf.errors import QuotaExceeded, StoreError

TROUBLE: Final = (StoreError, QuotaExceeded)
"""No row is to blame: the store is down, full, or the tenant's quota is used up. Such rows wait; error rows would be
useless once there is room."""

_PAUSE_S = 2.0
_MAX_PAUSE_S = 30.0


class Breaker:
    """Closed, rows go on freely. `TROUBLE` opens it: one row at a time tries, after a growing pause, until one ends.

    A document that finds the store full was computed in vain, so the others wait.
    """

    def __init__(self) -> None:
        self.trouble: StoreError | QuotaExceeded | None = None
        self._pause_s = _PAUSE_S
        self._probe = asyncio.Lock()

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        async with self._probe if self.trouble else nullcontext():
            trying = self.trouble is not None
            if trying:
                await asyncio.sleep(self._pause_s)
            try:
                yield
            except TROUBLE as error:
                self.trouble = error
                if trying:  # rows under way at the start fail together, and do not count
                    self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                raise

    def close(self) -> None:
        """A row has ended: the store works."""
        self.trouble = None
        self._pause_s = _PAUSE_S
