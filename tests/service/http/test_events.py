"""Event streams as the service writes them and both kinds of readers split them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, get_args

import httpx
import httpx2
import openai
import pytest
from anthropic.types.shared.error_type import ErrorType
from fastapi import FastAPI, Request, Response
from openai.types.responses import ResponseErrorEvent

from kvshelf import errors
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.responses import ResponsesRequest
from kvshelf.client import AsyncClient
from kvshelf.service.dialects.responses import Responding
from kvshelf.service.http.errors import wire
from kvshelf.service.http.events import event_stream

LINE_ENDS = "one\u2028two\u2029three\x85four\vfive\fsix\x1cseven\r\neight"
"""What Python, and so httpx, takes for the ends of lines."""


def answering(text: str, *, fails: bool = False) -> AsyncClient:
    """A client of a service that streams this text as one piece, and then the answer or an error."""
    app = FastAPI()

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {"object": "answer.delta", "text": text}
        if fails:
            raise errors.StoreUnavailable(text)
        usage = {"cache_read_tokens": 9, "read_tokens": 7, "prefill_tokens": 3, "completion_tokens": 2}
        told = {"id": "ans_1", "object": "answer", "cache_id": "kvs_1", "finish_reason": "stop", "load_ms": 1.5}
        yield {**told, "text": text, "usage": usage, "policy": "full", "compression_ratio": 0.0}

    @app.post("/v1/caches/kvs_1/query")
    async def query(request: Request) -> Response:
        return await event_stream(request, events())

    return AsyncClient("http://service.test", transport=httpx.ASGITransport(app))


@pytest.mark.anyio
async def test_no_character_of_an_answer_ends_a_line() -> None:
    async with answering(LINE_ENDS) as client:
        stream = await client.caches.stream("kvs_1", "which?")
        assert [piece async for piece in stream] == [LINE_ENDS]
        assert (await stream.final()).text == LINE_ENDS


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", "overloaded_error"), ("/v1/responses", "store_error")])
async def test_events_with_a_type_are_named_by_it_and_so_is_an_error(path: str, kind: str) -> None:
    app = FastAPI()

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "first", "message": {}}
        raise errors.StoreUnavailable("away")

    @app.post(path)
    async def answer(request: Request) -> Response:
        return await event_stream(request, events())

    async with httpx.AsyncClient(base_url="http://service.test", transport=httpx.ASGITransport(app)) as client:
        text = (await client.post(path)).text
    first, second = text.removesuffix("\n\n").split("\n\n")
    assert first == 'event: first\ndata: {"type":"first","message":{}}'
    name, _, data = second.partition("\ndata: ")
    assert name == "event: error"
    error = json.loads(data)
    assert (error["type"], error["error"]["type"], error["error"]["message"]) == ("error", kind, "away")


@pytest.mark.anyio
async def test_an_error_within_a_response_is_an_event_that_openai_s_client_raises() -> None:
    app = FastAPI()
    body = ResponsesRequest(input="?", cache_id="kvs_1")

    async def pieces() -> AsyncGenerator[Piece | Answer, None]:
        yield Piece("one")
        raise errors.StoreUnavailable("away", param="cache_id")

    @app.post("/v1/responses")
    async def answer(request: Request) -> Response:
        return await event_stream(request, Responding(body, body.asking(may_write=False), "tiny").events(pieces()))

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(base_url="http://service.test/v1", api_key="any", http_client=http) as client:
        seen = []

        async def read() -> None:
            async for event in await client.responses.create(model="tiny", input="?", stream=True):
                seen.append(event.type)

        with pytest.raises(openai.APIError, match="away") as raised:
            await read()
        assert seen[-1] == "response.output_text.delta"
        assert (raised.value.code, raised.value.param) == ("store_unavailable", "cache_id")
        text = (await http.post("http://service.test/v1/responses")).text
    data = json.loads(text.removesuffix("\n\n").rpartition("\ndata: ")[2])
    assert ResponseErrorEvent.model_validate(data).sequence_number == len(seen)


@pytest.mark.parametrize("cls", sorted(errors.by_code().values(), key=lambda cls: cls.code))
def test_every_error_has_a_type_that_anthropic_s_client_knows(cls: type[errors.KvshelfError]) -> None:
    found = wire(cls("away"), anthropic=True)
    assert found["error"]["type"] in get_args(ErrorType)
    assert found["error"] | {"type": cls.type} == wire(cls("away"), anthropic=False)["error"]


@pytest.mark.anyio
async def test_an_error_behind_the_first_piece_is_raised_with_its_whole_message() -> None:
    async with answering(LINE_ENDS, fails=True) as client:
        stream = await client.caches.stream("kvs_1", "which?")
        with pytest.raises(errors.StoreUnavailable) as caught:
            [piece async for piece in stream]
    assert caught.value.message == LINE_ENDS
