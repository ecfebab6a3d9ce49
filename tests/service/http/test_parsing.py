"""Bodies are bounded before they are parsed, and a large one is parsed in its own process."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvshelf.api import CreateCache, Query
from kvshelf.api.anthropic import MessagesRequest
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.responses import ResponsesRequest
from kvshelf.api.strict import MAX_DEPTH, MAX_ELEMENTS, MAX_FIELDS, JsonBounds, parse_request
from kvshelf.errors import DeadlineExceeded, InvalidRequest, KvshelfError
from kvshelf.service.http import parsing
from kvshelf.service.http.parsing import LARGE_BYTES, Parser
from kvshelf.service.settings import Settings
from kvshelf.workers.replica.calls import Computing
from tests.amounts import few
from tests.attack.bodies import CALLS, CREATIONS, route_of
from tests.timing import least_s

MEGABYTE = 1 << 20

MODELS = {
    "/v1/caches": CreateCache,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


def nested(depth: int) -> bytes:
    return b'{"policy_params":' + b'{"a":' * (depth - 1) + b"1" + b"}" * depth


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{" + b",".join(b'"f%d":1' % i for i in range(MAX_FIELDS + 1)) + b"}", "fields"),
        (b'{"token_ids":[' + b"1," * (MAX_ELEMENTS + 1) + b"1]}", "elements"),
        (b'{"messages":[' + b"[]," * MAX_FIELDS + b"[]]}", "lists and objects"),
        (nested(MAX_DEPTH + 1), "nested"),
    ],
)
def test_a_body_beyond_a_bound_is_refused_before_it_is_parsed(body: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        JsonBounds().take(body)


@pytest.mark.parametrize(
    "body",
    [
        nested(MAX_DEPTH),
        json.dumps({"document": '{"a": [1, 2]}, \\" ' * 20_000}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 4096}).encode(),
        b'{"token_ids":[' + b"1," * (MAX_ELEMENTS - 1) + b"1]}",
    ],
    ids=["depth", "text that looks like JSON", "messages", "tokens"],
)
def test_what_a_request_may_have_is_within_the_bounds(body: bytes) -> None:
    JsonBounds().take(body)


def test_unbalanced_brackets_and_quotes_are_left_to_the_parser() -> None:
    for body in (b"[" * 100, b'{"a": "' + b"[" * 100, b"]]]]", b'"', b""):
        JsonBounds().take(body)
        with pytest.raises(InvalidRequest):
            parse_request(CreateCache, body)


def longest_silence(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives or raises, and the longest time in which nothing else ran on the event loop.

    In processor time of this process, with that of threads that hold the interpreter's lock: the suite keeps all
    processors busy, and its services come first. Nothing is collected meanwhile: the objects of a whole suite take the
    collector longer than what is measured.
    """

    async def run() -> tuple[Any, float]:
        longest = 0.0

        async def beat() -> None:
            nonlocal longest
            while True:
                started = time.process_time()
                await asyncio.sleep(0.002)
                longest = max(longest, time.process_time() - started)

        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.05)
        try:
            found = await work()
        except KvshelfError as error:
            found = error
        beating.cancel()
        return found, longest

    gc.disable()
    try:
        return asyncio.run(run())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body",
    [
        b'{"token_ids": [' + b'"",' * 2_600_000 + b'""]}',
        b"{" + b",".join(b'"f%d":1' % i for i in range(200_000)) + b"}",
        b'{"policy_params":{"a":[' + b"[]," * (4 * MEGABYTE) + b"[]]}}",
        b'{"policy_params":{"a":' + b"[" * (16 * MEGABYTE),
        b'{"document": "' + b"\\ud800" * MEGABYTE + b'"}',
    ],
    ids=["wrong elements", "unknown fields", "lists", "depth", "half characters"],
)
def test_a_large_bad_body_does_not_hold_the_loop(body: bytes) -> None:
    """They held it for up to 17.8 s."""
    found, silence = longest_silence(lambda: Parser(Settings(), Computing()).parsed(CreateCache, body, "acme"))
    assert isinstance(found, InvalidRequest)
    assert "to parse" not in found.message
    assert silence < 0.3


@pytest.mark.parametrize(
    "fields",
    few(
        1,
        [
            {"document": "größer 😀\n" * 200_000, "labels": {"team": "law"}, "compression_ratio": 0.5},
            {
                "messages": [{"role": "user", "content": "x" * 2_000}] * 1_000,
                "policy": "lagkv",
                "policy_params": {"lag": 32},
            },
            {"token_ids": list(range(300_000)), "name": "ids", "ttl_s": 5},
        ],
    ),
    ids=["text", "messages", "tokens"],
)
def test_a_large_body_means_what_a_small_one_means(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    assert len(body) > LARGE_BYTES
    found, _ = longest_silence(lambda: Parser(Settings(), Computing()).parsed(CreateCache, body, "acme"))
    expected = CreateCache.model_validate_json(body)
    assert found == expected
    assert found.model_fields_set == expected.model_fields_set


def test_an_error_of_a_large_body_names_its_field() -> None:
    body = json.dumps({"prompt": "x" * 2 * MEGABYTE, "max_tokens": 0}).encode()
    found, _ = longest_silence(lambda: Parser(Settings(), Computing()).parsed(Query, body, "acme"))
    assert isinstance(found, InvalidRequest)
    assert found.param == "max_tokens"


def test_a_body_that_needs_too_much_to_parse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_MEMORY_BYTES", 256 * MEGABYTE)
    body = json.dumps({"document": "x" * 60 * MEGABYTE + "😀"}, ensure_ascii=False).encode()
    found, _ = longest_silence(lambda: Parser(Settings(), Computing()).parsed(CreateCache, body, "acme"))
    assert isinstance(found, InvalidRequest)
    assert "takes too much memory" in found.message


def test_a_body_that_is_parsed_too_late_is_refused() -> None:
    body = json.dumps({"document": "x" * 2 * MEGABYTE}).encode()
    found, _ = longest_silence(
        lambda: Parser(Settings(request_deadline_s=0.01), Computing()).parsed(CreateCache, body, "acme")
    )
    assert isinstance(found, DeadlineExceeded)


CALLING = {
    "chat": (
        ChatCompletionRequest,
        '{"cache_id":"a","messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":'
        '{"name":"f","arguments":%s}}]},{"role":"tool","tool_call_id":"a","content":"x"}],'
        '"tools":[{"type":"function","function":{"name":"f"}}]}',
    ),
    "responses": (
        ResponsesRequest,
        '{"cache_id":"a","input":[{"type":"function_call","call_id":"a","name":"f","arguments":%s},'
        '{"type":"function_call_output","call_id":"a","output":"x"}],"tools":[{"type":"function","name":"f"}]}',
    ),
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a":[' + "0," * MAX_ELEMENTS + "0]}", "elements"),
        ('{"a":[' + "[]," * MAX_FIELDS + "[]]}", "lists and objects"),
        ("{" + ",".join(f'"f{number}":1' for number in range(MAX_FIELDS)) + "}", "fields"),
        ('{"a":' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH, "nested"),
        ('{"a":' + "9" * 2000 + "}", "digits"),
        ('{"a":1e999}', "must be a JSON object"),
        ('{"a":NaN}', "must be a JSON object"),
        ('{"a":' + "[" * 3000, "must be a JSON object"),
        ("[]", "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("dialect", CALLING)
def test_json_in_a_text_has_the_bounds_of_a_body(dialect: str, arguments: str, problem: str) -> None:
    model, body = CALLING[dialect]
    with pytest.raises(InvalidRequest, match=problem) as refused:
        parse_request(model, (body % json.dumps(arguments)).encode())
    assert "arguments" in str(refused.value.param)
    assert len(refused.value.message) < 400


def test_json_texts_of_a_body_have_its_bounds_together() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "0," * 300_000 + "0]}"}}
    message = {"role": "assistant", "tool_calls": [call] * 4}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"cache_id": "a", "messages": [message], "tools": tools}
    with pytest.raises(InvalidRequest, match="elements"):
        parse_request(ChatCompletionRequest, json.dumps(body).encode())


@pytest.mark.parametrize("name", few(20, [*CREATIONS, *CALLS]))
def test_a_body_takes_time_in_proportion_to_its_length(name: str) -> None:
    """On the event loop: 120 kB of the first took 24 s."""
    model = MODELS[route_of(name)]

    def parse(body: bytes) -> None:
        with suppress(InvalidRequest):
            request = parse_request(model, body)
            asking = getattr(request, "asking", None)
            if isinstance(request, ResponsesRequest):
                asking(may_write=False)

    def time_of(size: int) -> float:
        body = {**CREATIONS, **CALLS}[name](size)
        return least_s(lambda: parse(body))

    assert time_of(LARGE_BYTES) < max(0.03, 12 * time_of(LARGE_BYTES // 4))
    assert time_of(LARGE_BYTES) < 0.15


def test_what_a_child_has_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    body = CALLS["chat: arguments of zeros"](2 * MEGABYTE).replace(b"kvs_0", b"a")
    monkeypatch.setattr(json, "loads", None)
    found, silence = longest_silence(
        lambda: Parser(Settings(), Computing()).parsed(ChatCompletionRequest, body, "acme")
    )
    assert isinstance(found, ChatCompletionRequest)
    assert found.asking.messages is not None
    assert silence < 0.1


def test_a_refusal_shows_the_beginning_of_a_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_request(CreateCache, json.dumps({"k" * 100_000: 1}).encode())
    assert refused.value.param == "k" * 60 + "..."
