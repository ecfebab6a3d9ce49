"""How long a cache is kept, what may change about it, and whether its text is kept: over HTTP."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import open_store
from tests.service.conftest import created, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

FAR = 9e9
DOCUMENT = "The ferry leaves when the bell has rung twice. " * 9


@pytest.fixture(scope="module")
def changed(http: httpx.Client) -> str:
    """The id of a cache that the tests of this file change."""
    return str(created(http, document=DOCUMENT, labels={"of": "ferry"}, name="ferry")["id"])


def patch(http: httpx.Client, cache_id: str, **body: Any) -> dict[str, Any]:
    response = http.patch(f"/v1/caches/{cache_id}", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    assert http.get(f"/v1/caches/{cache_id}").json() == found
    return found


def test_what_is_given_changes_and_all_else_stays(http: httpx.Client, changed: str) -> None:
    before = http.get(f"/v1/caches/{changed}").json()
    assert before["expires_at"] is None
    later = patch(http, changed, ttl_s=1000)
    assert later["expires_at"] == pytest.approx(time.time() + 1000, abs=30)
    assert later | {"expires_at": None} == before
    at = round(time.time()) + 5000.5
    assert patch(http, changed, expires_at=at)["expires_at"] == at
    several = patch(http, changed, name="", pinned=True, labels={"to": "island"})
    assert (several["name"], several["pinned"], several["labels"]) == ("", True, {"to": "island"})
    assert several["expires_at"] == at
    for null in ({"ttl_s": None}, {"expires_at": None}):
        patch(http, changed, ttl_s=50)
        assert patch(http, changed, **null)["expires_at"] is None
    assert not patch(http, changed, pinned=False)["pinned"]


def test_a_cache_is_guaranteed_by_its_creation_by_another_one_and_by_a_change(http: httpx.Client) -> None:
    until = round(time.time()) + 500.5
    body = {"document": DOCUMENT + "Guaranteed.", "guaranteed_until": until}
    refused(http.post("/v1/caches", json=body | {"ttl_s": 100}), 400, "invalid_request")
    assert created(http, **body, ttl_s=1000)["guaranteed_until"] == until
    longer = created(http, **body | {"guaranteed_until": until + 50})
    assert (longer["existing"], longer["guaranteed_until"]) == (True, until + 50)
    again = created(http, **body)
    assert again["guaranteed_until"] == until + 50, "a creation shortens nothing"
    assert patch(http, again["id"], guaranteed_until=until)["guaranteed_until"] == until
    assert patch(http, again["id"], guaranteed_until=None)["guaranteed_until"] is None


def test_labels_that_were_changed_are_found(http: httpx.Client, changed: str) -> None:
    for harbour in ("north", "south"):
        patch(http, changed, labels={"harbour": harbour})
        found = {
            name: [cache["id"] for cache in http.get("/v1/caches", params={"label.harbour": name}).json()["data"]]
            for name in ("north", "south")
        }
        assert found == {"north": [], "south": []} | {harbour: [changed]}


def test_a_cache_whose_time_was_cut_short_expires(http: httpx.Client) -> None:
    cache_id = created(http, document=DOCUMENT + "soon over", ttl_s=5000)["id"]
    # Not by `patch`, which then looks the cache up: by that time it may be gone.
    assert http.patch(f"/v1/caches/{cache_id}", json={"ttl_s": 0.2, "pinned": True}).status_code == 200
    time.sleep(0.4)
    error = refused(http.patch(f"/v1/caches/{cache_id}", json={"ttl_s": 100}), 410, "cache_expired")
    assert (error["miss_reason"], error["details"]["reason"]) == ("expired", "expired")


def test_each_question_prolongs_a_cache_that_renews(http: httpx.Client) -> None:
    """Also the turns behind it, and an earlier cache of the same document takes the renewal on."""
    plain = created(http, document=DOCUMENT + "renewed", ttl_s=50)
    assert (plain["ttl_renew"], plain["ttl_s"]) == (False, None)
    cache = created(http, document=DOCUMENT + "renewed", ttl_s=40, ttl_renew=True)
    assert (cache["existing"], cache["ttl_renew"], cache["ttl_s"]) == (True, True, 40)
    assert cache["expires_at"] == plain["expires_at"], "no life is shortened"
    cache = patch(http, cache["id"], ttl_s=40, ttl_renew=True)

    def expires_at(cache_id: str, later: float) -> float:
        """Once it is later than this."""
        end = time.monotonic() + 60
        while (at := float(http.get(f"/v1/caches/{cache_id}").json()["expires_at"])) <= later:
            assert time.monotonic() < end
            time.sleep(0.05)
        return at

    time.sleep(0.5)  # more than a hundredth of its time
    asked_at = time.time()
    answer = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "When?", "max_tokens": 1, "store": True})
    assert asked_at + 40 <= expires_at(cache["id"], cache["expires_at"]) <= time.time() + 40
    turn = http.get(f"/v1/caches/{answer.json()['stored_cache_id']}").json()
    assert (turn["ttl_renew"], turn["ttl_s"]) == (True, 40)
    more = http.post(f"/v1/caches/{cache['id']}/append", json={"document": " More."}).json()
    assert (more["ttl_renew"], more["ttl_s"]) == (True, 40)
    assert more["expires_at"] == pytest.approx(time.time() + 40, abs=20)
    assert not patch(http, cache["id"], ttl_renew=False)["ttl_renew"]
    assert not patch(http, turn["id"], expires_at=round(time.time()) + 60)["ttl_renew"], "a new end ends the renewal"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"ttl_renew": True}, "ttl_renew"),
        ({"ttl_renew": True, "ttl_s": None}, "ttl_renew"),
        ({"ttl_renew": True, "expires_at": 5e9}, "ttl_renew"),
        ({"ttl_renew": "yes", "ttl_s": 5}, "ttl_renew"),
        ({"colour": "red"}, "colour"),
        ({"id": "kvs_1"}, "id"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": -5}, "ttl_s"),
        ({"ttl_s": "60"}, "ttl_s"),
        ({"ttl_s": True}, "ttl_s"),
        ({"ttl_s": 1e300}, "ttl_s"),
        ({"ttl_s": 10**400}, "ttl_s"),
        ({"ttl_s": [1]}, "ttl_s"),
        ({"expires_at": 1}, "expires_at"),
        ({"expires_at": 1e300}, "expires_at"),
        ({"expires_at": 10**400}, "expires_at"),
        ({"ttl_s": 5, "expires_at": 5e9}, "expires_at"),
        ({"ttl_s": None, "expires_at": None}, "expires_at"),
        ({"labels": None}, "labels"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"labels": {"a b": "1"}}, "labels.a b"),
        ({"labels": {str(n): "" for n in range(65)}}, "labels"),
        ({"labels": {"a": "\0"}}, "labels.a"),
        ({"name": None}, "name"),
        ({"name": "x" * 300}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"pinned": 1}, "pinned"),
        ({"guaranteed_until": 5}, "guaranteed_until"),
        ({"guaranteed_until": "tomorrow"}, "guaranteed_until"),
        ({"guaranteed_until": True}, "guaranteed_until"),
        ({"guaranteed_until": 1e12}, "guaranteed_until"),
        ({"guaranteed_until": FAR, "ttl_s": 50}, "guaranteed_until"),
        ({"pinned": None}, "pinned"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_changes_that_are_none(http: httpx.Client, changed: str, body: dict[str, Any], param: str | None) -> None:
    before = http.get(f"/v1/caches/{changed}").json()
    assert refused(http.patch(f"/v1/caches/{changed}", json=body), 400, "invalid_request")["param"] == param
    assert http.get(f"/v1/caches/{changed}").json() == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"ttl_s": NaN}', b'{"name": "\\ud800"}', b"\xff"])
def test_bodies_of_changes_that_are_no_json(http: httpx.Client, changed: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    refused(http.patch(f"/v1/caches/{changed}", content=body, headers=headers), 400, "invalid_request")
    refused(http.patch(f"/v1/caches/{changed}", data={"name": "x"}), 415, "unsupported_media_type")


@pytest.mark.parametrize("cache_id", ["kvs_" + "0" * 40, "kvs_x", "import", "a" * 500, "%00", "..%2Fkvs"])
def test_changes_of_what_is_not_there(http: httpx.Client, cache_id: str) -> None:
    response = http.patch(f"/v1/caches/{cache_id}", json={"pinned": True})
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("cache_not_found", "not_found")


def test_the_source_is_kept_when_it_is_asked_for(http: httpx.Client, service: LiveService) -> None:
    document = "Kept word for word: ¾ of a pound, 北極. " * 9
    messages = [{"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": "Who is there?"}]
    without = created(http, document=document, policy="full")
    with_source = created(http, document=document, policy="full", keep_source=True)
    assert (without["has_source"], with_source["has_source"]) == (False, True)
    assert (with_source["id"], with_source["existing"]) == (without["id"], True)
    assert created(http, document=document, policy="full")["has_source"]
    fresh = created(http, document=document, policy="knorm", keep_source=True)
    assert (fresh["existing"], fresh["has_source"]) == (False, True)
    spoken = created(http, messages=messages, policy="full", keep_source=True)
    with open_store(f"disk://{service.home}/shelf") as store:
        assert [store.source(cache["id"]) for cache in (with_source, fresh)] == [document, document]
        assert json.loads(store.source(spoken["id"])) == messages


def test_the_source_of_a_form_and_of_a_creation_in_the_background(http: httpx.Client, service: LiveService) -> None:
    files = {"file": ("a.txt", b"From a file. " * 20, "text/plain")}
    uploaded = http.post("/v1/caches", data={"keep_source": "true"}, files=files).json()
    body = {"document": "Later. " * 30, "keep_source": True}
    accepted = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"}).json()
    done = http.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 60}).json()
    with open_store(f"disk://{service.home}/shelf") as store:
        assert store.source(uploaded["id"]) == "From a file. " * 20
        assert store.source(done["cache_id"]) == body["document"]
