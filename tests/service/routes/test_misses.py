"""on_miss and compare: caches that are made again from their kept source, and full caches beside compressed ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import httpx
import pytest

from kvshelf import CompressedCache, open_store
from kvshelf.service.routes.queries import agreement
from kvshelf.store import housekeeping
from kvshelf.store.disk import DiskStore
from tests.amounts import few
from tests.service.conftest import created, other_model, refused
from tests.service.routes.test_queries import ask, events

if TYPE_CHECKING:
    from tests.conftest import LiveService

Lost = Literal["evicted", "expired", "corrupt"]

TEXT = "The pilot boat leaves the harbour when the tide turns. " * 20
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


def lose(service: LiveService, cache_id: str, how: Lost) -> None:
    """Let a cache be lost: as a full shelf, time, or a bad disk does it."""
    if how == "corrupt":
        return flip(service, cache_id)
    with DiskStore.open(service.home / "shelf") as store:
        if how == "expired":
            store.update(cache_id, ttl_s=900)
        entry = store.index.find(cache_id, "default")
        assert entry is not None
        assert housekeeping.bury(store.index, store.blobs, entry, how, time.time() + 1000)
    return None


def flip(service: LiveService, cache_id: str) -> None:
    files = (service.home / "shelf" / "blobs").glob(f"{cache_id.removeprefix('kvs_')}-*")
    (path,) = files
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


@pytest.mark.parametrize("how", get_args(Lost))
@pytest.mark.parametrize(
    "body",
    few(
        3,
        [
            {"document": TEXT + "a", "compression_ratio": 0.75, "labels": {"a": "b"}, "name": "tide"},
            {"document": TEXT + "b", "budget_tokens": 33, "codec": "int4", "ttl_s": 900},
            {"document": TEXT + "c", "policy": "lagkv", "policy_params": {"lag": 16}, "layout": "plain"},
            {"document": TEXT + "d", "policy": "snapkv", "expected_questions": ["When does the boat leave?"]},
            {"messages": TURNS, "policy": "kvzip"},
            {"token_ids": list(range(300, 500)), "policy": "keydiff"},
        ],
    ),
    ids=lambda body: next(iter(body)) + "-" + str(body.get("policy", body.get("codec", "default"))),
)
def test_a_lost_cache_is_made_again_from_its_token_ids(
    http: httpx.Client, service: LiveService, body: dict[str, Any], how: Lost
) -> None:
    body = body | {"keep_source": "tokens"}
    body |= {"labels": {"how": how}} if "labels" not in body else {}
    cache = created(http, **body)
    assert (cache["source"]["form"], cache["has_source"], cache["source"]["expires_at"]) == ("tokens", True, None)
    assert cache["source"]["bytes"] <= 2 * cache["tokens"]["document"]
    question = {"messages": [{"role": "user", "content": "When?"}]} if "messages" in body else {"prompt": "When?"}
    before = ask(http, cache, **question, max_tokens=8)
    blob = http.get(f"/v1/caches/{cache['id']}/blob").content
    lose(service, cache["id"], how)
    code = {"corrupt": (424, "cache_corrupt")}.get(how, (410, "cache_expired"))
    refused(http.get(f"/v1/caches/{cache['id']}/blob"), *code)
    answer = ask(http, cache, **question, max_tokens=8, on_miss="recompute")
    assert (answer["recomputed"], answer["cache_id"], answer["text"]) == (how, cache["id"], before["text"])
    again = http.get(f"/v1/caches/{cache['id']}/blob").content
    assert CompressedCache.from_bytes(again).identity == CompressedCache.from_bytes(blob).identity
    now = http.get(f"/v1/caches/{cache['id']}").json()
    for field in ("name", "labels", "codec", "policy_params", "source", "document_id"):
        assert now[field] == cache[field]
    assert "recomputed" not in ask(http, cache, **question, max_tokens=8, on_miss="recompute")
    http.delete(f"/v1/caches/{cache['id']}")


def test_several_lost_caches_and_a_chat_are_made_again(http: httpx.Client, service: LiveService) -> None:
    caches = [created(http, document=f"{TEXT}{number}th", keep_source="tokens") for number in range(2)]
    body = {"prompt": "When?", "max_tokens": 8, "cache_ids": [cache["id"] for cache in caches]}
    before = http.post("/v1/query", json=body).json()
    lose(service, caches[0]["id"], "evicted")
    lose(service, caches[1]["id"], "expired")
    answer = http.post("/v1/query", json=body | {"on_miss": "recompute"}).json()
    assert answer["text"] == before["text"]
    assert answer["recomputed"] == [
        {"cache_id": caches[0]["id"], "reason": "evicted"},
        {"cache_id": caches[1]["id"], "reason": "expired"},
    ]
    lose(service, caches[0]["id"], "evicted")
    chat = {"cache_id": caches[0]["id"], "messages": [{"role": "user", "content": "When?"}], "max_tokens": 8}
    refused(http.post("/v1/chat/completions", json=chat), 410, "cache_expired")
    found = http.post("/v1/chat/completions", json=chat | {"on_miss": "recompute"}).json()
    assert found["recomputed"] == [{"cache_id": caches[0]["id"], "reason": "evicted"}]
    assert "recomputed" not in http.post("/v1/chat/completions", json=chat | {"on_miss": "recompute"}).json()
    lose(service, caches[0]["id"], "expired")
    body = chat | {"on_miss": "recompute", "stream": True}
    *_, last = events(http.post("/v1/chat/completions", json=body))
    assert last["recomputed"] == [{"cache_id": caches[0]["id"], "reason": "expired"}]
    refused(http.post("/v1/chat/completions", json=chat | {"on_miss": "guess"}), 400, "invalid_request")


def test_a_source_that_is_of_another_document_makes_nothing(http: httpx.Client, service: LiveService) -> None:
    """Its bytes are as they were kept: whoever stored it vouched for what it is not."""
    cache = created(http, document=TEXT + "vouched")
    with DiskStore.open(service.home / "shelf") as store:
        store.keep_source(cache["id"], TEXT + "another")
    lose(service, cache["id"], "evicted")
    body = {"prompt": "When?", "max_tokens": 4, "on_miss": "recompute"}
    error = refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 409, "model_mismatch")
    assert error["details"]["cache_id"] == cache["id"]
    refused(http.get(f"/v1/caches/{cache['id']}"), 410, "cache_expired")


def test_token_ids_show_and_compare_as_a_text_does(http: httpx.Client) -> None:
    cache = created(http, document=TEXT + "shown", compression_ratio=0.9, keep_source="tokens")
    kept = http.get(f"/v1/caches/{cache['id']}/kept").json()
    assert "".join(kept["tokens"][kept["template_tokens"] :]) == TEXT + "shown"
    assert ask(http, cache, prompt="When?", max_tokens=4, compare=True)["compare"]["text"]
    assert http.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]


def test_a_form_keeps_token_ids(http: httpx.Client) -> None:
    files = {"file": ("tide.txt", (TEXT + "form").encode(), "text/plain")}
    for form, wire in (("tokens", "tokens"), ("tokens", '"tokens"'), ("text", "true")):
        kept = http.post("/v1/caches", data={"keep_source": wire, "source_ttl_s": "60"}, files=files).json()["source"]
        assert kept["form"] == form
        assert kept["expires_at"] == pytest.approx(time.time() + 60, abs=30)
    wrong = http.post("/v1/caches", data={"keep_source": "yes"}, files=files)
    assert refused(wrong, 400, "invalid_request")["param"] == "keep_source"


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


def test_a_cache_gets_a_successor_under_another_model(
    http: httpx.Client, service: LiveService, tiny_folder: Path
) -> None:
    text, other = TEXT + "successor", other_model(tiny_folder)
    cache = other.compress(text, policy="knorm", compression_ratio=0.5)
    fields: dict[str, Any] = {"codec": "int8", "labels": {"a": "b"}, "name": "tide", "pinned": True}
    fields["guaranteed_until"] = until = round(time.time()) + 500.0
    with open_store(f"disk://{service.home}/shelf") as store:
        old = store.put(cache, **fields, source=text, ttl_s=900, ttl_renew_s=900)
        bare = store.put(other.compress(text, policy="full"))
    response = http.post(f"/v1/caches/{old.id}/remake", json={})
    assert response.status_code == 201, response.text
    made = response.json()
    assert (made["policy"], made["compression_ratio"], made["codec"]) == ("knorm", 0.5, "int8")
    assert (made["labels"], made["name"], made["pinned"]) == ({"a": "b"}, "tide", True)
    assert made["guaranteed_until"] == until
    assert (made["ttl_renew"], made["ttl_s"], made["has_source"]) == (True, 900, True)
    assert made["id"] != old.id
    for cache_id in (old.id, made["id"]):  # again after a stop; and one of this model is its own successor
        again = http.post(f"/v1/caches/{cache_id}/remake", json={"model": made["model"]})
        assert (again.status_code, again.json()["id"], again.json()["existing"]) == (200, made["id"], True)
    assert http.get(f"/v1/caches/{old.id}").status_code == 200, "the old one stays"
    refused(http.post(f"/v1/caches/{bare.id}/remake", json={}), 409, "source_not_kept")
    wrong = refused(http.post(f"/v1/caches/{old.id}/remake", json={"model": "unknown"}), 400, "invalid_request")
    assert wrong["param"] == "model"


def test_without_a_source_a_miss_stays_one_and_says_why(http: httpx.Client, service: LiveService) -> None:
    def lost(cache: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": "When?", "on_miss": "recompute"}
        return refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 409, "source_not_kept")

    bare = created(http, document=TEXT + "bare")
    flip(service, bare["id"])
    assert lost(bare)["details"]["miss_reason"] == "corrupt"
    gone = created(http, document=TEXT + "gone", ttl_s=0.2, keep_source=True, source_ttl_s=0.2)
    time.sleep(0.3)
    assert lost(gone)["details"]["miss_reason"] == "expired"
    bare = created(http, document=TEXT + "bare and evicted")
    lose(service, bare["id"], "evicted")
    assert lost(bare)["details"]["miss_reason"] == "evicted"
    deleted = created(http, document=TEXT + "deleted", keep_source="tokens")
    http.delete(f"/v1/caches/{deleted['id']}")
    again = http.post(f"/v1/caches/{deleted['id']}/query", json={"prompt": "?", "on_miss": "recompute"})
    refused(again, 404, "cache_not_found")
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
