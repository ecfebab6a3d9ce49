"""The types of /v1/responses: OpenAI's request and response, plus what `kvshelf.api.openai` adds to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from kvshelf.api import shapes, strict
from kvshelf.api.openai import DEFAULT_MAX_TOKENS, OpenAIRequest
from kvshelf.api.queries import Asking, Linked, Remade, Source
from kvshelf.api.strict import misuse
from kvshelf.api.tools import (
    MAX_TOOLS,
    MODE_OR_ONE,
    CalledFunction,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolAsking,
    ToolCall,
    ToolTurn,
    require_tools,
    require_unshaped,
)

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
"""OpenAI's unsupported fields, each with the values besides null that change nothing."""

LOGPROBS: Final = "message.output_text.logprobs"

Include = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""All but the first belong to items that no answer has, and have no effect."""


class ResponsePart(strict.RequestBody):
    """A text. `annotations` and `logprobs` are those of an answer that is sent back, and have no effect."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


_Parts = Annotated[
    list[Annotated[ResponsePart, strict.require_type("input_text", "output_text", what="a part {}")]],
    Field(min_length=1, max_length=256, fail_fast=True),
    Tag("(list)"),
]
_Content = Annotated[Annotated[str, Tag("(one)")] | _Parts, strict.ONE_OR_LIST]


def _plain(content: str | list[ResponsePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Item(strict.RequestBody):
    """`id` and `status` are those of an item that is sent back, and have no effect."""

    id: str | None = None
    status: str | None = None


class ResponseItem(_Item):
    """A message. `phase` is that of an answer that is sent back, and has no effect."""

    type: Literal["message"] = "message"
    role: Literal[strict.Role, "developer"]
    content: _Content
    phase: str | None = None

    def turn(self) -> ToolTurn:
        return ToolTurn(role="system" if self.role == "developer" else self.role, content=_plain(self.content))


_CallId = Annotated[str, Field(min_length=1, max_length=128)]


class CallItem(_Item, CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: _CallId

    def call(self) -> ToolCall:
        function = CalledFunction.model_construct(name=self.name, arguments=self.arguments)
        return ToolCall(id=self.call_id, function=function)


class ResultItem(_Item):
    """What the caller's function gave for a call."""

    type: Literal["function_call_output"]
    call_id: _CallId
    output: _Content

    def turn(self) -> ToolTurn:
        return ToolTurn(role="tool", content=_plain(self.output), tool_call_id=self.call_id)


class ReasoningPart(strict.RequestBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Thoughts of an earlier answer, sent back with the answer that follows them."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=256, fail_fast=True)] | None = None
    encrypted_content: None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


_ITEM_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")
_AnyItem = Annotated[
    Annotated[ResponseItem, Tag("(message)")]
    | Annotated[CallItem, Tag("(function_call)")]
    | Annotated[ResultItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(lambda item: strict.type_tag(item, default="message")),
    strict.require_type(*_ITEM_TYPES, what="an item {}", default="message"),
]
_Items = Annotated[list[_AnyItem], Field(min_length=1, max_length=strict.MAX_MESSAGES, fail_fast=True), Tag("(list)")]


def _turns(items: Sequence[ResponseItem | CallItem | ResultItem | ReasoningItem]) -> list[ToolTurn]:
    """The turns of a conversation. Thoughts, text and calls of one answer are one turn."""
    turns: list[ToolTurn] = []
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thought += item.text
            continue
        if isinstance(item, CallItem):
            answered = bool(turns) and turns[-1].role == "assistant" and not thought
            answer = turns.pop() if answered else ToolTurn(role="assistant", content="")
            turn = answer.model_copy(update={"tool_calls": [*answer.tool_calls, item.call()]})
        else:
            turn = item.turn()
        if thought and turn.role == "assistant":
            turn = turn.model_copy(update={"reasoning_content": thought})
            thought = ""
        turns.append(turn)
    return turns


class Reasoning(strict.RequestBody):
    """`effort`: as `reasoning_effort` of chat completions. `summary` has no effect: an answer has whole thoughts."""

    effort: shapes.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(Function):
    """A function without the wrapping of chat completions."""

    type: Literal["function"]

    def wrapped(self) -> Tool:
        fields = {name: getattr(self, name) for name in Function.model_fields}
        return Tool(type="function", function=Function.model_construct(**fields))


class FunctionChoice(NamedFunction):
    """One function by name, without the wrapping of chat completions."""

    type: Literal["function"]

    def wrapped(self) -> NamedTool:
        return NamedTool(type="function", function=NamedFunction(name=self.name))


_Tools = Annotated[
    list[Annotated[FunctionTool, strict.require_type("function", what="a tool {}")]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
_Mode = Literal["none", "auto", "required"]
_Choice = Annotated[
    Annotated[_Mode, Tag("(mode)")] | Annotated[FunctionChoice, Tag("(one)")],
    MODE_OR_ONE,
    strict.require_type("function", what="a choice {}"),
]


class FlatText(shapes.AnyText):
    PARAM = "text.format"


class FlatObject(shapes.AnyObject):
    PARAM = "text.format"


class _Wrapped(shapes.OfSchema):
    PARAM = "text.format"


class FlatSchema(shapes.JsonSchema):
    """A schema as this API has it, without the wrapping of chat completions."""

    type: Literal["json_schema"]

    def wrapped(self) -> shapes.OfSchema:
        fields = {name: getattr(self, name) for name in shapes.JsonSchema.model_fields}
        return _Wrapped(type="json_schema", json_schema=shapes.JsonSchema.model_construct(**fields))


_Format = (
    Annotated[FlatText, Tag("(text)")]
    | Annotated[FlatObject, Tag("(json_object)")]
    | Annotated[FlatSchema, Tag("(json_schema)")]
)


class TextOptions(strict.RequestBody):
    """What the answer must be. `verbosity` is accepted with the value that changes nothing."""

    format: Annotated[_Format, Discriminator(shapes.kind_of)] | None = None
    verbosity: Literal["medium"] | None = None


class ObfuscationOptions(strict.RequestBody):
    include_obfuscation: bool = False


class ResponsesRequest(OpenAIRequest):
    """OpenAI's body plus the stored cache to ask: `cache_id`, `cache_ids`, or what `previous_response_id` kept. By
    default question and answer are kept, where one whole cache is asked with a key that may write; `store: false` keeps
    nothing."""

    NAMES_CACHE: ClassVar[tuple[str, ...]] = (*OpenAIRequest.NAMES_CACHE, "previous_response_id")

    model_config = ConfigDict(
        json_schema_extra=strict.one_of(cache_id="string", cache_ids="array", previous_response_id="string")
    )

    input: Annotated[Annotated[strict.Text, Tag("(one)")] | _Items, strict.ONE_OR_LIST]
    instructions: strict.Text | None = None
    max_output_tokens: strict.MaxTokens | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    stream_options: ObfuscationOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: shapes.TemplateKwargs | None = None
    text: TextOptions | None = None
    grammar: shapes.Grammar | None = None
    choices: shapes.Choices | None = None
    tools: _Tools | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    top_logprobs: shapes.TopLogprobs | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        return strict.without_unsupported(data, _ASKS_NOTHING)

    @property
    def response_format(self) -> shapes.AnyText | shapes.AnyObject | shapes.OfSchema | None:
        """`text.format` as a chat completion has it."""
        flat = None if self.text is None else self.text.format
        return flat.wrapped() if isinstance(flat, FlatSchema) else flat

    @property
    def logprobs(self) -> bool:
        """Whether the answer is to tell how likely its tokens were."""
        return LOGPROBS in (self.include or ())

    @property
    def _items(self) -> list[ResponseItem | CallItem | ResultItem | ReasoningItem]:
        return [ResponseItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def _wrapped_choice(self) -> _Mode | NamedTool:
        choice = self.tool_choice or "auto"
        return choice.wrapped() if isinstance(choice, FunctionChoice) else choice

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        shapes.require_one_shape(self)
        if self.top_logprobs and not self.logprobs:
            raise misuse("top_logprobs", f"top_logprobs is only allowed with include: [{LOGPROBS!r}]")
        calls = any(isinstance(item, CallItem | ResultItem) for item in self._items)
        require_tools([tool.wrapped() for tool in self.tools or ()], self._wrapped_choice, calls=calls)
        require_unshaped(self, self._wrapped_choice)
        self._require_calls()
        return self

    def _require_calls(self) -> None:
        """Refuse a result without its call before it. The calls of an earlier response are not in this body."""
        call_ids = set()
        for place, item in enumerate(self._items):
            if isinstance(item, CallItem):
                call_ids.add(item.call_id)
            elif isinstance(item, ResultItem) and item.call_id not in call_ids and self.previous_response_id is None:
                raise misuse(
                    f"input[{place}].call_id",
                    f"there is no call {item.call_id[:80]!r} before its output; send the function_call, too, or give "
                    "the previous_response_id of the response that made it",
                )

    def asking(self, *, may_write: bool) -> Asking:
        """The question that the body asks. may_write: whether its caller may keep answers."""
        keeps = may_write and self.cache_ids is None and self.select is None and self.suffix is None
        system = [ToolTurn(role="system", content=self.instructions)] if self.instructions else []
        turns = system + _turns(self._items)
        limit = self.max_output_tokens or DEFAULT_MAX_TOKENS
        fields: dict[str, Any] = {
            "store": keeps if self.store is None else self.store,
            "response_format": self.response_format,
            "grammar": self.grammar,
            "choices": self.choices,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        if not self.tools:
            messages = [strict.Message.model_validate(turn.template_fields) for turn in turns]
            return self._asking(messages, limit, **fields)
        tools = [tool.wrapped() for tool in self.tools]
        fields |= {"tools": tools, "tool_choice": self._wrapped_choice}
        fields["parallel_tool_calls"] = self.parallel_tool_calls is not False
        return self._asking(turns, limit, ToolAsking, **fields)


class OutputText(strict.ResponseBody):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[shapes.Logprob] = Field(default_factory=list)


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(strict.ResponseBody):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(strict.ResponseBody):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputReasoning(strict.ResponseBody):
    """What the model thought before it answered."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningPart]


class InputTokensDetails(strict.ResponseBody):
    """`cached_tokens` came from the shelf, `cache_write_tokens` were prefilled and kept."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(strict.ResponseBody):
    reasoning_tokens: int = 0


class ResponseUsage(strict.ResponseBody):
    """OpenAI's, plus `prefill_token_equivalents` and `prefill_token_equivalents_saved`, as of a query's usage."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int
    prefill_token_equivalents: float | None = None
    prefill_token_equivalents_saved: float | None = None


class IncompleteDetails(strict.ResponseBody):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(strict.ResponseBody):
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
    output: list[OutputReasoning | OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: _Choice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    sources: list[Source] | None = None
    exact: Literal[False] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None
    linked: Linked | None = None


class ResponseDeleted(strict.ResponseBody):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
