"""Small records of each tenant, by name, until they are deleted: certificates and workflows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Generic, TypeVar

from kvshelf.api.certificates import Certificate
from kvshelf.api.workflows import Workflow
from kvshelf.artifact.identity import digest
from kvshelf.errors import CertificateNotFound, KvshelfError, StateConflict, WorkflowNotFound
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, Kind, read

RecordT = TypeVar("RecordT", bound=StoredRecord)

MOST_CERTIFICATES: Final = 1000
MOST_WORKFLOWS: Final = 100
"""Of a tenant: their listing is one answer."""


class NamedTable(Generic[RecordT]):
    """The records of one kind in one home. Two tenants see nothing of each other. Raises as `JobTable` does. most:
    records of a tenant. missing: the error for a name that the tenant has not."""

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
            stored = self._table.change(replace(earlier, text=text))
        elif len(self._table.listing(self._kind, tenant, None, self._most)) >= self._most:
            raise StateConflict(f"there are {self._most} {self._kind}s, as many as may be; delete one")
        else:
            stored = self._table.add(Item(self._kind, id, tenant, text))
        if stored is None:
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


class _KeptCertificate(StoredRecord):
    certificate: Certificate


class CertificateTable:
    """The certificates of one home."""

    def __init__(self, table: JobTable) -> None:
        self._named = NamedTable(table, "certificate", _KeptCertificate, MOST_CERTIFICATES, _no_certificate)

    def keep(self, certificate: Certificate, *, tenant: str) -> bool:
        """As `NamedTable.keep`, by the certificate's name."""
        return self._named.keep(certificate.name, _KeptCertificate(certificate=certificate), tenant=tenant)

    def get(self, name: str, *, tenant: str) -> Certificate:
        """Raises `CertificateNotFound`."""
        return self._named.get(name, tenant=tenant).certificate

    def list(self, *, tenant: str) -> list[Certificate]:
        """Newest first."""
        return [record.certificate for record in self._named.list(tenant=tenant)]

    def delete(self, name: str, *, tenant: str) -> None:
        """Caches that were made under it stay, with its digest. Raises `CertificateNotFound`."""
        self._named.delete(name, tenant=tenant)


def _no_certificate(name: str) -> CertificateNotFound:
    return CertificateNotFound(
        f"there is no certificate {name[:80]!r}; make it with kvshelf certify, or name one of GET /v1/certificates",
        param="certificate",
    )


class KeptWorkflow(StoredRecord):
    """models: by cache, the name of the served model that answers from it."""

    id: str
    workflow: Workflow
    models: dict[str, str]


class WorkflowTable(NamedTable[KeptWorkflow]):
    """The workflows of one home. `get` and `delete` raise `WorkflowNotFound`."""

    def __init__(self, table: JobTable) -> None:
        super().__init__(table, "workflow", KeptWorkflow, MOST_WORKFLOWS, _no_workflow)


def _no_workflow(id: str) -> WorkflowNotFound:
    return WorkflowNotFound(
        f"there is no workflow {id[:80]!r}; PUT /v1/workflows/{{id}} keeps one, GET /v1/workflows names yours",
        param="workflow",
    )
