"""The certificates of each tenant, by name, until they are deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvshelf.api.certificates import Certificate
from kvshelf.artifact.identity import digest
from kvshelf.errors import CertificateNotFound, StateConflict
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, read

MOST_CERTIFICATES: Final = 1000
"""Of a tenant: their listing is one answer."""


class _KeptCertificate(StoredRecord):
    certificate: Certificate


class CertificateTable:
    """The certificates of one home. Two tenants see nothing of each other. Raises as `JobTable` does."""

    def __init__(self, table: JobTable) -> None:
        self._table = table

    def keep(self, certificate: Certificate, *, tenant: str) -> bool:
        """Keep a certificate in place of the one of its name; returns whether there was none. Raises `StateConflict`
        where another caller changes the same, and beyond `MOST_CERTIFICATES`."""
        id, text = _id(certificate.name, tenant), _KeptCertificate(certificate=certificate).model_dump_json()
        earlier = self._table.find(id, tenant)
        if earlier is not None:
            kept = self._table.change(replace(earlier, text=text))
        elif len(self._table.listing("certificate", tenant, None, MOST_CERTIFICATES)) >= MOST_CERTIFICATES:
            raise StateConflict(f"there are {MOST_CERTIFICATES} certificates, as many as may be; delete one")
        else:
            kept = self._table.add(Item("certificate", id, tenant, text))
        if kept is None:
            raise StateConflict(f"certificate {certificate.name!r} was changed meanwhile; send it again")
        return earlier is None

    def get(self, name: str, *, tenant: str) -> Certificate:
        """Raises `CertificateNotFound` for an unknown name, and another tenant's."""
        item = self._table.find(_id(name, tenant), tenant)
        if item is None:
            raise CertificateNotFound(
                f"there is no certificate {name[:80]!r}; make it with kvshelf certify, or name one of "
                "GET /v1/certificates",
                param="certificate",
            )
        return read(item, _KeptCertificate).certificate

    def list(self, *, tenant: str) -> list[Certificate]:
        """Newest first."""
        items = self._table.listing("certificate", tenant, None, MOST_CERTIFICATES)
        return [read(item, _KeptCertificate).certificate for item in items]

    def delete(self, name: str, *, tenant: str) -> None:
        """Caches that were made under it stay, with its digest. Raises `CertificateNotFound`."""
        self.get(name, tenant=tenant)
        self._table.remove(_id(name, tenant))


def _id(name: str, tenant: str) -> str:
    return "cert_" + digest("kvshelf.certificate", tenant, name)
