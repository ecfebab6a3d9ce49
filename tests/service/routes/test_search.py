"""POST /v1/caches/search: which documents of a filter hold the words of a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvshelf import CompressedCache, Engine
from tests.service.conftest import created, refused
from tests.service.scrape import moving

MODEL = "random-tiny"
BLOB = {"content-type": "application/octet-stream"}
SHELF = {"shelf": "search"}
TEXTS = {
    "lamp": "The lamp of the lighthouse burns whale oil. " * 20,
    "ferry": "A ferry crosses the sound twice a day. " * 30,
    "keeper": "Nobody has seen the keeper since March. " * 12,
}


@pytest.fixture(scope="module")
def caches(http: httpx.Client) -> dict[str, str]:
    """Ids of caches of several policies and codecs by name, under one label."""
    kinds: tuple[dict[str, Any], ...] = (
        {"policy": "full"},
        {"policy": "keydiff"},
        {"policy": "knorm", "codec": "int4"},
    )
    return {
        name: created(http, document=text, name=name, labels=SHELF, **kind)["id"]
        for (name, text), kind in zip(TEXTS.items(), kinds, strict=True)
    }


def search(http: httpx.Client, query: str, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/caches/search", json={"query": query, "labels": SHELF} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_the_document_that_holds_the_words_comes_first(http: httpx.Client, caches: dict[str, str], name: str) -> None:
    found = search(http, TEXTS[name].split(".")[0])
    assert found.keys() == {"object", "data", "searched", "skipped"}
    assert (found["object"], found["searched"]) == ("list", len(TEXTS))
    assert {hit["cache_id"]: hit["name"] for hit in found["data"]} == {id: name for name, id in caches.items()}
    scores = [hit["score"] for hit in found["data"]]
    assert (found["data"][0]["name"], scores) == (name, sorted(scores, reverse=True))
    assert 1 >= scores[0] > scores[1]
    assert set(found["skipped"].values()) == {0}


def test_scores_are_the_engine_s(http: httpx.Client, caches: dict[str, str], tiny_folder: Path) -> None:
    from kvshelf.engine.summary import score, unpacked

    engine = Engine.load(str(tiny_folder), device="cpu")
    question = engine.searcher.codes(engine.searcher.encode("When does the ferry cross?"))
    blobs = (http.get(f"/v1/caches/{id}/blob").content for id in caches.values())
    scores = score(question, [unpacked(CompressedCache.from_bytes(blob).summary) for blob in blobs])
    hits = {hit["cache_id"]: hit["score"] for hit in search(http, "When does the ferry cross?")["data"]}
    assert [hits[id] for id in caches.values()] == pytest.approx(scores, abs=1e-3)


def test_a_limit_names_fewer_and_compares_all(http: httpx.Client, caches: dict[str, str]) -> None:
    found = search(http, "the ferry", limit=1)
    assert [hit["cache_id"] for hit in found["data"]] == [caches["ferry"]]
    assert found["searched"] == len(TEXTS)


def test_labels_narrow_and_nothing_is_an_empty_list(http: httpx.Client) -> None:
    body = {"query": "lamp", "labels": SHELF | {"no": "such"}}
    with moving(http) as moved:
        found = http.post("/v1/caches/search", json=body).json()
    assert (found["data"], found["searched"]) == ([], 0)
    assert moved("kvshelf_searches_total", model=MODEL, result="found") == 1


def test_a_document_is_named_once_by_its_newest_cache(http: httpx.Client) -> None:
    labels = {"shelf": "twice"}
    created(http, document=TEXTS["lamp"], policy="knorm", compression_ratio=0.25, labels=labels)
    newest = created(http, document=TEXTS["lamp"], policy="knorm", compression_ratio=0.75, labels=labels)
    found = search(http, "lamp", labels=labels)
    assert [hit["cache_id"] for hit in found["data"]] == [newest["id"]]
    assert (found["searched"], found["skipped"]["same_document"]) == (1, 1)


def test_caches_without_a_summary_are_counted(http: httpx.Client, tiny_folder: Path) -> None:
    from dataclasses import replace

    engine = Engine.load(str(tiny_folder), device="cpu")
    plain = replace(engine.compress("The buoy has no bell. " * 20), summary=())
    imported = http.post("/v1/caches/import?label.shelf=plain", content=plain.to_bytes(), headers=BLOB)
    assert imported.status_code == 201, imported.text
    found = search(http, "bell", labels={"shelf": "plain"})
    assert (found["data"], found["searched"], found["skipped"]["without_summary"]) == ([], 0, 1)


def test_an_imported_cache_is_found(http: httpx.Client, tiny_folder: Path) -> None:
    engine = Engine.load(str(tiny_folder), device="cpu")
    blob = engine.compress("The fog horn sounds at noon. " * 20).to_bytes("int4")
    imported = http.post("/v1/caches/import?label.shelf=imported", content=blob, headers=BLOB).json()
    found = search(http, "fog horn", labels={"shelf": "imported"})
    assert [hit["cache_id"] for hit in found["data"]] == [imported["id"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": " \n"}, "query"),
        ({"query": "tide " * 20_000}, "query"),
        ({"query": 7}, "query"),
        ({}, "query"),
        ({"query": "tide", "limit": 0}, "limit"),
        ({"query": "tide", "limit": 65}, "limit"),
        ({"query": "tide", "labels": ["shelf"]}, "labels"),
        ({"query": "tide", "labels": {"shelf": 1}}, "labels.shelf"),
        ({"query": "tide", "model": "unknown"}, "model"),
        ({"query": "tide", "top": 3}, "top"),
    ],
)
def test_bad_input_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = refused(http.post("/v1/caches/search", json=body), 400, "invalid_request")
    assert error["param"] == param
