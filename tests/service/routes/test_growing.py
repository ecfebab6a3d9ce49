"""Documents that grow and conversations that last, over HTTP."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import httpx
import pytest

from kvshelf import Client
from tests.service.conftest import created, refused
from tests.service.scrape import moving

FACTS = "The code of the {} gate is {}. "
COLOURS = ("red", "blue", "green", "amber", "white", "black", "ivory", "violet")


def facts(start: int, count: int) -> str:
    return "".join(FACTS.format(COLOURS[n % 8], n * 7919 % 9973) for n in range(start, start + count))


def append(http: httpx.Client, cache: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = http.post(f"/v1/caches/{cache['id']}/append", json=body)
    assert response.status_code in (200, 201), response.text
    found: dict[str, Any] = response.json()
    return found


def unique(text: str) -> str:
    return f"[{uuid.uuid4().hex[:8]}] {text}"


def test_a_document_grows_by_text_file_turns_and_ids(http: httpx.Client) -> None:
    root = created(http, document=unique(facts(0, 20)), policy="full", ttl_s=900, name="gates.txt")
    text = append(http, root, document=facts(20, 10), policy="keydiff", compression_ratio=0.25, labels={"a": "b"})
    assert (text["parent_id"], text["policy"], text["labels"], text["existing"]) == (
        root["id"],
        "keydiff",
        {"a": "b"},
        False,
    )
    assert text["expires_at"] == root["expires_at"], "by default a child expires with its parent"
    assert text["tokens"]["document"] > root["tokens"]["document"]
    assert text["document_id"] != root["document_id"]
    again = append(http, root, document=facts(20, 10), policy="keydiff", compression_ratio=0.25)
    assert (again["id"], again["existing"]) == (text["id"], True)
    form = http.post(
        f"/v1/caches/{text['id']}/append",
        files={"file": ("more.txt", facts(30, 5).encode(), "text/plain")},
        data={"policy": "full", "name": "more", "ttl_s": "60"},
    )
    assert form.status_code == 201, form.text
    file = form.json()
    assert (file["name"], file["parent_id"]) == ("more", text["id"])
    assert file["expires_at"] < root["expires_at"]
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    talk = append(http, file, messages=turns, policy="full")
    plain = created(http, document=unique("one two three"), layout="plain", policy="full")
    more = append(http, plain, token_ids=[5, 6, 7])
    assert more["tokens"]["document"] == plain["tokens"]["document"] + 3
    chain = http.get(f"/v1/caches/{talk['id']}/turns").json()["data"]
    assert [each["cache_id"] for each in chain] == [root["id"], text["id"], file["id"], talk["id"]]
    assert chain[0]["children"] == [text["id"]]
    assert (text["name"], talk["name"]) == ("gates.txt, append 1", "more, append 1")
    second = append(http, text, token_ids=[5, 6])
    assert second["name"] == "gates.txt, append 2"
    assert more["name"] == f"{plain['id'][:12]}, append 1", "a cache without a name is called by its id"
    assert sum(each["tokens"] for each in chain) == talk["tokens"]["document"] == chain[-1]["total_tokens"]
    listed = http.get("/v1/caches", params={"parent_id": root["id"]}).json()["data"]
    assert [each["id"] for each in listed] == [text["id"]]
    answer = http.post(f"/v1/caches/{talk['id']}/query", json={"prompt": "x", "max_tokens": 1}).json()
    assert answer["usage"]["cache_read_tokens"] == talk["tokens"]["document"]
    for cache in (second, talk, file, text, root, more, plain):
        assert http.delete(f"/v1/caches/{cache['id']}").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", None),
        ({"document": "a", "token_ids": [1]}, 400, "invalid_request", None),
        ({"document": ""}, 422, "document_too_short", "document"),
        ({"document": "a", "policy": "auto"}, 400, "invalid_request", "policy"),
        ({"document": "a", "policy": "nosuch"}, 400, "invalid_request", "policy"),
        ({"document": "a", "policy": "infllm"}, 422, "policy_unsupported", "policy"),
        ({"document": "a " * 30, "policy": "streaming_llm", "policy_params": {"positions": "cache"}}, 422,
         "policy_unsupported", "policy"),
        ({"document": "word " * 40_000}, 413, "document_too_long", "document"),
        ({"document": "a", "codec": "int4"}, 400, "invalid_request", "codec"),
        ({"document": "a", "ttl_s": 5, "expires_at": 4e9}, 400, "invalid_request", None),
        ({"token_ids": [1], "tokenizer": "other"}, 400, "invalid_request", "tokenizer"),
        ({"token_ids": [10**9]}, 400, "invalid_request", "token_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_appended_is_refused_by_name(
    http: httpx.Client, cache: dict[str, Any], body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    response = http.post(f"/v1/caches/{cache['id']}/append", json=body)
    error = response.json()["error"]
    assert error["code"] == code, response.text
    assert response.status_code == status
    if param is not None:
        assert error["param"] == param


def test_turns_go_on_under_one_budget(bundled_service: str) -> None:
    """By raw HTTP, and by the client."""
    on = {"policy_params": {"prefill": "chunked"}, "budget_tokens": 64}
    with httpx.Client(base_url=bundled_service, timeout=120) as http, Client(bundled_service) as client:
        params = {"prefill": "chunked", "chunk": 64, "keep_scores": True}
        asked = {"policy": "make_each_token_count", "policy_params": params, "budget_tokens": 64}
        root = created(http, document=unique(facts(0, 20)), **asked)
        blob = http.get(f"/v1/caches/{root['id']}/blob").content
        grown = append(http, root, document=facts(20, 10), **on)
        assert (grown["parent_id"], grown["tokens"]["kept"], grown["policy_params"]["keep_scores"]) == (
            root["id"],
            64,
            True,
        )
        assert append(http, root, document=facts(20, 10), **on)["id"] == grown["id"]
        apart = append(http, root, document=facts(20, 10), budget_tokens=64)
        assert apart["tokens"]["kept"] == 128
        assert http.get(f"/v1/caches/{root['id']}/blob").content == blob, "the parent stays as it is"
        last = client.caches.append(grown["id"], document=facts(30, 10), **on)
        assert last.tokens.kept == 64
        assert client.caches.query(last.id, "What is the code?", max_tokens=2).usage.cache_read_tokens
        for cache in (apart["id"], created(http, document=unique("x"), policy="full")["id"]):
            response = http.post(f"/v1/caches/{cache}/append", json={"document": "more", **on, "policy": "trimkv"})
            assert refused(response, 422, "policy_unsupported")["param"] == "policy_params.prefill"
        client.caches.delete(root["id"], cascade=True)


def test_nothing_is_appended_to_a_cache_that_is_gone_or_another_s(http: httpx.Client) -> None:
    root = created(http, document=unique("gone"), policy="full")
    http.delete(f"/v1/caches/{root['id']}")
    refused(http.post(f"/v1/caches/{root['id']}/append", json={"document": "more"}), 404, "cache_not_found")
    refused(http.get(f"/v1/caches/{root['id']}/turns"), 404, "cache_not_found")


def test_a_cache_with_children_is_deleted_with_them_or_not_at_all(http: httpx.Client) -> None:
    root = created(http, document=unique(facts(0, 5)), policy="full")
    child = append(http, root, document=facts(5, 5))
    grandchild = append(http, child, document=facts(10, 5))
    refused(http.delete(f"/v1/caches/{root['id']}"), 409, "cache_has_children")
    assert http.delete(f"/v1/caches/{root['id']}", params={"cascade": "true"}).status_code == 200
    for cache in (root, child, grandchild):
        refused(http.get(f"/v1/caches/{cache['id']}"), 404, "cache_not_found")


def test_an_export_of_a_child_is_whole(http: httpx.Client) -> None:
    from kvshelf import CompressedCache

    root = created(http, document=unique(facts(0, 30)), policy="full", codec="int4")
    child = append(http, root, document=facts(30, 30))
    blob = http.get(f"/v1/caches/{child['id']}/blob", params={"about": "true"}).content
    cache = CompressedCache.from_bytes(blob)
    assert cache.num_tokens == child["tokens"]["document"]
    ask = {"prompt": "What is the code of the blue gate?", "max_tokens": 8}
    before = http.post(f"/v1/caches/{child['id']}/query", json=ask).json()["text"]
    assert http.delete(f"/v1/caches/{root['id']}", params={"cascade": "true"}).status_code == 200
    response = http.post(
        "/v1/caches/import", content=blob, headers={"content-type": "application/octet-stream"}, params={"ttl_s": 600}
    )
    assert response.status_code == 201, response.text
    imported = response.json()
    assert (imported["id"], imported["parent_id"]) == (child["id"], None)
    assert http.post(f"/v1/caches/{child['id']}/query", json=ask).json()["text"] == before
    refused(http.get(f"/v1/caches/{child['id']}/kept"), 409, "source_not_kept")
    http.delete(f"/v1/caches/{child['id']}")


def test_a_stored_turn_is_asked_like_any_cache(http: httpx.Client) -> None:
    root = created(http, document=unique(facts(0, 30)), policy="full", ttl_s=900)
    body = {"prompt": "What is the code of the red gate?", "max_tokens": 12, "store": True}
    answer = http.post(f"/v1/caches/{root['id']}/query", json=body).json()
    stored = http.get(f"/v1/caches/{answer['stored_cache_id']}").json()
    assert (stored["parent_id"], stored["policy"], stored["expires_at"]) == (root["id"], "full", root["expires_at"])
    assert stored["timings"]["prefill_s"] == 0, "its keys and values were there already"
    assert stored["name"] == f"{root['id'][:12]}, turn 1"
    chain = http.get(f"/v1/caches/{stored['id']}/turns").json()["data"]
    assert chain[1]["messages"] == [
        {"role": "user", "content": body["prompt"]}, {"role": "assistant", "content": answer["text"]},
    ]  # fmt: skip
    follow = http.post(f"/v1/caches/{stored['id']}/query", json={"prompt": "And again?", "max_tokens": 4}).json()
    assert follow["usage"]["cache_read_tokens"] == stored["tokens"]["document"]
    assert "stored_cache_id" not in follow
    own = http.post(f"/v1/caches/{root['id']}/query", json=body | {"ttl_s": 60, "prompt": "Else?"}).json()
    assert http.get(f"/v1/caches/{own['stored_cache_id']}").json()["expires_at"] < root["expires_at"]
    several = http.post(f"/v1/caches/{root['id']}/query", json=body | {"prompt": ["a?", "b?"]}).json()["data"]
    assert len({each["stored_cache_id"] for each in several}) == 2
    endless = created(http, document=unique("endless"), policy="full")
    kept = http.post(f"/v1/caches/{endless['id']}/query", json=body).json()
    if "stored_cache_id" in kept:
        assert http.get(f"/v1/caches/{kept['stored_cache_id']}").json()["expires_at"] is not None, "never none"
    for cache in (root, endless):
        assert http.delete(f"/v1/caches/{cache['id']}", params={"cascade": "true"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "ttl_s": 5}, "ttl_s"),
        ({"prompt": "a", "store": True, "compare": True}, "compare"),
        ({"prompt": "a", "store": True, "select": {"method": "quest"}}, "store"),
        ({"prompt": "a", "store": "yes"}, "store"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_any_work(
    http: httpx.Client, cache: dict[str, Any], body: dict[str, Any], param: str
) -> None:
    error = refused(http.post(f"/v1/caches/{cache['id']}/query", json=body), 400, "invalid_request")
    assert error["param"] == param


def test_several_documents_keep_no_turn(http: httpx.Client, cache: dict[str, Any]) -> None:
    body = {"cache_ids": [cache["id"]], "prompt": "a", "store": True}
    assert refused(http.post("/v1/query", json=body), 400, "invalid_request")["param"] == "store"
    chat = {"cache_ids": [cache["id"]], "messages": [{"role": "user", "content": "a"}], "store": True}
    assert refused(http.post("/v1/chat/completions", json=chat), 400, "invalid_request")["param"] == "store"


def test_a_client_that_sends_everything_again_prefills_its_new_turn_alone(http: httpx.Client) -> None:
    """OpenAI's own client, streaming or not; the same answers as without anything stored."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    root = created(http, document=unique(facts(0, 40)), policy="full", ttl_s=900)
    questions = [f"What is the code of the {colour} gate?" for colour in COLOURS[:6]]

    def talk(*, store: bool) -> tuple[list[str], list[int], list[int]]:
        messages: list[dict[str, str]] = []
        said, prefilled, read = [], [], []
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            options = {"max_tokens": 12, "store": store, "extra_body": {"cache_id": root["id"]}}
            if number % 2:
                stream = client.chat.completions.create(
                    model=root["model"], messages=messages, stream=True,
                    stream_options={"include_usage": True}, **options,
                )  # fmt: skip
                chunks = list(stream)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                usage = chunks[-1].usage
                if store:
                    ending = next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason)
                    assert ending.stored_cache_id.startswith("kvs_")
            else:
                whole = client.chat.completions.create(model=root["model"], messages=messages, **options)
                text, usage = whole.choices[0].message.content, whole.usage
                assert ("stored_cache_id" in (whole.model_extra or {})) == store
            messages.append({"role": "assistant", "content": text})
            said.append(text)
            read.append(usage.prompt_tokens_details.cached_tokens)
            prefilled.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        return said, prefilled, read

    plain, all_again, _ = talk(store=False)
    said, prefilled, read = talk(store=True)
    assert said == plain, "the same tokens, from the shelf or prefilled"
    assert all_again == sorted(all_again)
    assert all_again[-1] > 3 * all_again[0]
    assert max(prefilled) <= 1.2 * prefilled[0] + 2, "flat"
    assert read == sorted(read)
    # Sent again once more, now without store: everything but the last question is on the shelf.
    chain = http.get("/v1/caches", params={"parent_id": root["id"]}).json()["data"]
    assert len(chain) == 1, "one conversation is one chain"
    assert http.delete(f"/v1/caches/{root['id']}", params={"cascade": "true"}).status_code == 200


def test_a_stored_turn_is_in_memory_for_the_next(http: httpx.Client) -> None:
    root = created(http, document=unique(facts(0, 30)), policy="full", ttl_s=900)
    cache_id = root["id"]
    for number in range(3):
        body = {"prompt": f"What is the code of the {COLOURS[number]} gate?", "max_tokens": 8, "store": True}
        with moving(http) as moved:
            response = http.post(f"/v1/caches/{cache_id}/query", json=body)
        assert number == 0 or moved("kvshelf_cache_hits_total", read_from="memory") == 1
        cache_id = response.json()["stored_cache_id"]
    assert http.delete(f"/v1/caches/{root['id']}", params={"cascade": "true"}).status_code == 200


def test_a_parent_deleted_meanwhile_leaves_a_whole_child_or_none(http: httpx.Client) -> None:
    for delay_s in (0.0, 0.02, 0.08, 0.2):
        root = created(http, document=unique(facts(0, 20)), policy="full")
        results: list[httpx.Response] = []
        more = facts(20, 40)

        def grow(root: dict[str, Any] = root, results: list[httpx.Response] = results, more: str = more) -> None:
            results.append(http.post(f"/v1/caches/{root['id']}/append", json={"document": more}))

        thread = threading.Thread(target=grow)
        thread.start()
        thread.join(delay_s)
        deleted = http.delete(f"/v1/caches/{root['id']}", params={"cascade": "true"})
        thread.join()
        assert deleted.status_code == 200
        (response,) = results
        listed = http.get("/v1/caches", params={"parent_id": root["id"]}).json()["data"]
        if response.status_code == 201:
            gone = http.get(f"/v1/caches/{response.json()['id']}").status_code
            assert gone == 404, "the deletion came after it, and took it along"
        else:
            refused(response, 404, "cache_not_found")
        assert listed == []
