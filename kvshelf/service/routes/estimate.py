"""/v1/estimate: the cost of a creation, without doing it."""

from __future__ import annotations

from fastapi import APIRouter, Request

from kvshelf.api import Estimate, EstimateObject
from kvshelf.service.access.keys import Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.routes.caches import require_tokenizer
from kvshelf.service.service import TAKES_TOKENS, InService
from kvshelf.workers.replica.create.spec import require_policy

router = APIRouter(prefix="/v1/estimate", tags=["caches"], responses=openapi.ERRORS)


@router.post("", openapi_extra=openapi.body_of(Estimate), dependencies=[TAKES_TOKENS])
async def estimate(request: Request, service: InService, caller: Reader) -> EstimateObject:
    """The document's tokens and, for each policy, the kept entries, stored bytes and seconds. Nothing is compressed;
    the document's tokens count as used."""
    body = await read_json(request, Estimate, service)
    if body.policy is not None:
        require_policy(body)
    engine = service.engine(body.model, adapter=body.adapter)
    require_tokenizer(service, engine.model, body)
    return await until_hangup(request, engine.estimate(body, caller=service.within(caller)))
