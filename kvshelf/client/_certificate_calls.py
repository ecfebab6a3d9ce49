"""The calls of `client.certificates`."""

from __future__ import annotations

from kvshelf.api.certificates import Certificate, CertificateDeleted, CertificateList
from kvshelf.client._calls import quoted
from kvshelf.client._exchange import HttpCall, parse_as


def keep_certificate(certificate: Certificate) -> HttpCall[Certificate]:
    """Keep a certificate that `kvshelf certify` has made, in place of the one of its name. Raises `InvalidRequest` for
    one that was changed since, `ModelMismatch` for one of a model that the service has not."""
    return HttpCall(
        "POST", "/v1/certificates", parse_as(Certificate), body={"json": certificate.model_dump(mode="json")}
    )


def list_certificates() -> HttpCall[list[Certificate]]:
    """The certificates of your tenant, newest first."""
    return HttpCall("GET", "/v1/certificates", lambda response: parse_as(CertificateList)(response).data)


def retrieve_certificate(name: str) -> HttpCall[Certificate]:
    """One certificate. Raises `CertificateNotFound`."""
    return HttpCall("GET", f"/v1/certificates/{quoted(name)}", parse_as(Certificate))


def delete_certificate(name: str) -> HttpCall[CertificateDeleted]:
    """Delete a certificate; caches that were made under it stay. Raises `CertificateNotFound`."""
    return HttpCall("DELETE", f"/v1/certificates/{quoted(name)}", parse_as(CertificateDeleted))
