"""What a creation changes of a cache that is on the shelf already. Blocks; for threads."""

from __future__ import annotations

from collections.abc import Mapping

from kvshelf.errors import EtagMismatch, InvalidRequest
from kvshelf.store.base import Store
from kvshelf.store.checks import LABEL_LIMIT
from kvshelf.store.manifest import Manifest


def described(store: Store, manifest: Manifest, labels: Mapping[str, str], name: str) -> Manifest:
    """Adds the labels of its newest request to an existing cache, and gives it the name, unless that is empty.

    Changes that others make at the same time stay. Raises `InvalidRequest` if the cache would have too many labels.
    """
    while not is_described(manifest, labels, name):
        joined = _joined(manifest.labels, labels)
        if len(joined) > LABEL_LIMIT:
            raise InvalidRequest(
                f"cache {manifest.id} has {len(manifest.labels)} labels and would have {len(joined)} with these; at "
                f"most {LABEL_LIMIT} are possible, so take some off first",
                param="labels",
            )
        seen, name_now = [manifest.revision], name or manifest.name
        try:
            return store.update(manifest.id, tenant=manifest.tenant, if_revision=seen, labels=joined, name=name_now)
        except EtagMismatch:  # it was changed since it was read
            manifest = store.stat(manifest.id, tenant=manifest.tenant)
    return manifest


def is_described(manifest: Manifest, labels: Mapping[str, str], name: str) -> bool:
    """Whether an existing cache has the labels and the name of a request."""
    return _joined(manifest.labels, labels) == manifest.labels and name in ("", manifest.name)


def prolonged(store: Store, manifest: Manifest, ttl_s: float | None, expires_at: float | None) -> Manifest:
    """Extends the life of an existing cache to what its newest request asks for; never shortens it."""
    have, want = manifest.expires_at, store.expiry(ttl_s, expires_at)
    if have is None or (want is not None and want <= have):
        return manifest
    return store.update(manifest.id, tenant=manifest.tenant, expires_at=want)


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
