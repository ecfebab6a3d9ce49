"""The clock of a Redis home: the server's, so that all who use the home agree on what has expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvshelf.errors import StoreError
from kvshelf.store.jobs.clock import uptime_s
from kvshelf.store.redis.link import RedisLink

ASK_EVERY_S: Final = 60.0

_AGAIN_S: Final = 5.0
"""After a failure. A caller waits for an unreachable server no more often than this."""

_SCRIPT: Final = "return redis.call('TIME')"  # a script, because a cluster finds its server by a key


class RedisClock:
    """Seconds since 1970. The server is asked once a minute, and this machine's uptime carries its answer on, so that
    the wall clock of this machine does not matter. It stands in as long as the server never answered."""

    def __init__(self, link: RedisLink, key: str, elapsed: Callable[[], float] = uptime_s) -> None:
        """key: any key of the home."""
        self._link = link
        self._key = key
        self._elapsed = elapsed
        self._answer: tuple[float, float] | None = None  # the server's time, and ours when it came
        self._ask_at = -1.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        elapsed = self._elapsed()
        if elapsed >= self._ask_at and self._lock.acquire(blocking=False):  # the others go on with what is known
            try:
                self._ask()
            finally:
                self._lock.release()
        if self._answer is None:
            return time.time()
        server, then = self._answer
        return server + self._elapsed() - then

    def _ask(self) -> None:
        try:
            seconds, micros = self._link.script(_SCRIPT, [self._key], [])
            self._answer = int(seconds) + int(micros) / 1e6, self._elapsed()
        except (StoreError, TypeError, ValueError):
            self._ask_at = self._elapsed() + _AGAIN_S
        else:
            self._ask_at = self._elapsed() + ASK_EVERY_S
