"""Caches that every replica has in memory before their questions come: which, and those of the setting `warm`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import structlog

from kvshelf.api.caches import MOST_WARM
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.service.engines import EngineClient, serving
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


async def warm(
    store: Store,
    engines: Mapping[str, EngineClient],
    identities: Mapping[str, ModelIdentity],
    tenants: Iterable[str],
    labels: Mapping[str, str],
    *,
    limit_s: float,
) -> None:
    """Have the caches of all tenants with these labels in the memory of each replica of their model, for which they
    must fit together. Caches of models that are not served stay where they are."""
    by_model: dict[str, list[tuple[str, str]]] = {}
    for tenant in tenants:
        for manifest in await asyncio.to_thread(labelled, store, tenant, labels):
            try:
                model = serving(identities, ModelIdentity(**manifest.identity["model"]))
            except ModelMismatch:
                continue
            by_model.setdefault(model, []).append((tenant, manifest.id))
    for model, keys in by_model.items():
        for replica in await engines[model].warm(keys, caller=Caller(deadline_s=limit_s)):
            log.info("caches are warm", model=model, **replica.model_dump())
