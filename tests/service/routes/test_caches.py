"""/v1/caches: every form of a creation, listing, deleting, downloading."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvshelf import CompressedCache
from tests.service.scrape import scrape

DOCUMENT = "The keeper of the northern light wrote down every ship. " * 12

CACHE_FIELDS = {
    "id", "object", "document_id", "model", "layout", "policy", "policy_params", "compression_ratio", "codec", "tokens",
    "bytes", "quality", "tried", "created_at", "expires_at", "last_used_at", "pinned", "name", "labels", "has_source",
    "guaranteed_until", "min_quality", "recoded",
    "source", "timings", "existing", "uses", "parent_id", "ttl_s", "ttl_renew", "dtype", "date",
    "chat_template_kwargs", "warnings", "certificate",
}  # fmt: skip


def create(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/caches", json=body)
    assert response.status_code in (200, 201), response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_new_cache_is_201_and_the_same_again_200(http: httpx.Client) -> None:
    body = {
        "document": DOCUMENT,
        "policy": "lagkv",
        "compression_ratio": 0.5,
        "labels": {"kind": "log"},
        "name": "ships",
    }
    first, second = http.post("/v1/caches", json=body), http.post("/v1/caches", json=body)
    assert (first.status_code, second.status_code) == (201, 200)
    new, found = first.json(), second.json()
    assert new.keys() == CACHE_FIELDS
    assert (new["existing"], found["existing"]) == (False, True)
    assert new | {"existing": True} == found
    assert first.headers["location"] == f"/v1/caches/{new['id']}"
    assert new["id"].startswith("kvs_")
    assert new["document_id"].startswith("doc_")
    assert (new["object"], new["model"], new["layout"], new["codec"]) == ("cache", "random-tiny", "chat", "none")
    assert (new["policy"], new["compression_ratio"], new["name"]) == ("lagkv", 0.5, "ships")
    assert new["policy_params"]["lag"] > 0
    assert 0 < new["tokens"]["kept"] <= new["tokens"]["document"] / 2
    assert 0 < new["bytes"]["stored"] < new["bytes"]["full"]
    assert set(new["timings"]) == {"queue_s", "prefill_s", "compress_s", "store_s"}
    assert new["timings"]["prefill_s"] > 0
    assert http.get(f"/v1/caches/{new['id']}").json() == new


@pytest.mark.parametrize(
    ("codec", "canonical"),
    [
        ("int4", "int4"),
        ("int2:residual=8,group=32", "int2:residual=8"),
        ("mixed:share=.25", "mixed:share=0.25"),
        ("klt:step=1.50", "klt"),
        ("klt:steps=kl,step=3", "klt:step=3,steps=kl"),
        ("klt:shares=20/30.0,classes=1.50/4", "klt:classes=1.5/4,shares=20/30"),
    ],
)
def test_a_codec_is_stored_named_and_read_back(http: httpx.Client, codec: str, canonical: str) -> None:
    plain = create(http, document=DOCUMENT, compression_ratio=0.5)
    coded = create(http, document=DOCUMENT, compression_ratio=0.5, codec=codec)
    again = create(http, document=DOCUMENT, compression_ratio=0.5, codec=canonical)
    assert (coded["codec"], again["id"], again["existing"]) == (canonical, coded["id"], True)
    assert coded["id"] != plain["id"]
    assert coded["tokens"] == plain["tokens"]
    assert coded["bytes"]["full"] == plain["bytes"]["full"]
    assert coded["bytes"]["stored"] < plain["bytes"]["stored"]
    cache = CompressedCache.from_bytes(http.get(f"/v1/caches/{coded['id']}/blob").content)
    assert cache.codec == canonical
    answer = http.post(f"/v1/caches/{coded['id']}/query", json={"prompt": "Which ships?", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["cache_read_tokens"] == coded["tokens"]["document"]


def test_all_three_forms_and_a_file(http: httpx.Client) -> None:
    text = create(http, document=DOCUMENT + "text", policy="full")
    assert text["compression_ratio"] == 0
    assert text["tokens"]["kept"] == text["tokens"]["document"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert create(http, messages=messages, policy="full")["layout"] == "chat"
    ids = create(http, token_ids=[7, 8, 9] * 10, policy="full")
    assert (ids["layout"], ids["tokens"]["document"]) == ("plain", 30)
    form = {"policy": "full", "labels": json.dumps({"from": "file"})}
    file = {"file": ("a.txt", (DOCUMENT + "text").encode(), "text/plain")}
    response = http.post("/v1/caches", data=form, files=file)
    assert (response.status_code, response.json()["id"]) == (200, text["id"])


def test_token_ids_of_another_tokenizer_are_refused(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    ids = {"token_ids": [7, 8, 9] * 10, "policy": "full"}
    assert create(http, **ids, tokenizer=model["tokenizer"])["id"] == create(http, **ids)["id"]
    for path in ("/v1/caches", "/v1/estimate"):
        refusal = http.post(path, json=ids | {"tokenizer": "0" * 64})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "tokenizer")
        assert model["tokenizer"] in refusal.json()["error"]["message"]
    without = http.post("/v1/caches", json={"document": DOCUMENT, "tokenizer": model["tokenizer"]})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "tokenizer")


def test_budgets_and_layouts_are_different_caches_of_one_document(http: httpx.Client) -> None:
    by_tokens = create(http, document=DOCUMENT, budget_tokens=32)
    assert by_tokens["tokens"]["kept"] == 32
    by_ratio = create(http, document=DOCUMENT, compression_ratio=0.9)
    assert by_ratio["id"] != by_tokens["id"]
    assert by_ratio["document_id"] == by_tokens["document_id"]
    assert create(http, document=DOCUMENT, layout="plain", budget_tokens=32)["document_id"] != by_tokens["document_id"]


def test_expected_questions_make_another_cache(http: httpx.Client) -> None:
    plain = create(http, document=DOCUMENT, policy="snapkv")
    guided = create(http, document=DOCUMENT, policy="snapkv", expected_questions=["What is the code?"])
    assert guided["id"] != plain["id"]
    assert guided["document_id"] == plain["document_id"]
    again = http.post(
        "/v1/caches", json={"document": DOCUMENT, "policy": "snapkv", "expected_questions": ["What is the code?"]}
    )
    assert (again.status_code, again.json()["id"]) == (200, guided["id"])


def test_fifty_equal_creations_at_once_are_one_prefill(bundled_service: str) -> None:
    """At a service with its own limits: the shared one queues fewer than fifty."""
    body = {"document": "Fifty people ask for this at once. " * 40}
    every = httpx.Limits()  # of the connections may idle, as those of the fixture `http` may
    with httpx.Client(base_url=bundled_service, timeout=120, limits=every) as http, ThreadPoolExecutor(50) as threads:
        before = scrape(http)
        responses = list(threads.map(lambda _: http.post("/v1/caches", json=body), range(50)))
        prefilled = {key: value - before.get(key, 0) for key, value in scrape(http).items()}
    assert sorted(response.status_code for response in responses) == [200] * 49 + [201]
    # A second prefill would have measured, and stored, another time.
    assert len({json.dumps(response.json()["timings"]) for response in responses}) == 1
    tokens = responses[0].json()["tokens"]["document"]
    assert prefilled["kvshelf_document_tokens_total", frozenset({("model", "kvshelf-tiny")})] == tokens


def test_listing_filters_and_pages(http: httpx.Client) -> None:
    ids = [
        create(http, document=f"Page {n}. {DOCUMENT}", policy="full", labels={"suite": "paging", "n": str(n)})["id"]
        for n in range(5)
    ]
    listed: list[str] = []
    after: dict[str, str] = {}
    pages = 0
    while True:
        page = http.get("/v1/caches", params={"label.suite": "paging", "limit": 2} | after).json()
        assert page.keys() == {"object", "data", "has_more", "last_id"}
        assert page["object"] == "list"
        listed += [cache["id"] for cache in page["data"]]
        pages += 1
        assert page["last_id"] == listed[-1]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert (listed, pages) == (ids[::-1], 3)
    one = http.get("/v1/caches", params={"label.suite": "paging", "label.n": "3"}).json()["data"]
    assert [cache["id"] for cache in one] == [ids[3]]
    by_document = http.get("/v1/caches", params={"document_id": one[0]["document_id"]}).json()["data"]
    assert [cache["id"] for cache in by_document] == [ids[3]]
    by_id = http.get("/v1/caches", params={"id_prefix": ids[2][:16]}).json()["data"]
    assert [cache["id"] for cache in by_id] == [ids[2]]
    for id in ids[:3]:
        http.patch(f"/v1/caches/{id}", json={"name": "the first pages"})
    by_name = http.get("/v1/caches", params={"name": "the first pages", "limit": 2}).json()
    assert ([cache["id"] for cache in by_name["data"]], by_name["has_more"]) == ([ids[2], ids[1]], True)
    nothing = http.get("/v1/caches", params={"label.suite": "paging", "policy": "snapkv"}).json()
    assert nothing == {"object": "list", "data": [], "has_more": False, "last_id": None}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"after": "kvs_nothing"}, "after"),
        ({"polcy": "x"}, "polcy"),
        ({"id_prefix": "kvs_abc"}, "id_prefix"),
        ({"id_prefix": "abcd1234"}, "id_prefix"),
        ({"name": "half a \0"}, "name"),
    ],
)
def test_bad_filters_are_refused_by_name(http: httpx.Client, params: dict[str, Any], param: str) -> None:
    response = http.get("/v1/caches", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"
    assert response.json()["error"]["param"] == param


def test_a_change_can_depend_on_what_was_seen(http: httpx.Client) -> None:
    created = http.post("/v1/caches", json={"document": DOCUMENT + "tags", "policy": "full"})
    url = f"/v1/caches/{created.json()['id']}"
    first = http.get(url).headers["etag"]
    assert created.headers["etag"] == first
    assert http.post(f"{url}/query", json={"prompt": "?", "max_tokens": 1}).status_code == 200
    for seen in (first, f"W/{first}", f'"other", {first}', "*"):
        unchanged = http.get(url, headers={"if-none-match": seen})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", first)
    changed = http.patch(url, json={"name": "one"}, headers={"if-match": first})
    assert (changed.status_code, changed.json()["name"]) == (200, "one")
    assert changed.headers["etag"] == http.get(url, headers={"if-none-match": first}).headers["etag"] != first
    for stale in (first, f"W/{changed.headers['etag']}", "nothing"):
        for refusal in (
            http.patch(url, json={"name": "two"}, headers={"if-match": stale}),
            http.delete(url, headers={"if-match": stale}),
        ):
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (412, "etag_mismatch")
    assert http.get(url).json()["name"] == "one"
    assert http.delete(url, headers={"if-match": changed.headers["etag"]}).status_code == 200


def test_of_many_who_saw_the_same_one_changes_it(http: httpx.Client) -> None:
    url = f"/v1/caches/{create(http, document=DOCUMENT + 'race', policy='full')['id']}"
    seen = http.get(url).headers["etag"]

    def change(n: int) -> int:
        return http.patch(url, json={"name": str(n)}, headers={"if-match": seen}).status_code

    with ThreadPoolExecutor(10) as threads:
        assert sorted(threads.map(change, range(10))) == [200] + [412] * 9


def test_deleting_with_what_extends_it(http: httpx.Client) -> None:
    url = f"/v1/caches/{create(http, document=DOCUMENT + 'to be deleted with all', policy='full')['id']}"
    assert http.delete(url, params={"cascade": "perhaps"}).status_code == 400
    assert http.delete(url, params={"cascade": "true"}).json()["descendants"] == []
    assert http.get(url).status_code == 404


def test_deleting(http: httpx.Client) -> None:
    cache_id = create(http, document=DOCUMENT + "to be deleted", policy="full")["id"]
    assert http.delete(f"/v1/caches/{cache_id}").json() == {
        "id": cache_id,
        "object": "cache",
        "deleted": True,
        "descendants": [],
    }
    for response in (
        http.get(f"/v1/caches/{cache_id}"),
        http.delete(f"/v1/caches/{cache_id}"),
        http.get(f"/v1/caches/{cache_id}/blob"),
        http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "?"}),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "cache_not_found")


def test_a_blob_is_the_cache(http: httpx.Client, cache: dict[str, Any]) -> None:
    response = http.get(f"/v1/caches/{cache['id']}/blob")
    assert response.status_code == 200
    assert len(response.content) == cache["bytes"]["stored"] == int(response.headers["content-length"])
    loaded = CompressedCache.from_bytes(response.content)
    assert loaded.num_tokens == cache["tokens"]["document"]
    assert loaded.to_bytes() == response.content


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, -1),
        ("bytes=-50", -50, -1),
        ("bytes=10-999999999", 10, -1),
        (f"bytes=10-{'9' * 5000}", 10, -1),
        (f"bytes=-{'9' * 5000}", 0, -1),
        (f"bytes={'0' * 5000}-9", 0, 9),
    ],
    ids=lambda value: str(value)[:20],
)
def test_ranges(http: httpx.Client, cache: dict[str, Any], header: str, first: int, last: int) -> None:
    whole = http.get(f"/v1/caches/{cache['id']}/blob").content
    response = http.get(f"/v1/caches/{cache['id']}/blob", headers={"range": header})
    first, last = first % len(whole), last % len(whole)
    assert response.status_code == 206
    assert response.content == whole[first : last + 1]
    assert response.headers["content-range"] == f"bytes {first}-{last}/{len(whole)}"


def test_ranges_that_are_none_and_etags(http: httpx.Client, cache: dict[str, Any]) -> None:
    url = f"/v1/caches/{cache['id']}/blob"
    whole = http.get(url)
    for ignored in ("bytes=0-1,5-6", "lines=1-2", "bytes=9-3", "bytes=-"):
        response = http.get(url, headers={"range": ignored})
        assert (response.status_code, len(response.content)) == (200, len(whole.content))
    for beyond in (len(whole.content), "9" * 5000):
        outside = http.get(url, headers={"range": f"bytes={beyond}-"})
        assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(whole.content)}")
    etag = whole.headers["etag"]
    assert http.get(url, headers={"if-none-match": etag}).status_code == 304
    assert http.get(url, headers={"range": "bytes=0-9", "if-range": etag}).status_code == 206
    assert http.get(url, headers={"range": "bytes=0-9", "if-range": '"another"'}).status_code == 200


def test_protected_text_is_kept_counted_and_made_again(http: httpx.Client) -> None:
    blocks = [{"text": DOCUMENT}, {"text": "Never open the gate. ", "protect": True}, {"text": DOCUMENT}]
    body: dict[str, Any] = {"compression_ratio": 0.75, "codec": "int8", "keep_source": True}
    plain = create(http, document=DOCUMENT + "Never open the gate. " + DOCUMENT, **body)
    marked = create(http, document=blocks, **body)
    named = create(
        http, document=DOCUMENT + "Never open the gate. " + DOCUMENT, protect=["text:Never open the gate."], **body
    )
    assert marked["id"] != plain["id"]
    assert marked["document_id"] == plain["document_id"]
    assert (plain["tokens"]["protected"], marked["tokens"]["kept"]) == (0, plain["tokens"]["kept"])
    assert 0 < named["tokens"]["protected"] <= marked["tokens"]["protected"] < 30
    said = [
        {"role": "system", "content": [{"text": "Be brief.", "protect": True}]},
        {"role": "user", "content": DOCUMENT},
    ]
    conversation = create(http, messages=said, compression_ratio=0.5)
    system = create(
        http, messages=[{"role": "system", "content": "Be brief."}, said[1]], protect=["system"], compression_ratio=0.5
    )
    assert 0 < conversation["tokens"]["protected"] <= system["tokens"]["protected"]
    asked = {"prompt": "Which gate?", "max_tokens": 4}
    answer = http.post(f"/v1/caches/{marked['id']}/query", json=asked).json()["text"]
    part = http.post(f"/v1/caches/{marked['id']}/query", json=asked | {"select": {"method": "quest", "tokens": 100}})
    assert part.status_code == 200, part.text
    http.delete(f"/v1/caches/{marked['id']}")
    assert create(http, document=blocks, **body)["id"] == marked["id"]
    assert http.post(f"/v1/caches/{marked['id']}/query", json=asked).json()["text"] == answer
    more = [{"text": DOCUMENT}, {"text": "Never open the window. ", "protect": True}]
    grown = http.post(f"/v1/caches/{marked['id']}/append", json={"document": more, "policy": "streaming_llm"}).json()
    assert 0 < grown["tokens"]["protected"] - marked["tokens"]["protected"] < 12
    wrong = http.post(f"/v1/caches/{marked['id']}/append", json={"document": "More.", "protect": ["text:zebra"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "protect")


def test_the_turn_behind_a_protected_conversation_is_found(http: httpx.Client) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DOCUMENT}]
    cache = create(http, messages=said, protect=["system"], policy="full")
    url, asked = f"/v1/caches/{cache['id']}/query", [{"role": "user", "content": "Which gate?"}]
    first = http.post(url, json={"messages": asked, "max_tokens": 4, "store": True}).json()
    again = [*asked, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Which else?"}]
    second = http.post(url, json={"messages": again, "max_tokens": 4}).json()
    assert second["usage"]["cache_read_tokens"] > cache["tokens"]["document"]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"document": DOCUMENT, "protect": ["text:zebra"]}, "protect", "zebra"),
        ({"document": DOCUMENT, "protect": ["system"]}, "protect", "no system message"),
        ({"document": DOCUMENT, "protect": ["lines:(?=x)"]}, "protect", "cannot be read"),
        ({"document": DOCUMENT, "protect": ["lines:."], "compression_ratio": 0.5}, "protect", "budget"),
        ({"document": [{"text": DOCUMENT, "keep": True}]}, "document[0]", "a block is"),
        ({"document": DOCUMENT, "split": True, "protect": ["first:3"]}, "protect", "split"),
    ],
)
def test_protect_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str, told: str) -> None:
    response = http.post("/v1/caches", json={"policy": "keydiff", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert told in error["message"]
