"""/v1/caches: create, list, get, change, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.client.types import CacheList, CacheObject, CreateCache, Deleted, ListCaches, RequestObject, UpdateCache
from kvshelf.service import openapi
from kvshelf.service.body import read_create, read_json, read_query
from kvshelf.service.keys import Reader, Writer
from kvshelf.service.routes.requests import request_json
from kvshelf.service.state import InService, cache_object, cache_response, off_loop, until_hangup
from kvshelf.store.manifest import Manifest
from kvshelf.workers.policies import build

router = APIRouter(prefix="/v1/caches", tags=["caches"], responses=openapi.ERRORS)

_ACCEPTED: dict[int | str, dict[str, Any]] = {
    **openapi.EXISTING,
    202: {"model": RequestObject, "description": "with `Prefer: respond-async`: it is written down and will be done"},
}


@router.post(
    "",
    status_code=201,
    response_model=CacheObject,
    responses=_ACCEPTED,
    openapi_extra=openapi.body_of(CreateCache, form=True),
)
async def create(
    request: Request, service: InService, caller: Writer, prefer: Annotated[str, Header()] = ""
) -> Response:
    """Compress a document once and store it. The same document, model and policy give the same id."""
    body = await read_create(request, service.settings)
    engine = service.engine(body.model)
    build(body.policy, body.policy_params)
    await off_loop(service.store.expiry, body.ttl_s, body.expires_at)
    spec = body.model_dump(mode="json") | {"model": engine.model}
    if "respond-async" in [wish.strip().lower() for wish in prefer.split(",")]:
        record = await service.background.submit(spec, caller.tenant)
        headers = {"location": f"/v1/requests/{record.id}", "preference-applied": "respond-async"}
        return JSONResponse(request_json(record), status_code=202, headers=headers)
    deadline_s = service.settings.request_deadline_s
    created = await until_hangup(request, engine.create(spec, tenant=caller.tenant, deadline_s=deadline_s))
    return cache_response(Manifest.model_validate(created.manifest), existing=created.existing)


_FILTERS = [
    openapi.query_parameter("document_id", "string", "caches of this document"),
    openapi.query_parameter("model", "string", "caches of this model"),
    openapi.query_parameter("policy", "string", "caches of this policy"),
    openapi.query_parameter("limit", "integer", "1 to 1000 caches in this page; 20 if absent"),
    openapi.query_parameter("after", "string", "the last id of the page before"),
]


@router.get("", openapi_extra={"parameters": _FILTERS})
async def list_caches(request: Request, service: InService, caller: Reader) -> CacheList:
    """Caches on the shelf, newest first. `label.<key>=<value>` filters by label, and may be given several times."""
    filters = read_query(request, ListCaches)
    page = await off_loop(
        service.store.list,
        tenant=caller.tenant,
        document_id=filters.document_id,
        model=filters.model,
        policy=filters.policy,
        labels=filters.labels,
        limit=filters.limit,
        after=filters.after,
    )
    data = [cache_object(manifest) for manifest in page.data]
    return CacheList(data=data, has_more=page.has_more, last_id=data[-1].id if data else None)


@router.get("/{cache_id}")
async def get_cache(cache_id: str, service: InService, caller: Reader) -> CacheObject:
    """What the shelf knows about one cache."""
    return cache_object(await off_loop(service.store.stat, cache_id, tenant=caller.tenant))


@router.patch("/{cache_id}", openapi_extra=openapi.body_of(UpdateCache))
async def update_cache(cache_id: str, request: Request, service: InService, caller: Writer) -> CacheObject:
    """Change how long a cache is kept, its name, its labels, or whether it is pinned; all else stays as it is."""
    body = await read_json(request, UpdateCache, service.settings)
    return cache_object(await off_loop(service.store.update, cache_id, tenant=caller.tenant, **body.changes()))


@router.delete("/{cache_id}")
async def delete_cache(cache_id: str, service: InService, caller: Writer) -> Deleted:
    """Remove a cache. Downloads and answers that have begun are completed."""
    receipt = await off_loop(service.store.delete, cache_id, tenant=caller.tenant)
    return Deleted(id=receipt.id)
