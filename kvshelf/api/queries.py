"""The types of asking a stored cache: the question and its answers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from kvshelf.api.strict import (
    FinishReason,
    ListBody,
    MaxTokens,
    MessageList,
    MissReason,
    Prompts,
    RequestBody,
    ResponseBody,
    Seed,
    Stops,
    Temperature,
    TopP,
    misuse,
    one_of,
)


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
    compare: bool = Field(False, description="also answer from the full cache; needs it stored, or the source kept")
    on_miss: Literal["error", "recompute"] = Field(
        "error", description="recompute: remake a cache that cannot be used from its kept source"
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


class Usage(ResponseBody):
    """`cache_read_tokens`: document tokens served from the shelf. `read_tokens`: stored entries that a token of the
    answer reads, of a KV head; the mean over layers and heads. `prefill_tokens`: tokens that went through the model,
    counted in its forward. `completion_tokens`: generated tokens."""

    cache_read_tokens: int
    read_tokens: int
    prefill_tokens: int
    completion_tokens: int


class Comparison(ResponseBody):
    """The answer of the full cache. `agreement` is the fraction of positions at which both answers have the same token,
    up to the end of the shorter one; that end counts as a token."""

    text: str
    agreement: float


class AnswerObject(ResponseBody):
    """`cache_id` is the cache that answered. If it replaces a cache that could not be used, `recomputed` says why.
    `compare` is the answer of the full cache. Both are present only if they apply."""

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


class AnswerList(ListBody):
    data: list[AnswerObject]


class Source(ResponseBody):
    """`share`: of the attention that the question gave to documents, the part that went to this one: a mean over
    layers, heads and the question's tokens. The shares of an answer add up to 1."""

    cache_id: str
    share: float


class AnswerDelta(ResponseBody):
    """One piece of a streamed answer. The joined pieces are the text of the answer that follows."""

    object: Literal["answer.delta"] = "answer.delta"
    text: str
