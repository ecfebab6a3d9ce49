"""Small records of each tenant, by name, until they are deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from kvshelf.artifact.identity import digest
from kvshelf.errors import KvshelfError, StateConflict
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, Kind, read

RecordT = TypeVar("RecordT", bound=StoredRecord)


class NamedTable(Generic[RecordT]):
    """The records of one kind in one home. Two tenants see nothing of each other. Raises as `JobTable` does.

    most: of a tenant: their listing is one answer. missing: the error for a name that the tenant has not.
    """

    def __init__(
        self, table: JobTable, kind: Kind, record: type[RecordT], most: int, missing: Callable[[str], KvshelfError]
    ) -> None:
        self._table = table
        self._kind: Kind = kind
        self._record = record
        self._most = most
        self._missing = missing

    def keep(self, name: str, record: RecordT, *, tenant: str) -> bool:
        """Keep a record in place of the one of its name; returns whether there was none. Raises `StateConflict` where
        another caller changes the same, and beyond `most`."""
        id, text = self._id(name, tenant), record.model_dump_json()
        earlier = self._table.find(id, tenant)
        if earlier is not None:
            kept = self._table.change(replace(earlier, text=text))
        elif len(self._table.listing(self._kind, tenant, None, self._most)) >= self._most:
            raise StateConflict(f"there are {self._most} {self._kind}s, as many as may be; delete one")
        else:
            kept = self._table.add(Item(self._kind, id, tenant, text))
        if kept is None:
            raise StateConflict(f"{self._kind} {name!r} was changed meanwhile; send it again")
        return earlier is None

    def get(self, name: str, *, tenant: str) -> RecordT:
        """Raises the error of `missing` for an unknown name, and another tenant's."""
        item = self._table.find(self._id(name, tenant), tenant)
        if item is None:
            raise self._missing(name)
        return read(item, self._record)

    def list(self, *, tenant: str) -> list[RecordT]:
        """Newest first."""
        return [read(item, self._record) for item in self._table.listing(self._kind, tenant, None, self._most)]

    def delete(self, name: str, *, tenant: str) -> None:
        """Raises as `get`."""
        self.get(name, tenant=tenant)
        self._table.remove(self._id(name, tenant))

    def _id(self, name: str, tenant: str) -> str:
        return f"{self._kind[:4]}_{digest(f'kvshelf.{self._kind}', tenant, name)}"
