"""What a shelf promises, whatever it is built on."""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, Self

from kvshelf.errors import CacheCorrupt, CacheNotFound, EtagMismatch, InvalidRequest
from kvshelf.store.arriving import ArrivingCache
from kvshelf.store.artifact import CompressedCache
from kvshelf.store.batches import Batches
from kvshelf.store.blobs import Health
from kvshelf.store.codecs import Codec
from kvshelf.store.identity import Identity
from kvshelf.store.ledger import Ledger
from kvshelf.store.manifest import Judgement, Manifest, Placement, Record, Timings, Usage

if TYPE_CHECKING:
    from kvshelf.store.uploads import Files  # which needs the rules, and these need this module

PAGE_LIMIT: Final = 1000
LABEL_LIMIT: Final = 64
TEXT_LIMIT: Final = 512
SOURCE_LIMIT: Final = 256 << 20
"""Characters of a source that is kept: far above what any model reads, and below what would hurt a reader's memory."""

_CACHE_ID = re.compile(r"kvs_[0-9a-f]{40}")


class Unset:
    """Tells "leave it as it is" from None, which means "none": no expiry."""


UNSET: Final = Unset()


class Page(Record):
    """Part of a listing, newest first. `has_more`: ask again with `after` = the last id of `data`."""

    data: tuple[Manifest, ...]
    has_more: bool


class Receipt(Record):
    """Proof of a deletion. Unix seconds and bytes; `homes` names the places the cache was removed from."""

    id: str
    deleted_at: float
    bytes_freed: int
    homes: tuple[str, ...]


class Swept(Record):
    """How many a sweep removed: expired caches and files, what dead writers left, and old tombstones, requests and
    batches."""

    expired: int = 0
    orphans: int = 0
    tombstones: int = 0
    requests: int = 0
    files: int = 0
    batches: int = 0


class Scrubbed(Record):
    """What reading one cache from its first byte to its last has shown; `problem` None: it is sound."""

    id: str
    tenant: str
    bytes: int
    problem: str | None = None


@dataclass(frozen=True)
class BlobFile:
    """A stored blob, verified and open for reading at byte 0. Close it, or use it in a `with` block.

    It stays readable when the cache is deleted meanwhile. `digest` is the blob's root digest in hex: equal digests mean
    equal bytes, so it serves as an ETag.
    """

    file: BinaryIO
    nbytes: int
    digest: str

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(abc.ABC):
    """Where caches live. One store serves several threads and several processes at once.

    Ids are content addresses that include the tenant, so an id of another tenant and an id that never was are the same
    `CacheNotFound`, word for word. Every method may raise `StoreUnavailable` when the place itself does not work.
    """

    ledger: Ledger
    files: Files
    batches: Batches

    @abc.abstractmethod
    def put(
        self,
        cache: CompressedCache,
        *,
        codec: str = "none",
        tenant: str = "default",
        ttl_s: float | None = None,
        expires_at: float | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "",
        pinned: bool = False,
        timings: Timings | None = None,
        source: str | None = None,
        judged: Judgement | None = None,
    ) -> Manifest:
        """Store a cache: write, verify what was written, then make it visible. Durable when it returns.

        `codec` is a text of `kvshelf.store.codecs`; "none" adds no encoding to what the cache has. The manifest and the
        id hold the canonical text of the codec that is stored. `source`: the document's text, to be kept beside it.
        When this cache is on the shelf already, nothing is written and the existing manifest is returned unchanged, its
        labels and expiry included (but a source is added where there is none). One that has expired or is corrupt is
        replaced. judged: what was measured of it. `store_s` of the manifest's timings is filled in. Raises
        `InvalidRequest` (arguments, or a cache that the codec or the format cannot hold), `QuotaExceeded`,
        `StorageFull`; nothing is visible after an error.
        """

    @abc.abstractmethod
    def expiry(self, ttl_s: float | None, expires_at: float | None) -> float | None:
        """When a cache put now with these would expire (Unix seconds, None: never), by the rules of this shelf.

        Raises `InvalidRequest`: so a request can be refused before any work.
        """

    @abc.abstractmethod
    def admit(self, tenant: str) -> None:
        """Raises `QuotaExceeded` when the tenant's quota is used up already, so that no work is begun for nothing."""

    def get(self, cache_id: str, *, tenant: str = "default") -> CompressedCache:
        """Read a cache; every digest and its content address are checked on every read.

        Raises `CacheNotFound` (unknown, deleted, another tenant's), `CacheExpired` (also one that was evicted to make
        room: `details["reason"]` says which), `CacheCorrupt`. A corrupt one is set aside and stays `CacheCorrupt` until
        it is deleted or put again.
        """
        with self.open_cache(cache_id, tenant=tenant) as arriving:
            arriving.read(together=True)
            return arriving.cache()

    @abc.abstractmethod
    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        """A cache whose header and content address are checked, to be read layer by layer while it is used.

        Raises as `get` does; what is wrong with a layer is found when it is read. It can be read to its end when the
        cache is deleted meanwhile. Close it before the store.
        """

    @abc.abstractmethod
    def open_blob(self, cache_id: str, *, tenant: str = "default") -> BlobFile:
        """The stored bytes, verified, for a download. Raises as `get` does."""

    @abc.abstractmethod
    def source(self, cache_id: str, *, tenant: str = "default") -> str:
        """The document's text, verified. Raises `SourceNotKept` where none was kept, and as `get` does."""

    def original(self, cache_id: str, *, tenant: str = "default") -> tuple[Manifest, str]:
        """The manifest and the document's text, to make a cache again: also of one whose blob is corrupt.

        Raises as `source` does; `CacheCorrupt` only where the text or the manifest is not what was written either.
        """
        return self.stat(cache_id, tenant=tenant), self.source(cache_id, tenant=tenant)

    @abc.abstractmethod
    def keep_source(self, cache_id: str, text: str, *, tenant: str = "default") -> Manifest:
        """Keep a document's text beside a cache that is there. Whose text it is, the caller must know.

        Nothing is written where a source is kept already. Raises as `put` and `get` do.
        """

    @abc.abstractmethod
    def keep_judgement(self, cache_id: str, judged: Judgement, *, tenant: str = "default") -> Manifest:
        """What was measured of a cache that is there, in place of what its manifest says. Raises as `get` does."""

    @abc.abstractmethod
    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        """The manifest; the blob is not read. Raises as `get` does."""

    @abc.abstractmethod
    def list(
        self,
        *,
        tenant: str = "default",
        document_id: str | None = None,
        model: str | None = None,
        policy: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page:
        """Live caches of a tenant, newest first; filters are joined by "and", labels must all be there.

        `after` is the last id of the page before. The order never changes, and deleting that cache does not lose the
        place. Raises `InvalidRequest` for a limit outside 1 to 1,000 or an `after` this tenant never had.
        """

    @abc.abstractmethod
    def update(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        ttl_s: float | Unset | None = UNSET,
        expires_at: float | Unset | None = UNSET,
        labels: Mapping[str, str] | Unset = UNSET,
        name: str | Unset = UNSET,
        pinned: bool | Unset = UNSET,
        if_revision: Collection[str] | None = None,
    ) -> Manifest:
        """Change what may change; None as `ttl_s` or `expires_at` means no expiry, labels are replaced as a whole.

        Raises as `get` does, and `InvalidRequest`. A pinned cache is never evicted for space; it expires all the same.
        if_revision: change it only as the caller has seen it, with one of these `Manifest.revision`s; else it is
        `EtagMismatch`. Of several callers who saw the same, in any processes, one succeeds.
        """

    @abc.abstractmethod
    def delete(self, cache_id: str, *, tenant: str = "default", if_revision: Collection[str] | None = None) -> Receipt:
        """Remove a cache, expired and corrupt ones too. Readers that have it open finish. Raises `CacheNotFound`.

        if_revision: as for `update`, and then it raises as `get` does, too.
        """

    @abc.abstractmethod
    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        """Record that the cache was used now; nothing happens for one that is gone."""

    @abc.abstractmethod
    def sweep(self, now: float | None = None) -> Swept:
        """Remove what has expired and what a crash left behind. Safe beside writers; call it every few minutes."""

    @abc.abstractmethod
    def cache_id(self, identity: Identity, *, tenant: str = "default", codec: str = "none") -> str:
        """The id a cache with this identity has here under a codec, whether it is stored or not.

        Texts of the same codec give the same id. Raises `InvalidRequest` for a text that is no codec.
        """

    @abc.abstractmethod
    def document_id(self, identity: Identity, *, tenant: str = "default") -> str:
        """The id that all caches of one document carry here."""

    @abc.abstractmethod
    def usage(self, *, tenant: str | None = None) -> Usage:
        """Caches and bytes of one tenant, or of all."""

    @abc.abstractmethod
    def health(self) -> Health:
        """Whether the home answers, and may be used. Quick and walks nothing, unlike `check`."""

    @abc.abstractmethod
    def check(self) -> Sequence[str]:
        """Every inconsistency found, one sentence each; blobs are not read. Empty means sound."""

    @abc.abstractmethod
    def scrub(self) -> Iterator[Scrubbed]:
        """Read every cache of every tenant to its end, set aside those that are corrupt, say what was found of each."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and connections. The store cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def not_found(cache_id: str) -> CacheNotFound:
    """The one message for ids that are unknown, deleted, malformed, or another tenant's."""
    return CacheNotFound(f"there is no cache {cache_id[:80]!r}; `list` shows what is on the shelf", param="cache_id")


def require_id(cache_id: str) -> str:
    """Refuse what cannot be an id before it comes near a file or a query."""
    if not isinstance(cache_id, str) or not _CACHE_ID.fullmatch(cache_id):
        raise not_found(str(cache_id))
    return cache_id


def corrupt(cache_id: str, problem: str, reason: str) -> CacheCorrupt:
    """`reason` is one word: a reason of docs/format.md, `missing`, `wrong_identity` or `quarantined`."""
    return CacheCorrupt(
        f"cache {cache_id} is corrupt ({problem}); it is never used. Compress its document again.",
        param="cache_id",
        reason=reason,
    )


def require_revision(manifest: Manifest, if_revision: Collection[str] | None) -> None:
    """Raises `EtagMismatch` if a caller has seen the cache, and has not seen it as it is now."""
    if if_revision is not None and manifest.revision not in if_revision:
        raise EtagMismatch(
            f'cache {manifest.id} was changed since: it has the ETag "{manifest.revision}" now; fetch it and decide '
            "again",
            param="if-match",
        )


def placement(
    tenant: str,
    codec: Codec,
    expires_at: float | None,
    labels: Mapping[str, str],
    name: str,
    pinned: bool,
    timings: Timings,
    source: str | None,
    judged: Judgement,
) -> Placement:
    """Check what a caller of `put` gave; raises `InvalidRequest`."""
    return Placement(
        tenant=require_text(tenant, "tenant", empty=False),
        codec=str(codec),
        expires_at=expires_at,
        labels=require_labels(labels),
        name=require_text(name, "name"),
        pinned=bool(pinned),
        timings=timings,
        source=None if source is None else require_source(source),
        judged=judged,
    )


def changes(labels: Mapping[str, str] | Unset, name: str | Unset, pinned: bool | Unset) -> dict[str, Any]:
    """Check what a caller of `update` gave besides the expiry; returns the manifest's fields that change."""
    found: dict[str, Any] = {}
    if not isinstance(labels, Unset):
        found["labels"] = require_labels(labels)
    if not isinstance(name, Unset):
        found["name"] = require_text(name, "name")
    if not isinstance(pinned, Unset):
        found["pinned"] = bool(pinned)
    return found


def require_text(value: str, param: str, *, limit: int = TEXT_LIMIT, empty: bool = True) -> str:
    """A string that fits and that any store can hold as UTF-8."""
    if not isinstance(value, str) or len(value) > limit or (not value and not empty):
        least = 0 if empty else 1
        raise InvalidRequest(f"{param} must be text of {least} to {limit} characters, not {value!r:.80}", param=param)
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidRequest(f"{param} holds a zero byte or half a surrogate pair: {value!r:.80}", param=param)
    return value


def require_source(text: str) -> str:
    """A document's text as it is: any characters that UTF-8 has, at least one."""
    if not isinstance(text, str) or not 0 < len(text) <= SOURCE_LIMIT:
        raise InvalidRequest(f"source must be text of 1 to {SOURCE_LIMIT} characters", param="source")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest("source holds half a surrogate pair, which is no text", param="source")
    return text


def require_limit(limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_LIMIT:
        raise InvalidRequest(f"limit must be a number from 1 to {PAGE_LIMIT}, not {limit!r}", param="limit")
    return limit


def require_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping) or len(labels) > LABEL_LIMIT:
        raise InvalidRequest(f"labels must be a mapping of at most {LABEL_LIMIT} names to texts", param="labels")
    return {
        require_text(key, "labels", limit=64, empty=False): require_text(value, f"labels.{key}")
        for key, value in labels.items()
    }


def require_expiry(ttl_s: float | None, expires_at: float | None, now: float) -> float | None:
    """When a cache expires (Unix seconds, None: never), from the two ways to say it."""
    if ttl_s is not None and expires_at is not None:
        raise InvalidRequest("give ttl_s or expires_at, not both", param="ttl_s")
    if ttl_s is not None:
        return now + _positive(ttl_s, "ttl_s", 0.0)
    return None if expires_at is None else _positive(expires_at, "expires_at", now)


def _positive(value: float, param: Literal["ttl_s", "expires_at"], least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < 1e12:
        meaning = "seconds from now" if param == "ttl_s" else "a time in the future, in Unix seconds"
        raise InvalidRequest(f"{param} must be {meaning}, not {value!r}", param=param)
    return float(value)
