"""Reading streamed answers from the lines of an event stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvshelf import errors
from kvshelf.api import AnswerObject, ReadShares
from kvshelf.client import AsyncClient, Client
from kvshelf.client._stream import AnswerReader

ANSWER = {
    "id": "ans_1",
    "object": "answer",
    "cache_id": "kvs_1",
    "text": "4 82",
    "finish_reason": "stop",
    "usage": {"cache_read_tokens": 9, "read_tokens": 7, "prefill_tokens": 3, "completion_tokens": 2},
    "load_ms": 1.5,
    "policy": "full",
    "compression_ratio": 0.0,
}
DELTAS = [{"object": "answer.delta", "text": "4"}, {"object": "answer.delta", "text": " 82"}]


def events(*items: Any) -> bytes:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def client(content: bytes) -> Client:
    headers = {"content-type": "text/event-stream"}
    return Client(
        "http://service.test",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=content, headers=headers)),
    )


def test_the_pieces_come_first_and_the_answer_last() -> None:
    with client(events(*DELTAS, ANSWER, "[DONE]")) as c, c.caches.stream("kvs_1", "which?") as stream:
        assert list(stream) == ["4", " 82"]
        assert stream.answer.text == "4 82"
        assert stream.answer.usage.prefill_tokens == 3


def test_the_answer_can_be_had_without_reading_the_pieces() -> None:
    with client(events(*DELTAS, ANSWER, "[DONE]")) as c:
        assert c.caches.stream("kvs_1", "which?").answer.id == "ans_1"


@pytest.mark.anyio
async def test_the_asynchronous_stream_gives_the_same() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=events(*DELTAS, ANSWER, "[DONE]")))
    async with AsyncClient("http://service.test", transport=transport) as c:
        stream = await c.caches.stream("kvs_1", "which?")
        assert [piece async for piece in stream] == ["4", " 82"]
        assert (await stream.final()).text == "4 82"


def test_an_error_in_the_middle_is_raised_after_the_pieces_before_it() -> None:
    error = {"error": {"message": "the worker died", "type": "worker_error", "param": None, "code": "worker_crashed"}}
    with client(events(DELTAS[0], error)) as c:
        stream = iter(c.caches.stream("kvs_1", "which?"))
        assert next(stream) == "4"
        with pytest.raises(errors.WorkerCrashed, match="the worker died"):
            next(stream)


@pytest.mark.parametrize("tail", [b"", b"data: [DONE]\n\n"])
def test_a_stream_without_an_answer_is_no_success(tail: bytes) -> None:
    with client(events(*DELTAS) + tail) as c, pytest.raises(errors.ConnectionFailed, match="before the answer"):
        list(c.caches.stream("kvs_1", "which?"))


@pytest.mark.parametrize(
    "line", ["data: {", "data: 7", "data: null", 'data: {"object": "answer"}', 'data: {"error": 1}']
)
def test_what_is_no_event_is_named(line: str) -> None:
    with pytest.raises(errors.ConnectionFailed, match="no event of kvshelf"):
        AnswerReader(AnswerObject).feed(line)


@pytest.mark.parametrize("line", ["", ": keep-alive", "event: message", "id: 3"])
def test_other_lines_of_the_protocol_add_nothing(line: str) -> None:
    assert AnswerReader(AnswerObject).feed(line) is None


def test_the_most_read_tokens_grow_around_the_highest_shares() -> None:
    read = ReadShares.of("kvs_1", bytes([0, 150, 255, 128, 100, 80, 0, 25, 0]))
    assert [(run.first, run.end) for run in read.most_read()] == [(1, 4), (4, 6), (7, 8)]
    assert read.most_read()[0].share == pytest.approx((150 + 255 + 128) / 3 / 255)
    assert [run.first for run in read.most_read(2)] == [1, 4]
    assert len(ReadShares.of("kvs_1", bytes([255, 0] * 9)).most_read()) == 5
    assert ReadShares.of("kvs_1", bytes(9)).most_read() == ReadShares.of("kvs_1", b"").most_read() == []
