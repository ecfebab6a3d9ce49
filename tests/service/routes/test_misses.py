"""on_miss and compare: caches that are made again from their kept source, and full caches beside compressed ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import CompressedCache, open_store
from kvshelf.service.routes.queries import agreement
from tests.service.conftest import created, other_model, refused
from tests.service.routes.test_queries import ask, events

if TYPE_CHECKING:
    from tests.conftest import LiveService

TEXT = "The pilot boat leaves the harbour when the tide turns. " * 20
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


def flip(service: LiveService, cache_id: str) -> None:
    files = (service.home / "shelf" / "blobs").glob(f"{cache_id.removeprefix('kvs_')}-*")
    path = max(files, key=lambda file: file.stat().st_size)  # the blob; the other one is the source
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "body",
    [
        {"document": TEXT + "0", "compression_ratio": 0.75, "labels": {"a": "b"}, "name": "tide", "ttl_s": 900},
        {"document": TEXT + "1", "budget_tokens": 33, "codec": "int4"},
        {"document": TEXT + "2", "policy": "lagkv", "policy_params": {"lag": 16}, "layout": "plain"},
        {"document": TEXT + "3", "policy": "snapkv", "expected_questions": ["When does the boat leave?"]},
        {"document": TEXT + "4", "policy": "full"},
        {"messages": TURNS, "policy": "ada"},
    ],
    ids=lambda body: str(body.get("policy", body.get("codec", "default"))),
)
def test_a_corrupt_cache_is_made_again_as_it_was(
    http: httpx.Client, service: LiveService, body: dict[str, Any]
) -> None:
    cache = created(http, **body, keep_source=True)
    blob = http.get(f"/v1/caches/{cache['id']}/blob").content
    flip(service, cache["id"])
    question = {"messages": [{"role": "user", "content": "When?"}]} if "messages" in body else {"prompt": "When?"}
    answer = ask(http, cache, **question, max_tokens=8, on_miss="recompute")
    assert (answer["recomputed"], answer["cache_id"]) == ("corrupt", cache["id"])
    # Not the same bytes: two prefills on a busy processor may differ in a last bit.
    again = http.get(f"/v1/caches/{cache['id']}/blob").content
    assert CompressedCache.from_bytes(again).identity == CompressedCache.from_bytes(blob).identity
    assert len(again) == len(blob)
    now = http.get(f"/v1/caches/{cache['id']}").json()
    for field in ("name", "labels", "codec", "policy_params", "bytes", "has_source"):
        assert now[field] == cache[field]
    assert (now["expires_at"] is None) == (cache["expires_at"] is None)
    flip(service, cache["id"])
    refused(http.get(f"/v1/caches/{cache['id']}/blob"), 424, "cache_corrupt")  # a query is answered from memory
    refused(http.post(f"/v1/caches/{cache['id']}/query", json=question), 424, "cache_corrupt")
    late = ask(http, cache, **question, max_tokens=8, on_miss="recompute")
    assert (late["recomputed"], late["text"]) == ("corrupt", answer["text"]), (
        "its source is there, whoever met it first"
    )
    usual = ask(http, cache, **question, max_tokens=8, on_miss="recompute")
    assert "recomputed" not in usual
    assert usual["text"] == answer["text"]


def test_a_stream_is_made_again_before_its_first_piece(http: httpx.Client, service: LiveService) -> None:
    cache = created(http, document=TEXT + "stream", keep_source=True)
    flip(service, cache["id"])
    body = {"prompt": "When?", "max_tokens": 8, "stream": True, "on_miss": "recompute"}
    *deltas, answer = events(http.post(f"/v1/caches/{cache['id']}/query", json=body))
    assert answer["recomputed"] == "corrupt"
    assert "".join(delta["text"] for delta in deltas) == answer["text"]


def test_a_cache_of_another_model_is_made_again_under_ours(
    http: httpx.Client, service: LiveService, tiny_folder: Path
) -> None:
    foreign = other_model(tiny_folder).compress(TEXT + "foreign", compression_ratio=0.75)
    with open_store(f"disk://{service.home}/shelf") as store:
        manifest = store.put(foreign, source=TEXT + "foreign", pinned=True)
    answer = ask(http, {"id": manifest.id}, prompt="When?", max_tokens=8, on_miss="recompute")
    ours = created(http, document=TEXT + "foreign", compression_ratio=0.75)
    assert (answer["recomputed"], answer["cache_id"]) == ("model_changed", ours["id"])
    assert ours["id"] != manifest.id
    assert (ours["existing"], ours["pinned"]) == (True, True)
    assert answer["text"] == ask(http, ours, prompt="When?", max_tokens=8)["text"]


def test_without_a_source_a_miss_stays_one_and_says_why(http: httpx.Client, service: LiveService) -> None:
    def lost(cache: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": "When?", "on_miss": "recompute"}
        return refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 409, "source_not_kept")

    bare = created(http, document=TEXT + "bare")
    flip(service, bare["id"])
    assert lost(bare)["details"]["miss_reason"] == "corrupt"
    gone = created(http, document=TEXT + "gone", ttl_s=0.2, keep_source=True)
    time.sleep(0.3)
    assert lost(gone)["details"]["miss_reason"] == "expired"
    unknown = http.post(f"/v1/caches/kvs_{'0' * 40}/query", json={"prompt": "?", "on_miss": "recompute"})
    refused(unknown, 404, "cache_not_found")


def test_comparing_with_the_full_cache(http: httpx.Client) -> None:
    cache = created(http, document=TEXT + "compare", compression_ratio=0.9, keep_source=True)
    prompts = ["When does it leave?", "tide"]
    compared = ask(http, cache, prompt=prompts, max_tokens=12, compare=True)["data"]
    page = http.get("/v1/caches", params={"document_id": cache["document_id"], "policy": "full"}).json()["data"]
    (full,) = page
    assert 0 < full["expires_at"] - full["created_at"] <= 600
    for prompt, answer in zip(prompts, compared, strict=True):
        assert answer["text"] == ask(http, cache, prompt=prompt, max_tokens=12)["text"]
        assert answer["compare"]["text"] == ask(http, full, prompt=prompt, max_tokens=12)["text"]
        assert 0 <= answer["compare"]["agreement"] <= 1
        same = ask(http, full, prompt=prompt, max_tokens=12, compare=True)
        assert same["compare"] == {"text": same["text"], "agreement": 1.0}
    # A model that says nothing sensible says something else from a tenth of the cache.
    # Drawn at random and without a seed, a cache agrees with itself all the same.
    drawn = ask(http, full, prompt="When?", max_tokens=12, temperature=1.0, compare=True)
    assert drawn["compare"] == {"text": drawn["text"], "agreement": 1.0}
    assert drawn["text"] != ask(http, full, prompt="When?", max_tokens=12, temperature=1.0, compare=True)["text"]
    assert min(answer["compare"]["agreement"] for answer in compared) < 1


def test_comparing_needs_a_full_cache_or_a_source(http: httpx.Client) -> None:
    cache = created(http, document=TEXT + "no source", compression_ratio=0.9)
    body = {"prompt": "When?", "max_tokens": 4, "compare": True}
    error = refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 409, "source_not_kept")
    assert error["param"] == "compare"
    created(http, document=TEXT + "no source", policy="full", codec="int8")
    refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 409, "source_not_kept")
    created(http, document=TEXT + "no source", policy="full")
    assert "agreement" in ask(http, cache, prompt="When?", max_tokens=4, compare=True)["compare"]


def test_agreement_counts_equal_tokens_up_to_the_first_end() -> None:
    end = 0
    assert agreement([5, 6, 7, end], [5, 6, 7, end]) == 1
    assert agreement([5, 6, 7, 8], [5, 9, 7, 8]) == 0.75
    assert agreement([5, end], [5, 6, 7, end]) == 0.5
    assert agreement([9], [5]) == 0
    assert agreement([], []) == 1
