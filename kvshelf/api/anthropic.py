"""The types of POST /v1/messages and its count_tokens: Anthropic's, plus `cache_id` and `cache` of kvshelf."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from kvshelf.api import anthropic_blocks, strict
from kvshelf.api.creation import CreateCache
from kvshelf.api.queries import Asking
from kvshelf.api.shapes import JsonSchema, OfSchema
from kvshelf.api.strict import misuse
from kvshelf.api.tools import Tool, ToolAsking, ToolChoice, ToolTurn, require_tools

MAX_MARKS: Final = 4
MIN_CACHED_CHARACTERS: Final = 256
"""Of a text that becomes a cache: below, to prefill it takes less time than to find it."""

_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "top_k": (),
}
"""Anthropic's unsupported fields, each with the values besides null that change nothing."""


class Metadata(strict.RequestBody):
    user_id: str | None = None


class CompressionChoice(strict.RequestBody):
    """How a cache that `cache_control` asks for is compressed, as in a creation; by default nothing is lost."""

    policy: Annotated[str, Field(min_length=1, max_length=64)] = "full"
    policy_params: strict.AnyFields = Field(default_factory=dict, max_length=64)
    compression_ratio: strict.Ratio | None = None
    codec: strict.CodecText = "none"


class OutputFormat(strict.RequestBody):
    type: Literal["json_schema"]
    schema_: strict.AnyFields = Field(alias="schema")


class OfOutputSchema(OfSchema):
    PARAM: ClassVar[str] = "output_config.format"


class OutputConfig(strict.RequestBody):
    """`format`: the text of the answer is JSON that fits its schema."""

    format: OutputFormat | None = None
    effort: None = None


class Thinking(strict.RequestBody):
    """Whether the model thinks before it answers, where its chat template can turn that on and off. `budget_tokens` and
    `display` have no effect: thoughts count for `max_tokens`, and the answer has all of them."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def query_fields(self) -> dict[str, Any]:
        return {"reasoning_effort": "none" if self.type == "disabled" else "medium"}


class CountTokensRequest(strict.RequestBody):
    """Anthropic's body of `count_tokens`, plus `cache_id`: a stored cache that the conversation begins with."""

    model: strict.ModelName
    messages: Annotated[
        list[anthropic_blocks.InputMessage], Field(min_length=1, max_length=strict.MAX_MESSAGES, fail_fast=True)
    ]
    system: anthropic_blocks.Texts | None = None
    tools: anthropic_blocks.CustomTools | None = None
    tool_choice: anthropic_blocks.CustomToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: anthropic_blocks.CacheControl | None = None
    cache_id: str | None = None
    thinking: Thinking | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("thread") is not None:
            # By these details Anthropic's client knows that it must send whole conversations.
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise misuse("thread", "thread is not supported; send the whole conversation", **details)
        return strict.without_unsupported(data, _ASKS_NOTHING)

    @model_validator(mode="after")
    def _conversation_fits(self) -> Self:
        roles = [message.role for message in self.messages]
        if roles[0] != "user" or roles[-1] != "user":
            raise misuse("messages", "the first message and the last must be the user's: kvshelf continues no answer")
        if len(self._marks) > MAX_MARKS:
            raise misuse("cache_control", f"{len(self._marks)} blocks have cache_control; at most {MAX_MARKS} may")
        calls = any(turn.role == "tool" or turn.tool_calls for turn in self._question_turns)
        require_tools(self._tools, self._tool_choice, calls=calls)
        if self._response_format is not None and self._tool_choice not in ("auto", "none"):
            param = OfOutputSchema.PARAM
            raise misuse(param, f"tool_choice says what the answer must be; leave {param} out")
        return self

    @property
    def document(self) -> str | None:
        """The text of the cache that this request makes or finds; None if it makes none."""
        return anthropic_blocks.joined(self._beginning) or None

    @property
    def asking(self) -> Asking:
        """The question, behind the cache if there is one."""
        return self._asking(max_tokens=strict.MAX_TOKENS)

    def _asking(self, **fields: Any) -> Asking:
        """fields: of an `Asking`, on how the answer is made."""
        fields["response_format"] = self._response_format
        fields |= {} if self.thinking is None else self.thinking.query_fields
        turns = self._question_turns
        if not self.tools:
            return Asking(messages=[strict.Message.model_validate(turn.template_fields) for turn in turns], **fields)
        parallel = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        return ToolAsking(
            messages=turns, tools=self._tools, tool_choice=self._tool_choice, parallel_tool_calls=parallel, **fields
        )

    @property
    def _question_turns(self) -> list[ToolTurn]:
        turns = self._turns
        system = anthropic_blocks.blocks_of(self.system)
        if self.cache_id is None:
            turns[0] = ("user", [*system, *turns[0][1]][len(self._beginning) :])
        elif system:
            turns.insert(0, ("system", system))
        return anthropic_blocks.as_turns(turns)

    @property
    def _turns(self) -> list[anthropic_blocks.Turn]:
        """The conversation. Messages of one role in a row are one turn."""
        runs = groupby(self.messages, key=lambda message: message.role)
        return [(role, [block for message in run for block in message.blocks]) for role, run in runs]

    @property
    def _beginning(self) -> list[anthropic_blocks.AnyBlock]:
        """The blocks of the cache that `cache_control` asks for."""
        if self.cache_id is not None or not self._marks:
            return []
        blocks = self._before_question
        marked = [at for at, block in enumerate(blocks, 1) if block.cache_control is not None]
        return blocks[: marked[-1]] if marked else blocks

    @property
    def _before_question(self) -> list[anthropic_blocks.AnyBlock]:
        return [*anthropic_blocks.blocks_of(self.system), *self._turns[0][1][:-1]]

    @property
    def _marks(self) -> list[anthropic_blocks.CacheControl]:
        blocks = [*anthropic_blocks.blocks_of(self.system)]
        blocks += [block for message in self.messages for block in message.blocks]
        marks = [block.cache_control for block in blocks] + [self.cache_control]
        return [mark for mark in marks if mark is not None]

    @property
    def _tools(self) -> list[Tool]:
        return [tool.plain for tool in self.tools or ()]

    @property
    def _tool_choice(self) -> ToolChoice:
        return "auto" if self.tool_choice is None else self.tool_choice.plain

    @property
    def _response_format(self) -> OfSchema | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = JsonSchema.model_construct(name="output_config", schema_=self.output_config.format.schema_)
        return OfOutputSchema(type="json_schema", json_schema=schema)


class MessagesRequest(CountTokensRequest):
    """Anthropic's body. It asks the stored cache `cache_id`, or the beginning of the conversation: the blocks of
    `system` and of the user's first turn up to the last with `cache_control`, before the question, which is the last
    block of this turn. If they have none and a later block does, all blocks before the question count.

    The beginning is one document. A later `cache_control`, or that of the body, keeps the turn behind it. All that is
    kept lives for the longest `ttl` of the request, from its last use on.
    """

    max_tokens: Annotated[int, Field(ge=0, le=strict.MAX_TOKENS)] = Field(
        description="0: the cache is made, and nothing is said"
    )
    stop_sequences: Annotated[list[strict.StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool = False
    temperature: strict.Temperature | None = None
    top_p: strict.TopP | None = None
    metadata: Metadata | None = None
    cache: CompressionChoice | None = None
    conversation: strict.Conversation | None = None

    @model_validator(mode="after")
    def _asks_a_cache(self) -> Self:
        if self.cache_id is None:
            self._require_beginning()
        elif self.cache is not None:
            raise misuse("cache", "the cache of cache_id is there already; leave cache out")
        if self.stream and not self.max_tokens:
            raise misuse("stream", "with max_tokens 0 there is no answer to stream; leave stream out")
        return self

    def _require_beginning(self) -> None:
        if not self._marks:
            raise misuse(
                "cache_control",
                "this service answers from stored caches only: give a long block cache_control, or give cache_id",
            )
        if not self._before_question:
            raise misuse(
                "cache_control",
                "nothing stands before the question, which is the last block of the user's first turn; put the "
                "document in a block before it",
            )
        if (length := len(anthropic_blocks.joined(self._beginning))) < MIN_CACHED_CHARACTERS:
            raise misuse(
                "cache_control",
                f"what is to be cached has {length} characters, and at least {MIN_CACHED_CHARACTERS} are needed; put "
                "cache_control on a longer block before the question, which is the last block of the user's first turn",
            )

    @property
    def _ttl_s(self) -> float | None:
        """Lifetime of all that is kept, from now on. None: nothing is kept."""
        return max((_TTL_S[mark.ttl] for mark in self._marks), default=None)

    @property
    def _marks_turn(self) -> bool:
        """Whether question and answer are to be kept."""
        return len(self._marks) > sum(block.cache_control is not None for block in self._beginning)

    @property
    def not_kept(self) -> str | None:
        """Why the turn is not kept although it has `cache_control`; None if it is kept, or has none."""
        unanswered = self._marks_turn and not self.max_tokens
        return "with max_tokens 0 there is no answer to keep" if unanswered else None

    @property
    def creation(self) -> CreateCache:
        """The cache of the beginning."""
        choice = self.cache or CompressionChoice()
        lives: dict[str, Any] = {"ttl_s": self._ttl_s, "ttl_renew": True}
        return CreateCache(model=self.model, document=self.document, layout="chat", **lives, **choice.model_dump())

    @property
    def asking(self) -> Asking:
        keeps = self._marks_turn and self.not_kept is None
        return self._asking(
            max_tokens=self.max_tokens or 1,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=self.stop_sequences,
            store=keeps,
            conversation=self.conversation,
            ttl_s=self._ttl_s if keeps else None,
            ttl_renew=keeps,
        )


class TokenCount(strict.ResponseBody):
    """`input_tokens`: of the whole conversation, those of a cache that it begins with included."""

    input_tokens: int


class MessageUsage(strict.ResponseBody):
    """Together all tokens of the conversation: `cache_read_input_tokens` came from the shelf,
    `cache_creation_input_tokens` were prefilled and kept, `input_tokens` prefilled and not kept."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerText(strict.ResponseBody):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class AnswerThinking(strict.ResponseBody):
    """What the model thought before it answered. `signature` is empty: nothing is encrypted."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class AnswerCall(strict.ResponseBody):
    """A tool that the caller is to run; its result comes in a block `tool_result` with this id."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerThinking | AnswerText | AnswerCall
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageObject(strict.ResponseBody):
    """Anthropic's message, plus `cache_id` of the question, and `stored_cache_id` or `not_stored` of a turn to keep."""

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


class MessageError(strict.ResponseBody):
    """An error as Anthropic's API writes it: `type` of the error is Anthropic's, the other fields are kvshelf's."""

    type: Literal["error"] = "error"
    error: strict.ErrorBody
    request_id: str
