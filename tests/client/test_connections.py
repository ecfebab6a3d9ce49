"""The connections of both clients, on real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvshelf.client import AsyncClient, Client

CALLS = 30
"""At once: more than the 20 connections that httpx lets idle by default."""


class Service(ThreadingHTTPServer):
    """It answers once `CALLS` requests wait, and counts the connections."""

    request_queue_size = CALLS
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Listing)
        self.all_wait = threading.Barrier(CALLS)
        self.connections = 0

    def process_request(self, request: object, client_address: object) -> None:
        self.connections += 1
        super().process_request(request, client_address)  # type: ignore[arg-type]


class Listing(BaseHTTPRequestHandler):
    """An empty list of caches."""

    protocol_version = "HTTP/1.1"
    server: Service

    def do_GET(self) -> None:
        self.server.all_wait.wait(30)
        body = json.dumps({"object": "list", "data": [], "has_more": False, "last_id": None}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask_with_threads(url: str) -> None:
    with Client(url) as client, ThreadPoolExecutor(CALLS) as threads:
        for _ in range(2):
            assert list(threads.map(lambda _: list(client.caches.list()), range(CALLS))) == [[]] * CALLS


def ask_with_tasks(url: str) -> None:
    async def once(client: AsyncClient) -> None:
        assert [cache async for cache in client.caches.list()] == []

    async def main() -> None:
        async with AsyncClient(url) as client:
            for _ in range(2):
                await asyncio.gather(*(once(client) for _ in range(CALLS)))

    asyncio.run(main())


@pytest.mark.parametrize("ask", [ask_with_threads, ask_with_tasks])
def test_no_connection_is_closed_between_calls(ask: Callable[[str], None]) -> None:
    """A surplus one could be closed when another call has just begun to use it."""
    with running() as server:
        ask(f"http://127.0.0.1:{server.server_port}")
        assert server.connections == CALLS
