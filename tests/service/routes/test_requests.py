"""Creations in the background: accepted at once, done later, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgpack
import pytest

from kvshelf import open_store
from tests.conftest import save_random_model

if TYPE_CHECKING:
    from tests.conftest import LiveService

ASYNC = {"prefer": "respond-async"}
FIELDS = {"id", "object", "state", "cache_id", "cache_ids", "attempts", "error", "created_at", "updated_at"}


def submit(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/caches", json=body, headers=ASYNC)
    assert response.status_code == 202, response.text
    accepted: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/v1/requests/{accepted['id']}"
    assert accepted.keys() == FIELDS
    assert (accepted["object"], accepted["id"][:4]) == ("cache.request", "req_")
    return accepted


def ended(http: httpx.Client, accepted: dict[str, Any]) -> dict[str, Any]:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        request: dict[str, Any] = http.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 30}).json()
        if request["state"] in ("done", "failed"):
            return request
    raise AssertionError(f"{accepted['id']} did not end")


def test_a_creation_in_the_background_is_the_same_cache(http: httpx.Client) -> None:
    body = {"document": "Written in the background. " * 9, "policy": "lagkv", "labels": {"by": "night"}}
    accepted = submit(http, **body)
    request = ended(http, accepted)
    assert (request["state"], request["attempts"], request["error"]) == ("done", 1, None)
    cache = http.get(f"/v1/caches/{request['cache_id']}").json()
    assert cache["labels"] == {"by": "night"}
    found = http.post("/v1/caches", json=body)
    assert (found.status_code, found.json()["id"]) == (200, request["cache_id"])


def test_the_same_creation_is_the_same_request_and_is_done_once(http: httpx.Client) -> None:
    body = {"document": "Asked for again and again. " * 9}
    with ThreadPoolExecutor(10) as threads:
        ids = {accepted["id"] for accepted in threads.map(lambda _: submit(http, **body), range(10))}
    assert len(ids) == 1
    request = ended(http, {"id": ids.pop()})
    assert request["attempts"] == 1
    assert submit(http, **body)["state"] == "done"


def test_what_was_done_is_done_again_when_its_cache_is_gone(http: httpx.Client) -> None:
    body = {"document": "Here today, gone tomorrow. " * 9}
    cache_id = ended(http, submit(http, **body))["cache_id"]
    http.delete(f"/v1/caches/{cache_id}")
    again = ended(http, submit(http, **body))
    assert (again["state"], again["cache_id"]) == ("done", cache_id)
    assert http.get(f"/v1/caches/{cache_id}").status_code == 200


def test_what_was_done_is_done_again_when_its_labels_or_its_name_were_changed(http: httpx.Client) -> None:
    body = {"document": "Filed under many names. " * 9, "labels": {"drawer": "top"}, "name": "first"}
    cache_id = ended(http, submit(http, **body))["cache_id"]
    other = ended(http, submit(http, **body | {"labels": {"drawer": "low", "key": "brass"}, "name": "second"}))
    assert other["cache_id"] == cache_id
    cache = http.get(f"/v1/caches/{cache_id}").json()
    assert (cache["labels"], cache["name"]) == ({"drawer": "low", "key": "brass"}, "second")
    assert ended(http, submit(http, **body))["state"] == "done"
    cache = http.get(f"/v1/caches/{cache_id}").json()
    assert (cache["labels"], cache["name"]) == ({"drawer": "top", "key": "brass"}, "first")


def test_what_was_done_lives_on_when_it_is_asked_for_again(http: httpx.Client) -> None:
    body = {"document": "Until the next tide, and the next. " * 9, "ttl_s": 500}
    cache_id = ended(http, submit(http, **body))["cache_id"]
    before = http.get(f"/v1/caches/{cache_id}").json()["expires_at"]
    assert submit(http, **body)["state"] == "done"
    assert http.get(f"/v1/caches/{cache_id}").json()["expires_at"] > before


def test_a_document_that_cannot_be_done_fails_with_its_error(http: httpx.Client) -> None:
    request = ended(http, submit(http, token_ids=[5] * 16_385))
    assert (request["state"], request["cache_id"], request["attempts"]) == ("failed", None, 1)
    assert request["error"]["code"] == "document_too_long"
    assert request["error"].keys() == {"message", "type", "param", "code"}


def test_what_another_service_on_the_shelf_accepted_for_its_model_is_left_to_it(
    http: httpx.Client, service: LiveService
) -> None:
    """This test is that other service."""
    request_id, body = "req_" + "e" * 40, {"document": "Not for you.", "model": "served-elsewhere"}
    with open_store(f"disk://{service.home}/shelf") as store:
        store.requests.open(request_id, tenant="default", body=msgpack.packb(body))
        end = time.monotonic() + 30
        while f'"request": "{request_id}"' not in service.log.read_text():
            assert time.monotonic() < end, "the service has not seen the request"
            time.sleep(0.1)
        request = http.get(f"/v1/requests/{request_id}").json()
        assert (request["state"], request["attempts"], request["error"]) == ("queued", 0, None)
        attempt = store.requests.start(request_id, worker="elsewhere", lease_s=9)
        store.requests.finish(request_id, attempt, cache_ids=())
    assert ended(http, {"id": request_id})["state"] == "done"


def test_bad_bodies_are_refused_at_once(http: httpx.Client) -> None:
    for body in ({"document": "x", "policy": "magic"}, {"document": "x", "colour": "red"}, {}):
        assert http.post("/v1/caches", json=body, headers=ASYNC).status_code == 400


@pytest.mark.parametrize("wait_s", ["-1", "soon", "1e9", "nan"])
def test_waiting_has_bounds(http: httpx.Client, wait_s: str) -> None:
    response = http.get("/v1/requests/req_x", params={"wait_s": wait_s})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "wait_s")


def test_waiting_ends_when_its_time_is_over(http: httpx.Client) -> None:
    states = []
    for first in range(5):  # on a busy machine the answer may take longer than the work
        accepted = submit(http, token_ids=[5 + (first + n) % 600 for n in range(16_000)], policy="streaming_llm")
        started = time.monotonic()
        states.append(http.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 0.2}).json()["state"])
        assert time.monotonic() - started < 10
        http.delete(f"/v1/caches/{ended(http, accepted)['cache_id']}")
        if states[-1] in ("queued", "running"):
            return
    raise AssertionError(states)


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_accepted_work_survives_the_death_of_the_whole_service(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    """kill -9 right after the 202s, in the middle of a prefill; the next start finishes what was accepted.

    That start serves a second model besides, which changes nothing for the first one's work.
    """
    other = save_random_model(tmp_path / "random-other", seed=1)
    with start_service(tmp_path, tiny_folder) as first, httpx.Client(base_url=first.url, timeout=60) as http:
        long = submit(http, token_ids=[5 + n % 600 for n in range(16_000)], policy="streaming_llm")
        short = [submit(http, document=f"Number {n} of the night shift. " * 9) for n in range(5)]
        while http.get(f"/v1/requests/{long['id']}").json()["state"] == "queued":
            time.sleep(0.02)
        assert http.get(f"/v1/requests/{long['id']}").json()["state"] == "running"
        first.kill()
    with start_service(tmp_path, tiny_folder, other) as second, httpx.Client(base_url=second.url, timeout=60) as http:
        requests = [ended(http, accepted) for accepted in (long, *short)]
        assert [request["state"] for request in requests] == ["done"] * 6
        assert requests[0]["attempts"] == 2  # one was counted before the kill
        listed = http.get("/v1/caches", params={"limit": 100}).json()["data"]
        assert {cache["id"] for cache in listed} == {request["cache_id"] for request in requests}
        for cache in listed:
            assert http.get(f"/v1/caches/{cache['id']}/blob").status_code == 200  # complete: its digests are checked
        _ask_both_models(http, listed[0]["id"])


def _ask_both_models(http: httpx.Client, first_model_s: str) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["random-tiny", "random-other"]
    created = http.post("/v1/caches", json={"document": "For the second model. " * 5, "model": "random-other"})
    assert (created.status_code, created.json()["model"]) == (201, "random-other")
    for cache_id in (created.json()["id"], first_model_s):
        answer = http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "tide", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    parts = [part["name"] for part in http.get("/readyz").json()["parts"]]
    assert parts == ["store", "workers:random-tiny", "workers:random-other"]
