"""What a creation changes of a cache that is on the shelf already. Blocks; for threads. Needs no torch."""

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
    while changes := _changes(manifest, labels or {}, name) | _prolong(store, manifest, lifetime):
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
    if (joined := _join(manifest.labels, labels)) != manifest.labels:
        changes["labels"] = joined
    if name not in ("", manifest.name):
        changes["name"] = name
    return changes


def _prolong(store: Store, manifest: Manifest, spec: CreateCache | AppendCache | ImportCache | None) -> dict[str, Any]:
    """The changes that give an existing cache the longer of two lives, of two renewals and of two guarantees."""
    changes: dict[str, Any] = {}
    if spec is None:
        return changes
    until = spec.guaranteed_until if isinstance(spec, CreateCache) else None
    if until is not None and until > (manifest.guaranteed_until or 0.0):
        changes["guaranteed_until"] = until
    have, want = manifest.expires_at, store.expiry(spec.ttl_s, spec.expires_at)
    renewal = max(filter(None, (manifest.ttl_renew_s, spec.ttl_renew_s)), default=None)
    if have is None or (want is not None and want <= have and renewal == manifest.ttl_renew_s):
        return changes
    return changes | {"expires_at": None if want is None else max(have, want), "ttl_renew_s": renewal}


def _join(labels: Mapping[str, str], newest: Mapping[str, str]) -> dict[str, str]:
    """The labels of a cache that was on the shelf, with those of its newest creation.

    A part of a document may have those of an earlier split, of another version of the document say: it belongs to the
    newest.
    """
    joined = {**labels, **newest}
    if newest.get("split") is not None and labels.get("split") == newest["split"] == newest.get("document"):
        joined["document"] = labels.get("document", newest["document"])  # the newest has no name: the old one stays
    return joined
