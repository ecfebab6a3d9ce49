"""What tenants use: counted in each process, and added every few seconds to one item for each tenant and day."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final

from pydantic import Field

from kvshelf.api.usage import KEEP_DAYS, MOST_PARTS, Metered
from kvshelf.artifact.identity import digest
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

_DIGITS: Final = 40


class DayUsed(StoredRecord):
    """One tenant's use of one day of UTC, by model; and what of it was of a conversation, by its id and model, and of
    a group of the guard, by the value of its label, the first `MOST_PARTS` of each. writers: the number of the last
    addition of each, so that one whose answer was lost is not added twice."""

    LATER = ("conversations", "guard_groups")

    tenant: str
    day: datetime.date
    by_model: dict[str, Metered] = Field(default_factory=dict)
    conversations: dict[str, dict[str, Metered]] = Field(default_factory=dict)
    guard_groups: dict[str, dict[str, Metered]] = Field(default_factory=dict)
    writers: dict[str, int] = Field(default_factory=dict)


class Metering:
    """The use of one home. Raises as `JobTable` does."""

    def __init__(self, table: JobTable) -> None:
        self._table = table

    def add(
        self,
        tenant: str,
        day: datetime.date,
        used: Mapping[str, Metered],
        *,
        writer: str,
        number: int,
        parts: Mapping[str, Mapping[str, Mapping[str, Metered]]] | None = None,
    ) -> None:
        """Add to what a tenant has used on a day, by model, and what of it each part has: by the name of a field that
        tells parts apart ("conversations", "guard_groups"). Atomic, and durable when it returns. Does nothing if the
        writer has added this number, or a higher one, to that day before."""
        while True:
            item = self._table.find(_id(tenant, day), tenant)
            known = DayUsed(tenant=tenant, day=day) if item is None else read(item, DayUsed)
            if known.writers.get(writer, 0) >= number:
                return
            told_apart = {name: _parts(getattr(known, name), more) for name, more in (parts or {}).items()}
            new = {"by_model": _sums(known.by_model, used), "writers": known.writers | {writer: number}}
            record = known.model_copy(update=new | told_apart)
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


def _sums(known: Mapping[str, Metered], more: Mapping[str, Metered]) -> dict[str, Metered]:
    return {**known, **{model: known.get(model, Metered()) + used for model, used in more.items()}}


def _parts(
    known: Mapping[str, Mapping[str, Metered]], more: Mapping[str, Mapping[str, Metered]]
) -> dict[str, Mapping[str, Metered]]:
    sums = dict(known)
    for name, used in more.items():
        if name in sums or len(sums) < MOST_PARTS:
            sums[name] = _sums(sums.get(name, {}), used)
    return sums


def _id(tenant: str, day: datetime.date) -> str:
    return f"usage_{day:%Y%m%d}_{digest('kvshelf.usage', tenant)[:_DIGITS]}"


def _item(record: DayUsed, version: int) -> Item:
    midnight = datetime.datetime.combine(record.day, datetime.time(), datetime.UTC)
    due = (midnight + datetime.timedelta(days=KEEP_DAYS)).timestamp()
    text = record.model_dump_json()
    return Item("usage", _id(record.tenant, record.day), record.tenant, text, version, open=True, due=due)
