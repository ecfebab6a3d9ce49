"""Counts what tenants use in one process, and adds it to the home every few seconds."""

from __future__ import annotations

import datetime
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.api.usage import MOST_PARTS, Metered
from kvshelf.errors import KvshelfError
from kvshelf.store.jobs.metering import Metering, ModelUsed

log = logging.getLogger("kvshelf.store")

FLUSH_S: Final = 2.0
"""Seconds between two additions to the store: what a killed replica loses at most."""

NAMED_DAYS: Final = 1
"""Age in days of the oldest counts that are sent with the names of their parts, which an erasure bars for that long."""

_STOP_S: Final = 2.0


@dataclass
class _Counts:
    """whole: with what is of no conversation and no group of the guard."""

    whole: Counter[str] = field(default_factory=Counter)
    conversations: dict[str, Counter[str]] = field(default_factory=dict)
    guard_groups: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, amounts: Mapping[str, Any], conversation: str | None, guard_group: str | None) -> None:
        self.whole.update(amounts)
        for parts, name in ((self.conversations, conversation), (self.guard_groups, guard_group)):
            if name is not None and (name in parts or len(parts) < MOST_PARTS):
                parts.setdefault(name, Counter()).update(amounts)


class Meter:
    """The use of one model in this process, by tenant and day. `add` may be called from any thread."""

    def __init__(self, metering: Metering, model: str, *, now: Callable[[], float] = time.time) -> None:
        """now: the wall clock, Unix seconds."""
        self._metering = metering
        self._model = model
        self._now = now
        self._writer = secrets.token_hex(4)
        self._number = 0
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._pending: dict[tuple[str, datetime.date], _Counts] = {}
        self._unsent: list[tuple[str, datetime.date, _Counts]] = []  # of one number, until the store has all of it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"meter-{model}", daemon=True)

    def add(
        self, tenant: str, conversation: str | None = None, *, guard_group: str | None = None, **amounts: float
    ) -> None:
        """Count fields of `Metered` for a tenant, today. conversation, guard_group: that they are of, one at most."""
        with self._lock:
            self._pending.setdefault((tenant, self._today), _Counts()).add(amounts, conversation, guard_group)

    @property
    def _today(self) -> datetime.date:
        return datetime.datetime.fromtimestamp(self._now(), datetime.UTC).date()

    def spent(self, tenant: str, seconds: float) -> None:
        """Count seconds of the model for a tenant."""
        self.add(tenant, worker_s=seconds)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Add the rest to the store, if it takes that at once."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def flush(self) -> None:
        """Add what was counted to the store. After an error the same is tried again, before anything newer."""
        with self._sending:
            self._send()
            with self._lock:
                pending, self._pending = self._pending, {}
            self._number += 1
            self._unsent = [(*key, counts) for key, counts in pending.items()]
            self._send()

    def _send(self) -> None:
        while self._unsent:
            tenant, day, counts = self._unsent[-1]
            if (self._today - day).days > NAMED_DAYS:
                counts = _Counts(counts.whole)
            groups = {name: Metered(**amounts) for name, amounts in counts.guard_groups.items()}
            used = {self._model: ModelUsed(**counts.whole, guard_groups=groups)}
            parts = {name: {self._model: Metered(**amounts)} for name, amounts in counts.conversations.items()}
            self._metering.add(tenant, day, used, writer=self._writer, number=self._number, conversations=parts)
            self._unsent.pop()

    def _run(self) -> None:
        failing = False
        while True:
            ended = self._ended.wait(FLUSH_S)
            try:
                self.flush()
                failing = False
            except KvshelfError as error:
                if not failing:
                    log.warning("the use of tenants could not be stored and is kept for later: %s", error)
                failing = True
            if ended:
                return
