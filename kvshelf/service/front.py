"""What stands before the routes of every HTTP application of kvshelf: keys, tenants' limits, errors and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fastapi import APIRouter, FastAPI
from opentelemetry.trace import Tracer

from kvshelf.service.access.keys import REREAD_S, Access, LiveKeys
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.http import errors
from kvshelf.service.loops import repeat
from kvshelf.service.observe.questions import QuestionMetrics
from kvshelf.service.observe.telemetry import ObservedRequests
from kvshelf.service.settings import Settings


def guard(
    app: FastAPI,
    routers: Sequence[APIRouter],
    settings: Settings,
    keys: LiveKeys | None,
    limits: TenantLimits,
    metrics: QuestionMetrics,
    tracer: Tracer,
    *,
    listed: str = "/openapi.json lists all routes",
) -> None:
    """Give an application its routes and what stands before them. listed: where a caller finds the routes."""
    for router in routers:
        app.include_router(router)
    app.add_middleware(Access, keys=keys, allowed_hosts=settings.allowed_hosts, limits=limits)
    errors.install(app, [route for router in routers for route in router.routes], listed=listed)
    app.add_middleware(ObservedRequests, metrics=metrics, tracer=tracer)  # added last, so it wraps all others


@contextmanager
def rereading(keys: LiveKeys | None) -> Iterator[None]:
    """Reads the keys again and again during the block, which is on an event loop."""
    if keys is None:
        yield
        return
    pause = partial(asyncio.sleep, REREAD_S)
    task = asyncio.create_task(repeat("reading of the API keys", partial(asyncio.to_thread, keys.reread), pause))
    try:
        yield
    finally:
        task.cancel()
