"""What tenants use: counted in each process, and added every few seconds to one item for each tenant and day."""

from __future__ import annotations

import datetime
from collections.abc import Container, Iterable, Mapping
from typing import Final, TypeVar

from pydantic import Field

from kvshelf.api.usage import KEEP_DAYS, MOST_PARTS, Metered
from kvshelf.artifact.identity import digest
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

_DIGITS: Final = 40
_ALL: Final = "*"

PartT = TypeVar("PartT")


class ModelUsed(Metered):
    """Of one model; and what of it was of a group of the guard, by the value of its label, the first `MOST_PARTS` of
    them. It stands here, and not beside `conversations`, as earlier versions ignore what they do not know of a
    `Metered`, and cannot read a `DayUsed` with more."""

    guard_groups: dict[str, Metered] = Field(default_factory=dict)

    def __add__(self, other: Metered) -> ModelUsed:
        more = other.guard_groups if isinstance(other, ModelUsed) else {}
        groups = _sums(self.guard_groups, _first(self.guard_groups, more))
        return ModelUsed(**dict(super().__add__(other)), guard_groups=groups)


class DayUsed(StoredRecord):
    """One tenant's use of one day of UTC, by model; and what of it was of a conversation, by its id and model, the
    first `MOST_PARTS` of them. writers: the number of the last addition of each, so that one whose answer was lost is
    not added twice. erased: digests of names that an erasure has ended, which additions that were counted before it do
    not bring back; with `_ALL` no name is told apart any more."""

    LATER = ("conversations", "erased")

    tenant: str
    day: datetime.date
    by_model: dict[str, ModelUsed] = Field(default_factory=dict)
    conversations: dict[str, dict[str, Metered]] = Field(default_factory=dict)
    writers: dict[str, int] = Field(default_factory=dict)
    erased: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """What of it callers have named: groups of the guard and conversations."""
        return {*self.conversations, *(group for used in self.by_model.values() for group in used.guard_groups)}

    def without(self, names: Container[str]) -> DayUsed:
        """With nothing told apart of these; what they used stays in the whole."""
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
        """Add to what a tenant has used on a day, by model, and what of it each conversation has. Atomic, and durable
        when it returns. Does nothing if the writer has added this number, or a higher one, to that day before."""
        while True:
            item = self._table.find(_id(tenant, day), tenant)
            known = DayUsed(tenant=tenant, day=day) if item is None else read(item, DayUsed)
            if known.writers.get(writer, 0) >= number:
                return
            by_model = {model: ModelUsed() + own for model, own in used.items()}
            more = DayUsed(tenant=tenant, day=day, by_model=by_model, conversations=dict(conversations or {}))
            more = more.without({name for name in more.names if known.erased & {_ALL, self._digest(name)}})
            models = {model: known.by_model.get(model, ModelUsed()) + own for model, own in more.by_model.items()}
            parts = _first(known.conversations, more.conversations)
            sums = {name: _sums(known.conversations.get(name, {}), part) for name, part in parts.items()}
            new = {"by_model": known.by_model | models, "conversations": known.conversations | sums}
            record = known.model_copy(update=new | {"writers": known.writers | {writer: number}})
            if self._stored(record, item):
                return

    def days(self, first: datetime.date, last: datetime.date, *, tenant: str | None) -> list[DayUsed]:
        """The use of each tenant and day in a window that has any. tenant None: of all."""
        if tenant is None:
            items = self._table.open_items("usage")
        else:
            items = self._table.listing("usage", tenant, None, KEEP_DAYS + 2)
        records = [read(item, DayUsed) for item in items]
        return sorted((used for used in records if first <= used.day <= last), key=lambda used: (used.day, used.tenant))

    def bar_names(self, tenant: str, days: Iterable[datetime.date], names: Iterable[str] | None) -> None:
        """Let no later addition to these days tell anything apart by these names, or (None) by any."""
        barred = frozenset([_ALL] if names is None else map(self._digest, names))
        for day in days if barred else ():
            while True:
                item = self._table.find(_id(tenant, day), tenant)
                known = DayUsed(tenant=tenant, day=day) if item is None else read(item, DayUsed)
                erased = known.erased | barred
                if len(erased) > MOST_PARTS:
                    erased = frozenset([_ALL])
                if erased == known.erased or self._stored(known.model_copy(update={"erased": erased}), item):
                    break

    def _stored(self, record: DayUsed, item: Item | None) -> bool:
        """Store what a day's item becomes; False where another writer was faster."""
        if item is None:
            return self._table.add(_item(record, 0)) is not None
        return self._table.change(_item(record, item.version)) is not None

    def _digest(self, name: str) -> str:
        return digest("kvshelf.usage.erased", name, key=self._key)

    def forget_names(self, item_id: str, tenant: str, names: Container[str]) -> None:
        """Tell nothing apart any more that has one of these names, on one day of a tenant (`Item.id`)."""
        while (item := self._table.find(item_id, tenant)) is not None:
            if self._stored(read(item, DayUsed).without(names), item):
                return


def _sums(known: Mapping[str, Metered], more: Mapping[str, Metered]) -> dict[str, Metered]:
    return {**known, **{name: known.get(name, Metered()) + used for name, used in more.items()}}


def _first(known: Mapping[str, PartT], more: Mapping[str, PartT]) -> dict[str, PartT]:
    """Those parts of `more` that are told apart: what is known, and new ones until there are `MOST_PARTS`."""
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
