"""The blocks of Anthropic's messages: texts, documents, calls of tools and their results; and the tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from kvshelf.api import tools
from kvshelf.api.strict import (
    ONE_OR_LIST,
    AnyFields,
    RequestBody,
    Role,
    Text,
    ToolName,
    WrittenObject,
    misuse,
    require_type,
    type_tag,
    without_unsupported,
)

BETWEEN_BLOCKS: Final = "\n\n"
"""Between two blocks, and between a document and its question: a text reads the same, wherever its cache_control is."""

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
}
"""A tool's unsupported fields, each with the values besides null that change nothing."""

CallId = Annotated[str, Field(min_length=1, max_length=128)]


class CacheControl(RequestBody):
    """The conversation up to this block is kept, for `ttl` from each use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class NoCitations(RequestBody):
    enabled: Literal[False] = False


class TextBlock(RequestBody):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: None = None

    @property
    def plain(self) -> str:
        return self.text


def _is_text(source: Any) -> Any:
    if isinstance(source, dict) and source.get("type") != "text":
        raise misuse("", f"a document of source type {str(source.get('type'))!r:.40} is not supported; send its text")
    return source


class TextSource(RequestBody):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text


class DocumentBlock(RequestBody):
    """A text with what is known about it; the model reads `title`, `context` and the text, each on lines of its own."""

    type: Literal["document"]
    source: Annotated[TextSource, BeforeValidator(_is_text)]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None
    citations: NoCitations | None = None

    @property
    def plain(self) -> str:
        return "\n".join(text for text in (self.title, self.context, self.source.data) if text)


class DirectCaller(RequestBody):
    type: Literal["direct"]


class ToolUseBlock(RequestBody):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: WrittenObject
    caller: DirectCaller | None = None
    toolset_name: None = None
    cache_control: CacheControl | None = None

    @property
    def call(self) -> tools.ToolCall:
        """In OpenAI's shape."""
        return tools.ToolCall(
            id=self.id, function=tools.CalledFunction.model_construct(name=self.name, arguments=self.input)
        )


class ThinkingBlock(RequestBody):
    """Thoughts of an earlier answer, sent back. `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: None = None

    @property
    def plain(self) -> str:
        return self.thinking


MAX_BLOCKS: Final = 256
_WHAT: Final = "a block {} here"
_TextList = Annotated[
    list[Annotated[TextBlock, require_type("text", what=_WHAT)]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    Tag("(list)"),
]
Texts = Annotated[Annotated[Text, Tag("(one)")] | Annotated[_TextList, Field(min_length=1)], ONE_OR_LIST]


class ToolResultBlock(RequestBody):
    """What a tool returned. With `is_error` the model reads it behind the word Error."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[Annotated[str, Tag("(one)")] | _TextList, ONE_OR_LIST] = ""
    is_error: bool = False
    toolset_name: None = None
    cache_control: CacheControl | None = None

    @property
    def plain(self) -> str:
        text = self.content if isinstance(self.content, str) else joined(self.content)
        return f"Error: {text}" if self.is_error else text


AnyBlock = TextBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_KnownBlock = (
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[DocumentBlock, Tag("(document)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")]
)
_Block = Annotated[
    Annotated[_KnownBlock, Discriminator(type_tag)],
    require_type("text", "document", "thinking", "tool_use", "tool_result", what=_WHAT),
]
_Blocks = Annotated[list[_Block], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True), Tag("(list)")]


def blocks_of(content: str | Sequence[AnyBlock] | None) -> list[AnyBlock]:
    """A text is one block."""
    if content is None:
        return []
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else list(content)


def joined(blocks: Iterable[AnyBlock]) -> str:
    """The texts of blocks as one; calls and thoughts have none."""
    return BETWEEN_BLOCKS.join(block.plain for block in blocks if not isinstance(block, ToolUseBlock | ThinkingBlock))


_NOT_OF: Final = {"user": ("tool_use", "thinking"), "assistant": ("tool_result", "document")}


class InputMessage(RequestBody):
    """One turn: a text, or blocks, whose texts the model reads as one."""

    role: Literal["user", "assistant"]
    content: Annotated[Annotated[Text, Tag("(one)")] | _Blocks, ONE_OR_LIST]

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        wrong = next((block.type for block in self.blocks if block.type in _NOT_OF[self.role]), None)
        if wrong is not None:
            raise misuse("messages", f"a message of role {self.role} has a block of type {wrong}, which it cannot have")
        return self

    @property
    def blocks(self) -> list[AnyBlock]:
        return blocks_of(self.content)


Turn = tuple[Role, list[AnyBlock]]


def as_turns(turns: Iterable[Turn]) -> list[tools.ToolTurn]:
    """The turns of a conversation in OpenAI's shape. Raises for a call without its result in the next turn, and for a
    result without call."""
    converted: list[tools.ToolTurn] = []
    called: list[str] = []
    for role, blocks in turns:
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        answers = [result.tool_use_id for result in results]
        if sorted(answers) != sorted(called):
            raise misuse(
                "messages",
                f"the tool_result blocks answer {', '.join(answers) or 'no tool_use'}, and the turn before them has "
                f"{', '.join(called) or 'no tool_use'}; answer each tool_use once, in the next message",
            )
        if results != blocks[: len(results)]:
            raise misuse(
                "messages", "a text stands before a tool_result; the tool_result blocks of a message come first"
            )
        converted += [
            tools.ToolTurn(role="tool", content=item.plain, tool_call_id=item.tool_use_id) for item in results
        ]
        calls = [block.call for block in blocks if isinstance(block, ToolUseBlock)]
        called = [call.id for call in calls]
        if rest := [block for block in blocks if not isinstance(block, ToolResultBlock)]:
            thought = "".join(block.thinking for block in rest if isinstance(block, ThinkingBlock))
            converted.append(
                tools.ToolTurn(role=role, content=joined(rest), tool_calls=calls, reasoning_content=thought or None)
            )
    return converted


def _is_of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise misuse("tools", 'an input_schema is that of an object; give it "type": "object"')
    return schema


class CustomTool(RequestBody):
    """A tool that the caller's program runs. `strict` has no effect: an `input` that `tool_choice` asks for always fits
    `input_schema`. Nor has `cache_control`: the tools' text stands behind the cache."""

    name: ToolName
    input_schema: Annotated[AnyFields, AfterValidator(_is_of_object)]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") not in (None, "custom"):
            kind = f"{data['type']!r:.60}"
            raise misuse(
                "tools", f"a tool of type {kind} is not supported; give a name, a description and an input_schema"
            )
        return without_unsupported(data, _ASKS_NOTHING)

    @property
    def plain(self) -> tools.Tool:
        """In OpenAI's shape."""
        function = tools.Function.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema
        )
        return tools.Tool(type="function", function=function)


CustomTools = Annotated[list[CustomTool], Field(max_length=tools.MAX_TOOLS, fail_fast=True)]


class CustomToolChoice(RequestBody):
    """`auto`: the model may call tools; `any`: it must call one; `tool`: it must call the one with `name`; `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise misuse("tool_choice", "tool_choice has a name if its type is tool, and only then")
        return self

    @property
    def plain(self) -> tools.ToolChoice:
        """In OpenAI's shape."""
        if self.name is not None:
            return tools.NamedTool(type="function", function=tools.NamedFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"
