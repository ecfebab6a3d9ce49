"""Anthropic's own client against a live service: it is understood, and it understands what comes back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.service.conftest import created

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20
QUESTION = "Where is the green book?"
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service_url, api_key="anything", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model(http: httpx.Client) -> str:
    found: str = http.get("/v1/models").json()["data"][0]["id"]
    return found


def unique(text: str = DOCUMENT) -> str:
    return f"[{uuid.uuid4().hex[:8]}] {text}"


def marked(text: str, **control: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": EPHEMERAL | control}


def user(*blocks: str | dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks],
    }


def asked(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]} | fields


def test_a_marked_system_text_becomes_a_cache_and_is_found_again(
    client: anthropic.Anthropic, http: httpx.Client, model: str
) -> None:
    body = asked(model, system=[marked(unique())])
    first = client.messages.create(**body)
    second = client.messages.create(**body)
    cache = http.get(f"/v1/caches/{first.cache_id}").json()  # type: ignore[attr-defined]  # kvshelf's own field
    tokens = cache["tokens"]["document"]
    assert (cache["policy"], cache["codec"]) == ("full", "none")
    assert cache["expires_at"] == pytest.approx(time.time() + 300, abs=30)
    assert (first.type, first.role, first.model, first.stop_reason) == ("message", "assistant", model, "max_tokens")
    usage = first.usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (tokens, 0)
    assert (second.usage.cache_creation_input_tokens, second.usage.cache_read_input_tokens) == (0, tokens)
    assert usage.input_tokens == second.usage.input_tokens > 0
    assert usage.output_tokens == 8
    assert first._request_id
    answer = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": QUESTION, "max_tokens": 8}).json()
    assert [block.text for block in first.content] == [block.text for block in second.content] == [answer["text"]]


def test_where_a_text_is_marked_changes_nothing_that_the_model_reads(client: anthropic.Anthropic, model: str) -> None:
    """The same cache, whether the text is the system's or a document's; what follows it belongs to the question."""
    text = unique()
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text},
        "cache_control": EPHEMERAL,
        "citations": {"enabled": False},
    }
    said = [
        client.messages.create(**asked(model, **fields))
        for fields in (
            {"system": [marked(text)], "messages": [user("Be brief.", QUESTION)]},
            {"system": [marked(text), {"type": "text", "text": "Be brief."}]},
            {"messages": [user(document, "Be brief.", QUESTION)]},
            {"messages": [user(text, "Be brief.\n\n" + QUESTION)], "cache_control": EPHEMERAL},
        )
    ]
    assert len({one.cache_id for one in said}) == 1  # type: ignore[attr-defined]
    assert len({one.content[0].text for one in said}) == 1
    titled = client.messages.create(**asked(model, messages=[user(document | {"title": "Tides"}, QUESTION)]))
    assert titled.cache_id != said[0].cache_id  # type: ignore[attr-defined]


def test_a_use_extends_the_life_of_what_was_kept(client: anthropic.Anthropic, http: httpx.Client, model: str) -> None:
    text = unique()

    def expiry(ttl: str) -> float:
        said = client.messages.create(**asked(model, system=[marked(text, ttl=ttl)]))
        found: float = http.get(f"/v1/caches/{said.cache_id}").json()["expires_at"]  # type: ignore[attr-defined]
        return found

    first, second = expiry("5m"), expiry("5m")
    assert second > first
    hour = expiry("1h")
    assert hour == pytest.approx(time.time() + 3600, abs=30)
    assert expiry("5m") == hour, "a shorter time shortens nothing"


def test_turns_are_kept_behind_the_cache_and_live_together(
    client: anthropic.Anthropic, http: httpx.Client, model: str
) -> None:
    system = [marked(unique(), ttl="1h")]
    messages: list[dict[str, Any]] = []
    stored: list[str] = []
    prefilled, length = [], 0
    for turn in range(4):
        messages.append(user(f"What is fact {turn} of the green book?"))
        said = client.messages.create(**asked(model, system=system, messages=messages, cache_control=EPHEMERAL))
        usage = said.usage
        if turn:
            assert usage.cache_read_input_tokens == length, "all that was read or said before"
        assert usage.input_tokens == 0, "what was prefilled is kept"
        prefilled.append(usage.cache_creation_input_tokens or 0)
        stored.append(said.stored_cache_id)  # type: ignore[attr-defined]
        length = http.get(f"/v1/caches/{stored[-1]}").json()["tokens"]["document"]
        messages.append({"role": "assistant", "content": said.to_dict()["content"]})
    assert max(prefilled[1:]) < 40 < prefilled[0]
    early = http.patch(f"/v1/caches/{stored[1]}", json={"ttl_s": 10, "ttl_renew": True}).json()["expires_at"]
    time.sleep(1.5)
    client.messages.create(**asked(model, system=system, messages=[*messages, user("And?")]))
    end = time.monotonic() + 30
    while http.get(f"/v1/caches/{stored[1]}").json()["expires_at"] <= early + 1:
        assert time.monotonic() < end, "the last turn, which was read, lets those before it live on"
        time.sleep(0.05)


def test_a_stored_cache_is_asked_by_its_id(
    client: anthropic.Anthropic, http: httpx.Client, cache: dict[str, Any]
) -> None:
    own = {"cache_id": cache["id"]}
    said = client.messages.create(**asked(cache["model"], system="Be exact.", extra_body=own))
    body = {"prompt": "Be exact.\n\n" + QUESTION, "max_tokens": 8}
    answer = http.post(f"/v1/caches/{cache['id']}/query", json=body).json()
    assert said.content[0].text == answer["text"]
    assert said.usage.cache_read_input_tokens == cache["tokens"]["document"]
    assert said.usage.cache_creation_input_tokens == 0
    kept = client.messages.create(**asked(cache["model"], messages=[user(marked(QUESTION))], extra_body=own))
    turn = http.get(f"/v1/caches/{kept.stored_cache_id}").json()  # type: ignore[attr-defined]
    assert turn["parent_id"] == cache["id"]
    assert http.get(f"/v1/caches/{cache['id']}").json()["expires_at"] == cache["expires_at"]


def test_without_an_answer_the_cache_is_made_all_the_same(client: anthropic.Anthropic, model: str) -> None:
    body = asked(model, system=[marked(unique())], cache_control=EPHEMERAL)
    made = client.messages.create(**body | {"max_tokens": 0})
    assert (made.content, made.stop_reason, made.usage.output_tokens) == ([], "max_tokens", 0)
    assert "no answer to keep" in made.not_stored  # type: ignore[attr-defined]
    found = client.messages.create(**body)
    assert found.cache_id == made.cache_id  # type: ignore[attr-defined]
    assert 0 < (made.usage.cache_creation_input_tokens or 0) == found.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="no answer to stream"):
        client.messages.create(**body | {"max_tokens": 0}, stream=True)


def test_a_policy_is_kvshelf_s_own_field(client: anthropic.Anthropic, http: httpx.Client, model: str) -> None:
    choice = {"policy": "keydiff", "compression_ratio": 0.5, "codec": "int8"}
    said = client.messages.create(**asked(model, system=[marked(unique())], extra_body={"cache": choice}))
    found = http.get(f"/v1/caches/{said.cache_id}").json()  # type: ignore[attr-defined]
    assert (found["policy"], found["codec"]) == ("keydiff", "int8")
    assert found["compression_ratio"] == pytest.approx(0.5, abs=0.02)


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, cache: dict[str, Any]) -> None:
    own = {"cache_id": cache["id"]}
    body = asked(cache["model"], max_tokens=12, extra_body=own)
    plain = client.messages.create(**body).content[0].text
    stop = plain[4:7]
    said = client.messages.create(**body, stop_sequences=["never said", stop])
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert said.content[0].text == plain[: plain.index(stop)]
    warm = body | {"extra_body": own | {"temperature": 1.0, "top_p": 0.99}}
    drawn = {client.messages.create(**warm).content[0].text for _ in range(4)}
    assert len(drawn) > 1


def test_a_stream_has_anthropic_s_events(client: anthropic.Anthropic, service_url: str, model: str) -> None:
    body = asked(model, system=[marked(unique())])
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    whole = client.messages.create(**body)
    assert streamed.content[0].text == text == whole.content[0].text
    assert streamed.usage.cache_creation_input_tokens == whole.usage.cache_read_input_tokens
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (streamed.stop_reason, streamed.model) == (whole.stop_reason, model)
    raw = httpx.post(f"{service_url}/v1/messages", json=body | {"stream": True}, timeout=60).text
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")]
    deltas = names.count("content_block_delta")
    assert deltas > 3
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "[DONE]" not in raw


@pytest.mark.anyio
async def test_the_asynchronous_client(service_url: str, cache: dict[str, Any]) -> None:
    body = asked(cache["model"], extra_body={"cache_id": cache["id"]})
    async with anthropic.AsyncAnthropic(base_url=service_url, api_key="anything", max_retries=0) as client:
        said = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            assert await stream.get_final_text() == said.content[0].text
        missing = body | {"extra_body": {"cache_id": "kvs_" + "0" * 40}}
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**missing, stream=True)


def test_tokens_are_counted_without_a_cache(
    client: anthropic.Anthropic, http: httpx.Client, cache: dict[str, Any], model: str
) -> None:
    def counted(**fields: Any) -> int:
        return client.messages.count_tokens(model=model, **fields).input_tokens

    def read(**fields: Any) -> int:
        usage = client.messages.create(model=model, max_tokens=1, **fields).usage
        parts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
        return sum(part or 0 for part in parts)

    messages: Any = [user("Where?"), {"role": "assistant", "content": "There."}, user(QUESTION)]
    system = [marked(unique())]
    own = {"extra_body": {"cache_id": cache["id"]}}
    before = len(http.get("/v1/caches", params={"limit": 1000}).json()["data"])
    counts = counted(system=system, messages=messages), counted(messages=messages, **own)
    assert len(http.get("/v1/caches", params={"limit": 1000}).json()["data"]) == before
    assert counts == (read(system=system, messages=messages), read(messages=messages, **own))
    alone = counted(messages=messages)
    assert 0 < alone < counted(system="Be exact.", messages=messages) < min(counts)
    with pytest.raises(anthropic.NotFoundError, match="'claude'"):
        client.messages.count_tokens(model="claude", messages=messages)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model=model, messages=messages, extra_body={"cache_id": "kvs_" + "0" * 40})


def test_what_the_model_cannot_do_is_refused_before_its_cache_is_made(
    client: anthropic.Anthropic, http: httpx.Client, model: str
) -> None:
    before = http.get("/v1/caches", params={"limit": 1000}).json()["data"]
    schema = {"format": {"type": "json_schema", "schema": {"type": "x"}}}
    tool = {"name": "find", "input_schema": {"type": "object"}}
    for change, param in (({"output_config": schema}, "output_config.format"), ({"tools": [tool]}, "tools")):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**asked(model, system=[marked(unique())], **change))
        assert refused.value.body["error"]["param"] == param  # type: ignore[index]
    assert http.get("/v1/caches", params={"limit": 1000}).json()["data"] == before


def test_the_models(client: anthropic.Anthropic, service_url: str, model: str) -> None:
    (found,) = client.models.list()
    assert (found.id, found.type, found.display_name, found.lifecycle) == (model, "model", model, "active")
    assert found.created_at.timestamp() == pytest.approx(time.time(), abs=3600)
    assert client.models.retrieve(model) == found
    with pytest.raises(anthropic.NotFoundError, match="'no/such'") as missing:
        client.models.retrieve("no/such")
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as other:
        assert other.models.retrieve(model).id == model
        with pytest.raises(openai.NotFoundError):
            other.models.retrieve("no/such")


LONG = marked("long " * 100)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "stored caches only"),
        ({"cache_control": EPHEMERAL}, "nothing stands before the question"),
        ({"system": [marked("short")]}, "has 5 characters, and at least 256"),
        ({"system": [LONG] * 5}, "5 blocks have cache_control; at most 4"),
        ({"system": [LONG], "messages": [user({"type": "image", "source": {}}, "?")]}, "block of type 'image'"),
        ({"system": [LONG], "messages": [user({"type": "tool_result", "tool_use_id": "a"}, "?")]}, "no tool_use"),
        ({"messages": [user({"type": "document", "source": {"type": "base64", "data": ""}})]}, "type 'base64'"),
        ({"messages": [user({"type": "document", "source": {"type": "url", "url": ""}})]}, "source type 'url'"),
        ({"system": [LONG], "tools": [{"name": "find", "input_schema": {"type": "object"}}]}, "model has no tools"),
        ({"system": [LONG], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        (
            {"system": [LONG], "output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format cannot",
        ),
        ({"system": [LONG], "extra_body": {"cache": {"policy": "nosuch"}}}, "nosuch"),
        ({"system": [LONG], "extra_body": {"colour": "red"}}, "unknown field"),
        ({"system": [LONG], "extra_body": {"temperature": -1.0}}, "temperature"),
        ({"system": [LONG], "messages": [user("?"), {"role": "assistant", "content": "On"}]}, "the user's"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(
    client: anthropic.Anthropic, model: str, change: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as raised:
        client.messages.create(**asked(model, **change), stream=stream)
    assert raised.value.type == "invalid_request_error"
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]
    body: Any = raised.value.body
    assert (body["type"], body["request_id"]) == ("error", raised.value.request_id)


def test_what_is_not_there_is_not_found(client: anthropic.Anthropic, http: httpx.Client, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'claude' is not served") as raised:
        client.messages.create(**asked("claude", system=[LONG]))
    assert raised.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model, extra_body={"cache_id": "kvs_" + "0" * 40}))
    gone = created(http, document=unique("This is gone in a moment. " * 20), ttl_s=0.2)
    time.sleep(0.3)
    with pytest.raises(anthropic.APIStatusError) as expired:
        client.messages.create(**asked(model, extra_body={"cache_id": gone["id"]}))
    assert expired.value.body["error"]["code"] == "cache_expired"  # type: ignore[index]
    assert http.get("/v1/messages").json()["type"] == "error"
