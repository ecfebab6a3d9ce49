"""The calls of `client.certificates`, `client.workflows` and `client.erasures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from kvshelf.api.caches import CreateErasure, Erasure
from kvshelf.api.certificates import Certificate, CertificateDeleted, CertificateList
from kvshelf.api.workflows import Workflow, WorkflowDeleted, WorkflowList, WorkflowObject, WorkflowStep
from kvshelf.client._calls import checked, quoted
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


def keep_workflow(id: str, steps: Mapping[str, Mapping[str, Any] | WorkflowStep]) -> HttpCall[WorkflowObject]:
    """Keep a workflow in place of the one of its id: steps by name, each with the `cache_ids` that it asks, the steps
    that are `next`, `join` ("any" or "all" of the steps before it) and `duration_s`. Raises `InvalidRequest` for a
    circle and an unknown step, `CacheNotFound`, `ModelMismatch`."""
    path = f"/v1/workflows/{quoted(id)}"
    return HttpCall("PUT", path, parse_as(WorkflowObject), body={"json": checked(Workflow, {"steps": steps})})


def list_workflows() -> HttpCall[list[WorkflowObject]]:
    """The workflows of your tenant, newest first."""
    return HttpCall("GET", "/v1/workflows", lambda response: parse_as(WorkflowList)(response).data)


def retrieve_workflow(id: str) -> HttpCall[WorkflowObject]:
    """One workflow. Raises `WorkflowNotFound`."""
    return HttpCall("GET", f"/v1/workflows/{quoted(id)}", parse_as(WorkflowObject))


def delete_workflow(id: str) -> HttpCall[WorkflowDeleted]:
    """Delete a workflow; its caches stay. Raises `WorkflowNotFound`."""
    return HttpCall("DELETE", f"/v1/workflows/{quoted(id)}", parse_as(WorkflowDeleted))


class ErasureFields(TypedDict, total=False):
    """Whose things are to go; None means absent."""

    labels: Mapping[str, str] | None
    name: str | None
    tenant: str | None
    dry_run: bool | None


def create_erasure(**fields: Unpack[ErasureFields]) -> HttpCall[Erasure]:
    """Erase everything that has all of `labels`, and the `name`, and what is derived from it; returns the receipt.

    With `tenant` alone, your own: everything that it has. `dry_run`: say what would go, and leave it. While the receipt
    says `in_progress`, send the same again for the rest. Raises `InvalidRequest`, `StateConflict` while another caller
    erases the same.
    """
    return HttpCall("POST", "/v1/erasures", parse_as(Erasure), body={"json": checked(CreateErasure, fields)})
