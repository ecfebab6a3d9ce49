"""Looks up a cache by its id, the beginning of the id, or its name; services and stores take full ids alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvshelf.errors import CacheNotFound, InvalidRequest

if TYPE_CHECKING:
    from kvshelf.api import CacheObject
    from kvshelf.client import Client
    from kvshelf.store.base import Store
    from kvshelf.store.manifest import Manifest

    Listing = Callable[..., Iterable[CacheObject | Manifest]]

SHORT: Final = len("kvs_") + 8
"""Characters of a short id, if that is enough. Among 50,000 caches, 0.3 pairs share so many on average."""

_ID: Final = re.compile(r"kvs_[0-9a-f]{40}")
_BEGINNING: Final = re.compile(r"(?:kvs_)?([0-9a-f]{4,40})")
_LONGEST_NAME: Final = 256
_MOST: Final = 8
"""Candidates that a message lists."""


def id_at(client: Client, reference: str) -> str:
    """The full id of the cache of a service that `reference` means. Raises `CacheNotFound`, `InvalidRequest`."""
    return _resolved(client.caches.list, reference)


def ids_at(client: Client, references: str) -> list[tuple[str, str]]:
    """One reference, or several with commas between them, each with the full id that it means. Raises as `id_at`.

    A name may have a comma itself: what is the name of one cache means that one.
    """
    parts = [part.strip() for part in references.split(",")]
    if len(parts) == 1 or len(references) <= _LONGEST_NAME:
        try:
            return [(references, id_at(client, references))]
        except CacheNotFound:
            if len(parts) == 1:
                raise
    return [(part, id_at(client, part)) for part in parts]


def id_in(store: Store, reference: str) -> str:
    """As `id_at`, in a store."""
    return _resolved(lambda **query: store.list(**query).data, reference)


def shortened(ids: Sequence[str]) -> list[str]:
    """The ids cut to one length, at which they differ."""
    different = len(set(ids))
    length = SHORT
    while len({id[:length] for id in ids}) < different:
        length += 1
    return [id[:length] for id in ids]


def _resolved(listing: Listing, reference: str) -> str:
    if _ID.fullmatch(reference):
        return reference
    if not reference:
        raise InvalidRequest("'' is not an id or a name", param="CACHE")
    filters = [{"name": reference}]
    if beginning := _BEGINNING.fullmatch(reference):
        filters.append({"id_prefix": f"kvs_{beginning[1]}"})
    listed = (islice(listing(**query, limit=_MOST + 1), _MOST + 1) for query in filters)
    caches_by_id = {cache.id: cache for caches in listed for cache in caches}
    if not caches_by_id:
        raise CacheNotFound(
            f"there is no cache {reference[:80]!r}: none has this name, and no id begins so (with at least 4 digits); "
            "`kvshelf ls` shows what is on the shelf",
            param="CACHE",
        )
    if len(caches_by_id) > 1:
        raise _ambiguous(reference, list(caches_by_id.values()))
    return next(iter(caches_by_id))


def _ambiguous(reference: str, candidates: Sequence[CacheObject | Manifest]) -> InvalidRequest:
    ids = [cache.id for cache in candidates]
    lines = [
        f"  {short}  {cache.policy}, {cache.compression_ratio:.0%} removed, codec {cache.codec}, {cache.name or '-'}"
        for short, cache in zip(shortened(ids), candidates, strict=True)
    ]
    more = ["  and more"] if len(lines) > _MOST else []
    message = f"{reference!r} may be any of several caches; give the id of one:"
    return InvalidRequest("\n".join([message, *lines[:_MOST], *more]), param="CACHE", candidates=ids[:_MOST])
