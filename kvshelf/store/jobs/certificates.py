"""The certificates of each tenant, by name, until they are deleted."""

from __future__ import annotations

from typing import Final

from kvshelf.api.certificates import Certificate
from kvshelf.errors import CertificateNotFound
from kvshelf.store.jobs.named import NamedTable
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import JobTable

MOST_CERTIFICATES: Final = 1000
"""Of a tenant: their listing is one answer."""


class _KeptCertificate(StoredRecord):
    certificate: Certificate


class CertificateTable:
    """The certificates of one home, see `NamedTable`."""

    def __init__(self, table: JobTable) -> None:
        self._kept = NamedTable(table, "certificate", _KeptCertificate, MOST_CERTIFICATES, _missing)

    def keep(self, certificate: Certificate, *, tenant: str) -> bool:
        """Keep a certificate in place of the one of its name; returns whether there was none. Raises `StateConflict`
        where another caller changes the same, and beyond `MOST_CERTIFICATES`."""
        return self._kept.keep(certificate.name, _KeptCertificate(certificate=certificate), tenant=tenant)

    def get(self, name: str, *, tenant: str) -> Certificate:
        """Raises `CertificateNotFound` for an unknown name, and another tenant's."""
        return self._kept.get(name, tenant=tenant).certificate

    def list(self, *, tenant: str) -> list[Certificate]:
        """Newest first."""
        return [kept.certificate for kept in self._kept.list(tenant=tenant)]

    def delete(self, name: str, *, tenant: str) -> None:
        """Caches that were made under it stay, with its digest. Raises `CertificateNotFound`."""
        self._kept.delete(name, tenant=tenant)


def _missing(name: str) -> CertificateNotFound:
    return CertificateNotFound(
        f"there is no certificate {name[:80]!r}; make it with kvshelf certify, or name one of GET /v1/certificates",
        param="certificate",
    )
