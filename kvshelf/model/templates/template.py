"""A model's chat template: the text that it writes for a conversation, and the variables that it reads."""

from __future__ import annotations

import datetime
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from kvshelf.errors import InvalidRequest
from kvshelf.model.templates.thoughts import Thoughts

Message = Mapping[str, Any]
"""`role` and `content`; an assistant's message may have `tool_calls`, in OpenAI's shape with arguments as objects, and
`reasoning_content`."""

ANY_DATE: Final = "2000-01-01"
"""The day that a template gets where nothing depends on it, and where a document is named whatever the day."""

_DATES: Final = '{%- macro strftime_now(format) -%}{{ kvshelf_dates[format] }}{%- endmacro %}{{ "" }}'
"""The beginning of a template that gets its day from kvshelf: transformers takes no function for a variable."""

_RESERVED: Final = frozenset({
    "messages", "strftime_now", "raise_exception", "kvshelf_dates",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
})  # fmt: skip
"""Variables of a template that no caller may set: transformers has each of these for something else."""
_MARK: Final = "\ue000"
_FAMILIES: Final = (
    ("<|im_start|>", "ChatML"),
    ("<|start_header_id|>", "Llama 3"),
    ("<|channel|>", "harmony"),
    ("<start_of_turn>", "Gemma"),
    ("<|turn>", "Gemma 4"),
    ("<\uff5cUser\uff5c>", "DeepSeek"),
    ("<|START_OF_TURN_TOKEN|>", "Cohere"),
    ("[gMASK]", "GLM"),
    ("[INST]", "Mistral and Llama 2"),
    ("<|user|>", "Zephyr and Phi"),
    ("USER:", "Vicuna"),
)
"""Marks and the families of templates; the first mark that a template has gives its family."""


class ChatTemplate:
    """The chat template of one tokenizer of transformers, or none. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._chat = tokenizer

    @property
    def text(self) -> Any:
        """The tokenizer's: a text, several texts by their names, or None."""
        return self._chat.chat_template

    def require(self) -> None:
        """Raises `InvalidRequest` where there is no template to write a conversation with."""
        if not self.text:
            raise InvalidRequest(
                "the model has no chat template; use layout 'plain', or serve it with --chat-template", param="layout"
            )
        if isinstance(self.text, dict) and "default" not in self.text:
            names = ", ".join(sorted(self.text))
            raise InvalidRequest(
                f"the model has several chat templates and none is the default: {names}; serve it with "
                "--chat-template and one of these names",
                param="layout",
            )

    @property
    def usable(self) -> bool:
        """Whether `require` raises nothing."""
        return bool(self.text) and (not isinstance(self.text, dict) or "default" in self.text)

    @cached_property
    def source(self) -> str:
        """The text of the template that conversations are written with."""
        self.require()
        return cast(str, self.text["default"] if isinstance(self.text, dict) else self.text)

    @cached_property
    def family(self) -> str:
        """The usual name of templates that begin turns in this way."""
        return next((name for mark, name in _FAMILIES if mark in self.source), "of its own")

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, besides messages and tools."""
        read = frozenset(meta.find_undeclared_variables(self._parsed))
        return read - _RESERVED - frozenset(self._chat.special_tokens_map) - frozenset(DEFAULT_NAMESPACE)

    def choose_variables(self, named: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """The variables for the template. named: a caller's. effort: of thinking; "none" and "minimal" turn it off.
        Raises `InvalidRequest` for a variable that the template does not read, and where thinking cannot be turned
        off."""
        if reserved := sorted(set(named) & _RESERVED):
            raise InvalidRequest(
                f"chat_template_kwargs has {', '.join(reserved)}, which kvshelf tells the chat template itself; leave "
                "them out",
                param="chat_template_kwargs",
            )
        unknown = sorted(set(named) - self.variables)
        if unknown:
            known = ", ".join(sorted(self.variables)) or "none"
            raise InvalidRequest(
                f"the chat template of this model reads no {', '.join(unknown)}; it reads {known}",
                param="chat_template_kwargs",
            )
        if effort is None:
            return dict(named)
        thinks = effort not in ("none", "minimal")
        switches = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        known_switches = {name: value for name, value in switches.items() if name in self.variables}
        if not known_switches and not thinks and Thoughts.of(self.source) is not None:
            raise InvalidRequest(
                "the chat template of this model has nothing that turns thinking off; leave reasoning_effort out",
                param="reasoning_effort",
            )
        return known_switches | dict(named)

    @cached_property
    def dated(self) -> bool:
        """Whether the template writes the date."""
        return "strftime_now" in meta.find_undeclared_variables(self._parsed)

    @cached_property
    def _formats(self) -> frozenset[str]:
        """The formats in which the template writes the date."""
        calls = self._parsed.find_all(nodes.Call)
        dates = [call for call in calls if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now"]
        first = [call.args[0] for call in dates if call.args]
        return frozenset(form.value for form in first if isinstance(form, nodes.Const))

    @cached_property
    def _parsed(self) -> nodes.Template:
        return ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"]).parse(self.source)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a content must be a list of parts, because the template writes nothing for a text."""
        for content in (_MARK, [{"type": "text", "text": _MARK}]):
            try:
                if _MARK in self._render([{"role": "user", "content": content}], {"add_generation_prompt": False}):
                    return not isinstance(content, str)
            except InvalidRequest:
                continue
        return False

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the arguments of a call must be JSON as text: with an object the template fails."""
        question = {"role": "user", "content": "?"}
        shapes: tuple[Any, Any] = ({}, "{}")
        for arguments in shapes:
            call = {"type": "function", "id": "kvshelf01", "function": {"name": "name", "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                self._render([question, answer], {"add_generation_prompt": False})
            except InvalidRequest:
                continue
            return bool(arguments == "{}")
        return False

    @cached_property
    def _thoughts_field(self) -> str:
        """The field of a message from which the template reads thoughts."""
        fields = ("reasoning_content", "reasoning", "thinking")
        return next((name for name in fields if re.search(rf"\b{name}\b", self.source)), fields[0])

    def _message(self, message: Message) -> Message:
        """A message in the shape that this template reads."""
        calls, thoughts = message.get("tool_calls"), message.get("reasoning_content")
        shaped = {name: value for name, value in message.items() if name != "reasoning_content"}
        if thoughts and not (calls and message["content"] and self._thoughts_field == "thinking"):
            shaped[self._thoughts_field] = thoughts
        if calls and self._arguments_as_text:
            shaped["tool_calls"] = [_with_text(call) for call in calls]
        if self.takes_parts and isinstance(message.get("content"), str):
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        return shaped

    def write(
        self,
        messages: Sequence[Message],
        *,
        opening: bool = False,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        date: str = "",
    ) -> str:
        """The text that the template writes for these messages. options: variables; it gets those that it reads. date:
        its day, as YYYY-MM-DD. Raises `InvalidRequest` for messages that it refuses."""
        self.require()
        messages = [self._message(message) for message in messages]
        variables = {name: value for name, value in (options or {}).items() if name in self.variables}
        variables |= {"add_generation_prompt": opening, "tools": tools}
        if self.dated:
            day = datetime.datetime.strptime(date or ANY_DATE, "%Y-%m-%d")
            dates = {form: day.strftime(form) for form in self._formats}
            variables |= {"chat_template": _DATES + self.source, "kvshelf_dates": dates}
        return self._render(messages, variables)

    def _render(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        try:
            text = cast(str, self._chat.apply_chat_template(list(messages), tokenize=False, **variables))
            return text.encode(errors="backslashreplace").decode()  # half a surrogate pair, in arguments, as its escape
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise InvalidRequest(f"the model's chat template refuses these turns: {error}", param="messages") from error


class _Generation(Extension):
    """The tag `generation` of transformers, for parsing a template: its content is parsed as without the tag."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
