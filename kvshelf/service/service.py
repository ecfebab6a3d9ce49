"""The parts of the service that routes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from kvshelf.api import CacheObject, ModelObject
from kvshelf.api.service import Readiness
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.artifact.shape import LayerShape
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.service.access.keys import KeyCaller
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.engines import EngineClient, serving_all
from kvshelf.service.http.parsing import Extractor, Parser
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.jobs.background import Background
from kvshelf.service.jobs.batches import BatchRunner
from kvshelf.service.losses import warnings_of
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.served import served_model
from kvshelf.workers.replica.api import Stored
from kvshelf.workers.replica.calls import Caller, Computing
from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.singleflight import SingleFlight

ResultT = TypeVar("ResultT")

THREADS = 32
"""Threads of this process for blocking calls."""

WHOLE_CACHES = 4
"""Whole caches read or written concurrently: few, so that small calls always find a thread."""


@dataclass(frozen=True)
class Service:
    """The parts of a running front end. The mappings and `models` are in the order of the settings.

    transforms: the digest of each model's own, "" without. whole: the queue of calls that read or write whole caches.
    extractor: reads uploaded files that are not plain text. parser: parses JSON bodies. computing: makes and writes
    answers that may be long. listing: reads lists from the store and writes them, on threads of its own, because a
    store that hangs must hold up no answer. limits: what each tenant may ask, and how much of it is left. readiness:
    concurrent questions whether the service is ready share one look.
    """

    settings: Settings
    store: Store
    engines: Mapping[str, EngineClient]
    models: tuple[ModelObject, ...]
    identities: Mapping[str, ModelIdentity]
    layer_shapes: Mapping[str, Sequence[LayerShape]]
    transforms: Mapping[str, str]
    background: Background
    batches: BatchRunner
    metrics: Metrics
    whole: FairQueue
    extractor: Extractor
    parser: Parser
    computing: Computing
    listing: Computing
    readiness: SingleFlight[Readiness]
    limits: TenantLimits

    def within(self, caller: KeyCaller) -> Caller:
        """The caller, with the time that one request may take."""
        return caller.within(self.settings.request_deadline_s)

    def engine(
        self, model: str | None, unknown: type[KvshelfError] = InvalidRequest, *, adapter: str | None = None
    ) -> EngineClient:
        """The engine of a model, or of an adapter of it, by name. Raises as `served_model`."""
        return self.engines[served_model(self.engines, model, adapter, unknown)]

    def engine_for_all(
        self, manifests: Sequence[Manifest], successor: Callable[[Manifest], str | None] = lambda _: None
    ) -> EngineClient:
        """The engine for caches that are asked together: the one that runs the model of all. As `serving_all`."""
        return self.engines[serving_all(self.identities, manifests, successor)]

    def namesake(self, manifest: Manifest) -> str | None:
        """The name of a cache's model, if a model is served under it, perhaps with other weights now."""
        return manifest.model if manifest.model in self.engines else None

    def successor(self, manifest: Manifest, adapter: str | None) -> str | None:
        """The name of the model that makes a cache again whose own nobody runs: of the same name, the adapter that is
        asked for, or the first. Beside adapters the first is none: it would answer for one that is gone."""
        adapted = any(engine.parent is not None for engine in self.engines.values())
        return self.namesake(manifest) or adapter or (None if adapted else next(iter(self.engines)))

    def reader(self, manifest: Manifest) -> EngineClient:
        """The engine that reads a cache: of its model, of one of this name, or the first, whose error names how the
        models differ where that matters."""
        return self.engine_for_all([manifest], lambda _: self.namesake(manifest) or next(iter(self.engines)))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


InService = Annotated[Service, Depends(_service)]


async def _require_tokens(request: Request, service: InService) -> None:
    service.limits.require_tokens(request.state.caller.tenant)


TAKES_TOKENS = Depends(_require_tokens)
"""A dependency of routes whose work takes tokens: refuses a tenant over its limit before reading the body."""


async def in_turn(
    service: Service, caller: KeyCaller, call: Callable[..., ResultT], *args: Any, **kwargs: Any
) -> ResultT:
    """As `off_loop`, for whole caches, in fair turns. Raises `QueueFull`, or `DeadlineExceeded` if no turn comes."""
    async with service.whole.turn(caller.tenant, service.settings.request_deadline_s):
        return await off_loop(call, *args, **kwargs)


def written(answer: BaseModel) -> Response:
    """An answer as JSON. It takes time in proportion to its length: for `Service.computing` where that may be long."""
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


def cache_response(stored: Stored) -> JSONResponse:
    """The response to a creation or an import: 201, or 200 if the cache existed."""
    cache = cache_object(stored.manifest, existing=stored.existing)
    headers = {"location": f"/v1/caches/{cache.id}", "etag": etag_of(stored.manifest)}
    return JSONResponse(cache.model_dump(mode="json"), status_code=200 if stored.existing else 201, headers=headers)


def etag_of(manifest: Manifest) -> str:
    return f'"{manifest.revision}"'


def cache_object(manifest: Manifest, *, existing: bool = False) -> CacheObject:
    """A manifest as the API shows it."""
    derived = {"object", "dtype", "tokens", "bytes", "existing", "source", "date", "chat_template_kwargs", "warnings"}
    same = CacheObject.model_fields.keys() - derived
    source = manifest.source
    return CacheObject.model_validate(
        manifest.model_dump(include=same)
        | {
            "dtype": manifest.identity["model"]["dtype"],
            "tokens": {
                "document": manifest.num_tokens,
                "kept": manifest.kept_tokens,
                "protected": sum(end - first for first, end in manifest.identity.get("protect") or ()),
            },
            "bytes": manifest.bytes,
            "has_source": source is not None,
            "source": source and {"form": source.form, "bytes": source.nbytes, "expires_at": source.expires_at},
            "ttl_renew": manifest.ttl_renew_s is not None,
            "ttl_s": manifest.ttl_renew_s,
            "existing": existing,
            "date": manifest.identity.get("date"),
            "chat_template_kwargs": manifest.identity.get("variables", {}),
            "warnings": warnings_of(manifest),
        }
    )
