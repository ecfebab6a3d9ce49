"""Answers in a shape, several answers, and how likely their tokens were: queries, chat completions, the clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from pydantic import BaseModel

from kvshelf import AsyncClient, Client
from kvshelf.api import AnswerObject
from kvshelf.errors import InvalidRequest
from tests.service.conftest import created, refused
from tests.service.routes.test_queries import events

QUESTION = "What is the access code of the amber falcon?"
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{6}$"}},
    "required": ["code"],
    "additionalProperties": False,
}
IN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "fact", "schema": CODE, "strict": True}}
CHAT: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def cache(http: httpx.Client) -> dict[str, Any]:
    filler = "The harbour opens at six. " * 20
    document = f"{filler}The access code of the amber falcon is 482913. {filler}"
    return created(http, document=document, policy="full")


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def post(http: httpx.Client, cache: dict[str, Any], **body: Any) -> httpx.Response:
    return http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": QUESTION, "max_tokens": 24} | body)


def test_each_shape_of_a_query(http: httpx.Client, cache: dict[str, Any]) -> None:
    answer = post(http, cache, response_format=IN_SCHEMA).json()
    jsonschema.validate(json.loads(answer["text"]), CODE)
    assert answer["finish_reason"] == "stop"
    assert post(http, cache, choices=["175206", "482913"]).json()["text"] in ("175206", "482913")
    assert re.fullmatch("no [a-z]{3}", post(http, cache, grammar='start: "no " /[a-z]{3}/').json()["text"])
    assert "logprobs" not in answer


def test_a_stream_in_a_shape(http: httpx.Client, cache: dict[str, Any]) -> None:
    *pieces, answer = events(post(http, cache, response_format=IN_SCHEMA, stream=True, logprobs=True))
    assert "".join(piece["text"] for piece in pieces) == answer["text"]
    jsonschema.validate(json.loads(answer["text"]), CODE)
    assert "".join(told["token"] for told in answer["logprobs"]) == answer["text"]
    assert len(pieces) > 1
    assert all("".join(told["token"] for told in piece["logprobs"]) == piece["text"] for piece in pieces)
    assert [told for piece in pieces for told in piece["logprobs"]] == answer["logprobs"]


def test_several_answers_to_each_prompt(http: httpx.Client, cache: dict[str, Any]) -> None:
    drawn = {"temperature": 3.0, "seed": 2**63 - 1, "max_tokens": 6}
    answers = post(http, cache, prompt=[QUESTION, "Who?"], n=3, **drawn).json()["data"]
    assert len(answers) == 6
    assert len({answer["text"] for answer in answers[:3]}) == 3
    assert post(http, cache, n=3, **drawn).json()["data"][1]["text"] == answers[1]["text"]
    again = post(http, cache, **drawn | {"seed": -(2**63)}).json()
    assert again["text"] == answers[1]["text"]


class Fact(BaseModel):
    kind: Literal["code", "name"]
    found: bool


def test_openais_parse_gives_a_model(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    said = client.chat.completions.parse(
        model=cache["model"], messages=CHAT, response_format=Fact, extra_body={"cache_id": cache["id"]}
    )
    assert isinstance(said.choices[0].message.parsed, Fact)


def test_openais_choices_and_logprobs(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": cache["model"], "messages": CHAT, "max_tokens": 5, "n": 3, "seed": 5}
    asked |= {"temperature": 2.0, "logprobs": True, "top_logprobs": 2, "extra_body": {"cache_id": cache["id"]}}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts: list[str] = ["", "", ""]
    likely: list[list[ChatCompletionTokenLogprob]] = [[], [], []]
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                likely[choice.index] += choice.logprobs.content or []
                own = bytes(b for told in likely[choice.index] for b in told.bytes or ()).decode(errors="replace")
                assert own == texts[choice.index], "each chunk has the logprobs of its own tokens"
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    for choice, streamed in zip(whole.choices, likely, strict=True):
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert [told.token for told in streamed] == [told.token for told in content]
        assert [told.logprob for told in streamed] == pytest.approx([told.logprob for told in content], abs=1e-3)
        assert all(len(told.top_logprobs) == 2 and told.logprob <= 0 for told in content)
        assert bytes(b for told in content for b in told.bytes or ()).decode(errors="replace") == choice.message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 15
    assert usage.prompt_tokens == cache["tokens"]["document"] + whole.usage.prompt_tokens - cache["tokens"]["document"]


@pytest.mark.anyio
async def test_both_clients(service_url: str, cache: dict[str, Any]) -> None:
    with Client(service_url) as client:
        answer = client.caches.query(cache["id"], QUESTION, choices=["175206", "482913"], logprobs=True)
        assert isinstance(answer, AnswerObject)
        assert answer.text in ("175206", "482913")
        assert "".join(told.token for told in answer.logprobs or ()) == answer.text
        assert len(client.caches.query(cache["id"], [QUESTION], n=2)) == 2
        with pytest.raises(InvalidRequest, match="prompts as a list"):
            client.caches.query(cache["id"], QUESTION, n=2)
    async with AsyncClient(service_url) as other:
        text = (await other.caches.query(cache["id"], QUESTION, response_format=IN_SCHEMA)).text
        jsonschema.validate(json.loads(text), CODE)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"choices": ["a"], "grammar": "start: /a/"}, "choices", "one shape"),
        ({"choices": ["a", "a"]}, "choices", "twice"),
        ({"choices": []}, "choices", "at least 1"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None, "schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}},
         "response_format", "strng"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 70_000]}}}},
         "response_format", "65536"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"choices": ["a" * 1024], "max_tokens": 2}, "max_tokens", "1024 bytes"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"n": 2, "stream": True}, "n", "stream"),
        ({"n": 2, "store": True}, "n", "store"),
        ({"n": 17}, "n", "16"),
    ],
)  # fmt: skip
def test_bad_shapes_are_refused(
    http: httpx.Client, cache: dict[str, Any], body: dict[str, Any], param: str | None, says: str
) -> None:
    error = refused(post(http, cache, **body), 400, "invalid_request")
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_openais_client_gets_its_own_error(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=cache["model"], messages=CHAT, response_format=wrong, extra_body={"cache_id": cache["id"]}
        )
    assert caught.value.param == "response_format"
