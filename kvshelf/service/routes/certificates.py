"""/v1/certificates: bounds of the answers that compressed caches lose, made by `kvshelf certify`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvshelf.api.certificates import Certificate, CertificateDeleted, CertificateList
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.service import InService, written

router = APIRouter(prefix="/v1/certificates", tags=["certificates"], responses=openapi.ERRORS)


@router.post(
    "",
    status_code=201,
    response_model=Certificate,
    responses={200: {"model": Certificate, "description": "it is kept in place of another one of its name"}},
    openapi_extra=openapi.body_of(Certificate),
)
async def keep(request: Request, service: InService, caller: Writer) -> Response:
    """Keep a certificate of one of the service's models. It replaces the one of its name; caches that were made under
    that one stay as they are, with its digest."""
    body = await read_json(request, Certificate, service)
    if not body.digest:
        raise InvalidRequest(
            "a certificate has a digest of its other fields; make it with kvshelf certify", param="digest"
        )
    served = {name: identity.fingerprint() for name, identity in service.identities.items()}
    if body.fingerprint not in served.values():
        models = ", ".join(f"{name!r} ({fingerprint[:16]})" for name, fingerprint in served.items())
        raise ModelMismatch(
            f"certificate {body.name!r} was made with {body.model!r} (fingerprint {body.fingerprint[:16]}), and this "
            f"service has {models}: certify the "
            "questions with one of these",
            cache_fingerprint=body.fingerprint,
            field="model",
        )
    is_new = await off_loop(service.store.certificates.keep, body, tenant=caller.tenant)
    response = await service.computing.run(written, body)
    response.status_code = 201 if is_new else 200
    return response


@router.get("", response_model=CertificateList)
async def list_certificates(service: InService, caller: Reader) -> Response:
    """The certificates of the caller's tenant, newest first."""
    table = service.store.certificates
    return await service.listing.run(lambda: written(CertificateList(data=table.list(tenant=caller.tenant))))


@router.get("/{name}", response_model=Certificate)
async def get_certificate(name: str, service: InService, caller: Reader) -> Response:
    """One certificate, with the bounds of its groups."""
    certificate = await off_loop(service.store.certificates.get, name, tenant=caller.tenant)
    return await service.computing.run(written, certificate)


@router.delete("/{name}")
async def delete_certificate(name: str, service: InService, caller: Writer) -> CertificateDeleted:
    """Delete a certificate. Caches that were made under it stay as they are, with its digest."""
    await off_loop(service.store.certificates.delete, name, tenant=caller.tenant)
    return CertificateDeleted(name=name)
