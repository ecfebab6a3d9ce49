"""/v1/caches: create, list, get, change, delete. /v1/estimate: the cost of a creation, without doing it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from kvshelf import api
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.bodies import read_document, read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_query
from kvshelf.service.http.events import EVENT_STREAM, event_stream
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.jobs.warming import labelled, warm
from kvshelf.service.routes.requests import request_json
from kvshelf.service.service import TAKES_TOKENS, InService, Service, cache_object, cache_response, etag_of, written
from kvshelf.store.base import Store
from kvshelf.store.checks import require_revision
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.create.spec import require_policy
from kvshelf.workers.replica.memory.retention import Hint

router = APIRouter(prefix="/v1", tags=["caches"], responses=openapi.ERRORS)

Cascade = Annotated[bool, Query(description="also delete the caches that extend it, and those that extend these")]

_ACCEPTED: dict[int | str, dict[str, Any]] = {
    200: openapi.json_or_events(api.CacheObject, api.LevelList)[200]
    | {"description": "everything was there, or the events"},
    202: {
        "model": api.RequestObject,
        "description": "the request, with `Prefer: respond-async`; a worker will take it",
    },
}


@router.post(
    "/caches",
    status_code=201,
    response_model=api.CacheObject | api.LevelList,
    responses=_ACCEPTED,
    openapi_extra=openapi.body_of(api.CreateCache, form=True),
    dependencies=[TAKES_TOKENS],
)
async def create(
    request: Request, service: InService, caller: Writer, prefer: Annotated[str, Header()] = ""
) -> Response:
    """Compress a document once and store its cache. The same document, model and policy give the same id.

    A cache that is on the shelf already gets the labels that are given beside its own, and the name. It lives at least
    as long as the request asks for.

    With `levels`, the answer lists one cache per level; with `split` or `episodes`, one per part or episode. With
    `min_quality` or the policy "auto", the service stores the smallest cache that is good enough.

    With `Accept: text/event-stream` the answer is a stream: `cache.progress` events, then what would be the body of the
    answer.

    In a form, the part `file` holds the document; the other parts are the fields. Text is sent plain (`policy=full`),
    every other type as JSON (`compression_ratio=0.75`, `labels={"team": "law"}`, `levels=[0.5, 0.75]`).
    """
    body = await read_document(request, service, caller, api.CreateCache)
    engine = service.engine(body.model, adapter=body.adapter)
    require_tokenizer(service, engine.model, body)
    require_policy(body)
    spec = body.model_copy(update={"model": engine.model, "adapter": None})
    expires_at = await off_loop(service.store.expiry, body.ttl_s, body.expires_at)
    if (until := body.guaranteed_until) is not None:
        await off_loop(service.store.require_promise, until, expires_at, tenant=caller.tenant)
    if "respond-async" in [wish.strip().lower() for wish in prefer.split(",")]:
        record = await service.background.submit(spec, caller.tenant)
        headers = {"location": f"/v1/requests/{record.id}", "preference-applied": "respond-async"}
        return JSONResponse(request_json(record), status_code=202, headers=headers)
    within = service.within(caller)
    if EVENT_STREAM in request.headers.get("accept", ""):
        return await event_stream(request, _events(service, engine.watch(spec, caller=within), body))
    created = await until_hangup(request, engine.create(spec, caller=within))
    if _makes_several(body):
        status = 200 if created.existing else 201
        return await service.computing.run(lambda: JSONResponse(_cache_list(created), status_code=status))
    return cache_response(created.caches[0])


def _makes_several(body: api.CreateCache) -> bool:
    return body.in_parts or (body.levels is not None and not body.chooses)


def _cache_list(created: Created) -> dict[str, Any]:
    data = [cache_object(cache.manifest, existing=cache.existing) for cache in created.caches]
    return api.LevelList(data=data).model_dump(mode="json")


async def _events(
    service: Service, watched: AsyncGenerator[api.CreationProgress | Created, None], body: api.CreateCache
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(watched) as events:
        async for event in events:
            if isinstance(event, api.CreationProgress):
                yield event.model_dump(mode="json")
            elif _makes_several(body):
                yield await service.computing.run(_cache_list, event)
            else:
                yield cache_object(event.manifest, existing=event.existing).model_dump(mode="json")


def require_tokenizer(service: Service, model: str, body: api.CreateCache | api.AppendCache) -> None:
    """Raises `InvalidRequest` if token ids come from a tokenizer other than the model's: they would mean other text."""
    tokenizer = service.identities[model].tokenizer
    if body.tokenizer not in (None, tokenizer):
        raise InvalidRequest(
            f"the token ids come from the tokenizer {body.tokenizer!r}, and {model!r} has {tokenizer!r}; use that one, "
            "or send the document as text",
            param="tokenizer",
        )


@router.post("/estimate", openapi_extra=openapi.body_of(api.Estimate), dependencies=[TAKES_TOKENS])
async def estimate(request: Request, service: InService, caller: Reader) -> api.EstimateObject:
    """The document's tokens and, for each policy, the kept entries, stored bytes and seconds. Nothing is compressed;
    the document's tokens count as used."""
    body = await read_json(request, api.Estimate, service)
    if body.policy is not None:
        require_policy(body)
    engine = service.engine(body.model, adapter=body.adapter)
    require_tokenizer(service, engine.model, body)
    return await until_hangup(request, engine.estimate(body, caller=service.within(caller)))


@router.get("/caches", response_model=api.CacheList, openapi_extra=openapi.query_of(api.ListCaches))
async def list_caches(request: Request, service: InService, caller: Reader) -> Response:
    """Caches on the shelf, newest first. `label.<key>=<value>` filters by label and may be repeated."""
    filters = read_query(request, api.ListCaches)
    return await service.listing.run(_listed, service.store, filters, caller.tenant)


def _listed(store: Store, filters: api.ListCaches, tenant: str) -> Response:
    page = store.list(tenant=tenant, **dict(filters))
    data = [cache_object(manifest) for manifest in page.data]
    return written(api.CacheList(data=data, has_more=page.has_more, last_id=data[-1].id if data else None))


@router.post("/caches/warm", response_model=api.WarmedCaches, openapi_extra=openapi.body_of(api.WarmCaches))
async def warm_caches(request: Request, service: InService, caller: Writer) -> Response:
    """Have caches in the memory of every replica before their questions come: for as long as an unused cache stays
    there, after those that nobody asks or warms. What does not fit is refused before anything of its model is read."""
    body = await read_json(request, api.WarmCaches, service)
    manifests = await off_loop(_to_warm, service.store, body, caller.tenant)
    warming = warm(service.engines, service.identities, manifests, caller=service.within(caller))
    return written(api.WarmedCaches(data=await until_hangup(request, warming)))


def _to_warm(store: Store, body: api.WarmCaches, tenant: str) -> list[Manifest]:
    if body.cache_ids:
        return [store.stat(cache_id, tenant=tenant) for cache_id in body.cache_ids]
    manifests = labelled(store, tenant, body.labels, body.model)
    if not manifests:
        raise InvalidRequest("no cache on the shelf has these labels; `kvshelf ls --label` shows some", param="labels")
    return manifests


@router.get(
    "/caches/{cache_id}",
    response_model=api.CacheObject,
    responses={304: {"description": "`If-None-Match` has its tag"}},
)
async def get_cache(
    cache_id: str, service: InService, caller: Reader, if_none_match: Annotated[str, Header()] = ""
) -> Response:
    """The metadata of one cache."""
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    if not {"*", etag_of(manifest)}.isdisjoint(tag.removeprefix("W/") for tag in _tags(if_none_match)):
        return Response(status_code=304, headers={"etag": etag_of(manifest)})
    return _tagged(manifest)


@router.patch("/caches/{cache_id}", response_model=api.CacheObject, openapi_extra=openapi.body_of(api.UpdateCache))
async def update_cache(
    cache_id: str, request: Request, service: InService, caller: Writer, if_match: Annotated[str, Header()] = ""
) -> Response:
    """Change the expiry, name, labels, pin or guarantee of a cache, or say when its next question comes. Absent fields
    stay as they are."""
    body = await read_json(request, api.UpdateCache, service)
    condition: dict[str, Any] = {"tenant": caller.tenant, "if_revision": _revisions(if_match)}
    if "next_use_s" not in body.model_fields_set:
        return _tagged(await off_loop(service.store.update, cache_id, **condition, **body.changes()))
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    engine = service.engine_for_all([manifest])  # before anything changes: nobody could ask a cache of another model
    if changes := body.changes():
        manifest = await off_loop(service.store.update, cache_id, **condition, **changes)
    else:
        require_revision(manifest, condition["if_revision"])
    await engine.hint([Hint(cache_id, body.next_use_s)], caller=caller.within(None))
    return _tagged(manifest)


@router.delete("/caches/{cache_id}", response_model=api.Deleted)
async def delete_cache(
    cache_id: str, service: InService, caller: Writer, cascade: Cascade = False, if_match: Annotated[str, Header()] = ""
) -> Response:
    """Delete a cache. Downloads and answers in progress are completed.

    A cache that others extend is deleted with these, by `cascade`, or not at all: they have its bytes.
    """
    condition = {"tenant": caller.tenant, "if_revision": _revisions(if_match)}
    receipt = await off_loop(service.store.delete, cache_id, cascade=cascade, **condition)
    deleted = api.Deleted(id=receipt.id, descendants=list(receipt.descendants))
    return await service.computing.run(written, deleted)


def _tagged(manifest: Manifest) -> Response:
    return JSONResponse(cache_object(manifest).model_dump(mode="json"), headers={"etag": etag_of(manifest)})


def _tags(header: str) -> list[str]:
    """The entity tags of an If-Match or If-None-Match header (RFC 9110, section 13.1)."""
    return [tag.strip() for tag in header.split(",")]


def _revisions(if_match: str) -> list[str] | None:
    """The revisions that If-Match names; None: any. The comparison is strong, so weak tags match no revision."""
    if not if_match or "*" in _tags(if_match):
        return None
    return [tag[1:-1] for tag in _tags(if_match) if tag[:1] == tag[-1:] == '"']
