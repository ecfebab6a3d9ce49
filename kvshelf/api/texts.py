"""The texts of a request that become tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
