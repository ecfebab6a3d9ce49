"""POST /v1/erasures: everything of a subject goes, and a receipt says what went."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from kvshelf.api.caches import CreateErasure, Erasure
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import Writer
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.service import InService, in_turn, written
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.erasure.signing import Signer, sealed

router = APIRouter(tags=["erasures"], responses=openapi.ERRORS)

_LIMIT_S: Final = 20.0
"""How long one request erases before it answers `in_progress`."""


@router.post("/v1/erasures", response_model=Erasure, openapi_extra=openapi.body_of(CreateErasure))
async def create_erasure(request: Request, service: InService, caller: Writer) -> Response:
    """Erase everything of a subject among the caller's tenant's own things: caches with these labels and this name, and
    those that extend them; their sources and responses; waiting requests and batches that ask for them; lines of
    files and journals that name them. Sent again, the same request goes on, and gives the same receipt for a day.

    What was under way is in `stays`: erase again when it has ended.
    """
    body = await read_json(request, CreateErasure, service)
    if body.tenant not in (None, caller.tenant):
        raise InvalidRequest("tenant: a key erases the things of its own tenant alone", param="tenant")
    subject = Subject(tenant=caller.tenant, labels=body.labels, name=body.name or None)
    key_file = service.settings.erasure_key_file

    def erase() -> Erasure:
        signer = None if key_file is None else Signer.read(key_file)
        return sealed(service.store.erase(subject, dry_run=body.dry_run, limit_s=_LIMIT_S), signer)

    return await service.computing.run(written, await in_turn(service, caller, erase))
