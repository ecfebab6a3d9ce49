"""/v1/caches/{id}/kept over HTTP, and through both clients."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvshelf import AsyncClient, Client, CompressedCache
from kvshelf.errors import SourceNotKept, StateConflict
from tests.service.conftest import created, refused
from tests.store.redis.servers import wait_until

DOCUMENT = "The harbour master keeps <b>the</b> tide tables in a green book. " * 20


def test_a_kept_source_shows_what_the_downloaded_cache_holds(http: httpx.Client, service_url: str) -> None:
    cache = created(http, document=DOCUMENT, compression_ratio=0.75, policy="snapkv", keep_source=True)
    with Client(service_url) as client:
        found = client.caches.kept(cache["id"])
        blob = CompressedCache.from_bytes(client.caches.download(cache["id"]))
    assert "".join(found.tokens[found.template_tokens :]) == DOCUMENT
    for told, layer in zip(found.layers, blob.layers, strict=True):
        heads = [told.positions(head) for head in range(layer.kv_heads)]
        assert heads == [head.tolist() for head in layer.positions]
    assert (found.document_id, found.num_tokens) == (cache["document_id"], cache["tokens"]["document"])


def test_the_caller_s_own_text_must_be_the_document(http: httpx.Client, service_url: str) -> None:
    cache = created(http, document=DOCUMENT + "Mine.", compression_ratio=0.5)
    path = f"/v1/caches/{cache['id']}/kept"
    refused(http.get(path), 409, "source_not_kept")
    for other in (DOCUMENT, DOCUMENT + "Mine"):
        error = refused(http.post(path, json={"document": other}), 409, "state_conflict")
        assert error["param"] == "document"
    with Client(service_url) as client:
        with pytest.raises(SourceNotKept):
            client.caches.kept(cache["id"])
        with pytest.raises(StateConflict):
            client.caches.kept(cache["id"], "Another.")
        found = client.caches.kept(cache["id"], DOCUMENT + "Mine.")

    async def awaited() -> object:
        async with AsyncClient(service_url) as client:
            return await client.caches.kept(cache["id"], DOCUMENT + "Mine.")

    assert asyncio.run(awaited()) == found


def test_pages_begin_where_they_are_asked_to(http: httpx.Client) -> None:
    cache = created(http, document=DOCUMENT, compression_ratio=0.5, keep_source=True)
    path = f"/v1/caches/{cache['id']}/kept"
    whole = http.get(path).json()
    later = http.get(path, params={"first_layer": 1}).json()
    assert later["layers"] == whole["layers"][1:]
    assert (later["tokens"], later["counts"], later["next_layer"]) == ([], [], None)
    assert refused(http.get(path, params={"first_layer": 2}), 400, "invalid_request")["param"] == "first_layer"
    refused(http.get(path, params={"first_layer": -1}), 400, "invalid_request")


@pytest.mark.parametrize(
    "body", [{}, {"document": "a", "token_ids": [1]}, {"document": 3}, {"text": "a"}, {"messages": []}]
)
def test_a_body_that_names_no_document_is_refused(http: httpx.Client, body: dict[str, object]) -> None:
    cache = created(http, document=DOCUMENT, compression_ratio=0.5)
    refused(http.post(f"/v1/caches/{cache['id']}/kept", json=body), 400, "invalid_request")


def test_looking_is_no_use_and_asking_is(http: httpx.Client) -> None:
    cache = created(http, document=DOCUMENT + "Once.", keep_source=True)
    path = f"/v1/caches/{cache['id']}"
    assert http.get(path + "/kept").status_code == 200
    assert http.get(path).json()["uses"] == 0
    http.post(path + "/query", json={"prompt": "Which book?", "max_tokens": 2})
    wait_until(lambda: http.get(path).json()["uses"] == 1, "the use is counted")


def test_an_empty_document_and_unknown_ids_are_named(http: httpx.Client) -> None:
    cache = created(http, document=DOCUMENT, compression_ratio=0.5)
    refused(http.post(f"/v1/caches/{cache['id']}/kept", json={"document": ""}), 422, "document_too_short")
    refused(http.post(f"/v1/caches/{cache['id']}/kept", json={"token_ids": []}), 422, "document_too_short")
    refused(http.get("/v1/caches/kvs_" + "0" * 40 + "/kept"), 404, "cache_not_found")


def test_the_prompt_that_is_shown_is_the_one_that_is_read(http: httpx.Client) -> None:
    made = created(http, document=f"{DOCUMENT} Shown.", policy="full", keep_source=True)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}

    def counted(body: dict[str, Any]) -> tuple[int, int]:
        response = http.post(f"/v1/caches/{made['id']}/prompt", json=body)
        assert response.status_code == 200, response.text
        parts = response.json()["parts"]
        shelf, read = (sum(p["num_tokens"] for p in parts if p["from_shelf"] is where) for where in (True, False))
        assert "What is it?" in "".join("".join(p["texts"]) for p in parts if p["part"] == "question")
        return shelf, read

    first = counted(asked)
    answer = http.post(f"/v1/caches/{made['id']}/query", json=asked | {"max_tokens": 4, "store": True}).json()
    assert first == (answer["usage"]["cache_read_tokens"], answer["usage"]["prefill_tokens"])
    said = {"role": "assistant", "content": answer["text"]}
    more = {"messages": [*asked["messages"], said, {"role": "user", "content": "And now?"}]}
    again = http.post(f"/v1/caches/{made['id']}/query", json=more | {"max_tokens": 4}).json()["usage"]
    assert counted(more) == (again["cache_read_tokens"], again["prefill_tokens"])
    assert again["cache_read_tokens"] > first[0], "the kept turn is on the shelf"
    refused(http.post(f"/v1/caches/{made['id']}/prompt", json={"prompt": ["a", "b"]}), 400, "invalid_request")
