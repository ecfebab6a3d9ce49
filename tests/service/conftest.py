"""What the tests of the HTTP interface share: plain HTTP, no client of kvshelf in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import Engine
from kvshelf.model.source import bundled_folder
from tests.engine.tools.test_tools import HERMES

if TYPE_CHECKING:
    from tests.conftest import LiveService

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


@pytest.fixture(scope="session")
def http(service_url: str) -> Iterator[httpx.Client]:
    """Threads may share it. Every connection may idle: httpcore can close a surplus one that another thread has just
    begun to use (https://github.com/encode/httpcore/issues/1110)."""
    with httpx.Client(base_url=service_url, timeout=120, limits=httpx.Limits()) as client:
        yield client


@pytest.fixture(scope="session")
def cache(http: httpx.Client) -> dict[str, Any]:
    """A stored cache that no test changes."""
    response = http.post("/v1/caches", json={"document": DOCUMENT, "compression_ratio": 0.75})
    assert response.status_code in (200, 201), response.text
    found: dict[str, Any] = response.json()
    return found


def created(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """What a creation answers; it must have been done."""
    response = http.post("/v1/caches", json=body)
    assert response.status_code in (200, 201), response.text
    found: dict[str, Any] = response.json()
    return found


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error object of a response that must have this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def await_log(service: LiveService, words: str, count: int = 1) -> None:
    """Until the service has logged these words so many times."""
    end = time.monotonic() + 200
    while service.log.read_text().count(words) < count:
        assert time.monotonic() < end, service.log.read_text()[-3000:]
        time.sleep(0.05)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Inside the block a process does nothing. It is not dead: what waits for it waits."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def other_model(folder: Path) -> Engine:
    """The model in a folder, with one other weight and the name that a service gives it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    return Engine(model, AutoTokenizer.from_pretrained(folder), name=folder.name)


@pytest.fixture(scope="module")
def tool_service(
    start_service: Callable[..., AbstractContextManager[LiveService]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """The bundled model with a template that has tools."""
    home = tmp_path_factory.mktemp("tools")
    folder = home / "with-tools"
    shutil.copytree(bundled_folder("kvshelf-tiny"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": HERMES}))
    with start_service(home, folder) as service:
        yield service


@pytest.fixture(autouse=True)
def _still_ready(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test sends to the shared service, it is ready afterwards."""
    yield
    if "service" in request.fixturenames:
        url = request.getfixturevalue("service_url")
        response = httpx.get(f"{url}/readyz", timeout=120)
        assert response.status_code == 200, response.text
