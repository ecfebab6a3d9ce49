"""The record of one stored cache. It is written last: a visible manifest means a complete and verified blob."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvshelf.api import CertifiedBy, Quality, Timings, Tried
from kvshelf.api.caches import Recoded
from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.identity import Identity, canonical_json, digest

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache

_REVISED: Final = {
    "blob_digest", "certificate", "created_at", "guaranteed_until", "labels", "min_quality", "name", "pinned",
    "quality", "source", "tried",
}  # fmt: skip
_REVISED_IF_SET: Final = {"certificate", "guaranteed_until", "min_quality"}
"""Fields of `_REVISED` that are left out where they are empty: clients keep ETags from before there were any."""

BY_GUARD: Final = "measured by the guard"
"""Beginning of the reason in a quality by which the guard has found a cache below its floor."""


class StoredRecord(BaseModel):
    """A record that a home keeps as JSON. Nothing unknown passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredUsage(StoredRecord):
    """Caches on the shelf and the bytes they take there."""

    caches: int
    bytes: int


class Judgement(StoredRecord):
    """How a cache compares with the full one, as the API reports it. quality: None if it was not measured. tried: all
    levels that were considered, if this cache was chosen among them. certificate: by which it was chosen. min_quality:
    the highest that a creation asked of it."""

    quality: Quality | None = None
    tried: tuple[Tried, ...] = ()
    certificate: CertifiedBy | None = None
    min_quality: float | None = None


class StoredBody(StoredRecord):
    """Where bytes lie in `Blobs`, how many they are there, and the BLAKE3 digest of the plain bytes in hex."""

    name: str
    stored_bytes: int
    digest: str


class SourceInfo(StoredRecord):
    """A kept source. form: the document's text (messages as JSON), or its token ids alone. nbytes: before encryption.
    digest: of these bytes, in hex. expires_at: Unix seconds, before or after the end of the cache; None: see
    `kvshelf.store.jobs.sources`. A deletion of the cache is its end in any case."""

    form: Literal["text", "tokens"]
    nbytes: int
    digest: str
    expires_at: float | None = None


_CONTENT: Final = {
    "identity", "model", "layout", "policy", "policy_params", "compression_ratio", "codec", "num_tokens", "kept_tokens",
    "bytes_full", "bytes_stored", "blob_digest", "segment_digests",
}  # fmt: skip
"""Fields that follow from a cache's bytes."""

_TIMES_16_BITS: Final = {"float32": 2, "float64": 4}
"""How much wider than 16 bits a model's numbers are. By name, because a front end does not import torch."""


class Manifest(StoredRecord):
    """The shelf's record of one cache. Times are Unix seconds, sizes bytes, digests hex.

    identity: `Identity.to_dict()`. bytes_full: keys and values before compression. bytes_stored: the blob. blob_digest:
    the blob's root digest; segment_digests: one per layer. uses: questions asked so far. ttl_renew_s: each use moves
    `expires_at` to so many seconds later; None: it stays. guaranteed_until: as `pinned` until then; None once a sweep
    has seen that it is over. source: of the document, if it is kept (`kvshelf.store.jobs.sources`). quality, tried,
    certificate, min_quality: see `Judgement`. parent_id: the cache that this one extends, None if it extends none.
    codec, identity: of the blob. recoded: if a ladder has coded it smaller since it was made.
    """

    id: str
    parent_id: str | None = None
    document_id: str
    tenant: str
    identity: dict[str, Any]
    model: str
    layout: str
    policy: str
    policy_params: dict[str, Any]
    compression_ratio: float
    codec: str
    num_tokens: int
    kept_tokens: int
    bytes_full: int
    bytes_stored: int
    blob_digest: str
    segment_digests: tuple[str, ...]
    quality: Quality | None = None
    tried: tuple[Tried, ...] = ()
    certificate: CertifiedBy | None = None
    min_quality: float | None = None
    recoded: Recoded | None = None
    timings: Timings = Field(default_factory=Timings)
    created_at: float
    expires_at: float | None = None
    ttl_renew_s: float | None = None
    last_used_at: float | None = None
    pinned: bool = False
    guaranteed_until: float | None = None
    name: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    source: SourceInfo | None = None
    uses: int = 0

    @property
    def has_source(self) -> bool:
        return self.source is not None

    @property
    def made_codec(self) -> str:
        """The codec that its id is of: the one under which it was made."""
        return self.codec if self.recoded is None else self.recoded.codec

    @property
    def made_identity(self) -> Identity:
        """The identity that its id is of: transforms belong to the codec of the blob alone. Raises as
        `Identity.from_dict`."""
        identity = Identity.from_dict(self.identity)
        return identity if self.recoded is None else replace(identity, transforms="")

    @property
    def content_digest(self) -> str:
        """A digest of everything that follows from the cache's bytes, in any home and of any tenant."""
        return digest("kvshelf.content", canonical_json(self.model_dump(mode="json", include=_CONTENT)))

    @property
    def found_by_guard(self) -> bool:
        """Whether the guard has found it below its floor."""
        return self.quality is not None and (self.quality.reason or "").startswith(BY_GUARD)

    @property
    def promised(self) -> bool:
        """Whether it may not be evicted: its pin, for ever or until a time, counts for the budget of promises."""
        return self.pinned or self.guaranteed_until is not None

    @property
    def bytes(self) -> dict[str, int]:
        """The sizes as the API shows them, see `kvshelf.api.caches.ByteCounts`."""
        in_16_bits = self.bytes_full // _TIMES_16_BITS.get(self.identity["model"]["dtype"], 1)
        return {"full": self.bytes_full, "full_16bit": in_16_bits, "stored": self.bytes_stored}

    @property
    def revision(self) -> str:
        """A digest of everything that can change except by a use."""
        moving = "expires_at" if self.ttl_renew_s is None else "ttl_renew_s"
        fields = self.model_dump(mode="json", include={moving, *_REVISED})
        fields = {name: value for name, value in fields.items() if value or name not in _REVISED_IF_SET}
        return digest("kvshelf.etag", canonical_json(fields))


class SourceRecord(StoredRecord):
    """A kept source, as the job table has it. manifest: of the cache, as it was when it was last changed; its `source`
    is this one. claimed: whether that cache was published with it. width: bytes of a token id, 0: UTF-8 text.
    compressed: whether the body is a frame of zstandard. protected_prefix: how many of the token ids the template
    wrote."""

    manifest: Manifest
    body: StoredBody
    claimed: bool = False
    width: int = 0
    compressed: bool = False
    protected_prefix: int = 0


def describe(cache: CompressedCache, packed: PackedBlob, **fields: Any) -> Manifest:
    """The manifest of a cache and its blob. fields: the fields of `Manifest` that neither determines."""
    identity = packed.header.identity
    return Manifest(
        model=identity.model.name,
        layout=identity.layout,
        policy=identity.policy,
        policy_params=identity.policy_params,
        compression_ratio=identity.compression_ratio,
        num_tokens=cache.num_tokens,
        kept_tokens=cache.kept_tokens,
        bytes_full=cache.bytes_full,
        **described_blob(packed),
        **fields,
    )


def described_blob(packed: PackedBlob) -> dict[str, Any]:
    """The fields of `Manifest` that another codec changes."""
    return {
        "identity": packed.header.identity.model_dump(),
        "codec": packed.header.codec,
        "bytes_stored": packed.nbytes,
        "blob_digest": packed.root.hex(),
        "segment_digests": tuple(layer.digest.hex() for layer in packed.header.layers),
    }
