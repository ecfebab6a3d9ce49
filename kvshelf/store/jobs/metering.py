"""What tenants use: counted in each process, and added every few seconds to one item for each tenant and day."""

from __future__ import annotations

import datetime
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import Field

from kvshelf.api.usage import KEEP_DAYS, Metered
from kvshelf.artifact.identity import digest
from kvshelf.errors import KvshelfError
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

_DIGITS: Final = 40


class DayUsed(StoredRecord):
    """One tenant's use of one day of UTC, by model. writers: the number of the last addition of each, so that one whose
    answer was lost is not added twice."""

    tenant: str
    day: datetime.date
    by_model: dict[str, Metered] = Field(default_factory=dict)
    writers: dict[str, int] = Field(default_factory=dict)


class Metering:
    """The use of one home. Raises as `JobTable` does."""

    def __init__(self, table: JobTable) -> None:
        self._table = table

    def add(self, tenant: str, day: datetime.date, used: Mapping[str, Metered], *, writer: str, number: int) -> None:
        """Add to what a tenant has used on a day, by model. Atomic, and durable when it returns. Does nothing if the
        writer has added this number, or a higher one, to that day before."""
        while True:
            item = self._table.find(_id(tenant, day), tenant)
            known = DayUsed(tenant=tenant, day=day) if item is None else read(item, DayUsed)
            if known.writers.get(writer, 0) >= number:
                return
            sums = {model: known.by_model.get(model, Metered()) + more for model, more in used.items()}
            record = known.model_copy(
                update={"by_model": known.by_model | sums, "writers": known.writers | {writer: number}}
            )
            if item is None:
                stored = self._table.add(_item(record, 0))
            else:
                stored = self._table.change(_item(record, item.version))
            if stored is not None:  # else another writer was faster
                return

    def days(self, first: datetime.date, last: datetime.date, *, tenant: str | None) -> list[DayUsed]:
        """The use of each tenant and day in a window that has any. tenant None: of all."""
        if tenant is None:
            items = self._table.open_items("usage")
        else:
            items = self._table.listing("usage", tenant, None, KEEP_DAYS + 2)
        records = [read(item, DayUsed) for item in items]
        return sorted((used for used in records if first <= used.day <= last), key=lambda used: (used.day, used.tenant))


def _id(tenant: str, day: datetime.date) -> str:
    return f"usage_{day:%Y%m%d}_{digest('kvshelf.usage', tenant)[:_DIGITS]}"


def _item(record: DayUsed, version: int) -> Item:
    midnight = datetime.datetime.combine(record.day, datetime.time(), datetime.UTC)
    due = (midnight + datetime.timedelta(days=KEEP_DAYS)).timestamp()
    text = record.model_dump_json()
    return Item("usage", _id(record.tenant, record.day), record.tenant, text, version, open=True, due=due)


log = logging.getLogger("kvshelf.store")

FLUSH_S: Final = 2.0
"""Seconds between two additions to the store: what a killed replica loses at most."""

_STOP_S: Final = 2.0


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
        self._pending: dict[tuple[str, datetime.date], Counter[str]] = {}
        self._unsent: list[tuple[str, datetime.date, Metered]] = []  # of one number, until the store has all of it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"meter-{model}", daemon=True)

    def add(self, tenant: str, **amounts: float) -> None:
        """Count fields of `Metered` for a tenant, today."""
        key = tenant, datetime.datetime.fromtimestamp(self._now(), datetime.UTC).date()
        with self._lock:
            self._pending.setdefault(key, Counter()).update(amounts)

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
            self._unsent = [(tenant, day, Metered(**counts)) for (tenant, day), counts in pending.items()]
            self._send()

    def _send(self) -> None:
        while self._unsent:
            tenant, day, used = self._unsent[-1]
            self._metering.add(tenant, day, {self._model: used}, writer=self._writer, number=self._number)
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
