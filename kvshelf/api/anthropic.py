"""The types of POST /v1/messages: Anthropic's request and response, plus `cache_id` and `cache`: a stored cache to ask,
or how the one that `cache_control` asks for is compressed.

The service accepts Anthropic's fields that it does not support only with a value that changes nothing, and refuses any
other. `temperature` is 0 by default, as in a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kvshelf.api.creation import CreateCache
from kvshelf.api.queries import Asking
from kvshelf.api.strict import (
    MAX_MESSAGES,
    CodecText,
    ErrorBody,
    MaxTokens,
    Message,
    ModelName,
    Ratio,
    RequestBody,
    ResponseBody,
    StopText,
    Temperature,
    Text,
    TopP,
    misuse,
    one_or_list,
    without_unsupported,
)

BETWEEN_BLOCKS: Final = "\n\n"
"""Between the texts of two blocks, and between a document and a question behind it: a text reads the same, wherever it
has cache_control."""

MAX_MARKS: Final = 4
MIN_CACHED_CHARACTERS: Final = 256
"""Of a text that becomes a cache: below, to prefill it takes less time than to find it."""

_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
    "top_k": (),
}
"""Anthropic's unsupported fields, each with the values besides null that change nothing."""


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


def _is_known(block: Any) -> Any:
    if isinstance(block, dict) and block.get("type") not in ("text", "document"):
        raise misuse("", f"a block of type {str(block.get('type'))!r:.40} is not supported; send text or document")
    return block


def _kind(block: Any) -> str:
    return f"({block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)})"


_Known = Annotated[TextBlock, Tag("(text)")] | Annotated[DocumentBlock, Tag("(document)")]
Block = Annotated[Annotated[_Known, Discriminator(_kind)], BeforeValidator(_is_known)]
_Blocks = Annotated[list[Block], Field(min_length=1, max_length=256, fail_fast=True), Tag("(list)")]
_Texts = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_is_known)]],
    Field(min_length=1, max_length=256, fail_fast=True),
    Tag("(list)"),
]
_Plain = Annotated[Text, Tag("(one)")]


def _blocks(content: str | Sequence[TextBlock | DocumentBlock] | None) -> list[TextBlock | DocumentBlock]:
    if content is None:
        return []
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else list(content)


def _joined(blocks: Sequence[TextBlock | DocumentBlock]) -> str:
    return BETWEEN_BLOCKS.join(block.plain for block in blocks)


class InputMessage(RequestBody):
    """One turn: a text, or blocks, which the model reads as one text."""

    role: Literal["user", "assistant"]
    content: Annotated[_Plain | _Blocks, Discriminator(one_or_list)]

    @property
    def blocks(self) -> list[TextBlock | DocumentBlock]:
        return _blocks(self.content)

    @property
    def plain(self) -> Message:
        return Message(role=self.role, content=_joined(self.blocks))


class Metadata(RequestBody):
    user_id: str | None = None


class CompressionChoice(RequestBody):
    """How a cache that `cache_control` asks for is compressed, as in a creation; by default nothing is lost."""

    policy: Annotated[str, Field(min_length=1, max_length=64)] = "full"
    policy_params: dict[str, Any] = Field(default_factory=dict, max_length=64)
    compression_ratio: Ratio | None = None
    codec: CodecText = "none"


class MessagesRequest(RequestBody):
    """Anthropic's body. What is asked is the stored cache `cache_id`, or the beginning of the conversation: the blocks
    of `system` and of the first message up to the last with `cache_control`, before the question. That is its last
    block. If they have none and a later block does, all blocks before the question count.

    The beginning is one document. A later `cache_control`, or that of the body, keeps the turn behind it. All that is
    kept lives for the longest `ttl` of the request, from its last use on.
    """

    model: ModelName
    max_tokens: MaxTokens
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[_Plain | _Texts, Discriminator(one_or_list)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    cache_id: str | None = None
    cache: CompressionChoice | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        return without_unsupported(data, _ASKS_NOTHING)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        roles = [message.role for message in self.messages]
        if roles[0] != "user" or roles[-1] != "user":
            raise misuse("messages", "the first message and the last must be the user's: kvshelf continues no answer")
        if len(self._marks) > MAX_MARKS:
            raise misuse("cache_control", f"{len(self._marks)} blocks have cache_control; at most {MAX_MARKS} may")
        if self.cache_id is None:
            self._require_beginning()
        elif self.cache is not None:
            raise misuse("cache", "the cache of cache_id is there already; leave cache out")
        return self

    def _require_beginning(self) -> None:
        if not self._marks:
            raise misuse(
                "cache_control",
                "this service answers from stored caches only: give a long block cache_control, or give cache_id",
            )
        if not self._before_question:
            raise misuse("cache_control", "nothing stands before the question; put the document in a block before it")
        if (length := len(_joined(self._beginning))) < MIN_CACHED_CHARACTERS:
            raise misuse(
                "cache_control",
                f"what is to be cached has {length} characters, and at least {MIN_CACHED_CHARACTERS} are needed; put "
                "cache_control on a longer block before the question",
            )

    @property
    def _before_question(self) -> list[TextBlock | DocumentBlock]:
        return [*_blocks(self.system), *self.messages[0].blocks[:-1]]

    @property
    def _beginning(self) -> list[TextBlock | DocumentBlock]:
        blocks = self._before_question
        marked = [at for at, block in enumerate(blocks, 1) if block.cache_control is not None]
        return blocks[: marked[-1]] if marked else blocks

    @property
    def _marks(self) -> list[CacheControl]:
        blocks = [*_blocks(self.system), *(block for message in self.messages for block in message.blocks)]
        found = [block.cache_control for block in blocks] + [self.cache_control]
        return [mark for mark in found if mark is not None]

    @property
    def _ttl_s(self) -> float | None:
        """How long what is kept lives from now on. None: nothing is kept."""
        return max((_TTL_S[mark.ttl] for mark in self._marks), default=None)

    @property
    def _keeps_turn(self) -> bool:
        """Whether question and answer are kept."""
        if self.cache_id is not None:
            return bool(self._marks)
        return len(self._marks) > sum(block.cache_control is not None for block in self._beginning)

    @property
    def creation(self) -> CreateCache:
        """The cache of the beginning."""
        choice = self.cache or CompressionChoice()
        document = _joined(self._beginning)
        lives: dict[str, Any] = {"ttl_s": self._ttl_s, "ttl_renew": True}
        return CreateCache(model=self.model, document=document, layout="chat", **lives, **choice.model_dump())

    @property
    def asking(self) -> Asking:
        """What is asked behind the cache."""
        return Asking(
            messages=self._asked,
            max_tokens=self.max_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=self.stop_sequences,
            store=self._keeps_turn,
            ttl_s=self._ttl_s if self._keeps_turn else None,
            ttl_renew=self._keeps_turn,
        )

    @property
    def _asked(self) -> list[Message]:
        if self.cache_id is not None:
            system = [Message(role="system", content=_joined(_blocks(self.system)))] if self.system else []
            return system + [message.plain for message in self.messages]
        first = [*_blocks(self.system), *self.messages[0].blocks][len(self._beginning) :]
        return [Message(role="user", content=_joined(first)), *(message.plain for message in self.messages[1:])]


class MessageUsage(ResponseBody):
    """Together all tokens of the conversation: `cache_read_input_tokens` came from the shelf,
    `cache_creation_input_tokens` were prefilled and kept, `input_tokens` prefilled and not kept."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerBlock(ResponseBody):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessageObject(ResponseBody):
    """Anthropic's message, plus `cache_id`, the cache that was asked, and `stored_cache_id` or `not_stored` where the
    turn was to be kept, as of an `AnswerObject`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    cache_id: str
    stored_cache_id: str | None = None
    not_stored: str | None = None


class MessageError(ResponseBody):
    """An error as Anthropic's API writes it: `type` of the error is Anthropic's, the other fields are kvshelf's."""

    type: Literal["error"] = "error"
    error: ErrorBody
    request_id: str
