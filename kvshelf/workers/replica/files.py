"""A stored cache as a file of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.artifact.identity import Identity
from kvshelf.engine.engine import Engine
from kvshelf.engine.files.export import engine_file
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.inspect import kept_source
from kvshelf.workers.replica.reading import whole

PIECE_BYTES: Final = 4 << 20
"""Most bytes of a piece, each of which is one message between two processes."""


def pieces(
    engine: Engine,
    store: Store,
    cache_id: str,
    to: ExportTo,
    *,
    tenant: str,
    dtype: ExportDtype | None,
    engine_model: str | None,
) -> Iterator[bytes]:
    """The bytes of `engine_file`. Raises as that and as `Store.get`, before the first piece."""
    manifest = store.stat(cache_id, tenant=tenant)
    cache = whole(engine, store, cache_id, tenant)
    ids = _document(engine, store, manifest, cache.identity)
    file = engine_file(engine, cache, to, dtype=dtype, engine_model=engine_model, document=ids)
    del cache
    for piece in file.pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def _document(engine: Engine, store: Store, manifest: Manifest, identity: Identity) -> Sequence[int]:
    """The cache's token ids where its source is kept and every token may have its entry, otherwise none."""
    if not manifest.has_source or identity.parent or manifest.kept_tokens < manifest.num_tokens:
        return ()
    return kept_source(engine, store, manifest, identity).token_ids
