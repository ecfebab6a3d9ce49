"""The texts of a request that become tokens, and the bytes of its other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from pydantic import BaseModel

_FIELDS: Final = ("document", "prompt", "query", "expected_questions", "chat_template_kwargs")


def texts_of(body: BaseModel) -> list[str]:
    """All texts of a request that a model reads: of a document, of questions, of messages with their calls, and of
    tools. Grammars and stop texts are never read; they have bounds of their own."""
    texts = [text for name in _FIELDS for text in _strings(getattr(body, name, None))]
    for message in getattr(body, "messages", None) or ():
        texts += _strings([message.content, getattr(message, "reasoning_content", None)])
        for call in getattr(message, "tool_calls", ()):
            texts += (call.function.name, call.function.arguments)
    for tool in getattr(body, "tools", None) or ():
        texts += _strings([tool.function.name, tool.function.description, tool.function.parameters])
    return texts


def size_of(value: Any) -> int:
    """About the bytes of a value on its way to another process: one for each character, eight for each other value."""
    if isinstance(value, str | bytes):
        return len(value)
    if is_dataclass(value) or isinstance(value, BaseModel):
        value = list(vars(value).values())
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 8


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
