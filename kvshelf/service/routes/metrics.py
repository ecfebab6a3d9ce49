"""/metrics: counters and timers of the service, for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from prometheus_client.exposition import choose_encoder

from kvshelf.service.access.keys import Admin
from kvshelf.service.http import openapi
from kvshelf.service.state import InService

router = APIRouter(tags=["service"], responses=openapi.ERRORS)


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
    encode, media_type = choose_encoder(accept)
    return Response(encode(service.metrics.registry), media_type=media_type)
