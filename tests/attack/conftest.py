"""A service with keys and, in a soak, all defaults, for attacks; and one client of each of two tenants."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from kvshelf.service.access.keyfile import KeyFile
from tests.attack.watch import memory_of

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]


@dataclass(frozen=True)
class Attacked:
    """The service, the keys of its tenants by name, and the memory that its front end took before any request."""

    service: LiveService
    keys: dict[str, str]
    base_bytes: int

    @property
    def url(self) -> str:
        return self.service.url

    def client(self, tenant: str) -> httpx.Client:
        # All connections may idle: httpcore can close a surplus one that another thread has just begun to use.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.Client(base_url=self.url, headers=self.headers(tenant), timeout=300, limits=limits)

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}


@pytest.fixture(scope="package")
def attacked(
    start_service: Start, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, soak: bool
) -> Iterator[Attacked]:
    home = tmp_path_factory.mktemp("attacked")
    file = KeyFile(home / "api-keys.json")
    keys = {tenant: file.create(tenant, ["read", "write"])[1] for tenant in ("mallory", "alice")}
    waiting_s = 15 if soak else 4  # the former is the default, and a test waits so long
    with start_service(home, tiny_folder, api_key_file=file.path, headers_deadline_s=waiting_s) as running:
        yield Attacked(running, keys, memory_of(running.front_end_pid()))


@pytest.fixture(scope="package")
def mcp_server(attacked: Attacked) -> Iterator[tuple[str, int]]:
    """The address and the process of `kvshelf mcp --http` before the service."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvshelf", "mcp", "--http", f"127.0.0.1:{port}", "--url", attacked.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvshelf is ready at")
        yield f"http://127.0.0.1:{port}", process.pid
        process.terminate()


@pytest.fixture
def mallory(attacked: Attacked) -> Iterator[httpx.Client]:
    """Who attacks."""
    with attacked.client("mallory") as client:
        yield client


@pytest.fixture
def alice(attacked: Attacked) -> Iterator[httpx.Client]:
    """Who works meanwhile."""
    with attacked.client("alice") as client:
        yield client
