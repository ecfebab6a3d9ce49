"""/v1/caches: create, list, get, delete, download."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvshelf.client.types import CacheList, CacheObject, CreateCache, Deleted, ListCaches, RequestObject
from kvshelf.errors import InvalidRequest
from kvshelf.service import openapi
from kvshelf.service.body import read_create
from kvshelf.service.errors import error_response
from kvshelf.service.routes.requests import request_json
from kvshelf.service.state import TENANT, InService, cache_object, off_loop, until_hangup
from kvshelf.store.base import BlobFile, require_expiry
from kvshelf.store.manifest import Manifest
from kvshelf.workers.policies import build

router = APIRouter(prefix="/v1/caches", tags=["caches"], responses=openapi.ERRORS)

_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")

_ACCEPTED: dict[int | str, dict[str, Any]] = {
    200: {"model": CacheObject, "description": "it was on the shelf already"},
    202: {"model": RequestObject, "description": "with `Prefer: respond-async`: it is written down and will be done"},
}


@router.post(
    "",
    status_code=201,
    response_model=CacheObject,
    responses=_ACCEPTED,
    openapi_extra=openapi.body_of(CreateCache, form=True),
)
async def create(request: Request, service: InService, prefer: Annotated[str, Header()] = "") -> Response:
    """Compress a document once and store it. The same document, model and policy give the same id."""
    body = await read_create(request, service.settings)
    engine = service.engine(body.model)
    build(body.policy, body.policy_params)
    require_expiry(body.ttl_s, body.expires_at, time.time())
    spec = body.model_dump(mode="json") | {"model": engine.model}
    if "respond-async" in [wish.strip().lower() for wish in prefer.split(",")]:
        record = await service.background.submit(spec, TENANT)
        headers = {"location": f"/v1/requests/{record.id}", "preference-applied": "respond-async"}
        return JSONResponse(request_json(record), status_code=202, headers=headers)
    deadline_s = service.settings.request_deadline_s
    created = await until_hangup(request, engine.create(spec, tenant=TENANT, deadline_s=deadline_s))
    cache = cache_object(Manifest.model_validate(created.manifest), existing=created.existing)
    headers = {"location": f"/v1/caches/{cache.id}"}
    return JSONResponse(cache.model_dump(mode="json"), status_code=200 if created.existing else 201, headers=headers)


_FILTERS = [
    openapi.query_parameter("document_id", "string", "caches of this document"),
    openapi.query_parameter("model", "string", "caches of this model"),
    openapi.query_parameter("policy", "string", "caches of this policy"),
    openapi.query_parameter("limit", "integer", "1 to 1000 caches in this page; 20 if absent"),
    openapi.query_parameter("after", "string", "the last id of the page before"),
]


@router.get("", openapi_extra={"parameters": _FILTERS})
async def list_caches(request: Request, service: InService) -> CacheList:
    """Caches on the shelf, newest first. `label.<key>=<value>` filters by label, and may be given several times."""
    filters = _filters(request)
    page = await off_loop(
        service.store.list,
        tenant=TENANT,
        document_id=filters.document_id,
        model=filters.model,
        policy=filters.policy,
        labels=filters.labels,
        limit=filters.limit,
        after=filters.after,
    )
    data = [cache_object(manifest) for manifest in page.data]
    return CacheList(data=data, has_more=page.has_more, last_id=data[-1].id if data else None)


def _filters(request: Request) -> ListCaches:
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        target, key = (labels, name.removeprefix("label.")) if name.startswith("label.") else (values, name)
        if key in target:
            raise InvalidRequest(f"{name} is given twice", param=name)
        target[key] = value
    if "labels" in values:
        raise InvalidRequest("labels: filter with label.<key>=<value>", param="labels")
    return ListCaches.model_validate(values | {"labels": labels})


@router.get("/{cache_id}")
async def get_cache(cache_id: str, service: InService) -> CacheObject:
    """What the shelf knows about one cache."""
    return cache_object(await off_loop(service.store.stat, cache_id, tenant=TENANT))


@router.delete("/{cache_id}")
async def delete_cache(cache_id: str, service: InService) -> Deleted:
    """Remove a cache. Downloads and answers that have begun are completed."""
    receipt = await off_loop(service.store.delete, cache_id, tenant=TENANT)
    return Deleted(id=receipt.id)


_BLOB = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@router.get(
    "/{cache_id}/blob",
    response_class=StreamingResponse,
    responses={200: {"description": "the blob"} | _BLOB, 206: {"description": "the range asked for"} | _BLOB},
)
async def download(
    cache_id: str,
    service: InService,
    range: Annotated[str, Header()] = "",
    if_range: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """The stored bytes, for `CompressedCache.from_bytes`. One byte range is honoured; several get the whole blob."""
    blob = await off_loop(service.store.open_blob, cache_id, tenant=TENANT)
    etag = f'"{blob.digest}"'
    headers = {"etag": etag, "accept-ranges": "bytes"}
    if etag in [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]:
        blob.close()
        return Response(status_code=304, headers=headers)
    span = None if if_range not in ("", etag) else _span(range, blob.nbytes)
    if span is not None and span[0] >= span[1]:
        blob.close()
        refused = error_response(InvalidRequest(f"range {range!r} is outside the {blob.nbytes} bytes", param="range"))
        refused.status_code = 416
        refused.headers["content-range"] = f"bytes */{blob.nbytes}"
        return refused
    start, end = span or (0, blob.nbytes)
    headers["content-length"] = str(end - start)
    if span is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{blob.nbytes}"
    content = _chunks(blob, start, end)
    status = 200 if span is None else 206
    return StreamingResponse(content, status_code=status, headers=headers, media_type="application/octet-stream")


def _span(header: str, size: int) -> tuple[int, int] | None:
    """First byte and one past the last of a Range header (RFC 9110, section 14.1.2). None: send all. Empty: refuse."""
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        return max(0, size - int(last)), size
    if last != "" and int(last) < int(first):
        return None  # not a valid range at all, so the header is ignored
    return int(first), min(size, int(last) + 1 if last else size)


async def _chunks(blob: BlobFile, start: int, end: int) -> AsyncIterator[bytes]:
    with blob:
        blob.file.seek(start)
        while start < end:
            chunk = await off_loop(blob.file.read, min(_CHUNK_BYTES, end - start))
            if not chunk:
                return  # shorter than its manifest says: the client sees a broken transfer, and checks digests
            start += len(chunk)
            yield chunk
