"""Arguments and results of stores besides caches and manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Self, TypedDict

from kvshelf.api import Quality, Timings
from kvshelf.store.manifest import Judgement, Manifest, StoredRecord


@dataclass(frozen=True)
class TokenIds:
    """A document as the model read it. The first `protected_prefix` ids were written by the chat template."""

    ids: tuple[int, ...]
    protected_prefix: int = 0


Source = str | TokenIds
"""The text of a document, messages as JSON, or the token ids alone."""


class EndFields(TypedDict, total=False):
    """When something ends, see `Store.expiry`."""

    ttl_s: float | None
    expires_at: float | None


class KeepFields(EndFields, total=False):
    """Options of `Store.put`."""

    ttl_renew_s: float | None
    labels: Mapping[str, str] | None
    name: str
    pinned: bool
    guaranteed_until: float | None
    timings: Timings | None
    source: Source | None
    source_ttl_s: float | None
    judged: Judgement | None
    parent_id: str | None


class FilterFields(TypedDict, total=False):
    """Filters of `Store.list`; None: any."""

    document_id: str | None
    model: str | None
    policy: str | None
    name: str | None
    id_prefix: str | None
    labels: Mapping[str, str] | None
    parent_id: str | None


class ChangeFields(EndFields, total=False):
    """Fields that `Store.update` changes; absent ones stay. None as `ttl_s` or `expires_at`: no expiry; None as
    `guaranteed_until` takes the promise back. quality: a new measurement."""

    ttl_renew_s: float | None
    labels: Mapping[str, str]
    name: str
    pinned: bool
    guaranteed_until: float | None
    quality: Quality


class Page(StoredRecord):
    """One page of a listing, newest first. `has_more`: ask again with `after` = the last id of `data`."""

    data: tuple[Manifest, ...]
    has_more: bool


class Changes(StoredRecord):
    """Changes of a shelf after a place. data: live caches that were put or changed, the last change last. ended: ids of
    caches that were deleted, evicted, found corrupt, or have expired. place: to ask from next. has_more: ask again."""

    data: tuple[Manifest, ...]
    ended: tuple[str, ...]
    place: str
    has_more: bool


class Receipt(StoredRecord):
    """Proof of a deletion. Unix seconds and bytes; `homes` names the home and tiers that had the cache. descendants:
    the caches that a cascade deleted before it, in this order; `bytes_freed` counts theirs."""

    id: str
    deleted_at: float
    bytes_freed: int
    homes: tuple[str, ...]
    descendants: tuple[str, ...] = ()


class Swept(StoredRecord):
    """How many items a sweep removed. orphans: bytes that dead writers left."""

    expired: int = 0
    orphans: int = 0
    tombstones: int = 0
    requests: int = 0
    responses: int = 0
    files: int = 0
    batches: int = 0
    sources: int = 0
    usage: int = 0


class Scrubbed(StoredRecord):
    """The result of reading one whole cache; `problem` None: it is sound."""

    id: str
    tenant: str
    bytes: int
    problem: str | None = None


@dataclass(frozen=True)
class BlobFile:
    """A verified blob, or an unverified file of `Files`, open at byte 0. Close it, or use it in a `with` block. It
    stays readable if the cache or file is deleted meanwhile. `digest` is the blob's root digest or the file's BLAKE3
    digest, in hex: equal digests mean equal bytes, so it serves as an ETag."""

    file: BinaryIO
    nbytes: int
    digest: str

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
