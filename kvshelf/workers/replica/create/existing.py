"""What a creation changes of a cache that is on the shelf already. Blocks; for threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.api import AppendCache, CreateCache, ImportCache
from kvshelf.errors import EtagMismatch, InvalidRequest
from kvshelf.store.base import Store
from kvshelf.store.checks import LABEL_LIMIT
from kvshelf.store.manifest import Manifest


def as_requested(
    store: Store,
    manifest: Manifest,
    *,
    labels: Mapping[str, str] | None = None,
    name: str = "",
    lifetime: CreateCache | AppendCache | ImportCache | None = None,
) -> Manifest:
    """An existing cache with what its newest request says: the labels beside its own, the name unless that is empty,
    and its life, which is never shortened.

    Changes that others make at the same time stay. Raises `InvalidRequest` if the cache would have too many labels.
    """
    while changes := _changes(manifest, labels or {}, name) | _longer(store, manifest, lifetime):
        if len(changes.get("labels", ())) > LABEL_LIMIT:
            raise InvalidRequest(
                f"cache {manifest.id} has {len(manifest.labels)} labels and would have {len(changes['labels'])} with "
                f"these; at most {LABEL_LIMIT} are possible, so take some off first",
                param="labels",
            )
        try:
            return store.update(manifest.id, tenant=manifest.tenant, if_revision=[manifest.revision], **changes)
        except EtagMismatch:  # it was changed since it was read
            manifest = store.stat(manifest.id, tenant=manifest.tenant)
    return manifest


def _changes(manifest: Manifest, labels: Mapping[str, str], name: str) -> dict[str, Any]:
    """What labels and a name change, as arguments of `Store.update`; nothing where the cache has them."""
    changes: dict[str, Any] = {}
    if (joined := _joined(manifest.labels, labels)) != manifest.labels:
        changes["labels"] = joined
    if name not in ("", manifest.name):
        changes["name"] = name
    return changes


def _longer(store: Store, manifest: Manifest, asked: CreateCache | AppendCache | ImportCache | None) -> dict[str, Any]:
    """The changes that give an existing cache the longer of two lives, and of two renewals."""
    if asked is None:
        return {}
    have, want = manifest.expires_at, store.expiry(asked.ttl_s, asked.expires_at)
    promise = _promise(manifest, asked)
    renewal = max((each for each in (manifest.ttl_renew_s, asked.ttl_renew_s) if each is not None), default=None)
    if have is None or (want is not None and want <= have and renewal == manifest.ttl_renew_s):
        return promise
    return promise | {"expires_at": None if want is None else max(have, want), "ttl_renew_s": renewal}


def _promise(manifest: Manifest, asked: CreateCache | AppendCache | ImportCache) -> dict[str, Any]:
    """The change that guarantees an existing cache for as long as its newest creation asks."""
    until = asked.guaranteed_until if isinstance(asked, CreateCache) else None
    return {} if until is None or until <= (manifest.guaranteed_until or 0.0) else {"guaranteed_until": until}


def _joined(had: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The labels of a cache that was on the shelf, with those of its newest creation.

    A part of a document may have those of an earlier split, of another version of the document say: it belongs to the
    newest.
    """
    labels = {**had, **given}
    again = given.get("split") is not None and had.get("split") == given["split"] == given.get("document")
    if again:  # no name: the one that was given before stays
        labels["document"] = had.get("document", labels["document"])
    return labels
