"""While the store is gone, or has no room, rows try it one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from kvshelf.errors import QuotaExceeded, StoreError

TROUBLE: Final = (StoreError, QuotaExceeded)
"""No row's fault: the store does not work, or has no room for this tenant or at all. Error rows would say so of each
document in turn, and be of no use when there is room again."""

_PAUSE_S = 2.0
_MAX_PAUSE_S = 30.0


class Calm:
    """Rows go on freely until the store is in trouble. Then one at a time tries, after a pause that grows, until one
    has come to its end: a document that finds the store full has been computed for nothing."""

    def __init__(self) -> None:
        self.trouble: StoreError | QuotaExceeded | None = None
        self._pause_s = _PAUSE_S
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._one if self.trouble else nullcontext():
            trying = self.trouble is not None
            if trying:
                await asyncio.sleep(self._pause_s)
            try:
                yield
            except TROUBLE as error:
                self.trouble = error
                if trying:  # those that were under way when it began fail together, and count for nothing
                    self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                raise

    def restored(self) -> None:
        self.trouble = None
        self._pause_s = _PAUSE_S
