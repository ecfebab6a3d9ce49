"""What tenants use: counted in each process, and added every few seconds to one item for each tenant and day."""

from __future__ import annotations

import datetime
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import Field

from kvshelf.api.usage import KEEP_DAYS, MOST_PARTS, Metered
from kvshelf.artifact.identity import digest
from kvshelf.errors import KvshelfError
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

log = logging.getLogger("kvshelf.store")

FLUSH_S: Final = 2.0
"""Seconds between two additions of a process to the store: what a killed replica loses at most."""

NAMED_DAYS: Final = 1
"""Age in days of the oldest counts that are sent with the names of their parts, which an erasure bars for that long."""

_STOP_S: Final = 2.0
_DIGITS: Final = 40
_ALL: Final = "*"

PartT = TypeVar("PartT")


class ModelUsed(Metered):
    """Use of one model. guard_groups: the part of each group of the guard, by the value of its label, the first
    `MOST_PARTS` of them."""

    guard_groups: dict[str, Metered] = Field(default_factory=dict)

    def __add__(self, other: Metered) -> ModelUsed:
        more = other.guard_groups if isinstance(other, ModelUsed) else {}
        groups = _sums(self.guard_groups, _first(self.guard_groups, more))
        return ModelUsed(**dict(super().__add__(other)), guard_groups=groups)


class DayUsed(StoredRecord):
    """One tenant's use of one day of UTC. by_model: all of it. conversations: the part of each conversation, by its id
    and model, the first `MOST_PARTS` of them. writers: the number of the last addition of each, so that an addition
    whose answer was lost is not added twice. erased: digests, under the home's key, of names that an erasure has ended
    and no addition brings back; `_ALL` bars every name, and takes the place of more than `MOST_PARTS` digests."""

    tenant: str
    day: datetime.date
    by_model: dict[str, ModelUsed] = Field(default_factory=dict)
    conversations: dict[str, dict[str, Metered]] = Field(default_factory=dict)
    writers: dict[str, int] = Field(default_factory=dict)
    erased: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """The names that callers gave to parts: groups of the guard and conversations."""
        return {*self.conversations, *(group for used in self.by_model.values() for group in used.guard_groups)}

    def without(self, names: Container[str]) -> DayUsed:
        """The record without the parts of these names; their use stays in the whole."""
        models = {
            model: used.model_copy(update={"guard_groups": _others(used.guard_groups, names)})
            for model, used in self.by_model.items()
        }
        return self.model_copy(update={"by_model": models, "conversations": _others(self.conversations, names)})


class Metering:
    """The use of one home. Raises as `JobTable` does."""

    def __init__(self, table: JobTable, key: bytes) -> None:
        """key: of the home's ids."""
        self._table = table
        self._key = key

    def add(
        self,
        tenant: str,
        day: datetime.date,
        used: Mapping[str, Metered],
        *,
        writer: str,
        number: int,
        conversations: Mapping[str, Mapping[str, Metered]] | None = None,
    ) -> None:
        """Add to a tenant's use of a day, by model, and to the part of each conversation. Atomic, and durable when it
        returns. Does nothing if the writer has added this number, or a higher one, to that day before."""
        by_model = {model: ModelUsed() + metered for model, metered in used.items()}
        counted = DayUsed(tenant=tenant, day=day, by_model=by_model, conversations=dict(conversations or {}))
        names = {name: self._digest(name) for name in counted.names}

        def with_more(known: DayUsed) -> DayUsed:
            if known.writers.get(writer, 0) >= number:
                return known
            more = counted.without({name for name, hashed in names.items() if known.erased & {_ALL, hashed}})
            models = {model: known.by_model.get(model, ModelUsed()) + used for model, used in more.by_model.items()}
            parts = _first(known.conversations, more.conversations)
            sums = {name: _sums(known.conversations.get(name, {}), part) for name, part in parts.items()}
            new = {"by_model": known.by_model | models, "conversations": known.conversations | sums}
            return known.model_copy(update=new | {"writers": known.writers | {writer: number}})

        self._change(tenant, day, with_more)

    def days(self, first: datetime.date, last: datetime.date, *, tenant: str | None) -> list[DayUsed]:
        """The records of a window of days that have any use. tenant None: of all tenants."""
        if tenant is None:
            items = self._table.open_items("usage")
        else:
            items = self._table.listing("usage", tenant, None, KEEP_DAYS + 2)
        records = [used for item in items if (used := read(item, DayUsed)).by_model and first <= used.day <= last]
        return sorted(records, key=lambda used: (used.day, used.tenant))

    def bar_names(self, tenant: str, days: Iterable[datetime.date], names: Iterable[str] | None) -> None:
        """Let no later addition to these days have parts of these names; None: of any name."""
        digests = frozenset([_ALL] if names is None else map(self._digest, names))

        def barred(known: DayUsed) -> DayUsed:
            erased = known.erased | digests
            return known.model_copy(update={"erased": erased if len(erased) <= MOST_PARTS else frozenset([_ALL])})

        for day in days:
            self._change(tenant, day, barred)

    def forget_names(self, tenant: str, day: datetime.date, names: Container[str]) -> None:
        """Drop the parts of these names."""
        self._change(tenant, day, lambda known: known.without(names))

    def _change(self, tenant: str, day: datetime.date, change: Callable[[DayUsed], DayUsed]) -> None:
        """Change the record of a day; tries again where another writer was faster."""
        while True:
            item = self._table.find(_id(tenant, day), tenant)
            known = DayUsed(tenant=tenant, day=day) if item is None else read(item, DayUsed)
            if (record := change(known)) == known:
                return
            if item is None:
                stored = self._table.add(_item(record, 0))
            else:
                stored = self._table.change(_item(record, item.version))
            if stored is not None:
                return

    def _digest(self, name: str) -> str:
        return digest("kvshelf.usage.erased", name, key=self._key)


@dataclass
class _Counts:
    """whole: includes the use without a conversation or group."""

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
        """Count fields of `Metered` for a tenant, today. Give a conversation or a guard_group, not both."""
        with self._lock:
            self._pending.setdefault((tenant, self._today), _Counts()).add(amounts, conversation, guard_group)

    @property
    def _today(self) -> datetime.date:
        return datetime.datetime.fromtimestamp(self._now(), datetime.UTC).date()

    def spent(self, tenant: str, seconds: float) -> None:
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


def _sums(known: Mapping[str, Metered], more: Mapping[str, Metered]) -> dict[str, Metered]:
    return {**known, **{name: known.get(name, Metered()) + used for name, used in more.items()}}


def _first(known: Mapping[str, PartT], more: Mapping[str, PartT]) -> dict[str, PartT]:
    """The parts of `more` that are known, and new ones until there are `MOST_PARTS`."""
    new = [name for name in more if name not in known][: MOST_PARTS - len(known)]
    return {name: more[name] for name in more if name in known or name in new}


def _others(parts: Mapping[str, PartT], names: Container[str]) -> dict[str, PartT]:
    return {name: part for name, part in parts.items() if name not in names}


def _id(tenant: str, day: datetime.date) -> str:
    return f"usage_{day:%Y%m%d}_{digest('kvshelf.usage', tenant)[:_DIGITS]}"


def _item(record: DayUsed, version: int) -> Item:
    midnight = datetime.datetime.combine(record.day, datetime.time(), datetime.UTC)
    # One that no number was added to is only there for additions on their way.
    due = (midnight + datetime.timedelta(days=KEEP_DAYS if record.by_model else 2)).timestamp()
    text = record.model_dump_json()
    return Item("usage", _id(record.tenant, record.day), record.tenant, text, version, open=True, due=due)
