"""About this service: models, policies, limits, health, metrics."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import JSONResponse

from kvshelf import api
from kvshelf.api.strict import MAX_PROMPTS
from kvshelf.errors import DeadlineExceeded, KvshelfError, NotFound, QueueFull, StoreUnavailable
from kvshelf.methods.catalog import catalog
from kvshelf.methods.method import POLICY, SELECTOR, SUFFIX_POLICY
from kvshelf.service.access.keyfile import SCOPES
from kvshelf.service.access.keys import Admin, Reader
from kvshelf.service.access.limits import allowance
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.service import InService, Service
from kvshelf.store.disk.folder import shortage
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.calls import Caller

router = APIRouter(tags=["service"], responses=openapi.ERRORS)

_PROBE_S = 2.0

_SPACE = "space"
"""The part that is there where room is short."""


@router.get("/v1/models")
async def models(service: InService, _: Reader) -> api.ModelList:
    """The models served; the first is the default."""
    models = list(service.models)
    return api.ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)


@router.get("/v1/models/{model_id:path}")  # ids of a hub have a slash
async def model(model_id: str, service: InService, _: Reader) -> api.ModelObject:
    """One of the models served."""
    service.engine(model_id, NotFound)
    return next(model for model in service.models if model.id == model_id)


@router.get("/v1/policies")
async def policies(_: Reader) -> api.PolicyList:
    """The compression policies with their parameters and sources."""
    return api.PolicyList(data=[api.PolicyObject.model_validate(info.to_dict()) for info in catalog(POLICY)])


@router.get("/v1/selectors")
async def selectors(_: Reader) -> api.SelectorList:
    """The selectors, which choose for one question what it reads, with their parameters and sources."""
    return api.SelectorList(data=[api.SelectorObject.model_validate(info.to_dict()) for info in catalog(SELECTOR)])


@router.get("/v1/suffix_policies")
async def suffix_policies(_: Reader) -> api.SuffixPolicyList:
    """The suffix policies, which bound what an answer holds in memory, with their parameters and sources."""
    return api.SuffixPolicyList(
        data=[api.SuffixPolicyObject.model_validate(info.to_dict()) for info in catalog(SUFFIX_POLICY)]
    )


@router.get("/v1/limits")
async def limits(service: InService, caller: Reader) -> api.Limits:
    """The limits of one request, how much of its limits the caller's tenant has used, and what the key allows."""
    settings = service.settings
    return api.Limits(
        max_body_bytes=settings.max_body_bytes,
        max_import_bytes=settings.max_import_bytes,
        max_file_bytes=settings.max_file_bytes,
        max_batch_rows=settings.max_batch_rows,
        max_document_tokens=settings.max_document_tokens,
        max_prompts=MAX_PROMPTS,
        max_queued_requests=settings.max_queued_requests,
        upload_deadline_s=settings.upload_deadline_s,
        request_deadline_s=settings.request_deadline_s,
        models={model.id: model.max_tokens for model in service.models},
        tenant=await _allowances(service, caller.tenant),
        scopes=[scope for scope in SCOPES if scope in caller.scopes],
    )


async def _allowances(service: Service, tenant: str) -> api.TenantAllowances:
    settings, limits = service.settings, service.limits
    try:
        usage = await off_loop(service.store.usage, tenant=tenant)
        caches, nbytes = usage.caches, usage.bytes
        batches = await off_loop(service.store.batches.count_unfinished, tenant=tenant)
    except StoreUnavailable:
        caches, nbytes, batches = None, None, None  # the limits are known even so
    return api.TenantAllowances(
        caches=allowance(settings.tenant_max_caches, caches),
        bytes=allowance(settings.tenant_max_bytes, nbytes),
        batches=allowance(settings.tenant_max_batches, batches),
        open_requests=limits.open_requests(tenant),
        requests_per_minute=limits.request_rate(tenant),
        tokens_per_minute=limits.token_rate(tenant),
    )


@router.get("/livez", response_class=Response, responses={200: {"description": "the process answers"}})
async def livez() -> Response:
    """Whether the front end answers. Workers and store are not checked, because a restart would not help them."""
    return Response("ok\n", media_type="text/plain")


@router.get(
    "/readyz", response_model=api.Readiness, responses={503: {"model": api.Readiness, "description": "not ready"}}
)
async def readyz(service: InService) -> Response:
    """Whether the service can do work now, and the state of each part. Concurrent callers share one look.

    Without room for more (the part `space`) it is degraded and still answers 200: what is on the shelf can be asked.
    """

    async def look() -> api.Readiness:
        workers = (_workers(engine.remote, service.settings.replicas) for engine in service.engines.values())
        shelf, others = await asyncio.gather(_store(service), asyncio.gather(*workers))
        parts = [*shelf, *others]
        return api.Readiness(status="ready" if all(part.ready for part in parts) else "degraded", parts=parts)

    readiness, _ = await service.readiness.join("", look)
    works = all(part.ready for part in readiness.parts if part.name != _SPACE)
    return JSONResponse(readiness.model_dump(mode="json"), status_code=200 if works else 503)


async def _store(service: Service) -> list[api.ReadyPart]:
    """The store, and the room for more: on it, and for temporary files."""
    try:
        async with asyncio.timeout(_PROBE_S):
            health = await off_loop(service.store.health)
    except KvshelfError as error:
        return [api.ReadyPart(name="store", ready=False, reason=error.message)]
    except TimeoutError:
        return [api.ReadyPart(name="store", ready=False, reason=f"no answer within {_PROBE_S:g} s")]
    full = list(filter(None, (*health.full, shortage(Path(tempfile.gettempdir())))))
    store = api.ReadyPart(name="store", ready=not health.faults, reason="; ".join(health.faults + health.warnings))
    return [store, *([api.ReadyPart(name=_SPACE, ready=False, reason="; ".join(full))] if full else [])]


async def _workers(engine: RemoteEngine, replicas: int) -> api.ReadyPart:
    """Asks both Ray and a replica, because Ray notices a death only at its next health check."""
    name = f"workers:{engine.model}"
    running = await _running(engine)
    try:
        await engine.call_within(_PROBE_S, ReplicaApi.describe, caller=Caller())
    except QueueFull:
        pass  # busy, and therefore running
    except DeadlineExceeded:
        # The replicas are too busy to answer, or dead; by now Ray knows which.
        running = None if running is None else await _running(engine)
        if running is None:
            return api.ReadyPart(
                name=name, ready=False, reason=f"neither a replica nor Ray answers within {_PROBE_S:g} s"
            )
        if running == 0:
            return api.ReadyPart(name=name, ready=False, reason=f"0 of {replicas} replicas run; one is being started")
    except KvshelfError as error:
        return api.ReadyPart(name=name, ready=False, reason=error.message)
    if running is None:
        reason = f"Ray does not say within {_PROBE_S:g} s how many of {replicas} replicas run"
    else:
        reason = "" if running >= replicas else f"{running} of {replicas} replicas run"
    return api.ReadyPart(name=name, ready=True, reason=reason)


async def _running(engine: RemoteEngine) -> int | None:
    """The number of replicas that take requests; None if Ray does not answer in time."""
    try:
        async with asyncio.timeout(_PROBE_S):
            return await engine.refresh()
    except TimeoutError:
        return None


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "all metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(_: Admin, service: InService, accept: Annotated[str, Header()] = "") -> Response:
    """All metrics of this service, in Prometheus' text format, or as OpenMetrics if the caller accepts it."""
    for model, engine in service.engines.items():
        service.metrics.read_queues(model, engine.remote.running, service.settings.replicas, engine.waiting)
    service.metrics.read_jobs(service.background.counts, service.batches.counts)
    await service.metrics.read_shelf(service.store)
    content, media_type = service.metrics.encoded(accept)
    return Response(content, media_type=media_type)
