"""The FastAPI application, made from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

import kvshelf
from kvshelf.client.types import ModelObject
from kvshelf.errors import KvshelfError
from kvshelf.service import errors, openapi
from kvshelf.service.background import Background
from kvshelf.service.routes import caches, chat, meta, queries, requests
from kvshelf.service.settings import Settings
from kvshelf.service.state import Service
from kvshelf.store.base import Store
from kvshelf.workers.remote import RemoteEngine, watch

log = structlog.get_logger("kvshelf.service")


def create_app(settings: Settings, engines: Mapping[str, RemoteEngine], store: Store) -> FastAPI:
    """The app around workers that run already. Its lifespan runs what goes on beside the requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        background = Background(store, engines, deadline_s=settings.request_deadline_s)
        models = await asyncio.gather(*(_describe(engine) for engine in engines.values()))
        app.state.service = Service(settings, store, engines, tuple(models), background)
        beside = [
            asyncio.create_task(watch(list(engines.values()))),
            asyncio.create_task(_sweep(store, settings.sweep_interval_s)),
        ]
        await background.start()
        try:
            yield
        finally:
            await background.stop()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    app = FastAPI(title="kvshelf", version=kvshelf.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    routers = [resource.router for resource in (caches, queries, requests, chat, meta)]
    for router in routers:
        app.include_router(router)
    errors.install(app, [route for router in routers for route in router.routes])
    openapi.install(app)
    return app


async def _describe(engine: RemoteEngine) -> ModelObject:
    return ModelObject.model_validate(await engine.describe(deadline_s=60.0) | {"created": int(time.time())})


async def _sweep(store: Store, interval_s: float) -> None:
    """Remove what has expired, now and then. A store that does not work now may work the next time."""
    while True:
        try:
            swept = await asyncio.to_thread(store.sweep)
            log.debug("swept", **swept.model_dump())
        except KvshelfError as error:
            log.warning("sweep failed", code=error.code, message=error.message)
        await asyncio.sleep(interval_s)
