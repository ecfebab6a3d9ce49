"""vLLM reads its caches from a kvshelf service over HTTP. Between the two is a wire that can damage bytes, and that
keeps its address when the service is started again elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from kvshelf.client import Client
from kvshelf.engine.engine import Engine
from kvshelf.integrations.vllm import shelf_request
from kvshelf.integrations.vllm.service import SILENCE_S
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import REREAD_S
from kvshelf.store.manifest import Manifest
from kvshelf.store.url import open_store
from tests.conftest import LiveService, live_service
from tests.integrations_vllm.conftest import Serving, document, served

TENANT = "acme"
REST_S = 1.1
"""After a failure vLLM asks no service for a second."""


class Wire:
    """Passes bytes between callers of `url` and the service at `target`."""

    def __init__(self) -> None:
        self.target = ""
        self.damages = False
        """Whether a bit flips behind the first 200,000 bytes of each answer."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(caller,), daemon=True).start()

    def _connect(self, caller: socket.socket) -> None:
        url = httpx.URL(self.target)
        with caller, suppress(OSError), socket.create_connection((url.host, url.port or 80)) as service:
            asking = threading.Thread(target=self._pass_on, args=(caller, service, False), daemon=True)
            asking.start()
            self._pass_on(service, caller, True)

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if answers and self.damages and passed > 200_000:
                    data[len(data) // 2] ^= 16
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@dataclass
class Real:
    """A vLLM that reads a service through a wire. client: of the service, by a key that writes. keys: the file in which
    the key of vLLM is. own: kvshelf's engine, and the shelf of the service."""

    http: httpx.Client
    model: str
    log: Path
    wire: Wire
    service: LiveService
    client: Client
    keys: KeyFile
    own: Serving

    def created(self, number: int, **how: Any) -> Manifest:
        """A cache that the service makes."""
        made = self.client.caches.create(document=document(number).text, **how)
        return self.own.store.stat(made.id, tenant=TENANT)

    def put(self, number: int, **how: Any) -> Manifest:
        """The same, but made by the engine of the tests, which is quicker."""
        return self.own.put(document(number).text, tenant=TENANT, **how)

    def ask(self, cache: Manifest, question: str = "Why?", **fields: Any) -> httpx.Response:
        request = shelf_request(cache, question, AutoTokenizer.from_pretrained(self.model))
        options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12} | fields
        return self.http.post("/v1/completions", json=request.body(self.model, **options))

    def require_own(self, cache: Manifest, question: str = "Why?") -> None:
        (choice,) = self.ask(cache, question).raise_for_status().json()["choices"]
        assert choice["token_ids"] == self.own.own(cache, question)

    def require_refused(self, cache: Manifest, code: str) -> str:
        """The line of vLLM's log that says why. vLLM goes on: a request without a cache is answered."""
        before = len(self._refusals())
        assert self.ask(cache).status_code == 500
        said = self._refusals()[before:]
        assert said
        assert f"code={code} " in said[-1]
        plain = {"model": self.model, "prompt": "Why?", "max_tokens": 2}
        assert self.http.post("/v1/completions", json=plain).is_success
        return said[-1]

    def _refusals(self) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if "code=" in line]


@pytest.fixture(scope="module")
def real(tiny: Engine, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("service")
    shelf = f"disk://{folder}/shelf"
    keys, wire = KeyFile(folder / "keys"), Wire()
    (_, reads), (_, writes) = (keys.create(TENANT, scopes) for scopes in (["read"], ["read", "write"]))
    with (
        pytest.MonkeyPatch.context() as patch,
        live_service(folder, "kvshelf-tiny", api_key_file=keys.path) as service,
        open_store(shelf) as store,
    ):
        wire.target = service.url
        patch.setenv("KVSHELF_API_KEY", reads)
        given = {"service": wire.url, "tenant": TENANT}
        with (
            served(model_folder, given, folder / "log", "--max-model-len", "2048") as (_, url),
            httpx.Client(base_url=url, timeout=120) as http,
            Client(service.url, api_key=writes) as client,
        ):
            own = Serving(None, tiny, store, folder)
            yield Real(http, str(model_folder), folder / "log", wire, service, client, keys, own)
    wire.close()


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_answers_from_a_service_are_those_of_kvshelf(real: Real, codec: str) -> None:
    """The second question takes the full pages from vLLM and the rest from the worker."""
    cache = real.created(80, policy="keydiff", compression_ratio=0.5, codec=codec)
    for question in document(80).questions:
        real.require_own(cache, question.text)


def test_a_cache_that_is_deleted_while_vllm_has_its_pages(real: Real) -> None:
    cache = real.put(81, policy="full")
    real.require_own(cache)
    real.client.caches.delete(cache.id)
    real.require_refused(cache, "cache_not_found")


def test_bytes_that_are_damaged_on_the_way(real: Real) -> None:
    cache = real.put(82, policy="full")
    assert cache.bytes_stored > 400_000
    real.wire.damages = True
    try:
        assert cache.id in real.require_refused(cache, "cache_corrupt")
    finally:
        real.wire.damages = False
    real.require_own(cache)


def test_bytes_that_are_damaged_on_the_disk_of_the_service(real: Real) -> None:
    cache = real.put(83, policy="full")
    (file,) = real.service.home.glob(f"shelf/**/{cache.id.removeprefix('kvs_')}-*.kvb")
    data = bytearray(file.read_bytes())
    data[int(0.9 * len(data))] ^= 16
    file.write_bytes(data)
    real.require_refused(cache, "cache_corrupt")


def test_transforms_are_not_fetched(real: Real) -> None:
    cache = real.put(84, policy="full", codec="klt")
    assert "transforms" in real.require_refused(cache, "model_mismatch")


def test_a_key_that_the_service_refuses(real: Real) -> None:
    cache, kept = real.put(85, policy="full"), real.keys.path.read_bytes()
    for record in real.keys.read():
        real.keys.revoke(record.id)
    time.sleep(2 * REREAD_S)
    assert "kvsk_" not in real.require_refused(cache, "unauthorized")
    real.keys.path.write_bytes(kept)
    time.sleep(2 * REREAD_S)
    real.require_own(cache)


def test_a_service_that_hangs(real: Real) -> None:
    """vLLM waits once, not for every request."""
    cache = real.put(86, policy="full")
    front_end = real.service.front_end_pid()
    os.kill(front_end, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            assert [answer.status_code for answer in pool.map(real.ask, [cache] * 3)] == [500] * 3
        assert SILENCE_S < time.monotonic() - began < 2 * SILENCE_S
        real.require_refused(cache, "store_unavailable")
    finally:
        os.kill(front_end, signal.SIGCONT)
    time.sleep(REST_S)
    real.require_own(cache)


def test_a_service_that_is_killed_and_started_again(real: Real) -> None:
    cache = real.put(87, policy="full")
    real.service.kill()
    real.require_refused(cache, "store_unavailable")
    with live_service(real.service.home, "kvshelf-tiny", api_key_file=real.keys.path) as again:
        real.wire.target = again.url
        time.sleep(REST_S)
        real.require_own(cache)
