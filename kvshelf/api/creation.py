"""The types of creating a cache: what is asked for, what it would take, and the request that is worked on meanwhile."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from kvshelf.api.errors import ErrorBody
from kvshelf.api.strict import (
    MAX_LEVELS,
    CacheName,
    CodecText,
    ExpiresAt,
    Labels,
    LayoutName,
    MessageList,
    ModelName,
    Ratio,
    RequestBody,
    RequestState,
    ResponseBody,
    Text,
    TokenId,
    Ttl,
    misuse,
    one_of,
    require_one_document,
    require_one_expiry,
)

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
        require_one_expiry(self.ttl_s, self.expires_at)
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
        require_one_document(self)
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

    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(  # type: ignore[assignment]  # wider
        None, description="one of /v1/policies, or auto; all of them if absent"
    )
    codec: CodecText | None = Field(None, description="as of a creation; the five codecs if absent")  # type: ignore[assignment]


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
