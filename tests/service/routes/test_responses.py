"""OpenAI's own client and POST /v1/responses of a live service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from kvshelf.api.strict import MAX_LABELS

QUESTION = "Where is the green book?"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as found:
        yield found


def asked(cache: dict[str, Any], **fields: Any) -> dict[str, Any]:
    own = {"cache_id": cache["id"]}
    return {"model": cache["model"], "input": QUESTION, "max_output_tokens": 8, "extra_body": own} | fields


def behind(response: Any, question: str, **fields: Any) -> dict[str, Any]:
    body = {"model": response.model, "input": question, "max_output_tokens": 8}
    return body | {"previous_response_id": response.id} | fields


def test_a_response(client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]) -> None:
    said = client.responses.create(**asked(cache, store=False, metadata={"a": "b"}, instructions="Be exact."))
    body = {"prompt": "Be exact.\n\n" + QUESTION, "max_tokens": 8}
    answer = http.post(f"/v1/caches/{cache['id']}/query", json=body).json()
    assert said.output_text == answer["text"]
    assert (said.status, said.object, said.metadata, said.store) == ("incomplete", "response", {"a": "b"}, False)  # type: ignore[attr-defined]
    assert said.incomplete_details is not None
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.usage is not None
    assert said.usage.input_tokens_details.cached_tokens == cache["tokens"]["document"]
    assert said.usage.input_tokens == cache["tokens"]["document"] + answer["usage"]["prefill_tokens"]
    assert said.usage.input_tokens_details.cache_write_tokens == 0
    assert said.usage.output_tokens == 8
    assert said._request_id
    with pytest.raises(openai.NotFoundError, match="it was not stored"):
        client.responses.create(**behind(said, "And now?"))


def test_a_response_is_asked_further(client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]) -> None:
    first = client.responses.create(**asked(cache))
    turn = http.get(f"/v1/caches/{first.stored_cache_id}").json()  # type: ignore[attr-defined]  # kvshelf's own field
    assert turn["parent_id"] == cache["id"]
    again = client.responses.create(**asked(cache))
    assert again.stored_cache_id == turn["id"]  # type: ignore[attr-defined]
    assert again.id != first.id
    texts = set()
    for earlier in (first, again):
        second = client.responses.create(**behind(earlier, "And the red one?"))
        texts.add(second.output_text)
        assert second.previous_response_id == earlier.id
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens == turn["tokens"]["document"]
    third = client.responses.create(**behind(second, "Both?"))
    chain = http.get(f"/v1/caches/{third.stored_cache_id}/turns").json()["data"]  # type: ignore[attr-defined]
    said = [message["content"] for link in chain[1:] for message in link["messages"]]
    assert said == [QUESTION, first.output_text, "And the red one?", second.output_text, "Both?", third.output_text]
    assert len(texts) == 1
    whole: list[Any] = [{"role": "user", "content": QUESTION}, *first.to_dict()["output"]]  # type: ignore[misc]
    whole.append({"role": "user", "content": [{"type": "input_text", "text": "And the red one?"}]})
    sent = client.responses.create(**asked(cache, input=whole, store=False))
    assert sent.output_text == second.output_text
    assert sent.usage is not None
    assert sent.usage.input_tokens_details.cached_tokens == turn["tokens"]["document"], "found behind cache_id, too"


def test_a_stream_has_openai_s_events(client: openai.OpenAI, service_url: str, cache: dict[str, Any]) -> None:
    body = asked(cache, store=False)
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    names = [event.type for event in events]
    deltas = names.count("response.output_text.delta")
    assert deltas > 3
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    sent = asked(cache) | {"stream": True, "cache_id": cache["id"], "store": False}
    sent.pop("extra_body")
    raw = httpx.post(f"{service_url}/v1/responses", json=sent, timeout=60).text
    assert raw.count("event: response.output_text.delta\ndata: ") == deltas
    assert "[DONE]" not in raw


def test_a_streamed_response_is_asked_further(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    """The client takes no other id at the end than at the beginning, where nobody knows what will be stored."""
    stop = client.responses.create(**asked(cache, store=False)).output_text[3:5]
    own = {"cache_id": cache["id"], "stop": stop}
    with client.responses.stream(**asked(cache, extra_body=own)) as stream:
        first = stream.until_done().get_final_response()
    assert first.status == "completed"
    second = client.responses.create(**behind(first, "And the red one?"))
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > cache["tokens"]["document"]


@pytest.mark.anyio
async def test_the_asynchronous_client(service_url: str, cache: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as client:
        said = await client.responses.create(**asked(cache, store=False))
        stream = await client.responses.create(**asked(cache, store=False), stream=True)
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == said.output_text
        missing = asked(cache, extra_body={"cache_id": "kvs_" + "0" * 40})
        for streamed in (False, True):
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.responses.create(**missing, stream=streamed)
            assert unknown.value.code == "cache_not_found"


TOOL: Any = {"type": "function", "name": "find", "parameters": None, "strict": None}
CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
JSON: Any = {"format": {"type": "json_object"}}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra_body": {}}, "cache_id or cache_ids or previous_response_id is needed"),
        ({"previous_response_id": "resp_1"}, "give cache_id or previous_response_id, not both"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: a tool of type 'web_search' is not supported"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, r"tools\[0\]: a tool of type 'mcp' is not supported"),
        ({"tools": [TOOL]}, "the chat template of this model has no tools"),
        ({"tools": [TOOL, TOOL]}, "two tools have the same name"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "there is no tool 'x'"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "a choice of type 'file_search' is not supported"),
        ({"tools": [TOOL], "tool_choice": "required", "text": JSON}, "leave text.format out"),
        (
            {"text": JSON, "extra_body": {"cache_id": "kvs_1", "grammar": "start: /a/"}},
            "text.format and grammar were given",
        ),
        ({"input": [RESULT], "tools": [TOOL]}, r"input\[0\].call_id: there is no call 'call_1'"),
        ({"input": [CALL, RESULT]}, "give the tools, too"),
        ({"input": [CALL | {"arguments": "4"}], "tools": [TOOL]}, r"input\[0\].arguments: .* must be a JSON object"),
        ({"top_logprobs": 2}, "only allowed with include"),
        ({"include": ["x"]}, "include"),
        ({"background": True}, "background is not supported"),
        ({"input": IMAGE}, "part of type 'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item of type 'item_reference'"),
        ({"temperature": -1.0}, "temperature"),
        ({"model": "other"}, "is of model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openai_s_exceptions(
    client: openai.OpenAI, cache: dict[str, Any], change: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        client.responses.create(**asked(cache, **change), stream=stream)
    assert raised.value.code == "invalid_request"
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]


def test_hints_are_accepted_and_have_no_effect(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    hints: dict[str, Any] = {
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "metadata": {"a": "b"}
    }  # fmt: skip
    plain = client.responses.create(**asked(cache, store=False)).output_text
    assert client.responses.create(**asked(cache, store=False), **hints).output_text == plain
    developer: list[Any] = [{"role": "developer", "content": "Be exact."}, {"role": "user", "content": QUESTION}]
    told = client.responses.create(**asked(cache, store=False, input=developer), **hints)
    chat = {"model": cache["model"], "messages": developer, "max_tokens": 8, "extra_body": {"cache_id": cache["id"]}}
    assert client.chat.completions.create(**chat, **hints).choices[0].message.content == told.output_text


class Fact(BaseModel):
    kind: Literal["code", "name"]
    found: bool


def test_openais_parse_gives_a_model(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    said = client.responses.parse(**asked(cache, store=False) | {"max_output_tokens": 40}, text_format=Fact)
    assert isinstance(said.output_parsed, Fact)
    assert said.text is not None
    assert said.text.format is not None
    assert said.text.format.type == "json_schema"
    wrong: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strng"}}}
    with pytest.raises(openai.BadRequestError, match=r"text.format cannot be used: .*strng") as refused:
        client.responses.create(**asked(cache), text=wrong)
    assert refused.value.param == "text.format"


def test_logprobs(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    said = client.responses.create(**asked(cache), **more)
    (message,) = said.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    told = part.logprobs
    assert told is not None
    assert len(told) == said.usage.output_tokens == 8  # type: ignore[union-attr]
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in told)
    assert b"".join(bytes(each.bytes) for each in told).decode() == said.output_text
    events: list[Any] = list(client.responses.create(**asked(cache), **more, stream=True))
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [each.token for each in done.logprobs] == [each.token for each in told]
    deltas = [each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert deltas == [each.token for each in told]
    whole: Any = [{"role": "user", "content": QUESTION}, *said.output, {"role": "user", "content": "More?"}]
    assert client.responses.create(**asked(cache, input=whole, store=False)).output_text


def test_a_kept_response_is_fetched_and_deleted(
    client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]
) -> None:
    body = asked(cache, input="Where is the brown book?", instructions="Be exact.", metadata={"a": "b"})
    first, equal = client.responses.create(**body), client.responses.create(**body)
    assert client.responses.retrieve(first.id) == first
    streamed = list(client.responses.create(**body, stream=True))[-1].response  # type: ignore[union-attr]
    assert client.responses.retrieve(streamed.id) == streamed
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        client.responses.retrieve(first.id, stream=True)
    second = client.responses.create(**behind(first, "And the red one?"))
    client.responses.delete(first.id)
    client.responses.delete(streamed.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone(first.id)
    assert client.responses.retrieve(equal.id) == equal, "it has the same turn"
    with pytest.raises(openai.ConflictError) as extended:
        client.responses.delete(equal.id)
    assert extended.value.code == "cache_has_children"
    client.responses.delete(second.id)
    client.responses.delete(equal.id)
    turn: str = equal.stored_cache_id  # type: ignore[attr-defined]
    assert http.get(f"/v1/caches/{turn}").status_code == 404
    kept = client.responses.create(**body)
    assert http.delete(f"/v1/caches/{turn}").status_code == 200
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(kept.id)


def test_labels_of_a_turn_are_the_callers(client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]) -> None:
    body = asked(cache, input="Where is the grey book?")
    first = client.responses.create(**body)
    path = f"/v1/caches/{first.stored_cache_id}"  # type: ignore[attr-defined]
    assert http.get(path).json()["labels"] == {}
    own = {f"own-{n}": "" for n in range(MAX_LABELS)}
    assert http.patch(path, json={"labels": own}).status_code == 200
    second = client.responses.create(**body)
    assert second.to_dict().get("not_stored") is None
    assert client.responses.retrieve(first.id).output_text == client.responses.retrieve(second.id).output_text
    assert http.delete(path).status_code == 200
    for response in (first, second):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
