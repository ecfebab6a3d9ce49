"""Hints of the next use and tools' names over HTTP: what is refused, and what a replica does by them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.service.conftest import created, refused
from tests.service.scrape import moving, scrape

DOCUMENT = "The pilot boat leaves the northern pier at every high tide. " * 12
UNKNOWN = "kvs_" + "0" * 40


@pytest.fixture(scope="module")
def cache(http: httpx.Client) -> dict[str, Any]:
    return created(http, document=DOCUMENT)


def hint(http: httpx.Client, cache_id: str, next_use_s: Any, **headers: str) -> httpx.Response:
    return http.patch(f"/v1/caches/{cache_id}", json={"next_use_s": next_use_s}, headers=headers)


def ask(http: httpx.Client, cache_id: str, **body: Any) -> httpx.Response:
    return http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "When?", "max_tokens": 4} | body)


def test_a_hinted_cache_is_in_memory_before_its_question(http: httpx.Client) -> None:
    fresh = created(http, document=DOCUMENT + "The tide tables are green.")
    with moving(http) as moved:
        answer = hint(http, fresh["id"], 0)
        assert answer.status_code == 200
        assert answer.json() == http.get(f"/v1/caches/{fresh['id']}").json(), "the manifest says nothing about it"
        before, end = _read_ahead(http), time.monotonic() + 60
        while _read_ahead(http) == before:  # a replica tells with its next reply, also to a hint
            assert hint(http, fresh["id"], 0).status_code == 200
            assert time.monotonic() < end
            time.sleep(0.05)
        assert ask(http, fresh["id"]).status_code == 200
    assert moved("kvshelf_cache_hits_total", read_from="memory") == moved("kvshelf_cache_hits_total") == 1
    assert moved("kvshelf_cache_retention_total", event="read_ahead") == 1


def _read_ahead(http: httpx.Client) -> float:
    numbers = scrape(http)
    labels = frozenset({("model", "random-tiny"), ("event", "read_ahead")})
    return numbers.get(("kvshelf_cache_retention_total", labels), 0.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "greater than or equal to 0"),
        (86401, "less than or equal to 86400"),
        ("20", "valid number"),
        (True, "valid number"),
        ([20], "valid number"),
    ],
)
def test_a_bad_hint_is_refused(http: httpx.Client, cache: dict[str, Any], value: Any, words: str) -> None:
    error = refused(hint(http, cache["id"], value), 400, "invalid_request")
    assert error["param"] == "next_use_s"
    assert words in error["message"]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_hint_is_a_finite_number(http: httpx.Client, cache: dict[str, Any], text: str) -> None:
    body = f'{{"next_use_s": {text}}}'
    answer = http.patch(f"/v1/caches/{cache['id']}", content=body, headers={"content-type": "application/json"})
    refused(answer, 400, "invalid_request")


def test_a_hint_is_about_a_cache_that_is_there_and_as_the_caller_saw_it(
    http: httpx.Client, cache: dict[str, Any]
) -> None:
    refused(hint(http, UNKNOWN, 5), 404, "cache_not_found")
    refused(hint(http, cache["id"], 5, **{"if-match": '"another"'}), 412, "etag_mismatch")
    seen = http.get(f"/v1/caches/{cache['id']}").headers["etag"]
    again = hint(http, cache["id"], 5, **{"if-match": seen})
    assert (again.status_code, again.headers["etag"]) == (200, seen), "a hint changes no cache"
    assert hint(http, cache["id"], None).status_code == 200


def test_a_hint_may_come_with_changes(http: httpx.Client) -> None:
    fresh = created(http, document=DOCUMENT + "Nobody waits.")
    answer = http.patch(f"/v1/caches/{fresh['id']}", json={"next_use_s": 20, "name": "tides"})
    assert (answer.status_code, answer.json()["name"]) == (200, "tides")
    assert "next_use_s" not in answer.json()


def test_warm_caches_are_in_memory_of_every_replica_before_their_questions(http: httpx.Client) -> None:
    one, two = (created(http, document=DOCUMENT + words, labels={"tide": "hot"}) for words in ("Ebb.", "Flow."))
    for chosen, caches in (({"cache_ids": [one["id"]]}, 1), ({"labels": {"tide": "hot"}, "replicas": "all"}, 2)):
        answer = http.post("/v1/caches/warm", json=chosen)
        assert answer.status_code == 200, answer.text
        (replica,) = answer.json()["data"]
        assert (replica["caches"], replica["left_out"]) == (caches, [])
        assert 0 < replica["read_bytes"] < replica["bytes"] + (caches == 1), "the first was there by then"
    with moving(http) as moved:
        for cache in (one, two):
            assert ask(http, cache["id"]).status_code == 200
    assert moved("kvshelf_cache_hits_total", read_from="memory") == moved("kvshelf_cache_hits_total") == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "cache_ids"),
        ({"cache_ids": []}, "cache_ids"),
        ({"cache_ids": [UNKNOWN], "labels": {"a": "b"}}, "cache_ids"),
        ({"cache_ids": [UNKNOWN] * 1001}, "cache_ids"),
        ({"cache_ids": UNKNOWN}, "cache_ids"),
        ({"cache_ids": [7]}, "cache_ids[0]"),
        ({"cache_ids": [UNKNOWN], "model": "random-tiny"}, "model"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"labels": {"nobody": "has it"}}, "labels"),
        ({"labels": {"a": "b"}, "replicas": "some"}, "replicas"),
        ({"labels": {"a": "b"}, "replicas": 2}, "replicas"),
        ({"label": "a=b"}, "label"),
    ],
)
def test_a_bad_choice_of_what_to_warm_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/caches/warm", json=body), 400, "invalid_request")["param"] == param


def test_only_what_is_on_the_shelf_is_warmed(http: httpx.Client, cache: dict[str, Any]) -> None:
    for absent in (UNKNOWN, "kvs_", "../shelf"):
        refused(http.post("/v1/caches/warm", json={"cache_ids": [cache["id"], absent]}), 404, "cache_not_found")


TOOLS = ["", "a b", "x" * 65, "søk", "a/b", 7, ["search"]]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_bad_name_of_a_tool_is_refused(http: httpx.Client, cache: dict[str, Any], tool: Any) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        (f"/v1/caches/{cache['id']}/query", {"prompt": "When?"}),
        ("/v1/query", {"prompt": "When?", "cache_ids": [cache["id"]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "When?"}], "cache_id": cache["id"]}),
    ]
    for path, body in calls:
        assert refused(http.post(path, json=body | {"tool": tool}), 400, "invalid_request")["param"] == "tool"


def test_a_tool_is_called_by_one_answer(http: httpx.Client, cache: dict[str, Any]) -> None:
    several = refused(ask(http, cache["id"], prompt=["When?", "Where?"], tool="search"), 400, "invalid_request")
    assert several["param"] == "tool"
    compared = refused(ask(http, cache["id"], compare=True, tool="search"), 400, "invalid_request")
    assert compared["param"] == "compare"


def test_every_way_of_asking_takes_a_tool(http: httpx.Client, cache: dict[str, Any]) -> None:
    """The answers are those without one."""
    chat = {"messages": [{"role": "user", "content": "When?"}], "cache_id": cache["id"], "max_tokens": 4}
    plain, named = (ask(http, cache["id"], **more).json()["text"] for more in ({}, {"tool": "search"}))
    assert plain == named
    streamed = ask(http, cache["id"], tool="search", stream=True)
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    joint = http.post("/v1/query", json={"prompt": "When?", "cache_ids": [cache["id"]], "tool": "s", "max_tokens": 4})
    assert joint.status_code == 200
    texts = [http.post("/v1/chat/completions", json=chat | more).json() for more in ({}, {"tool": "web.search-1"})]
    assert texts[0]["choices"] == texts[1]["choices"]
