"""Calls of tools by a real model, which a grammar holds to their schema. SmolLM2's own template has no tools; that of
Qwen 2.5 writes turns with the same tokens, and calls as JSON."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvshelf import Client
from tests.conftest import live_service
from tests.real.conftest import MODEL

if TYPE_CHECKING:
    from tests.conftest import LiveService

PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "tool": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["tool", "days"],
    "additionalProperties": False,
}
LEND: Any = {
    "type": "function",
    "function": {"name": "lend", "description": "Lends a tool to a member.", "parameters": PARAMETERS},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
QUESTION: Any = {"role": "user", "content": "Lend me a drill for three days."}


def test_calls_fit_their_schema_and_are_answered(tmp_path: Path, handbook: str) -> None:
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl, whose chat templates are data of this test, is not installed")
    template = Path(found.origin).parent / "chat_templates" / "qwen2_5.jinja"
    with live_service(tmp_path / "tools", MODEL, dtype="float32", chat_template=template) as running:
        _calls(running, handbook)


def _calls(running: LiveService, handbook: str) -> None:
    with Client(running.url) as shelf:
        cache = shelf.caches.create(document=handbook[:1200], policy="full", quality=False)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    asked: Any = {"model": MODEL, "tools": [LEND, CLOCK], "max_tokens": 64, "extra_body": {"cache_id": cache.id}}
    named: Any = {"type": "function", "function": {"name": "lend"}}
    said = client.chat.completions.create(messages=[QUESTION], tool_choice=named, parallel_tool_calls=False, **asked)
    (choice,) = said.choices
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name, set(arguments)) == ("tool_calls", "lend", {"tool", "days"})
    assert 1 <= arguments["days"] <= 14
    required = client.chat.completions.create(
        messages=[QUESTION], tool_choice="required", parallel_tool_calls=False, **asked
    )
    assert {each.function.name for each in required.choices[0].message.tool_calls or () if each.type == "function"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Lent until Friday."}
    told = client.chat.completions.create(messages=[QUESTION, choice.message, result], tool_choice="none", **asked)
    assert told.choices[0].message.content
    auto = client.chat.completions.create(messages=[QUESTION], **asked)
    assert auto.choices[0].finish_reason in ("stop", "length", "tool_calls")
