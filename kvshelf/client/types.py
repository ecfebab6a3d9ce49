"""The types of the HTTP API, shared word for word by the service and the clients.

Requests are strict: an unknown field, "3" where 3 is meant, true where a number is meant, NaN, and a value outside its
bounds are refused, with the field named. Fields of the contract that this version cannot honour are refused too, never
ignored. Responses are read leniently, so that a client understands a newer service.

Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. The bases and shared
fields are in `strict`; chat completions, in OpenAI's shapes, in `openai`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvshelf.client.strict import (
    MAX_LABELS,
    MAX_MESSAGES,
    MAX_TTL_S,
    CodecText,
    FinishReason,
    LabelKey,
    LabelValue,
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
    misuse,
    unsupported,
)


class Message(RequestBody):
    """One turn of a conversation."""

    role: Role
    content: str


MessageList = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class CreateCache(RequestBody):
    """POST /v1/caches: compress a document once. Exactly one of `document`, `messages` and `token_ids` is required.

    `compression_ratio` is the fraction of entries REMOVED, `budget_tokens` the mean number of entries kept per layer
    and KV head. Without either, the policy's default applies.
    """

    document: str | None = Field(None, description="the document as text; special tokens in it are plain text")
    messages: MessageList | None = Field(None, description="a conversation prefix, for chat models")
    token_ids: list[TokenId] | None = Field(None, description="the document as token ids of the model")
    model: ModelName | None = Field(None, description="one of /v1/models; the first one served if absent")
    layout: LayoutName | None = Field(None, description="chat if the model has a chat template, else plain")
    policy: Annotated[str, Field(min_length=1, max_length=64)] = Field("keydiff", description="one of /v1/policies")
    policy_params: dict[str, Any] = Field(default_factory=dict, max_length=64)
    compression_ratio: Ratio | None = None
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    codec: CodecText = "none"
    levels: list[Ratio] | None = None
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = None
    expected_questions: list[Text] = Field(
        default_factory=list, max_length=256, description="guide the policies that score by the end of the prompt"
    )
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)] | None = Field(
        None, description="seconds until the cache expires"
    )
    expires_at: Annotated[float, Field(gt=0)] | None = Field(None, description="Unix seconds, instead of ttl_s")
    name: Annotated[str, Field(max_length=256)] = ""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=MAX_LABELS)
    keep_source: bool = False

    @field_validator("policy")
    @classmethod
    def _no_auto(cls, policy: str) -> str:
        if policy == "auto":
            raise unsupported('policy "auto" (choosing the policy for you)')
        return policy

    @field_validator("levels", "min_quality", "keep_source")
    @classmethod
    def _later(cls, value: Any) -> Any:
        if value not in (None, [], False):
            raise unsupported("this field")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("document", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} were given" if given else "none was given"
            raise misuse("document", f"exactly one of document, messages and token_ids is needed; {found}")
        if self.compression_ratio is not None and self.budget_tokens is not None:
            raise misuse("budget_tokens", "give compression_ratio or budget_tokens, not both")
        if self.ttl_s is not None and self.expires_at is not None:
            raise misuse("expires_at", "give ttl_s or expires_at, not both")
        return self


class Query(RequestBody):
    """POST /v1/caches/{id}/query: ask a stored cache. Exactly one of `prompt` (one or several) and `messages`."""

    prompt: Prompts | None = None
    messages: MessageList | None = None
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool = False
    compare: bool = False
    on_miss: Literal["error", "recompute"] = "error"

    @field_validator("compare", "on_miss")
    @classmethod
    def _later(cls, value: Any) -> Any:
        if value in (True, "recompute"):
            raise unsupported(f"the value {value!r}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            found = "neither was given" if self.prompt is None else "both were given"
            raise misuse("prompt", f"exactly one of prompt and messages is needed; {found}")
        if self.stream and isinstance(self.prompt, list):
            raise misuse("stream", "several prompts cannot be streamed in one call; send one prompt per stream")
        return self


class ListCaches(BaseModel):
    """GET /v1/caches: the filters. Not strict, because in a query string every value is text.

    `labels` are sent as `label.<key>=<value>`, one parameter each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    document_id: str | None = None
    model: str | None = None
    policy: str | None = None
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=MAX_LABELS)
    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after: str | None = Field(None, description="the last id of the page before")


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


class CacheObject(ResponseBody):
    """One stored cache. `existing` is true in the answer to a POST that found the cache on the shelf."""

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
    quality: dict[str, Any] | None = None
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    pinned: bool = False
    name: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    has_source: bool = False
    timings: Timings = Timings()
    existing: bool = False


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
    """A request that is worked on in the background. `cache_id` is set once it is done, `error` once it has failed."""

    id: str
    object: Literal["cache.request"] = "cache.request"
    state: RequestState
    cache_id: str | None = None
    attempts: int = 0
    error: ErrorBody | None = None
    created_at: float | None = None
    updated_at: float | None = None


class Usage(ResponseBody):
    """`cache_read_tokens` are document tokens served from the shelf; `prefill_tokens` went through the model, counted
    in its forward; `completion_tokens` were generated."""

    cache_read_tokens: int
    prefill_tokens: int
    completion_tokens: int


class AnswerObject(ResponseBody):
    id: str
    object: Literal["answer"] = "answer"
    cache_id: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    load_ms: float
    policy: str
    compression_ratio: float


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


class Limits(ResponseBody):
    """What one request may ask of this service."""

    object: Literal["limits"] = "limits"
    max_body_bytes: int
    max_prompts: int
    max_queued_requests: int
    upload_deadline_s: float
    request_deadline_s: float
    models: dict[str, int] = Field(description="longest document, question and answer together, in tokens, by model")


class ReadyPart(ResponseBody):
    """One thing the service needs: the store, or the workers of a model."""

    name: str
    ready: bool
    reason: str = ""


class Readiness(ResponseBody):
    status: Literal["ready", "degraded"]
    parts: list[ReadyPart]
