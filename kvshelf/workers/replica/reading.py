"""Stored caches as an engine can use them."""

from __future__ import annotations

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.engine import Engine
from kvshelf.store.base import Store


def attached(engine: Engine, store: Store, arriving: ArrivingCache) -> Attachment:
    """The cache as the model reads it, by transforms from the shelf if the engine does not have them. Raises as
    `Engine.attach`."""
    _learn(engine, store, arriving.identity)
    return engine.attach(arriving)


def whole(engine: Engine, store: Store, cache_id: str, tenant: str) -> CompressedCache:
    """A cache, read and verified, whose transforms the engine knows. Raises as `Store.get`."""
    cache = store.get(cache_id, tenant=tenant)
    _learn(engine, store, cache.identity)
    return cache


def _learn(engine: Engine, store: Store, identity: Identity) -> None:
    """Have the transforms of a cache in the engine and on the shelf. An imported cache is under transforms that the
    shelf may lack: it keeps them from now on."""
    digest = identity.transforms
    if digest and not engine.coders.knows(digest):
        if (data := store.transforms.get(digest)) is not None:
            engine.coders.learn(data)
    elif digest:
        store.transforms.keep(digest, engine.coders.with_transforms(digest).transforms.data)
