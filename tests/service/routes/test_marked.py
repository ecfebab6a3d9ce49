"""OpenAI's own client with `prompt_cache_breakpoint`: a document becomes a cache and is found again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionContentPartTextParam

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20
QUESTION = "Where is the green book?"


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def model(http: httpx.Client) -> str:
    served: str = http.get("/v1/models").json()["data"][0]["id"]
    return served


def unique() -> str:
    return f"[{uuid.uuid4().hex[:8]}] {DOCUMENT}"


def marked(text: str, **more: Any) -> ChatCompletionContentPartTextParam:
    return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit", **more}}  # type: ignore[typeddict-item]


def conversation(*parts: Any, question: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def ask(client: openai.OpenAI, model: str, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=model, messages=messages, max_completion_tokens=8, **fields)


def details(completion: Any) -> tuple[int, int]:
    """Tokens that were on the shelf, and those that the request put there."""
    told = completion.usage.prompt_tokens_details
    return told.cached_tokens, told.cache_write_tokens


def test_a_marked_part_becomes_a_cache_and_is_found_again(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    messages = conversation(marked(unique()))
    first, second = (ask(client, model, messages) for _ in range(2))
    newest = http.get("/v1/caches", params={"limit": 1}).json()["data"][0]
    assert newest["expires_at"] == pytest.approx(time.time() + 1800, abs=60)
    tokens = newest["tokens"]["document"]
    assert (details(first), details(second)) == ((0, tokens), (tokens, 0))
    by_id = client.chat.completions.create(
        model=model,
        messages=conversation(),
        max_completion_tokens=8,
        extra_body={"cache_id": newest["id"]},
    )
    texts = {completion.choices[0].message.content for completion in (first, second, by_id)}
    assert len(texts) == 1
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == by_id.usage.prompt_tokens


def test_one_document_is_one_cache_for_both_vendors_clients(
    client: openai.OpenAI, service_url: str, model: str
) -> None:
    text = unique()
    with anthropic.Anthropic(base_url=service_url, api_key="anything", max_retries=0) as other:
        block: Any = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        made = other.messages.create(
            model=model, max_tokens=8, system=[block], messages=[{"role": "user", "content": QUESTION}]
        )
    system = {"role": "system", "content": [marked(text)]}
    completion = ask(client, model, [system, *conversation()])
    assert details(completion) == (made.usage.cache_creation_input_tokens, 0)
    assert completion.choices[0].message.content == made.content[0].text


def test_a_conversation_that_goes_on_finds_its_document(client: openai.OpenAI, model: str) -> None:
    messages = conversation(marked(unique(), ttl="12h"))
    first = ask(client, model, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And the key?"},
    ]
    second = ask(client, model, messages, prompt_cache_options={"ttl": "30m", "mode": "explicit"})
    assert details(second) == details(first)[::-1]


def test_a_stream_says_what_it_put_there(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, model, conversation(marked(unique())), **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    read, written = details(chunks[-1])
    assert read == 0 < written


def test_prewarm_makes_the_cache_and_answers_nothing(client: openai.OpenAI, model: str) -> None:
    messages = conversation(marked(unique()))
    warmed = ask(client, model, messages, prompt_cache_options={"prewarm": True})
    assert (warmed.choices[0].message.content, warmed.choices[0].finish_reason) == ("", "length")
    assert warmed.usage.completion_tokens == 0
    answered = ask(client, model, messages)
    assert details(answered) == details(warmed)[::-1]


def test_a_cache_is_compressed_as_the_request_says(client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    choice = {"policy": "keydiff", "compression_ratio": 0.5, "codec": "int8"}
    ask(client, model, conversation(marked(unique())), extra_body={"cache": choice})
    newest = http.get("/v1/caches", params={"limit": 1}).json()["data"][0]
    assert (newest["policy"], newest["codec"]) == ("keydiff", "int8")


@pytest.mark.parametrize(
    ("messages", "fields", "told"),
    [
        (conversation(marked("short")), {}, "5 characters, and at least 256"),
        ([{"role": "user", "content": [marked(DOCUMENT)]}], {}, "0 characters"),
        (conversation(*[marked(DOCUMENT)] * 5), {}, "5 parts have a prompt_cache_breakpoint; at most 4"),
        ([{"role": "assistant", "content": [marked(DOCUMENT)]}], {}, "must be the user's"),
        (
            conversation(marked(DOCUMENT)),
            {"stream": True, "prompt_cache_options": {"prewarm": True}},
            "no answer to stream",
        ),
        (conversation(marked(DOCUMENT, ttl="5m")), {}, "'30m' or '12h'"),
        (
            conversation(marked(DOCUMENT)),
            {"extra_body": {"cache_id": "kvs_" + "0" * 40, "cache": {}}},
            "leave cache out",
        ),
    ],
)
def test_bad_marks_are_refused(
    client: openai.OpenAI, model: str, messages: list[Any], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, model, messages, **fields)
    assert told in refusal.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [
                {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
            ]
        },
        {"extra_body": {"chat_template_kwargs": {"no_such_variable": True}}},
    ],
)
def test_what_a_model_cannot_do_is_refused_before_its_cache_is_made(
    client: openai.OpenAI, http: httpx.Client, model: str, fields: dict[str, Any]
) -> None:
    before = http.get("/v1/caches", params={"limit": 1}).json()["data"]
    with pytest.raises(openai.BadRequestError):
        ask(client, model, conversation(marked(unique())), **fields)
    assert http.get("/v1/caches", params={"limit": 1}).json()["data"] == before


def test_hints_beside_a_named_cache_change_nothing(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    plain = ask(client, cache["model"], conversation(), extra_body={"cache_id": cache["id"]})
    hinted = ask(
        client,
        cache["model"],
        [{"role": "user", "content": [marked(QUESTION)]}],
        extra_body={"cache_id": cache["id"]},
        prompt_cache_options={"mode": "implicit"},
    )
    assert hinted.choices[0].message.content == plain.choices[0].message.content
    assert hinted.usage == plain.usage
