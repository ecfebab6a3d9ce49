"""What a connection may cost before its first request is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn

from kvshelf.service.http.server import MAX_HEADER_BYTES, BoundedConnection, ConnectionLimits

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def hello(scope: dict[str, object], _receive: object, send: object) -> None:
    assert scope["type"] == "http"
    await asyncio.sleep(0.3)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"hi"})  # type: ignore[operator]


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[int]:
    config = uvicorn.Config(
        hello,  # type: ignore[arg-type]
        http=partial(BoundedConnection, limits),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        host="127.0.0.1", port=0, log_config=None, lifespan="off",
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def test_a_silent_connection_is_closed_and_one_that_works_is_not() -> None:
    async def run() -> None:
        async with serving(ConnectionLimits(100, 100, headers_s=0.2)) as port:
            reader, _ = await silent(port)
            started = time.monotonic()
            assert await reader.read() == b""
            assert 0.15 < time.monotonic() - started < 2
            reader, writer = await silent(port)
            writer.write(REQUEST)  # answered after 0.3 s: longer than headers may take
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
            writer.write(REQUEST)
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_headers_that_come_slowly_end_the_connection_also_after_a_request() -> None:
    async def run() -> None:
        async with serving(ConnectionLimits(100, 100, headers_s=0.3)) as port:
            reader, writer = await silent(port)
            writer.write(REQUEST)
            await reader.readuntil(b"hi")
            started = time.monotonic()
            writer.write(REQUEST[:20])
            for _ in range(10):
                await asyncio.sleep(0.1)
                writer.write(b"x")
                if reader.at_eof():
                    break
            assert time.monotonic() - started < 1.5
            assert await reader.read() == b""

    asyncio.run(run())


def test_connections_beyond_the_bound_are_told_so_and_a_place_is_free_again() -> None:
    async def run() -> None:
        limits = ConnectionLimits(most=100, most_per_address=2, headers_s=5)
        async with serving(limits) as port:
            first, second = await silent(port), await silent(port)
            reader, _ = await silent(port)
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
            first[1].close()
            await first[1].wait_closed()
            while limits.by_address.total() > 1:
                await asyncio.sleep(0.01)
            reader, writer = await silent(port)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
            second[1].close()

    asyncio.run(run())


def test_headers_are_bounded() -> None:
    async def run() -> None:
        async with serving(ConnectionLimits(100, 100, headers_s=5)) as port:
            reader, writer = await silent(port)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
            answer = b""
            try:
                for _ in range(64):
                    writer.write(b"x: " + b"y" * (64 << 10) + b"\r\n")
                    await writer.drain()
                answer = await reader.read()
            except ConnectionError:
                return
            assert answer.startswith(b"HTTP/1.1 4")

    asyncio.run(run())
