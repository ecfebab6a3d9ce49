"""The types of POST /v1/chat/completions, and the base of its request and that of `responses`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, Tag, model_validator

from kvshelf.api import shapes, strict
from kvshelf.api.anthropic import MIN_CACHED_CHARACTERS, CompressionChoice
from kvshelf.api.anthropic_blocks import BETWEEN_BLOCKS
from kvshelf.api.creation import CreateCache
from kvshelf.api.queries import Asking, AskShelf, Linked, Remade, Source
from kvshelf.api.strict import misuse
from kvshelf.api.tools import (
    MAX_TOOLS,
    ToolAsking,
    ToolCall,
    ToolChoice,
    Tools,
    ToolTurn,
    require_tools,
    require_unshaped,
)

DEFAULT_MAX_TOKENS = 256
ChatReason = strict.FinishReason | Literal["tool_calls"]

MAX_MARKS: Final = 4
"""Most parts of a request with a breakpoint."""
_TTL_S: Final = {"30m": 1800.0, "12h": 43200.0}
_SYSTEM: Final = ("system", "developer")

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""OpenAI's unsupported fields, each with the values besides null that change nothing."""

CacheTtl = Literal["30m", "12h"]


class Breakpoint(strict.RequestBody):
    """The conversation up to this part is to be found again. `ttl`: of `prompt_cache_options` by default."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class PromptCacheOptions(strict.RequestBody):
    """`ttl`: the lifetime of a breakpoint's cache from its last use on. `mode` has no effect."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: CacheTtl = "30m"


class TextPart(strict.RequestBody):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=256, fail_fast=True), Tag("(list)")]


class ChatMessage(strict.RequestBody):
    """One turn. `content` is text or OpenAI's list of text parts, joined without separator. `developer` is OpenAI's
    newer name of the role `system`. `reasoning_content`: thoughts of an earlier answer, for the model's chat template.
    """

    role: Literal[strict.Role, "developer", "tool"]
    content: Annotated[Annotated[str, Tag("(one)")] | _Parts, strict.ONE_OR_LIST] | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise misuse("messages", f"tool_calls are of role assistant, and this message is of role {self.role}")
        if self.content is None and self.tool_calls is None:
            raise misuse("messages", "a message needs a content; only an assistant's with tool_calls may have none")
        if self.role == "tool" and self.tool_call_id is None:
            raise misuse("messages", "a message of role tool needs the tool_call_id that it answers")
        return self

    @property
    def parts(self) -> list[TextPart]:
        """A text is one part."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or []

    @property
    def _text(self) -> str:
        return "".join(part.text for part in self.parts)

    def plain(self) -> strict.Message:
        thoughts = {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return strict.Message(role=self._role, content=self._text, **thoughts)  # type: ignore[arg-type]  # calls come with tools

    def turn(self) -> ToolTurn:
        """As a turn of a conversation with tools."""
        more = {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return ToolTurn(role=self._role, content=self._text, tool_calls=self.tool_calls or [], **more)

    @property
    def _role(self) -> strict.Role | Literal["tool"]:
        return "system" if self.role == "developer" else self.role


class StreamOptions(strict.RequestBody):
    include_usage: bool = False


class OpenAIRequest(AskShelf):
    """What the bodies of OpenAI's two APIs have in common: kvshelf's own fields, sampling, and hints without effect:
    `user`, `metadata`, `safety_identifier`, `prompt_cache_retention`, and, where a cache is named,
    `prompt_cache_options`. A `prompt_cache_key` that has the form of a `conversation` stands for one."""

    NAMES_CACHE: ClassVar[tuple[str, ...]] = ("cache_id", "cache_ids")

    cache_id: str | None = None
    cache_ids: strict.CacheIds | None = None
    model: strict.ModelName | None = None
    temperature: strict.Temperature | None = None  # type: ignore[assignment]  # wider: null is the default
    top_p: strict.TopP | None = None  # type: ignore[assignment]
    stream: bool | None = None
    store: bool | None = None  # type: ignore[assignment]
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @model_validator(mode="after")
    def _about_caches(self) -> Self:
        if self.cache_ids is not None:
            strict.require_each_once(self.cache_ids)
        names = [name for name in self.NAMES_CACHE if getattr(self, name) is not None]
        if not names and not self._has_beginning:
            needed = " or ".join(self.NAMES_CACHE)
            raise misuse("cache_id", f"{needed} is needed: this service answers from stored caches only")
        if len(names) > 1:
            raise misuse(names[1], f"give {names[0]} or {names[1]}, not both")
        if self.store and self.cache_ids is not None:
            raise misuse("store", "an answer is kept behind one cache; leave store out, or give cache_id")
        self.require_storable()
        if self.select is not None and self.select.passages:
            raise misuse("select.passages", "this answer has no passages; ask POST /v1/caches/{id}/query instead")
        return self

    @property
    def _has_beginning(self) -> bool:
        """Whether the conversation itself begins with the document to cache."""
        return False

    @property
    def _conversation(self) -> str | None:
        key = self.prompt_cache_key
        return key if key is not None and re.fullmatch(strict.CONVERSATION, key) else None

    def _asking(
        self, messages: Sequence[Any], max_tokens: int, kind: type[Asking] = Asking, *, store: bool, **more: Any
    ) -> Asking:
        fields = {name: value for name in AskShelf.model_fields if (value := getattr(self, name)) is not None}
        fields["conversation"] = self._conversation
        return kind(messages=list(messages), max_tokens=max_tokens, **fields | {"store": store}, **more)


class ChatCompletionRequest(OpenAIRequest):
    """OpenAI's body plus either `cache_id`, the stored cache to ask, or `cache_ids`, several to ask together, `select`,
    what the answer reads of them, `suffix`, what stays in memory of the answer itself, and `tool`, the tool that it
    calls, as in a query; `grammar` and `choices` say what the answer must be, as OpenAI's `response_format`. With
    `store` the turn is kept behind the cache, for `ttl_s` seconds (with `ttl_renew`: after each question) or as long as
    the cache; a later request with the whole conversation goes on from there."""

    model_config = ConfigDict(json_schema_extra=strict.one_of(cache_id="string", cache_ids="array"))

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=strict.MAX_MESSAGES, fail_fast=True)]
    max_tokens: strict.MaxTokens | None = None
    max_completion_tokens: strict.MaxTokens | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    conversation: strict.Conversation | None = None
    n: shapes.Answers | None = None
    response_format: shapes.ResponseFormat | None = None
    grammar: shapes.Grammar | None = None
    choices: shapes.Choices | None = None
    logprobs: bool | None = None
    top_logprobs: shapes.TopLogprobs | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: shapes.TemplateKwargs | None = None
    reasoning_effort: shapes.Effort | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, data: Any) -> Any:
        data = strict.without_unsupported(data, _ASKS_NOTHING)
        return data | {"tools": None} if isinstance(data, dict) and data.get("tools") == [] else data

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        calls = any(message.role == "tool" or message.tool_calls for message in self.messages)
        require_tools(self.tools, self.tool_choice, calls=calls)
        require_unshaped(self, self.tool_choice)
        self._require_calls()
        return self

    def _require_calls(self) -> None:
        """Refuse a result of no call before it. If no call is there, the cache may end with it."""
        call_ids: set[str] = set()
        for place, message in enumerate(self.messages):
            call_ids.update(call.id for call in message.tool_calls or ())
            if message.role == "tool" and call_ids and message.tool_call_id not in call_ids:
                raise misuse(
                    f"messages[{place}].tool_call_id",
                    f"there is no call {message.tool_call_id!r:.80} before its result; send the assistant's message "
                    "that made it, too",
                )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise misuse("max_completion_tokens", "give max_tokens or max_completion_tokens, not both")
        if self.stream_options is not None and not self.stream:
            raise misuse("stream_options", "stream_options is only allowed with stream: true")
        shapes.require_one_shape(self)
        shapes.require_logprobs(self)
        for name in ("store", "tool"):
            if (self.n or 1) > 1 and getattr(self, name):
                raise misuse("n", f"{name} is of one answer; leave n out")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def _conversation(self) -> str | None:
        return self.conversation or super()._conversation

    @property
    def _question_messages(self) -> list[ChatMessage]:
        return self.messages

    @property
    def asking(self) -> Asking:
        """The question that the body asks."""
        limit = self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS
        tools: dict[str, Any] = {}
        if self.tools is not None:
            parallel = self.parallel_tool_calls is not False
            tools = {"tools": self.tools, "tool_choice": self.tool_choice or "auto", "parallel_tool_calls": parallel}
        return self._asking(
            [message.turn() if tools else message.plain() for message in self._question_messages],
            limit,
            ToolAsking if tools else Asking,
            **tools,
            store=bool(self.store),
            response_format=self.response_format,
            grammar=self.grammar,
            choices=self.choices,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs,
            n=self.n or 1,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
        )


class PrewarmOptions(PromptCacheOptions):
    """`prewarm`: the cache is made, and nothing is answered."""

    prewarm: bool = False


class MarkedCompletionRequest(ChatCompletionRequest):
    """A `ChatCompletionRequest` that may have a `prompt_cache_breakpoint` in place of `cache_id`. The document is what
    stands before the question, the last part of the user's first message, up to the last part with a breakpoint; if
    none of them has one and a later part does, all of it. `cache` says how it is compressed; by default nothing is
    lost. It lives for the longest `ttl` of the request, from its last use on.

    With `prompt_cache_options.prewarm` the cache is made, and nothing is answered.
    """

    model_config = ConfigDict(json_schema_extra=None)

    cache: CompressionChoice | None = None
    prompt_cache_options: PrewarmOptions | None = None

    @model_validator(mode="after")
    def _begins_with_a_document(self) -> Self:
        if self.prewarm and self.stream:
            raise misuse("stream", "with prewarm there is no answer to stream; leave stream out")
        if self.cache_id is not None or self.cache_ids is not None:
            if self.cache is not None:
                raise misuse("cache", "the cache of cache_id is there already; leave cache out")
            return self
        if self.workflow is not None:
            raise misuse("workflow", "a step of a workflow asks caches that are there; give cache_id or cache_ids")
        if len(self._marks) > MAX_MARKS:
            raise misuse(
                "prompt_cache_breakpoint",
                f"{len(self._marks)} parts have a prompt_cache_breakpoint; at most {MAX_MARKS} may",
            )
        length = len(self.document or "")
        if length < MIN_CACHED_CHARACTERS:
            raise misuse(
                "prompt_cache_breakpoint",
                f"what is to be cached has {length} characters, and at least {MIN_CACHED_CHARACTERS} are needed; put "
                "the document, and its prompt_cache_breakpoint, into a part before the question, which is the last "
                "part of the user's first message",
            )
        return self

    @property
    def prewarm(self) -> bool:
        """Whether the cache is made, and nothing is answered."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def document(self) -> str | None:
        """The text of the cache that this request makes or finds; None where it names caches."""
        if self.cache_id is not None or self.cache_ids is not None:
            return None
        count = self._kept_parts
        texts = []
        for message in self._beginning:
            texts.append("".join(part.text for part in message.parts[:count]))
            count = max(count - len(message.parts), 0)
        return BETWEEN_BLOCKS.join(text for text in texts if text)

    @property
    def creation(self) -> CreateCache:
        """The cache of the document."""
        choice = self.cache or CompressionChoice()
        options = self.prompt_cache_options
        by_default = "30m" if options is None else options.ttl
        ttl_s = max(_TTL_S[mark.ttl or by_default] for mark in self._marks)
        return CreateCache(
            model=self.model,
            adapter=self.adapter,
            document=self.document,
            layout="chat",
            ttl_s=ttl_s,
            ttl_renew=True,
            **choice.model_dump(),
        )

    @property
    def may_be_refused(self) -> bool:
        """Whether a model may be unable to answer as the question asks."""
        shaped = self.response_format or self.grammar or self.choices
        return bool(self.tools or shaped or self.chat_template_kwargs or self.reasoning_effort)

    @property
    def _has_beginning(self) -> bool:
        return bool(self._marks)

    @property
    def _question_messages(self) -> list[ChatMessage]:
        """The conversation behind the document. The rest of the messages that it comes from is the user's turn."""
        if self.document is None:
            return self.messages
        parts = [part for message in self._beginning for part in message.parts]
        rest = ChatMessage(role="user", content=parts[self._kept_parts :])
        return [rest, *self.messages[len(self._beginning) :]]

    @property
    def _beginning(self) -> list[ChatMessage]:
        """The messages up to the user's first."""
        first = next(
            (at for at, message in enumerate(self.messages) if message.role not in _SYSTEM), len(self.messages)
        )
        if first == len(self.messages) or self.messages[first].role != "user":
            raise misuse("messages", "the first message behind the system's must be the user's, with the question")
        return self.messages[: first + 1]

    @property
    def _kept_parts(self) -> int:
        """How many parts of the beginning the document has."""
        parts = [part for message in self._beginning for part in message.parts][:-1]
        marked = [at for at, part in enumerate(parts, 1) if part.prompt_cache_breakpoint is not None]
        return marked[-1] if marked else len(parts)

    @property
    def _marks(self) -> list[Breakpoint]:
        marks = [part.prompt_cache_breakpoint for message in self.messages for part in message.parts]
        return [mark for mark in marks if mark is not None]


class PromptTokensDetails(strict.ResponseBody):
    """`cached_tokens`: document tokens from the shelf. `cache_write_tokens`: those that this request put there."""

    cached_tokens: int
    cache_write_tokens: int = 0
    audio_tokens: int = 0


class ChatUsage(strict.ResponseBody):
    """OpenAI's, plus `prefill_token_equivalents` and `prefill_token_equivalents_saved`, as of a query's usage."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prefill_token_equivalents: float | None = None
    prefill_token_equivalents_saved: float | None = None


class AssistantMessage(strict.ResponseBody):
    """OpenAI's, plus `reasoning_content`, what the model thought before; present only if it did."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChoiceLogprobs(strict.ResponseBody):
    content: list[shapes.Logprob]
    refusal: None = None


class ChatChoice(strict.ResponseBody):
    index: int = 0
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatReason


class ChatCompletion(strict.ResponseBody):
    """OpenAI's, plus `sources` and `exact` where the request had `cache_ids`, `stored_cache_id` or `not_stored` where
    it had `store` and `linked`, as of an `AnswerObject`, and `recomputed` where `on_miss` made caches again, as the
    first two of a `JointAnswer`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    sources: list[Source] | None = None
    exact: Literal[False] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None
    linked: Linked | None = None


class DeltaCall(ToolCall):
    index: int


class Delta(strict.ResponseBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChunkChoice(strict.ResponseBody):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatReason | None = None


class ChatCompletionChunk(strict.ResponseBody):
    """One event of a streamed completion. `logprobs` of a choice are of the tokens whose text ends in the event. The
    event with the `finish_reason` has those of tokens that have no text, and what a `ChatCompletion` has beside
    OpenAI's fields. With `include_usage` the last event has the usage and no choice."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    sources: list[Source] | None = None
    exact: Literal[False] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None
    linked: Linked | None = None
