"""The types of the HTTP API, shared word for word by the service and the clients.

Requests are strict: an unknown field, "3" where 3 is meant, true where a number is meant, NaN, and a value outside its
bounds are refused, with the field named. Responses are read leniently, so that a client understands a newer service.

Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. The bases and shared
fields are in `strict`; chat completions, in OpenAI's shapes, in `openai`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvshelf.client.strict import (
    MAX_LEVELS,
    MAX_MESSAGES,
    CacheName,
    CodecText,
    ExpiresAt,
    FinishReason,
    Labels,
    LayoutName,
    MaxTokens,
    MissReason,
    ModelName,
    Prompts,
    Ratio,
    RequestBody,
    RequestState,
    ResponseBody,
    Role,
    Seed,
    Stops,
    Temperature,
    Text,
    TokenId,
    TopP,
    Ttl,
    misuse,
    one_of,
)


class Message(RequestBody):
    """One turn of a conversation."""

    role: Role
    content: str


MessageList = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def _require_one_expiry(ttl_s: float | None, expires_at: float | None) -> None:
    if ttl_s is not None and expires_at is not None:
        raise misuse("expires_at", "give ttl_s or expires_at, not both")


_CHOSEN = {"policy_params", "compression_ratio", "budget_tokens", "codec", "levels", "expected_questions"}
"""What the policy "auto" is not told."""


class CacheOptions(RequestBody):
    """How a document is compressed and kept, whatever the document.

    `compression_ratio` is the fraction of entries REMOVED, `budget_tokens` the mean number of entries kept per layer
    and KV head. Without either, the policy's default applies.
    """

    model: ModelName | None = Field(None, description="one of /v1/models; the first one served if absent")
    layout: LayoutName | None = Field(None, description="chat if the model has a chat template, else plain")
    policy: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        "keydiff", description="one of /v1/policies; auto chooses policy, ratio and codec for the document"
    )
    policy_params: dict[str, Any] = Field(default_factory=dict, max_length=64)
    compression_ratio: Ratio | None = None
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    codec: CodecText = "none"
    levels: Annotated[list[Ratio], Field(min_length=1, max_length=MAX_LEVELS)] | None = Field(
        None, description="several compression ratios: as many caches, from one prefill"
    )
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="least agreement with the full cache: the smallest of the levels that has it is stored, or none; "
        "with the policy auto 0.98 unless given",
    )
    expected_questions: list[Text] = Field(
        default_factory=list, max_length=256, description="guide the policies that score by the end of the prompt"
    )
    ttl_s: Ttl | None = Field(None, description="seconds until the cache expires")
    expires_at: ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s")
    labels: Labels = Field(default_factory=dict)
    keep_source: bool = Field(False, description="keep the document's text, or the messages as JSON, beside the cache")

    @field_validator("levels")
    @classmethod
    def _distinct(cls, levels: list[float] | None) -> list[float] | None:
        if levels is not None and len(set(levels)) != len(levels):
            raise misuse("levels", "a level is given twice; each makes a cache of its own")
        return levels

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        chosen = [name for name in _CHOSEN & self.model_fields_set if getattr(self, name) not in (None, {}, [])]
        if self.policy == "auto" and chosen:
            raise misuse(min(chosen), f'the policy "auto" chooses for itself; leave {", ".join(sorted(chosen))} out')
        if self.compression_ratio is not None and self.budget_tokens is not None:
            raise misuse("budget_tokens", "give compression_ratio or budget_tokens, not both")
        for other in ("compression_ratio", "budget_tokens"):
            if self.levels is not None and getattr(self, other) is not None:
                raise misuse("levels", f"give levels or {other}, not both")
        _require_one_expiry(self.ttl_s, self.expires_at)
        return self


class CreateCache(CacheOptions):
    """POST /v1/caches: compress a document once. Exactly one of `document`, `messages` and `token_ids` is required.

    `compression_ratio` is the fraction of entries REMOVED, `budget_tokens` the mean number of entries kept per layer
    and KV head. Without either, the policy's default applies.
    """

    model_config = ConfigDict(json_schema_extra=one_of(document="string", messages="array", token_ids="array"))

    document: str | None = Field(None, description="the document as text; special tokens in it are plain text")
    messages: MessageList | None = Field(None, description="a conversation prefix, for chat models")
    token_ids: list[TokenId] | None = Field(None, description="the document as token ids of the model")
    tokenizer: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="with token_ids: the tokenizer that made them, as /v1/models names it; another one is refused"
    )
    name: CacheName = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("document", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} were given" if given else "none was given"
            raise misuse("document", f"exactly one of document, messages and token_ids is needed; {found}")
        if self.tokenizer is not None and self.token_ids is None:
            raise misuse("tokenizer", "only token_ids come from a tokenizer; leave it out")
        if self.keep_source and self.token_ids is not None:
            raise misuse("keep_source", "there is no source to keep: token_ids are no text")
        return self


class Estimate(CreateCache):
    """POST /v1/estimate: what a creation would take. The fields of a creation; nothing is compressed or stored.

    Without `policy` all policies are told, with their default parameters; without `codec` the five codecs. Each of the
    `levels` has a row, and so has each way that the policy "auto" would try.
    """


class UpdateCache(RequestBody):
    """PATCH /v1/caches/{id}: what is given changes, all else stays. Labels are replaced as a whole.

    A pinned cache is never evicted to make room; it expires all the same.
    """

    ttl_s: Ttl | None = Field(None, description="seconds from now; null: it never expires")
    expires_at: ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s; null: it never expires")
    labels: Labels = Field(default_factory=dict)
    name: CacheName = ""
    pinned: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.model_fields_set:
            raise misuse("", f"nothing is to change; give at least one of {', '.join(type(self).model_fields)}")
        if {"ttl_s", "expires_at"} <= self.model_fields_set:
            raise misuse("expires_at", "give ttl_s or expires_at, not both")
        return self

    def changes(self) -> dict[str, Any]:
        """The fields that were given."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Query(RequestBody):
    """POST /v1/caches/{id}/query: ask a stored cache. Exactly one of `prompt` (one or several) and `messages`."""

    model_config = ConfigDict(json_schema_extra=one_of(prompt=["string", "array"], messages="array"))

    prompt: Prompts | None = None
    messages: MessageList | None = None
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool = False
    compare: bool = Field(False, description="answer from the full cache too; it must be stored, or the source kept")
    on_miss: Literal["error", "recompute"] = Field(
        "error", description="recompute: a cache that cannot be used is made again from its kept source"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            found = "neither was given" if self.prompt is None else "both were given"
            raise misuse("prompt", f"exactly one of prompt and messages is needed; {found}")
        if self.stream and isinstance(self.prompt, list):
            raise misuse("stream", "several prompts cannot be streamed in one call; send one prompt per stream")
        if self.stream and self.compare:
            raise misuse("compare", "a comparison needs whole answers; leave stream out")
        return self


class QueryString(BaseModel):
    """Base of what is sent as a query string. Not strict, because every value there is text.

    `labels` are sent as `label.<key>=<value>`, one parameter each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    labels: Labels = Field(default_factory=dict)


class ListCaches(QueryString):
    """GET /v1/caches: the filters."""

    document_id: str | None = Field(None, description="caches of this document")
    model: str | None = Field(None, description="caches of this model")
    policy: str | None = Field(None, description="caches of this policy")
    limit: Annotated[int, Field(ge=1, le=1000, description="caches in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")


class ImportCache(QueryString):
    """POST /v1/caches/import: what is to be known about the cache whose blob is the body."""

    ttl_s: Ttl | None = Field(None, description="seconds until the cache expires")
    expires_at: ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s")
    name: CacheName = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require_one_expiry(self.ttl_s, self.expires_at)
        return self


class TokenCounts(ResponseBody):
    """`kept` is the mean number of entries per layer and KV head."""

    document: int
    kept: int


class ByteCounts(ResponseBody):
    """`full` is what the uncompressed KV of the document takes, `stored` the size of the blob."""

    full: int
    stored: int


class Timings(ResponseBody):
    """Seconds: waiting, model forward, compression, writing to the store."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    store_s: float = 0.0


class Quality(ResponseBody):
    """How close a cache is to the full one, on questions made from the document when it was compressed.

    `agreement`, 0 to 1: how often it says the token that the full cache is sure of. `kl`: the divergence of its
    probabilities, in nats. `tokens` were predicted, in `probe_s` seconds. Numbers of another `version` do not compare.
    """

    agreement: float
    kl: float
    tokens: int
    probe_s: float
    version: int


class Tried(ResponseBody):
    """One way to keep a document, and its bytes and quality, or the reason why there are none.

    `cache_id` is the id that its cache would have, null where the policy refused the document.
    """

    cache_id: str | None = None
    policy: str
    compression_ratio: float
    codec: str
    bytes: int | None = None
    quality: Quality | None = None
    reason: str | None = None


class CacheObject(ResponseBody):
    """One stored cache. `existing` is true in the answer to a POST that found the cache on the shelf.

    `quality` is how close it is to the full cache, null where that was not measured. `tried` is there where the cache
    was chosen among several ways to keep its document: all of them, and what came of each.
    """

    id: str
    object: Literal["cache"] = "cache"
    document_id: str
    model: str
    layout: LayoutName
    policy: str
    policy_params: dict[str, Any]
    compression_ratio: float
    codec: str
    tokens: TokenCounts
    bytes: ByteCounts
    quality: Quality | None = None
    tried: list[Tried] = Field(default_factory=list)
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    pinned: bool = False
    name: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    has_source: bool = False
    timings: Timings = Timings()
    uses: int = Field(0, description="questions asked so far")
    existing: bool = False


class LevelList(ResponseBody):
    """The answer to a creation with `levels`: the caches in their order."""

    object: Literal["list"] = "list"
    data: list[CacheObject]


class CacheList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[CacheObject]
    has_more: bool
    last_id: str | None


class Deleted(ResponseBody):
    """The answer to DELETE."""

    id: str
    object: Literal["cache"] = "cache"
    deleted: bool = True


class Verification(ResponseBody):
    """What reading a stored cache to its end has shown. `bytes` were read and are sound: the blob, and the source where
    one is kept. A cache that is not `ok` is set aside and never used; `reason` is one word, `problem` is for people."""

    id: str
    object: Literal["cache.verification"] = "cache.verification"
    ok: bool
    bytes: int = 0
    reason: str | None = None
    problem: str | None = None


class ErrorBody(ResponseBody):
    """`code` is what programs decide by, `type` its group, `param` the field at fault, `message` for people.

    `miss_reason` says why a stored cache could not be used. `details` holds machine-readable facts, for example both
    fingerprints of a model_mismatch. Both are there only when they say something.
    """

    message: str
    type: str
    param: str | None = None
    code: str
    miss_reason: MissReason | None = None
    details: dict[str, Any] | None = None


class ErrorEnvelope(ResponseBody):
    error: ErrorBody


class RequestObject(ResponseBody):
    """A request that is worked on in the background. `cache_id` is set once it is done, `error` once it has failed.

    `cache_ids` are those of all levels, in their order; `cache_id` is the first of them.
    """

    id: str
    object: Literal["cache.request"] = "cache.request"
    state: RequestState
    cache_id: str | None = None
    cache_ids: list[str] = Field(default_factory=list)
    attempts: int = 0
    error: ErrorBody | None = None
    created_at: float | None = None
    updated_at: float | None = None


class PolicyEstimate(ResponseBody):
    """What one policy would do. `kept` entries stay per layer and KV head; `bytes_stored` is the blob's size by codec.

    `seconds` are for prefill and compression, without waiting and storing. `basis` says where they come from:
    `measured` on this policy's own compressions, on those of `other_policies`, or `assumed` from the model's size. A
    policy that refuses the document says why in `refused`, and has no numbers.
    """

    policy: str
    kept: int | None = None
    compression_ratio: float | None = None
    bytes_stored: dict[str, int] | None = None
    seconds: float | None = None
    basis: Literal["measured", "other_policies", "assumed"] | None = None
    refused: str | None = None


class EstimateObject(ResponseBody):
    """What creating a cache would take. `tokens` and `bytes_full` (the uncompressed KV) are exact.

    `measured_tokens`: how many tokens of documents the worker that answered has compressed since it began.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    layout: LayoutName
    tokens: int
    bytes_full: int
    measured_tokens: int
    policies: list[PolicyEstimate]


class Usage(ResponseBody):
    """`cache_read_tokens` are document tokens served from the shelf; `prefill_tokens` went through the model, counted
    in its forward; `completion_tokens` were generated."""

    cache_read_tokens: int
    prefill_tokens: int
    completion_tokens: int


class Comparison(ResponseBody):
    """What the full cache answered. `agreement` is the fraction of positions at which both answers have the same token,
    up to where the first of them ends; its end counts as a token."""

    text: str
    agreement: float


class AnswerObject(ResponseBody):
    """`cache_id` is the cache that answered. `recomputed` says why another one could not, where it was made again;
    `compare` is what the full cache says. Both are there only when they say something."""

    id: str
    object: Literal["answer"] = "answer"
    cache_id: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    load_ms: float
    policy: str
    compression_ratio: float
    compare: Comparison | None = None
    recomputed: MissReason | None = None


class AnswerList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[AnswerObject]


class AnswerDelta(ResponseBody):
    """One piece of a streamed answer. The pieces, joined, are the text of the answer that follows them."""

    object: Literal["answer.delta"] = "answer.delta"
    text: str


class ModelObject(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvshelf"
    max_tokens: int = 0
    default_layout: LayoutName | None = None
    fingerprint: str | None = None
    tokenizer: str | None = Field(None, description="digest of the tokenizer; empty where the model has none")
    dtype: str | None = None
    device: str | None = None


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class PolicyObject(ResponseBody):
    """`parameters` maps a name to its type, default, legal values and help. `measured` are rows of the quality bench on
    the bundled model: the share of exact answers where the full cache gives nearly all, and the bytes it took."""

    id: str
    object: Literal["policy"] = "policy"
    summary: str
    advice: str = ""
    source: str
    phase: str = "during"
    takes_budget: bool = True
    takes_questions: bool = False
    measured: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, dict[str, Any]]


class PolicyList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[PolicyObject]


class Allowance(ResponseBody):
    """How much a tenant may have of something, has, and may have besides. `limit` null: any number. `used` null: not
    counted, or the store does not say at the moment."""

    limit: int | None
    used: int | None
    left: int | None


class TenantAllowances(ResponseBody):
    """Of the caller's tenant: what is on the shelf, and what it asks of this front end, this very request included."""

    caches: Allowance
    bytes: Allowance
    open_requests: Allowance
    requests_per_minute: Allowance


class Limits(ResponseBody):
    """What one request may ask of this service, and the caller's tenant of all together."""

    object: Literal["limits"] = "limits"
    max_body_bytes: int
    max_import_bytes: int = 0
    max_prompts: int
    max_queued_requests: int
    upload_deadline_s: float
    request_deadline_s: float
    models: dict[str, int] = Field(description="longest document, question and answer together, in tokens, by model")
    tenant: TenantAllowances | None = None


class ReadyPart(ResponseBody):
    """One thing the service needs: the store, or the workers of a model."""

    name: str
    ready: bool
    reason: str = ""


class Readiness(ResponseBody):
    status: Literal["ready", "degraded"]
    parts: list[ReadyPart]
