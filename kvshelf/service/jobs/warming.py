"""Caches that every replica has in memory before their questions come: which, and those of the setting `warm`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from kvshelf.api.caches import MOST_WARM, WarmedReplica
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.service.engines import EngineClient, serving
from kvshelf.service.loops import Hours
from kvshelf.service.observe.logs import note
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.calls import Caller

log = structlog.get_logger("kvshelf.service")


def labelled(store: Store, tenant: str, labels: Mapping[str, str], model: str | None = None) -> list[Manifest]:
    """The caches of a tenant that have all labels. Raises `InvalidRequest` for more than `MOST_WARM`."""
    page = store.list(tenant=tenant, labels=labels, model=model, limit=MOST_WARM)
    if page.has_more:
        raise InvalidRequest(
            f"more than {MOST_WARM} caches have these labels, and that many are warmed at once; give one label more",
            param="labels",
        )
    return list(page.data)


async def warm_labelled(
    store: Store,
    engines: Mapping[str, EngineClient],
    identities: Mapping[str, ModelIdentity],
    tenants: Iterable[str],
    labels: Mapping[str, str],
    *,
    hours: Hours,
    limit_s: float,
) -> None:
    """Have the caches of all tenants with these labels in the memory of each replica of their model, for which they
    must fit together, if it is one of the hours. Caches of models that are not served stay where they are."""
    if hours.begin_in_s(time.time()):
        return
    manifests = list[Manifest]()
    for tenant in tenants:
        for manifest in await asyncio.to_thread(labelled, store, tenant, labels):
            with suppress(ModelMismatch):
                serving(identities, ModelIdentity(**manifest.identity["model"]))
                manifests.append(manifest)
    for replica in await warm(engines, identities, manifests, caller=Caller(deadline_s=limit_s)):
        log.info("caches are warm", **replica.model_dump())


async def warm(
    engines: Mapping[str, EngineClient],
    identities: Mapping[str, ModelIdentity],
    manifests: Sequence[Manifest],
    *,
    caller: Caller,
) -> list[WarmedReplica]:
    """Have caches in the memory of each replica of their model, all models at once. Raises as `EngineClient.warm`, what
    the first model raises while others go on, and `ModelMismatch` for a cache of a model that is not served, before any
    is read."""
    by_model: dict[str, list[tuple[str, str]]] = {}
    for manifest in manifests:
        model = serving(identities, ModelIdentity(**manifest.identity["model"]))
        by_model.setdefault(model, []).append((manifest.tenant, manifest.id))
    warming = (engines[model].warm(keys, caller=caller) for model, keys in by_model.items())
    replicas = [replica for of_model in await asyncio.gather(*warming) for replica in of_model]
    note(warmed={f"{replica.model}#{number}": replica.bytes for number, replica in enumerate(replicas)})
    return replicas
