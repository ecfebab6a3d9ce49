"""Stored caches as an engine can use them, and as files of other engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.engine import Engine
from kvshelf.engine.files.export import engine_file
from kvshelf.store.base import Store
from kvshelf.workers.replica.inspect import kept_source

PIECE_BYTES: Final = 4 << 20
"""Most bytes of a piece of a file, each of which is one message between two processes."""


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


def exported(
    engine: Engine,
    store: Store,
    cache_id: str,
    to: ExportTo,
    *,
    tenant: str,
    dtype: ExportDtype | None,
    engine_model: str | None,
) -> Iterator[bytes]:
    """The bytes of `engine_file`, in pieces. Raises as that and as `Store.get`, before the first piece."""
    manifest = store.stat(cache_id, tenant=tenant)
    cache = whole(engine, store, cache_id, tenant)
    ids: Sequence[int] = ()
    if manifest.has_source and not cache.identity.parent and manifest.kept_tokens >= manifest.num_tokens:
        ids = kept_source(engine, store, manifest, cache.identity).token_ids  # every token may have its entry
    file = engine_file(engine, cache, to, dtype=dtype, engine_model=engine_model, document=ids)
    del cache
    for piece in file.pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])
