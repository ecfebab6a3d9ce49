"""The texts of a request that become tokens, and how much it has beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from pydantic import BaseModel

_FIELDS: Final = ("document", "prompt", "query", "expected_questions", "chat_template_kwargs")


def texts_of(body: BaseModel) -> list[str]:
    """All texts that a request has a model read: of a document, of a question or several, of messages with their calls,
    and of tools. Grammars and stop texts are never read; they have bounds of their own."""
    found = [text for name in _FIELDS for text in _strings(getattr(body, name, None))]
    for message in getattr(body, "messages", None) or ():
        found += _strings([message.content, getattr(message, "reasoning_content", None)])
        for call in getattr(message, "tool_calls", ()):
            found += (call.function.name, call.function.arguments)
    for tool in getattr(body, "tools", None) or ():
        found += _strings([tool.function.name, tool.function.description, tool.function.parameters])
    return found


def size_of(value: Any) -> int:
    """About as many bytes as a value takes that travels to another process: a byte for each character, eight for each
    other thing."""
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
