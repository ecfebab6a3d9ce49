"""The types of stored caches: one cache, lists, updates, imports, deletions, verifications and erasures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from kvshelf.api import strict
from kvshelf.api.certificates import CertifiedBy
from kvshelf.api.strict import misuse

ExportTo = Literal["llama.cpp", "mlx"]
"""The engines whose files a cache can become."""

ExportDtype = Literal["float32", "float16", "bfloat16"]
"""The dtype of the numbers in such a file."""

MOST_WARM: Final = 1000
"""Most caches that one call reads into memory."""

EXPORT_SUFFIXES: Final[dict[ExportTo, str]] = {"llama.cpp": ".bin", "mlx": ".safetensors"}
"""How the names of those files end."""


class TokenCounts(strict.ResponseBody):
    """`kept` is the mean number of entries per layer and KV head; `protected` of them were said to stay (`protect`)."""

    document: int
    kept: int
    protected: int = 0


class ByteCounts(strict.ResponseBody):
    """`full` is the size of the document's uncompressed KV cache in the model's dtype, `full_16bit` its size in 16-bit
    numbers, `stored` the size of the blob. Of a layer with a sliding window or chunked attention only what questions
    see counts. Say how much smaller a cache is against `full_16bit`: an fp32 cache doubles every factor."""

    full: int
    full_16bit: int
    stored: int

    @property
    def share(self) -> float:
        """The part of `full_16bit` that `stored` is; 0 where nothing is stored."""
        return self.stored / self.full_16bit if self.full_16bit else 0.0

    def describe(self, show: Callable[[int], str]) -> str:
        """For people, with sizes as `show` writes them: `full` too where the model computes in wider numbers."""
        wider = f"; {show(self.full)} in the model's dtype" if self.full > self.full_16bit else ""
        return f"{show(self.stored)}, {self.share:.1%} of {show(self.full_16bit)} uncompressed in 16 bits{wider}"


class Timings(strict.ResponseBody):
    """Seconds spent waiting, in the model's forward, compressing, and writing to the store."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    store_s: float = 0.0


WorstPart = dict[str, int | float]
"""A part of a document: `from` one token `to` another, and the `agreement` there. `from` is no name in Python."""


class Quality(strict.ResponseBody):
    """How close a cache is to the full one, on cues made from the document during compression.

    `agreement`, 0 to 1: the share of what the document decides that it answers as the full cache does: of `cues` places
    that count, among `asked`. `low` and `high`: the bounds of that share, each at 95 %. Where too few places count,
    `low` is null, where none does, `agreement`, too; `reason` says why, and no `min_quality` is met. It also says that
    fewer places were asked because a `min_quality` was out of reach. Of the full cache itself all three are 1, without
    cues. `worst`: the part of the document with the lowest share. `kl`: divergence of the probabilities, in nats.
    `full`: whether no more cues could be asked; a floor is met by no other figure. `probe_s`: what measuring took.
    Compare only numbers of one `version`.
    """

    agreement: float | None
    low: float | None
    high: float | None
    worst: WorstPart | None
    cues: int
    asked: int = 0
    full: bool = True
    reason: str | None = None
    kl: float
    probe_s: float
    version: int

    @property
    def text(self) -> str:
        """The agreement with its interval, for people; with the number of cues where there is no interval."""
        if self.agreement is None:
            return f"none: {self.reason}"
        if self.cues:
            return f"{self.agreement:.3f} ({self.interval})"
        return "1, nothing is lost" if self.reason is None else f"{self.agreement:.3f}, {self.reason}"

    @property
    def interval(self) -> str:
        """The interval of the agreement, for people; the number of cues where there is none."""
        return f"{self.cues} cues" if self.low is None else f"{self.low:.3f} to {self.high:.3f}"


class Tried(strict.ResponseBody):
    """One tried combination of policy, ratio and codec, with its bytes and quality or the `reason` for having none.

    `cache_id` is the id that its cache would have, null if the policy refused the document.
    """

    cache_id: str | None = None
    policy: str
    compression_ratio: float
    codec: str
    bytes: int | None = None
    quality: Quality | None = None
    reason: str | None = None


class Recoded(strict.ResponseBody):
    """A cache that a ladder has coded smaller. `codec`: of its creation and id. `at`: Unix seconds of the coding."""

    codec: str
    at: float


class SourceObject(strict.ResponseBody):
    """What is kept of a document, to make its cache again. `bytes` on the shelf, before encryption. `expires_at` null:
    30 days after the cache has expired or was evicted. It never stays when the cache is deleted."""

    form: Literal["text", "tokens"]
    bytes: int
    expires_at: float | None = None


class CacheObject(strict.ResponseBody):
    """One stored cache. `existing` is true in the answer to a POST that found the cache on the shelf.

    `quality` is its closeness to the full cache, null if not measured. If the cache was chosen among several
    combinations of policy, ratio and codec, `tried` lists all of them with their results, and `certificate` names the
    certificate by which it was chosen.
    """

    id: str
    object: Literal["cache"] = "cache"
    document_id: str
    model: str
    layout: strict.LayoutName
    policy: str
    policy_params: dict[str, Any]
    compression_ratio: float
    codec: str
    recoded: Recoded | None = Field(None, description="what it was, if the ladder has coded it smaller since")
    dtype: str = Field("", description="of the model and of stored entries under codec none; empty: not told")
    tokens: TokenCounts
    bytes: ByteCounts
    quality: Quality | None = None
    tried: list[Tried] = Field(default_factory=list)
    certificate: CertifiedBy | None = None
    min_quality: float | None = Field(None, description="the highest that a creation asked of it; no ladder goes below")
    created_at: float
    expires_at: float | None = None
    ttl_renew: bool = Field(False, description="each question moves expires_at to ttl_s from then")
    ttl_s: float | None = Field(None, description="of a cache with ttl_renew; null for others")
    last_used_at: float | None = None
    pinned: bool = False
    guaranteed_until: float | None = Field(None, description="never evicted before; null: nothing was promised")
    name: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    has_source: bool = False
    source: SourceObject | None = None
    parent_id: str | None = Field(None, description="the cache that this one extends")
    timings: Timings = Timings()
    uses: int = Field(0, description="questions asked so far")
    date: str | None = Field(None, description="the day that the model's chat template wrote before the document")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="those of the creation that changed what the template wrote there"
    )
    warnings: list[str] = Field(
        default_factory=list, description="what it may have lost, if it removes entries or agrees below 0.9"
    )
    existing: bool = False

    @property
    def entries_text(self) -> str:
        """The share of the entries that it keeps, and in which form, for people: beside sizes, because half the entries
        in float32 take as many bytes as all of them in 16 bits."""
        form = self.dtype if self.codec == "none" else self.codec
        return f"{self.tokens.kept / max(self.tokens.document, 1):.0%} of the entries in {form}"


class SaidMessage(strict.ResponseBody):
    """A message of a stored turn. Calls of tools are in its text, as JSON."""

    role: Literal[strict.Role, "tool"]
    content: str


class StoredTurn(strict.ResponseBody):
    """One cache of a conversation or a document that grew: what was appended to its parent, `tokens` of `total_tokens`.
    `messages`: of a turn that a query stored; null where their text is not kept. `children`: the newest
    caches that were appended to it, at most 20."""

    cache_id: str
    parent_id: str | None
    messages: list[SaidMessage] | None
    tokens: int
    total_tokens: int
    policy: str
    compression_ratio: float
    name: str
    created_at: float
    children: list[str]


class TurnList(strict.ListBody):
    """GET /v1/caches/{id}/turns: from the document that was compressed first, as far as known, to this cache."""

    data: list[StoredTurn]


class LevelList(strict.ListBody):
    """The answer to a creation with `levels`, `split` or `episodes`: one cache for each, in their order."""

    data: list[CacheObject]


class CacheList(strict.ListBody):
    data: list[CacheObject]
    has_more: bool
    last_id: str | None


class SearchCaches(strict.RequestBody):
    """POST /v1/caches/search: which documents hold the words of a question. `labels`: only caches that have all of
    these. `model`: whose caches are searched; by default the first model's."""

    query: Annotated[str, Field(min_length=1, description="a question, or words of one")]
    labels: strict.Labels = Field(default_factory=dict)
    model: str | None = None
    limit: Annotated[int, Field(ge=1, le=64, description="most documents to name")] = 5


class SearchHit(strict.ResponseBody):
    """`score`, 0 to 1: how much of the question the document holds. Scores of one search alone can be compared."""

    cache_id: str
    score: float
    name: str


class Skipped(strict.ResponseBody):
    """Caches of the filter that a search left out. `same_document`: older ones of a document; the newest stands for
    all. `other_model`: of another model than the search's. `without_summary`: no summary could be made of the
    document. `unreadable`: corrupt, or gone meanwhile."""

    same_document: int = 0
    other_model: int = 0
    without_summary: int = 0
    unreadable: int = 0


class SearchList(strict.ListBody):
    """The documents that hold most of the question, the best first, each by its newest cache. `searched` counts those
    that were compared, `skipped` the other caches of the filter."""

    data: list[SearchHit]
    searched: int
    skipped: Skipped


class ListCaches(strict.QueryString):
    """GET /v1/caches: the filters."""

    document_id: str | None = Field(None, description="caches of this document")
    model: str | None = Field(None, description="caches of this model")
    policy: str | None = Field(None, description="caches of this policy")
    name: str | None = Field(None, description="caches with this name")
    id_prefix: str | None = Field(None, description="caches whose id begins so: `kvs_` and at least 4 of its digits")
    parent_id: str | None = Field(None, description="caches that extend this cache")
    ended: bool = Field(
        False,
        description="instead of these, the caches that have expired or were evicted, and whose source is kept: until "
        "the expires_at of the source",
    )
    limit: Annotated[int, Field(ge=1, le=1000, description="caches in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")


class UpdateCache(strict.RequestBody, strict.Renewable):
    """PATCH /v1/caches/{id}: changes the given fields. `labels` replaces all labels.

    A pinned cache is never evicted to make room, but it still expires; a guaranteed one does neither before its time.
    Both count for the budget of promises. `next_use_s` is a hint to the replicas, which no answer shows.
    """

    ttl_s: strict.Ttl | None = Field(None, description="seconds from now; null: never expires")
    expires_at: strict.ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s; null: never expires")
    ttl_renew: bool = Field(
        False, description="each question moves the end of the cache to ttl_s from then; false: none does any more"
    )
    labels: strict.Labels = Field(default_factory=dict)
    name: strict.CacheName = ""
    pinned: bool = False
    guaranteed_until: strict.Guarantee | None = Field(
        None, description="Unix seconds: never evicted before; null takes the promise back"
    )
    next_use_s: strict.NextUse | None = Field(
        None, description="seconds until its next question: replicas keep or read it for that; null: nobody knows"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.model_fields_set:
            raise misuse("", f"nothing to change; give at least one of {', '.join(type(self).model_fields)}")
        strict.require_one_expiry(self.ttl_s, self.expires_at, ttl_renew=self.ttl_renew)
        if {"ttl_s", "expires_at"} <= self.model_fields_set:
            raise misuse("expires_at", "give ttl_s or expires_at, not both")
        return self

    def changes(self) -> dict[str, Any]:
        """The fields of the request, without the hint. A new end of the cache ends an earlier renewal."""
        changes = {name: getattr(self, name) for name in self.model_fields_set - {"next_use_s", "ttl_renew"}}
        if {"ttl_s", "expires_at", "ttl_renew"} & self.model_fields_set:
            changes["ttl_renew_s"] = self.ttl_renew_s
        return changes


class WarmCaches(strict.RequestBody):
    """POST /v1/caches/warm: caches that are to be in memory before their questions come, by ids or by labels."""

    cache_ids: Annotated[list[str], Field(max_length=MOST_WARM)] = Field(
        default_factory=list, description="these caches"
    )
    labels: strict.Labels = Field(
        default_factory=dict, description="instead of ids: the caches that have all these labels"
    )
    model: strict.ModelName | None = Field(
        None, description="with labels: the model's name in the caches; default: any"
    )
    replicas: Literal["all"] = Field("all", description="all: a question may go to any of them")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.cache_ids) == bool(self.labels):
            raise misuse("cache_ids", "give the caches by cache_ids or by labels, and not by both")
        if self.cache_ids and self.model is not None:
            raise misuse("model", "model goes with labels; leave it out")
        return self


class WarmedReplica(strict.ResponseBody):
    """What one replica of a model has in memory now of the caches: `bytes`, of which it read `read_bytes` for this.
    `left_out`: those without room beside the caches that questions use or await, and those with unreadable bytes."""

    replica: str
    model: str = ""
    caches: int
    bytes: int
    read_bytes: int
    left_out: list[str] = Field(default_factory=list)


class WarmedCaches(strict.ListBody):
    """The answer to POST /v1/caches/warm: a row for each replica that runs a model of the caches."""

    data: list[WarmedReplica]


class RemakeCache(strict.RequestBody):
    """POST /v1/caches/{id}/remake: the same document under a model that is served here, from the kept source."""

    model: strict.ModelName | None = Field(None, description="one of /v1/models; default: the first one")


class ImportCache(strict.QueryString, strict.Renewable):
    """POST /v1/caches/import: properties of the cache in the body. `name` and `labels` replace those of an export."""

    ttl_s: strict.Ttl | None = Field(None, description="seconds until the cache expires")
    expires_at: strict.ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s")
    ttl_renew: bool = Field(False, description="each question moves the end of the cache to ttl_s from then")
    name: strict.CacheName | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        strict.require_one_expiry(self.ttl_s, self.expires_at, ttl_renew=self.ttl_renew)
        return self


class Deleted(strict.ResponseBody):
    """The answer to DELETE. `descendants` are the ids of the caches that `cascade` deleted before it."""

    id: str
    object: Literal["cache"] = "cache"
    deleted: bool = True
    descendants: list[str] = Field(default_factory=list)


class Verification(strict.ResponseBody):
    """Result of reading a stored cache to its end. `bytes` counts the sound bytes of the blob and of any kept source. A
    cache that is not `ok` is quarantined and never used; `reason` is one word, `problem` a sentence."""

    id: str
    object: Literal["cache.verification"] = "cache.verification"
    ok: bool
    bytes: int = 0
    reason: str | None = None
    problem: str | None = None


ErasedKind = Literal["cache", "source", "response", "request", "batch", "file", "lines", "certificate", "workflow"]


class CreateErasure(strict.RequestBody):
    """POST /v1/erasures: everything that has all of `labels`, and the `name`, and what is derived from it. `tenant`,
    the caller's own, without labels and name: everything of it."""

    labels: strict.Labels = Field(default_factory=dict, description="what has all of these")
    name: strict.CacheName | None = Field(None, description="what has this name")
    tenant: str | None = Field(None, description="the caller's tenant; alone it means everything that the tenant has")
    dry_run: bool = Field(False, description="say what would go, and leave it")

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.labels and not self.name and self.tenant is None:
            raise misuse("labels", "say what is to be erased: labels, a name, or the tenant for everything of it")
        return self


class ErasedThing(strict.ResponseBody):
    """One thing that went. `digest`: BLAKE3 of its bytes, of a cache the root digest of its blob. `lines`: of a batch's
    journal, a file or a day's use, which else stays, so many lines went. `erased_at` null: not yet, or in a dry run."""

    kind: ErasedKind
    id: str
    digest: str | None = None
    bytes: int = 0
    lines: int = 0
    erased_at: float | None = None


class StayingThing(strict.ResponseBody):
    """What stays, and why."""

    kind: Literal["usage", "tombstone", "request", "batch", "workflow"]
    id: str
    why: str


class Erasure(strict.ResponseBody):
    """A receipt. `in_progress`: there was not enough time for all; the same request goes on. `digest`: BLAKE3 of the
    canonical JSON of the other fields but `public_key` and `signature`, which is Ed25519 over the 64 digits of it."""

    id: str
    object: Literal["erasure"] = "erasure"
    status: Literal["dry_run", "in_progress", "completed"]
    tenant: str
    labels: dict[str, str] = Field(default_factory=dict)
    name: str | None = None
    created_at: float
    completed_at: float | None = None
    homes: list[str]
    erased: list[ErasedThing]
    stays: list[StayingThing]
    counts: dict[str, int] = Field(default_factory=dict, description="things that went, by kind")
    bytes: int = 0
    digest: str = ""
    public_key: str | None = Field(None, description="Ed25519, 32 bytes in hex")
    signature: str | None = Field(None, description="64 bytes in hex; null where no key is set")
