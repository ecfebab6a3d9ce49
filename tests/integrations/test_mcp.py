"""`kvshelf mcp`, by the client of the official package, over both transports, before a real service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from kvshelf.errors import InvalidRequest
from kvshelf.integrations.mcp import build, serve
from kvshelf.service.access.keyfile import KeyFile

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.anyio

FACT = "The access code of the amber falcon is 482913. "
DOCUMENT = "The harbour opens at six and boats wait at the lock. " * 4 + FACT + "Boats wait at the lock. " * 4
QUESTION = "What is the access code of the amber falcon?"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def environment(url: str, key: str | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    return clean | {"KVSHELF_URL": url} | ({} if key is None else {"KVSHELF_API_KEY": key})


@contextmanager
def http_server(url: str, host: str = "127.0.0.1", key: str | None = None) -> Iterator[str]:
    """The address of `kvshelf mcp --http`; key: in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvshelf", "mcp", "--http", f"{host}:{port}"]
    process = subprocess.Popen(command, env=environment(url, key))
    try:
        end = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(timeout=60)


@asynccontextmanager
async def over_http(address: str, key: str | None = None) -> AsyncIterator[Client]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=120) as http,
        Client(streamable_http_client(address, http_client=http)) as client,
    ):
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    found: dict[str, Any] = result.structured_content
    return found


async def refused(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The error that a call must have, as the API shows it; its text begins with the code."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    error: dict[str, Any] = (result.structured_content or {})["error"]
    assert text_of(result) == f"{error['code']}: {error['message']}"
    return error


async def names(client: Client) -> set[str]:
    return {tool.name for tool in (await client.list_tools()).tools}


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert content.type == "text"
    return content.text


async def test_an_assistant_reads_what_each_tool_is_for(tmp_path: Path) -> None:
    tools = {}
    for files, more in ((None, set()), (tmp_path, {"put_file"})):
        async with Client(build("http://127.0.0.1:9", files=files)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tools.keys() == {"put", "ask", "search", "list", "delete"} | more
            assert "search" in (client.instructions or "")
    for tool in tools.values():
        assert tool.output_schema
        assert tool.description
        assert "\n    " not in tool.description
        properties = tool.input_schema["properties"]
        assert all(about.get("description") for about in properties.values()), tool.name
    assert tools["delete"].annotations is not None
    assert tools["delete"].annotations.destructive_hint
    assert tools["ask"].annotations is not None
    assert tools["ask"].annotations.read_only_hint
    assert tools["put"].input_schema["required"] == ["text"]


async def test_what_is_wrong_is_an_error_of_the_tool(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "inside" / "link.txt").symlink_to(tmp_path / "secret.txt")
    async with Client(build("http://127.0.0.1:9", files=tmp_path / "inside")) as client:
        error = await refused(client, "ask", cache_ids=["kvs_0"], question=QUESTION)
        assert (error["code"], error["details"]) == ("connection_failed", {"cause": "ConnectError"})
        for path in ("../secret.txt", "link.txt", str(tmp_path / "secret.txt"), "/etc/passwd"):
            error = await refused(client, "put_file", path=path)
            assert (error["code"], error["param"]) == ("invalid_request", "path")
            assert "is not in" in error["message"]
        assert "there is no file" in (await refused(client, "put_file", path="nothing.txt"))["message"]
        for tool, arguments, field in (
            ("ask", {"cache_ids": [], "question": QUESTION}, "cache_ids"),
            ("ask", {"cache_ids": ["kvs_0"]}, "question"),
            ("put", {"text": ""}, "text"),
            ("put", {"text": "a", "compression_ratio": 1}, "compression_ratio"),
            ("list", {"limit": 1000}, "limit"),
        ):
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            assert field in text_of(result)


@pytest.mark.parametrize("address", ["8766", "localhost", "localhost:port", "http://localhost:1", ":1", "a:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="is not HOST:PORT"):
        serve("http://127.0.0.1:9", address, None)


def test_files_are_of_a_folder_and_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--files is for stdio"):
        serve("http://127.0.0.1:9", "127.0.0.1:1", tmp_path)
    with pytest.raises(InvalidRequest, match="is not a folder"):
        serve("http://127.0.0.1:9", None, tmp_path / "nothing")


async def test_over_stdio(bundled_service: str, tmp_path: Path) -> None:
    (tmp_path / "falcon.txt").write_text(DOCUMENT)
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "kvshelf", "mcp", "--files", str(tmp_path)],
        env=environment(bundled_service),
    )
    async with Client(server) as client:
        told: list[float] = []

        async def tell(progress: float, _total: float | None, message: str | None) -> None:
            assert message
            told.append(progress)

        labels = {"from": "mcp"}
        arguments = {"text": DOCUMENT + "Over stdio.", "name": "stdio", "labels": labels, "policy": "full"}
        made = await client.call_tool("put", arguments, progress_callback=tell)
        assert told == sorted(set(told)) != []
        stored: dict[str, Any] = made.structured_content
        assert (stored["name"], stored["labels"], stored["existing"]) == ("stdio", labels, False)
        file = await call(client, "put_file", path="falcon.txt", labels=labels, compression_ratio=0.25, ttl_s=500)
        assert (file["name"], file["kept"] < file["tokens"], file["expires_at"] is None) == ("falcon.txt", True, False)
        one = await call(client, "ask", cache_ids=[stored["cache_id"]], question=QUESTION, max_tokens=16)
        assert "482913" in one["text"]
        assert (one["sources"], one["cached_tokens"]) == (
            [{"cache_id": stored["cache_id"], "share": 1.0}],
            stored["tokens"],
        )
        both = [stored["cache_id"], file["cache_id"]]
        two = await call(client, "ask", cache_ids=both, question=QUESTION, max_tokens=16)
        assert [source["cache_id"] for source in two["sources"]] == both
        assert (one["exact"], two["exact"]) == (None, False)
        hits = await call(client, "search", question=QUESTION, labels=labels)
        assert {hit["cache_id"] for hit in hits["data"]} <= set(both) != set()
        first = await call(client, "list", labels=labels, limit=1)
        rest = await call(client, "list", labels=labels, limit=1, after=first["next"])
        assert [one["cache_id"] for one in first["documents"] + rest["documents"]] == both[::-1]
        assert rest["next"] is None
        assert (await call(client, "delete", cache_id=both[0]))["id"] == both[0]
        assert (await refused(client, "ask", cache_ids=both, question="?"))["code"] == "cache_not_found"
        error = await refused(client, "put", text=DOCUMENT, policy="keydif")
        assert "did you mean 'keydiff'" in error["message"]
        again = await call(client, "put_file", path=str(tmp_path / "falcon.txt"), compression_ratio=0.25)
        assert (again["cache_id"], again["existing"], again["labels"]) == (file["cache_id"], True, labels)


@pytest.mark.slow
async def test_over_http_only_this_machine_s_pages_and_programs_are_served(bundled_service: str) -> None:
    with http_server(bundled_service) as address:
        async with over_http(address) as client:
            made = await call(client, "put", text=DOCUMENT, policy="full")
            said = await call(client, "ask", cache_ids=[made["cache_id"]], question=QUESTION, max_tokens=16)
            assert "482913" in said["text"]
            assert await names(client) == {"put", "ask", "search", "list", "delete"}
            error = await refused(client, "put", text="A long text. " * (1 << 19))
            assert error["code"] == "document_too_long", "the limit is the service's"
        hello = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        accept = {"accept": "application/json, text/event-stream"}
        too_large = httpx.post(address, content=bytes(65 << 20), headers=accept, timeout=60)
        assert too_large.status_code == 413
        said = too_large.json()
        assert (said["jsonrpc"], said["id"], said["error"]["data"]["code"]) == ("2.0", None, "body_too_large")
        cut = httpx.post(address, content=b'{"a":', headers=accept | {"content-type": "application/json"})
        assert (cut.status_code, cut.json()["error"]["code"]) == (400, -32700)
        for wrong in ({"host": "rebound.example"}, {"origin": "https://rebound.example"}):
            assert httpx.post(address, json=hello, headers=accept | wrong).status_code in (403, 421)
    with pytest.raises(InvalidRequest, match="asks for no API key"):
        serve(bundled_service, "0.0.0.0:1", None)


class Keyed(NamedTuple):
    """A service with keys, the keys by their role, and their file."""

    url: str
    keys: dict[str, str]
    file: KeyFile


@pytest.fixture(scope="module")
def keyed(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Keyed]:
    home = tmp_path_factory.mktemp("keyed")
    file = KeyFile(home / "api-keys.json")
    scopes = {
        "writer": ("acme", ["read", "write"]),
        "reader": ("acme", ["read"]),
        "other": ("other", ["read", "write"]),
    }
    keys = {name: file.create(tenant, allowed)[1] for name, (tenant, allowed) in scopes.items()}
    with start_service(home, tiny_folder, api_key_file=file.path) as running:
        yield Keyed(running.url, keys, file)


@pytest.mark.slow
async def test_over_http_each_caller_has_the_tenant_and_the_scopes_of_its_key(
    keyed: Keyed,
) -> None:
    url, keys, _ = keyed
    with http_server(url, "0.0.0.0", key=keys["writer"]) as address:
        async with over_http(address, keys["writer"]) as client:
            assert {"put", "delete"} < await names(client)
            made = await call(client, "put", text=DOCUMENT, name="acme's")
        async with over_http(address, keys["reader"]) as client:
            assert await names(client) == {"ask", "search", "list"}
            await call(client, "ask", cache_ids=[made["cache_id"]], question=QUESTION, max_tokens=2)
            for tool, arguments in (("put", {"text": DOCUMENT}), ("delete", {"cache_id": made["cache_id"]})):
                error = await refused(client, tool, **arguments)
                assert (error["code"], error["type"]) == ("forbidden", "permission_error")
                assert "the scope 'write'" in error["message"]
        async with over_http(address, keys["other"]) as client:
            assert (await call(client, "list"))["documents"] == []
            error = await refused(client, "ask", cache_ids=[made["cache_id"]], question=QUESTION)
            assert error["code"] == "cache_not_found"
        for key in (None, "kvsk_nobody"):  # the key in the server's own environment is not for its callers
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            refusal = httpx.post(address, content=b" " * (8 << 20), headers=headers)
            assert (refusal.status_code, refusal.json()["error"]["data"]["code"]) == (401, "unauthorized")


@pytest.mark.slow
async def test_over_stdio_the_key_is_that_of_the_environment(keyed: Keyed) -> None:
    url, keys, file = keyed
    command = {"command": sys.executable, "args": ["-m", "kvshelf", "mcp"]}
    async with Client(StdioServerParameters(**command, env=environment(url, keys["reader"]))) as client:
        await call(client, "list")
        assert await names(client) == {"ask", "search", "list"}
        assert "the scope 'write'" in (await refused(client, "put", text=DOCUMENT))["message"]
        file.revoke(keys["reader"].split("_")[1])
        end = time.monotonic() + 10
        while not (result := await client.call_tool("list", {})).is_error:
            assert time.monotonic() < end
            await anyio.sleep(0.1)
        assert text_of(result).startswith("unauthorized: this API key is not valid here; it may have been revoked")
