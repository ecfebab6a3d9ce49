"""The types of POST /v1/responses: OpenAI's request and response, plus what `kvshelf.api.openai` adds to completions.

Fields that the service does not support are accepted only with a value that changes nothing. `temperature` is 0 by
default, and an answer ends after 256 tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from kvshelf.api.openai import DEFAULT_MAX_TOKENS, OpenAIRequest
from kvshelf.api.queries import Asking, Remade, Source
from kvshelf.api.shapes import AnyObject, AnyText, Choices, Grammar, JsonSchema, OfSchema, kind_of, require_one_shape
from kvshelf.api.strict import (
    MAX_MESSAGES,
    MaxTokens,
    Message,
    RequestBody,
    ResponseBody,
    Role,
    Text,
    misuse,
    one_of,
    one_or_list,
    without_unsupported,
)

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""OpenAI's unsupported fields, each with the values besides null that change nothing."""

_TEXTS: Final = ("input_text", "output_text")


def _is_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in _TEXTS:
        raise misuse("", f"a part of type {str(part.get('type'))!r:.40} is not supported; send {' or '.join(_TEXTS)}")
    return part


def _is_message(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type", "message") != "message":
        raise misuse("", f"an item of type {str(item['type'])!r:.40} is not supported; send messages")
    return item


class ResponsePart(RequestBody):
    """A text. `annotations` and `logprobs` are those of an answer that is sent back, and have no effect."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


_Parts = Annotated[
    list[Annotated[ResponsePart, BeforeValidator(_is_text)]],
    Field(min_length=1, max_length=256, fail_fast=True),
    Tag("(list)"),
]


class ResponseItem(RequestBody):
    """One turn. `id`, `status` and `phase` are those of an answer that is sent back, and have no effect."""

    type: Literal["message"] = "message"
    role: Role | Literal["developer"]
    content: Annotated[Annotated[str, Tag("(one)")] | _Parts, Discriminator(one_or_list)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def plain(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


_Items = Annotated[
    list[Annotated[ResponseItem, BeforeValidator(_is_message)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    Tag("(list)"),
]


class FlatSchema(JsonSchema):
    """A schema as this API has it, without the wrapping of chat completions."""

    type: Literal["json_schema"]


_Plain = Annotated[AnyText, Tag("(text)")] | Annotated[AnyObject, Tag("(json_object)")]
_Format = _Plain | Annotated[FlatSchema, Tag("(json_schema)")]


class TextOptions(RequestBody):
    """What the answer must be. `verbosity` is accepted with the value that changes nothing."""

    format: Annotated[_Format, Discriminator(kind_of)] | None = None
    verbosity: Literal["medium"] | None = None


class ObfuscationOptions(RequestBody):
    include_obfuscation: bool = False


class ResponsesRequest(OpenAIRequest):
    """OpenAI's body plus the stored cache to ask: `cache_id`, `cache_ids`, or what `previous_response_id` kept. By
    default question and answer are kept, where one whole cache is asked with a key that may write; `store: false` keeps
    nothing."""

    NAMES_CACHE: ClassVar[tuple[str, ...]] = (*OpenAIRequest.NAMES_CACHE, "previous_response_id")

    model_config = ConfigDict(
        json_schema_extra=one_of(cache_id="string", cache_ids="array", previous_response_id="string")
    )

    input: Annotated[Annotated[Text, Tag("(one)")] | _Items, Discriminator(one_or_list)]
    instructions: Text | None = None
    max_output_tokens: MaxTokens = DEFAULT_MAX_TOKENS
    previous_response_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    stream_options: ObfuscationOptions | None = None
    text: TextOptions | None = None
    grammar: Grammar | None = None
    choices: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        return without_unsupported(data, _ASKS_NOTHING)

    @property
    def response_format(self) -> AnyText | AnyObject | OfSchema | None:
        """`text.format` as a chat completion has it."""
        wanted = None if self.text is None else self.text.format
        if not isinstance(wanted, FlatSchema):
            return wanted
        fields = wanted.model_dump(exclude={"type"})
        return OfSchema(type="json_schema", json_schema=JsonSchema(**fields))

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        require_one_shape(self)
        return self

    def asking(self, *, may_write: bool) -> Asking:
        """The question that the body asks. may_write: whether its caller may keep answers."""
        keeps = may_write and self.cache_ids is None and self.select is None and self.suffix is None
        store = keeps if self.store is None else self.store
        given = [Message(role="user", content=self.input)] if isinstance(self.input, str) else None
        asked = given or [item.plain() for item in self.input if isinstance(item, ResponseItem)]
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        shape: dict[str, Any] = {
            "response_format": self.response_format,
            "grammar": self.grammar,
            "choices": self.choices,
        }
        return self._asking(system + asked, self.max_output_tokens, store=store, **shape)


class OutputText(ResponseBody):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(ResponseBody):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class InputTokensDetails(ResponseBody):
    """`cached_tokens` came from the shelf, `cache_write_tokens` were prefilled and kept."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int = 0


class ResponseUsage(ResponseBody):
    """OpenAI's, plus `prefill_token_equivalents` and `prefill_token_equivalents_saved`, as of a query's usage."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int
    prefill_token_equivalents: float | None = None
    prefill_token_equivalents_saved: float | None = None


class IncompleteDetails(ResponseBody):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(ResponseBody):
    """OpenAI's, plus what a `ChatCompletion` has beside OpenAI's fields."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    sources: list[Source] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None
