"""A replica is killed; callers are told the truth, and the service recovers by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import open_store
from kvshelf.api.usage import today
from tests.service.conftest import DOCUMENT, created
from tests.service.scrape import scrape
from tests.store.redis.servers import wait_until

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.slow

Start = Callable[..., AbstractContextManager["LiveService"]]

LONG: dict[str, Any] = {"token_ids": [5 + n % 500 for n in range(16_000)], "policy": "streaming_llm"}


def kill_replica(service: LiveService) -> None:
    (pid,) = service.replica_pids()
    os.kill(pid, signal.SIGKILL)


def creations_asked_for(http: httpx.Client) -> float:
    labels = frozenset({("model", "random-tiny"), ("call", "create")})
    return scrape(http).get(("kvshelf_calls_in_flight", labels), 0)


def readiness(http: httpx.Client) -> tuple[int, dict[str, Any]]:
    response = http.get("/readyz")
    body: dict[str, Any] = response.json()
    return response.status_code, {part["name"]: part for part in body["parts"]}


def await_ready(http: httpx.Client) -> None:
    end = time.monotonic() + 120
    while readiness(http)[0] != 200:
        assert time.monotonic() < end, "the replica was not replaced"
        time.sleep(0.2)


@pytest.mark.timeout(300)
def test_a_killed_replica(http: httpx.Client, service: LiveService, cache: dict[str, Any]) -> None:
    query = f"/v1/caches/{cache['id']}/query"
    with ThreadPoolExecutor(1) as threads:
        with http.stream("POST", query, json={"prompt": "tide", "max_tokens": 15_000, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert "answer.delta" in next(lines)
            creating = threads.submit(http.post, "/v1/caches", json=LONG)
            wait_until(lambda: creations_asked_for(http) == 1, "a worker is asked for the creation")
            time.sleep(1)  # and has it; beside the stream it takes seconds
            kill_replica(service)
            rest = [line for line in lines if line]
        created = creating.result()
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "worker_crashed"
    assert rest[-1] == "data: [DONE]"
    assert (created.status_code, created.json()["error"]["code"]) == (503, "worker_crashed")
    assert int(created.headers["retry-after"]) > 0

    status, parts = readiness(http)
    assert status == 503
    assert parts["store"]["ready"]
    assert not parts["workers:random-tiny"]["ready"]
    assert parts["workers:random-tiny"]["reason"]
    assert http.get("/livez").status_code == 200
    assert http.get("/v1/caches").status_code == 200

    await_ready(http)
    assert http.post(query, json={"prompt": "tide", "max_tokens": 2}).status_code == 200


@pytest.mark.timeout(300)
def test_while_there_is_no_replica_queries_are_refused_at_once(
    http: httpx.Client, service: LiveService, cache: dict[str, Any]
) -> None:
    kill_replica(service)
    while readiness(http)[0] == 200:
        time.sleep(0.1)
    started = time.monotonic()
    response = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "tide", "max_tokens": 2})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert int(response.headers["retry-after"]) > 0
    assert time.monotonic() - started < 5
    await_ready(http)
    assert http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "tide", "max_tokens": 2}).status_code == 200


def killed_while_running(http: httpx.Client, service: LiveService, kills: int, turn: int) -> str | None:
    """The address of a request whose worker was killed in each of its attempts; None if a busy machine showed an
    attempt only after its end."""
    body = LONG | {"token_ids": [5 + turn, *LONG["token_ids"]]}
    accepted = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"}).json()
    url = f"/v1/requests/{accepted['id']}"
    for attempt in range(1, kills + 1):
        while (now := http.get(url).json())["attempts"] < attempt or now["state"] != "running":
            if now["state"] == "done":
                http.delete(f"/v1/caches/{now['cache_id']}")
                return None
            assert now["state"] in ("queued", "running")
            time.sleep(0.02)
        kill_replica(service)
    return url


@pytest.mark.timeout(400)
def test_a_document_that_always_kills_its_worker_is_given_up(
    http: httpx.Client, service: LiveService, soak: bool
) -> None:
    """Once in short, where the second attempt succeeds; with all counts until the document is given up."""
    url = next(filter(None, (killed_while_running(http, service, 3 if soak else 1, turn) for turn in range(5))))
    request = http.get(url, params={"wait_s": 200}, timeout=250).json()
    if soak:
        assert (request["state"], request["attempts"]) == ("failed", 3)
        assert request["error"]["code"] == "worker_crashed"
    else:
        assert (request["state"], request["attempts"]) == ("done", 2)
        http.delete(f"/v1/caches/{request['cache_id']}")
    await_ready(http)


def test_a_stop_in_good_order_loses_nothing_of_what_tenants_used(
    start_service: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    answers = 0
    with start_service(tmp_path, tiny_folder) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        cache_id = created(http, document=DOCUMENT)["id"]
        end = time.monotonic() + 4  # some are stored, and the last ones are not yet
        while time.monotonic() < end:
            asked = {"prompt": "When?", "max_tokens": 2}
            assert http.post(f"/v1/caches/{cache_id}/query", json=asked).status_code == 200
            answers += 1
    with open_store(f"disk://{tmp_path}/shelf") as store:
        (day,) = store.metering.days(today(), today(), tenant="default")
    (used,) = day.by_model.values()
    assert (used.answers, used.completion_tokens) == (answers, 2 * answers)
