"""A service whose shelf is in Redis, while Redis is hung, gone, full, or set up so that it may lose caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest

from kvshelf import Engine
from kvshelf.store.url import StoreConfig
from tests.service.conftest import await_log, created, refused
from tests.store.redis.servers import ValkeyServer, wait_until

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.slow

SECRET = "hunter2-and-more"
DOCUMENT = "The lamp was lit although nobody was on the island. " * 9


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), requirepass=SECRET, maxmemory="64mb") as server:
        yield server


@pytest.fixture(scope="module")
def afar(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    valkey: ValkeyServer,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveService]:
    home = tmp_path_factory.mktemp("afar")
    with start_service(home, tiny_folder, store=valkey.url, sweep_interval_s=0.5) as running:
        yield running


@pytest.fixture
def remote(afar: LiveService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=afar.url, timeout=120) as client:
        await_ready(client)
        yield client
        await_ready(client)


def store_part(http: httpx.Client) -> dict[str, Any]:
    started = time.monotonic()
    response = http.get("/readyz")
    assert time.monotonic() - started < 2.5
    part = next(part for part in response.json()["parts"] if part["name"] == "store")
    assert response.status_code == (200 if part["ready"] else 503)
    found: dict[str, Any] = part
    return found


def await_ready(http: httpx.Client) -> None:
    end = time.monotonic() + 60
    while not store_part(http)["ready"]:
        assert time.monotonic() < end, "the store is not used again"
        time.sleep(0.2)


def await_replica(http: httpx.Client) -> None:
    """Until a new document is stored: a replica has a breaker of its own, which rests for a second after its last try,
    also while the front end is ready."""
    body = {"document": f"Is the shelf back? {uuid4()}"}
    wait_until(lambda: http.post("/v1/caches", json=body).is_success, "the replica heals", 5.0)


def calls(http: httpx.Client, cache_id: str) -> dict[str, Callable[[], httpx.Response]]:
    cache = f"/v1/caches/{cache_id}"
    return {
        "list": lambda: http.get("/v1/caches"),
        "get": lambda: http.get(cache),
        "patch": lambda: http.patch(cache, json={"name": "x"}),
        "query": lambda: http.post(f"{cache}/query", json={"prompt": "Who lit it?", "max_tokens": 2}),
        "blob": lambda: http.get(f"{cache}/blob"),
        "verify": lambda: http.post(f"{cache}/verify"),
        "create": lambda: http.post("/v1/caches", json={"document": DOCUMENT + "again"}),
        "accept": lambda: http.post("/v1/caches", json={"document": "x" * 99}, headers={"prefer": "respond-async"}),
        "request": lambda: http.get("/v1/requests/req_x"),
        "delete": lambda: http.delete(cache),
    }


@contextmanager
def hung(valkey: ValkeyServer) -> Iterator[None]:
    valkey.pause()
    try:
        yield
    finally:
        valkey.resume()


def test_a_cache_in_redis_is_as_good_as_one_on_a_disk(remote: httpx.Client) -> None:
    cache = created(remote, document=DOCUMENT, keep_source=True)
    answer = remote.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Who lit it?", "max_tokens": 2})
    assert answer.json()["usage"]["cache_read_tokens"] == cache["tokens"]["document"]
    assert len(remote.get(f"/v1/caches/{cache['id']}/blob").content) == cache["bytes"]["stored"]
    assert remote.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]


def test_readiness_tells_what_an_operator_should_know(remote: httpx.Client, valkey: ValkeyServer) -> None:
    part = store_part(remote)
    assert part["ready"]
    assert "appendonly" in part["reason"]
    client = valkey.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        part = store_part(remote)
        assert not part["ready"]
        assert "allkeys-lru" in part["reason"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert store_part(remote)["ready"]


@pytest.mark.parametrize("failure", ["hung", "gone"])
@pytest.mark.timeout(300)
def test_every_call_says_so_within_a_second(remote: httpx.Client, valkey: ValkeyServer, failure: str) -> None:
    cache_id = created(remote, document=DOCUMENT)["id"]
    took: dict[str, float] = {}
    if failure == "hung":
        valkey.pause()
    else:
        valkey.kill()
    try:
        for _ in range(2):  # the first ones find out, the others are told
            for name, call in calls(remote, cache_id).items():
                started = time.monotonic()
                response = call()
                took[name] = max(took.get(name, 0), time.monotonic() - started)
                refused(response, 503, "store_unavailable")
                assert int(response.headers["retry-after"]) >= 1
        part = store_part(remote)
        assert not part["ready"]
        assert "cannot be reached" in part["reason"]
        assert remote.get("/livez").status_code == 200
        assert remote.get("/v1/models").status_code == 200
    finally:
        valkey.resume() if failure == "hung" else valkey.start()
    assert max(took.values()) < 1, took
    await_ready(remote)
    if failure == "gone":  # without persistence it comes back empty
        refused(remote.get(f"/v1/caches/{cache_id}"), 404, "cache_not_found")
    await_replica(remote)
    assert created(remote, document=DOCUMENT)["id"] == cache_id
    for name, call in calls(remote, cache_id).items():
        assert call().status_code == {"create": 201, "accept": 202, "request": 404}.get(name, 200), name


def test_accepted_work_outlives_an_outage(remote: httpx.Client, valkey: ValkeyServer) -> None:
    bodies = [{"document": f"Accepted number {n}. " * 30} for n in range(6)]
    requests = [remote.post("/v1/caches", json=body, headers={"prefer": "respond-async"}).json() for body in bodies]
    with hung(valkey):
        time.sleep(3)
    await_ready(remote)
    for request in requests:
        ended = remote.get(f"/v1/requests/{request['id']}", params={"wait_s": 60}).json()
        assert ended["state"] == "done", ended


def test_sweeping_goes_on_after_an_outage(remote: httpx.Client, valkey: ValkeyServer, afar: LiveService) -> None:
    failed = afar.log.read_text().count("sweep failed")
    with hung(valkey):
        await_log(afar, "sweep failed", failed + 2)
    await_ready(remote)
    await_replica(remote)
    cache = created(remote, document=DOCUMENT + "not for long", ttl_s=0.5)
    client, key = valkey.client(), f"{{kvshelf}}:c:{cache['id']}"
    wait_until(lambda: client.hmget(key, "state") == [b"expired"], "it is swept")
    refused(remote.get(f"/v1/caches/{cache['id']}"), 410, "cache_expired")


def test_a_full_redis_is_507_and_nothing_is_half_stored(remote: httpx.Client, valkey: ValkeyServer) -> None:
    client = valkey.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    try:
        refused(remote.post("/v1/caches", json={"document": DOCUMENT + "no room"}), 507, "storage_full")
        ready = remote.get("/readyz")
        (space,) = [part for part in ready.json()["parts"] if part["name"] == "space"]
    finally:
        client.config_set("maxmemory", "64mb")
    assert (ready.status_code, ready.json()["status"], space["ready"]) == (200, "degraded", False)
    assert space["reason"].startswith(f"the Redis server 127.0.0.1:{valkey.port} is full: it uses 10")
    assert {part["name"] for part in remote.get("/readyz").json()["parts"]} == {"store", "workers:random-tiny"}
    assert not created(remote, document=DOCUMENT + "no room")["existing"]


def test_the_password_is_nowhere(remote: httpx.Client, afar: LiveService) -> None:
    await_log(afar, '"store opened"')
    assert SECRET not in afar.log.read_text()
    assert SECRET not in remote.get("/readyz").text


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_copies_on_a_disk_answer_while_redis_is_gone_also_after_a_restart(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    """An earlier process left the cache in Redis and a copy on the disk. The service starts while Redis is gone. Redis
    comes back, empty, and goes again."""
    question = {"prompt": "Who lit it?", "max_tokens": 2}
    store = f"ram:16MiB+disk://{tmp_path}/copies?max=64MB+"
    with ValkeyServer(tmp_path, maxmemory="64mb") as server:
        with StoreConfig(store + server.url).open() as earlier:
            cache_id = earlier.put(Engine.load(str(tiny_folder), device="cpu").compress(DOCUMENT)).id
        server.kill()
        with (
            start_service(tmp_path, tiny_folder, store=store + server.url) as service,
            httpx.Client(base_url=service.url, timeout=60) as http,
        ):

            def answer() -> str:
                answered = http.post(f"/v1/caches/{cache_id}/query", json=question)
                assert answered.status_code == 200, answered.text
                text: str = answered.json()["text"]
                return text

            assert not store_part(http)["ready"]
            text = answer()
            refused(http.get("/v1/caches/kvs_" + "0" * 40), 503, "store_unavailable")
            server.start()
            await_ready(http)
            assert http.get(f"/v1/caches/{cache_id}").status_code == 200  # given back to a Redis that was empty
            await_replica(http)
            assert created(http, document="new " * 30)["id"]
            assert answer() == text
            server.kill()
            assert answer() == text
            refused(http.post("/v1/caches", json={"document": "newer " * 30}), 503, "store_unavailable")
