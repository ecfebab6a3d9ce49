"""Builds the FastAPI application from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog
from fastapi import FastAPI
from opentelemetry.trace import Tracer

import kvshelf
from kvshelf.api import ModelObject
from kvshelf.artifact.identity import LinkedIdentity, ModelIdentity
from kvshelf.artifact.shape import LayerShape
from kvshelf.errors import KvshelfError
from kvshelf.service import page_files
from kvshelf.service.access.keys import ANYONE, LiveKeys
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.engines import EngineClient
from kvshelf.service.front import guard, rereading
from kvshelf.service.http import openapi
from kvshelf.service.http.parsing import Extractor, Parser
from kvshelf.service.jobs.background import Background
from kvshelf.service.jobs.batches import BatchRunner
from kvshelf.service.jobs.warming import warm_labelled
from kvshelf.service.loops import Hours, repeat
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.routes import (
    batches,
    blobs,
    caches,
    certificates,
    chat,
    erasures,
    files,
    growth,
    inspect,
    messages,
    meta,
    queries,
    requests,
    responses,
    usage,
    workflows,
)
from kvshelf.service.service import THREADS, WHOLE_CACHES, Service
from kvshelf.service.settings import Settings
from kvshelf.store.base import Store
from kvshelf.workers.cluster.remote import RemoteEngine, watch
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.calls import Caller, Computing, Threads
from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.singleflight import SingleFlight

log = structlog.get_logger("kvshelf.service")

_SETTLE_S: Final = 2.0
"""How long a front end that stops waits for the replicas to store what tenants have used."""


def create_app(
    settings: Settings, workers: Mapping[str, RemoteEngine], store: Store, tracer: Tracer, keys: LiveKeys | None
) -> FastAPI:
    """The application for running workers. Its lifespan owns the background tasks."""
    numbers = Metrics()
    limits = TenantLimits(
        settings.tenant_max_concurrent,
        settings.tenant_requests_per_minute,
        settings.tenant_tokens_per_minute,
        max_held_bytes=settings.max_held_bytes,
    )
    engines = {
        name: EngineClient(engine, settings, numbers, tracer, limits.spend_tokens) for name, engine in workers.items()
    }

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threads = Threads(THREADS, "service")
        asyncio.get_running_loop().set_default_executor(threads)
        service = app.state.service = await _service(settings, workers, engines, store, numbers, limits)
        jobs = [
            _take_stock(store),
            repeat("watch over the replicas", partial(watch, list(workers.values())), partial(asyncio.sleep, 1.0)),
            repeat("sweep", partial(_sweep, store), partial(asyncio.sleep, settings.sweep_interval_s)),
        ]
        if settings.warm:
            hours, interval_s = Hours.parse(settings.warm_hours), settings.warm_interval_s
            jobs.append(
                repeat(
                    "warming",
                    partial(_warm, service, keys, hours),
                    lambda: asyncio.sleep(hours.next_look_s(time.time(), interval_s)),
                )
            )
        tasks = [asyncio.create_task(job) for job in jobs]
        service.background.start()
        service.batches.start()
        try:
            with rereading(keys):
                yield
        finally:
            await service.batches.stop()
            await service.background.stop()
            await _settle(workers.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(
        title="kvshelf", version=kvshelf.__version__, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None
    )
    resources = (
        *(caches, growth, blobs, queries, chat, responses, messages, inspect, certificates, workflows),
        *(requests, files, batches, erasures, meta, usage, page_files),
    )
    guard(app, [resource.router for resource in resources], settings, keys, limits, numbers, tracer)
    openapi.install(app)
    return app


async def _service(
    settings: Settings,
    workers: Mapping[str, RemoteEngine],
    engines: Mapping[str, EngineClient],
    store: Store,
    numbers: Metrics,
    limits: TenantLimits,
) -> Service:
    """The state that the routes share. Asks each worker to describe its model."""
    described = await asyncio.gather(*(engine.described(limit_s=60.0) for engine in workers.values()))
    for about in described:
        tell = log.warning if about["default_layout"] == "plain" else log.info  # it takes no conversation
        keys = ("dtype", "device", "max_tokens", "chat_template")
        tell("a model is served", model=about["id"], **{key: about[key] for key in keys})
    identities: dict[str, ModelIdentity] = {
        about["id"]: LinkedIdentity(**about["identity"], linked=about["linked"]) for about in described
    }
    waiting, computing = settings.max_queued_requests, Computing()
    return Service(
        settings=settings,
        store=store,
        engines=engines,
        models=tuple(
            ModelObject.model_validate(about | {"created": int(time.time()), "parent": engines[about["id"]].parent})
            for about in described
        ),
        identities=identities,
        layer_shapes={about["id"]: [LayerShape(*layer) for layer in about["layer_shapes"]] for about in described},
        transforms={about["id"]: about["transforms"] for about in described},
        background=Background(store, engines, deadline_s=settings.request_deadline_s, max_unfinished=waiting),
        batches=BatchRunner(store, workers, settings, numbers, identities),
        metrics=numbers,
        whole=FairQueue("whole caches", WHOLE_CACHES, waiting),
        extractor=Extractor(settings),
        parser=Parser(settings, computing),
        computing=computing,
        listing=Computing(),
        readiness=SingleFlight(),
        limits=limits,
    )


async def _settle(workers: Iterable[RemoteEngine]) -> None:
    """Have the replicas store what tenants have used: with a local cluster they end without notice."""
    calls = (engine.broadcast(_SETTLE_S, ReplicaApi.settle, caller=Caller()) for engine in workers)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(error, BaseException):
            log.warning("the use of the last seconds may be lost", message=str(error))


async def _take_stock(store: Store) -> None:
    """Logs once what the store contains. A background task, because checking a large store takes a while."""
    try:
        usage = await asyncio.to_thread(store.usage)
        unfinished = await asyncio.to_thread(store.requests.unfinished)
        health = await asyncio.to_thread(store.health)
        problems = await asyncio.to_thread(store.check)
    except KvshelfError as error:
        log.warning("store not available", code=error.code, message=error.message)
        return
    except Exception:  # nobody awaits this task
        log.exception("the store could not be checked")
        return
    log.info(
        "store opened",
        caches=usage.caches,
        bytes=usage.bytes,
        requests_unfinished=len(unfinished),
        problems=list(problems),
        warnings=list(health.warnings),
    )


async def _warm(service: Service, keys: LiveKeys | None, hours: Hours) -> None:
    labels = dict(label.split("=", 1) for label in service.settings.warm)
    tenants = [ANYONE.tenant] if keys is None else keys.tenants
    limit_s = service.settings.request_deadline_s
    engines, identities = service.engines, service.identities
    await warm_labelled(service.store, engines, identities, tenants, labels, hours=hours, limit_s=limit_s)


async def _sweep(store: Store) -> None:
    swept = await asyncio.to_thread(store.sweep)
    compacted = await asyncio.to_thread(store.compact)
    log.debug("swept", **swept.model_dump(), compacted=compacted)
