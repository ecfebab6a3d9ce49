"""Doubt about a home's clock: caches that expired only by a jump of the clock are hidden, and not deleted for a while.

A wall clock may jump by hours: a hardware clock in local time, a mistaken operator, a virtual machine that was moved.
So a sweep compares it with the time that went by since the last sweep. The difference is doubted for as long as it is
itself; if the clock is set right meanwhile, the caches come back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvshelf.errors import StoreError
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

log = logging.getLogger("kvshelf.store")

_ITEM: Final = "clock"

_STEP_S: Final = 5.0
"""A smaller difference between two sweeps of one machine's uptime is no jump: clocks are slewed."""

_NOTED_EVERY_S: Final = 300.0

_UNKNOWN_S: Final = 3 * _NOTED_EVERY_S
"""A smaller difference to what another machine noted, or this one before it started, is no jump."""

_MOST_S: Final = KEEP_ENDED_S
"""The longest that a jump is doubted, however far it went."""


def uptime_s() -> float:
    """Seconds since the machine started. They go on while it is suspended, and no setting of the clock changes them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot() -> str:
    """The id of the machine's start from which `uptime_s` counts; "" if it is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class _Sight(StoredRecord):
    """The clocks at a sweep. doubt_s: how much of `now` is doubted, negative after a jump back; left_s: for how long
    still."""

    now: float
    uptime_s: float
    boot: str
    doubt_s: float = 0.0
    left_s: float = 0.0


class Doubt:
    """The doubt about one home's clock, kept in the home, so that it outlives a restart. Any number of threads."""

    def __init__(
        self,
        table: JobTable,
        now: Callable[[], float],
        elapsed: Callable[[], float] = uptime_s,
        boot: str | None = None,
    ) -> None:
        """now: the home's clock, Unix seconds. elapsed: seconds that no setting of a clock changes; `now` itself if
        there are none, so that no jump is seen. boot: see `_boot`."""
        self._table = table
        self._now = now
        self._elapsed = elapsed
        self._boot = _boot() if boot is None else boot
        self._last: _Sight | None = None
        self._noted: _Sight | None = None
        self._lock = threading.Lock()

    def deadline(self) -> float:
        """The time (Unix seconds) of which it is certain that it is over: what ended before may be deleted for good.
        Raises as `JobTable` does."""
        if self._elapsed is self._now:
            return self._now()
        with self._lock:
            sight = _Sight(now=self._now(), uptime_s=self._elapsed(), boot=self._boot)
            item = None if self._last else self._table.find(_ITEM, None)
            last = self._last if item is None else read(item, _Sight)
            self._last = sight if last is None else _after(last, sight)
            if self._is_news(self._last):
                with suppress(StoreError):  # a full home: the sweep goes on, and makes room
                    self._note(self._last)
            return sight.now - self.seconds

    @property
    def seconds(self) -> float:
        """By how much the clock may be ahead."""
        return 0.0 if self._last is None else max(0.0, self._last.doubt_s)

    def _is_news(self, sight: _Sight) -> bool:
        noted = self._noted
        return (
            noted is None
            or noted.boot != sight.boot
            or noted.doubt_s != sight.doubt_s
            or sight.uptime_s - noted.uptime_s >= _NOTED_EVERY_S
        )

    def _note(self, sight: _Sight) -> None:
        item = self._table.find(_ITEM, None)
        text = sight.model_dump_json()
        if item is None:
            self._table.add(Item("clock", _ITEM, "", text))
        else:
            self._table.change(replace(item, text=text))  # if another process was faster, its note is as good
        self._noted = sight


def _after(last: _Sight, now: _Sight) -> _Sight:
    """The sight `now`, with what is left of the doubt at the last one, and the doubt about a jump since."""
    same = last.boot == now.boot != ""
    passed = max(0.0, now.uptime_s - last.uptime_s) if same else 0.0
    jump = now.now - last.now - passed
    left_s = max(0.0, last.left_s - passed)
    doubt = last.doubt_s if left_s else 0.0
    if abs(jump) > (_STEP_S if same else _UNKNOWN_S):
        doubt += jump
        doubt = 0.0 if math.isclose(doubt, 0.0, abs_tol=_STEP_S) else doubt  # it was set right again
        left_s = min(abs(doubt), _MOST_S)
        if doubt > 0:
            log.warning(
                "the clock went %.0f s further than time did: what expired in these is hidden, and deleted in %.0f s "
                "unless the clock is set right",
                jump,
                left_s,
            )
    return now.model_copy(update={"doubt_s": doubt, "left_s": left_s})
