"""A service with API keys: who is let in, what each may do, and that tenants learn nothing of each other."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from kvshelf.service.access.keyfile import KeyFile
from tests.service.conftest import await_log, created, refused
from tests.service.observe.test_logs import the_line
from tests.service.scrape import moving

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]

PER_MINUTE = 2400
CONCURRENT = 24
UNREAD_S = 2.0
MOST_CACHES = 1000
OPEN = {"/livez", "/readyz", "/openapi.json"}
DOCUMENT = "Quicksilver tides rise over the quay at noon. " * 12
UNKNOWN = "kvs_" + "0" * 40

NEEDS = {
    ("GET", "/v1/caches"): "read",
    ("POST", "/v1/caches"): "write",
    ("POST", "/v1/caches/import"): "write",
    ("GET", "/v1/caches/{cache_id}"): "read",
    ("PATCH", "/v1/caches/{cache_id}"): "write",
    ("DELETE", "/v1/caches/{cache_id}"): "write",
    ("POST", "/v1/caches/{cache_id}/append"): "write",
    ("GET", "/v1/caches/{cache_id}/turns"): "read",
    ("POST", "/v1/caches/{cache_id}/remake"): "write",
    ("GET", "/v1/caches/{cache_id}/blob"): "read",
    ("GET", "/v1/caches/{cache_id}/export"): "read",
    ("POST", "/v1/caches/{cache_id}/verify"): "write",
    ("POST", "/v1/caches/{cache_id}/query"): "read",
    ("POST", "/v1/query"): "read",
    ("POST", "/v1/caches/search"): "read",
    ("GET", "/v1/caches/{cache_id}/kept"): "read",
    ("POST", "/v1/caches/{cache_id}/kept"): "read",
    ("POST", "/v1/caches/{cache_id}/prompt"): "read",
    ("GET", "/v1/requests/{request_id}"): "read",
    ("POST", "/v1/chat/completions"): "read",
    ("POST", "/v1/caches/warm"): "write",
    ("POST", "/v1/responses"): "read",
    ("GET", "/v1/responses/{response_id}"): "read",
    ("DELETE", "/v1/responses/{response_id}"): "write",
    ("POST", "/v1/messages"): "read",
    ("POST", "/v1/messages/count_tokens"): "read",
    ("POST", "/v1/estimate"): "read",
    ("POST", "/v1/files"): "write",
    ("GET", "/v1/files"): "read",
    ("GET", "/v1/files/{file_id}"): "read",
    ("GET", "/v1/files/{file_id}/content"): "read",
    ("DELETE", "/v1/files/{file_id}"): "write",
    ("POST", "/v1/batches"): "write",
    ("GET", "/v1/batches"): "read",
    ("GET", "/v1/batches/{batch_id}"): "read",
    ("POST", "/v1/batches/{batch_id}/cancel"): "write",
    ("POST", "/v1/batches/{batch_id}/pause"): "write",
    ("POST", "/v1/batches/{batch_id}/resume"): "write",
    ("POST", "/v1/batches/{batch_id}/retry"): "write",
    ("POST", "/v1/erasures"): "write",
    ("POST", "/v1/certificates"): "write",
    ("GET", "/v1/certificates"): "read",
    ("GET", "/v1/certificates/{name}"): "read",
    ("DELETE", "/v1/certificates/{name}"): "write",
    ("PUT", "/v1/workflows/{id}"): "write",
    ("GET", "/v1/workflows"): "read",
    ("GET", "/v1/workflows/{id}"): "read",
    ("DELETE", "/v1/workflows/{id}"): "write",
    ("GET", "/v1/batches/{batch_id}/events"): "read",
    ("GET", "/v1/models"): "read",
    ("GET", "/v1/models/{model_id}"): "read",
    ("GET", "/v1/policies"): "read",
    ("GET", "/v1/selectors"): "read",
    ("GET", "/v1/suffix_policies"): "read",
    ("GET", "/v1/limits"): "read",
    ("GET", "/v1/usage"): "read",
    ("GET", "/metrics"): "admin",
}
"""The scope that each route needs. A route that is not here fails a test: somebody has to decide."""


class Guarded(NamedTuple):
    """A running service with keys, and its key file."""

    service: LiveService
    file: KeyFile

    def key(self, tenant: str, *scopes: str) -> str:
        """A new key, once the service knows it."""
        _, key = self.file.create(tenant, scopes or ("read", "write"))
        with self.client(key) as client:
            await_status(client, lambda status: status != 401)
        return key

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.service.url, headers=headers, timeout=120)


def await_status(client: httpx.Client, wanted: Callable[[int], bool]) -> None:
    end = time.monotonic() + 10
    while not wanted(client.get("/v1/limits").status_code):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def guarded(start_service: Start, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("guarded")
    file = KeyFile(home / "api-keys.json")
    file.create("nobody", ["read"])
    prices = home / "prices.json"
    prices.write_text(json.dumps({"currency": "EUR", "worker_hour": 3600, "gb_month": 1000}))
    limits = {"tenant_requests_per_minute": PER_MINUTE, "tenant_max_concurrent": CONCURRENT, "prices_file": prices}
    limits |= {"unread_deadline_s": UNREAD_S, "upload_grace_s": 30, "tenant_max_caches": MOST_CACHES}
    with start_service(home, tiny_folder, host="0.0.0.0", api_key_file=file.path, **limits) as running:
        yield Guarded(running, file)


@pytest.fixture(scope="module")
def acme(guarded: Guarded) -> Iterator[httpx.Client]:
    with guarded.client(guarded.key("acme")) as client:
        yield client


@pytest.fixture(scope="module")
def other(guarded: Guarded) -> Iterator[httpx.Client]:
    with guarded.client(guarded.key("other")) as client:
        yield client


@pytest.fixture(autouse=True)
def _still_ready(guarded: Guarded) -> Iterator[None]:
    """In place of the shared service's: whatever a test sends, this service is ready afterwards."""
    yield
    response = httpx.get(f"{guarded.service.url}/readyz", timeout=30)
    assert response.status_code == 200, response.text


def routes(guarded: Guarded) -> list[tuple[str, str]]:
    paths = httpx.get(f"{guarded.service.url}/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def path_of(template: str) -> str:
    ids = {"request_id": "req_" + "0" * 40, "file_id": "file_" + "0" * 40, "batch_id": "batch_" + "0" * 40}
    return template.format(cache_id=UNKNOWN, model_id="none", response_id="resp_none", name="none", id="none", **ids)


def test_nothing_but_health_is_open_without_a_key(guarded: Guarded) -> None:
    wrong = "kvsk_" + "0" * 16 + "_" + "0" * 64
    good = guarded.key("acme")
    with guarded.client("") as stranger, guarded.client(wrong) as impostor:
        for method, template in routes(guarded):
            path = path_of(template)
            for client in (stranger, impostor):
                response = client.request(method, path)
                if template in OPEN:
                    assert response.status_code == 200
                    continue
                refused(response, 401, "unauthorized")
                assert response.headers["www-authenticate"].startswith("Bearer")
        for path in ("/v1/nothing", "/etc/passwd", "/v1/caches/../livez/x"):
            refused(stranger.get(path), 401, "unauthorized")
        with guarded.client(guarded.key("acme", "admin")) as admin:
            for path in ("/openapi.json", "/docs"):  # both tell of the service, not of what is in it
                assert stranger.get(path).text == admin.get(path).text
        for name in ("api_key", "key", "authorization", "access_token"):
            response = stranger.get("/v1/models", params={name: good})
            assert good not in json.dumps(refused(response, 401, "unauthorized"))
        assert stranger.get("/v1/models", headers={"authorization": f"Bearer {good}"}).status_code == 200


def test_each_route_needs_its_scope_and_no_other_will_do(guarded: Guarded) -> None:
    by_scope = {scope: guarded.key("acme", scope) for scope in ("read", "write", "admin")}
    for method, template in routes(guarded):
        if template in OPEN:
            continue
        for scope, key in by_scope.items():
            with guarded.client(key) as client:
                response = client.request(method, path_of(template))
            if scope == NEEDS[method, template]:
                assert response.status_code not in (401, 403), (method, template)
            else:
                message = refused(response, 403, "forbidden")["message"]
                assert repr(NEEDS[method, template]) in message


def test_the_same_document_is_another_cache_for_another_tenant(acme: httpx.Client, other: httpx.Client) -> None:
    ours = created(acme, document=DOCUMENT)
    theirs = created(other, document=DOCUMENT)
    assert not theirs["existing"]
    assert ours["id"] != theirs["id"]
    assert ours["document_id"] != theirs["document_id"]
    for client, cache in ((acme, ours), (other, theirs)):
        assert cache["id"] in ids(client)
        assert created(client, document=DOCUMENT)["existing"]
    assert not set(ids(acme)) & set(ids(other))
    assert other.get("/v1/caches", params={"document_id": ours["document_id"]}).json()["data"] == []


def ids(client: httpx.Client) -> list[str]:
    return [cache["id"] for cache in client.get("/v1/caches", params={"limit": 1000}).json()["data"]]


def test_files_and_batches_of_another_tenant_are_not_there(acme: httpx.Client, other: httpx.Client) -> None:
    upload = {"files": {"file": ("secret.jsonl", b"")}, "data": {"purpose": "batch"}}
    file = acme.post("/v1/files", **upload).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/caches"}
    batch = acme.post("/v1/batches", json=body).json()["id"]
    unknown = {file: "file_" + "0" * 40, batch: "batch_" + "0" * 40}
    about = [("GET", "files", file, ""), ("GET", "files", file, "/content"), ("DELETE", "files", file, "")]
    about += [("GET", "batches", batch, ""), ("GET", "batches", batch, "/events")]
    about += [("POST", "batches", batch, f"/{verb}") for verb in ("cancel", "pause", "resume", "retry")]
    for method, kind, known, path in about:
        found = other.request(method, f"/v1/{kind}/{known}{path}")
        nothing = other.request(method, f"/v1/{kind}/{unknown[known]}{path}")
        assert (found.status_code, found.text.replace(known, unknown[known])) == (404, nothing.text), (method, path)
    refused(other.post("/v1/batches", json=body), 404, "file_not_found")
    for kind, known in (("files", file), ("batches", batch)):
        assert known in [each["id"] for each in acme.get(f"/v1/{kind}").json()["data"]]
        assert other.get(f"/v1/{kind}").json()["data"] == []
        refused(other.get(f"/v1/{kind}", params={"after": known}), 400, "invalid_request")


def test_a_tenant_is_never_taken_from_the_request(acme: httpx.Client, other: httpx.Client) -> None:
    ours = created(acme, document=DOCUMENT)
    for headers in ({"x-tenant": "acme"}, {"x-kvshelf-tenant": "acme"}, {"openai-organization": "acme"}):
        refused(other.get(f"/v1/caches/{ours['id']}", headers=headers), 404, "cache_not_found")
    refused(other.get("/v1/caches", params={"tenant": "acme"}), 400, "invalid_request")
    refused(other.post("/v1/caches", json={"document": DOCUMENT, "tenant": "acme"}), 400, "invalid_request")


ABOUT_ONE: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("PATCH", "", {"name": "mine now"}),
    ("DELETE", "", None),
    ("GET", "/blob", None),
    ("GET", "/export?to=mlx", None),
    ("POST", "/verify", None),
    ("GET", "/kept", None),
    ("POST", "/kept", {"document": DOCUMENT}),
    ("POST", "/query", {"prompt": "What rises?"}),
    ("POST", "/query", {"prompt": "What rises?", "stream": True}),
]


def same_but_for_the_id(found: httpx.Response, unknown: httpx.Response, cache_id: str) -> None:
    assert found.status_code == unknown.status_code == 404
    assert found.text.replace(cache_id, UNKNOWN) == unknown.text
    varying = {"date", "x-request-id", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"}
    kept = [{k: v for k, v in each.headers.items() if k not in varying} for each in (found, unknown)]
    assert kept[0] == kept[1]


def test_what_is_another_tenant_s_is_as_if_it_were_not(acme: httpx.Client, other: httpx.Client) -> None:
    ours = created(acme, document=DOCUMENT, keep_source=True)
    for method, what, body in ABOUT_ONE:
        found, unknown = (
            other.request(method, f"/v1/caches/{each}{what}", json=body) for each in (ours["id"], UNKNOWN)
        )
        same_but_for_the_id(found, unknown, ours["id"])
    chats = (
        other.post(
            "/v1/chat/completions", json={"cache_id": each, "messages": [{"role": "user", "content": "What rises?"}]}
        )
        for each in (ours["id"], UNKNOWN)
    )
    same_but_for_the_id(*chats, ours["id"])
    said = {"model": ours["model"], "max_tokens": 2, "messages": [{"role": "user", "content": "What rises?"}]}
    for each in (ours["id"], UNKNOWN):
        error = refused(other.post("/v1/messages", json=said | {"cache_id": each}), 404, "cache_not_found")
        assert error["message"].replace(each, UNKNOWN) == error["message"].replace(ours["id"], UNKNOWN)
    mine = created(other, document=DOCUMENT)["id"]
    named = other.post("/v1/caches/search", json={"query": "What rises?", "limit": 64}).json()["data"]
    assert mine in [hit["cache_id"] for hit in named]
    assert ours["id"] not in [hit["cache_id"] for hit in named]
    for stream in (False, True):
        body = {"prompt": "What rises?", "stream": stream}
        joint = (other.post("/v1/query", json=body | {"cache_ids": [mine, each]}) for each in (ours["id"], UNKNOWN))
        same_but_for_the_id(*joint, ours["id"])
    after = [other.get("/v1/caches", params={"after": each}) for each in (ours["id"], UNKNOWN)]
    assert after[0].status_code == after[1].status_code
    assert after[0].text.replace(ours["id"], UNKNOWN) == after[1].text
    here = acme.get(f"/v1/caches/{ours['id']}").json()
    assert (here["name"], here["id"]) == (ours["name"], ours["id"])
    assert acme.post(f"/v1/caches/{ours['id']}/verify").json()["ok"]


def test_another_tenant_s_lost_cache_is_made_again_by_its_tenant_alone(acme: httpx.Client, other: httpx.Client) -> None:
    ours = created(acme, document=DOCUMENT + "Ours.", keep_source="tokens", ttl_s=0.2)
    time.sleep(0.3)
    body = {"prompt": "What rises?", "max_tokens": 2, "on_miss": "recompute"}
    for path in ("query", "verify", "append"):
        sent = {"query": body, "append": {"document": "more"}}.get(path)
        tried = (other.post(f"/v1/caches/{each}/{path}", json=sent) for each in (ours["id"], UNKNOWN))
        same_but_for_the_id(*tried, ours["id"])
    gone = (other.delete(f"/v1/caches/{each}") for each in (ours["id"], UNKNOWN))
    same_but_for_the_id(*gone, ours["id"])
    found = acme.post(f"/v1/caches/{ours['id']}/query", json=body).json()
    assert (found.get("recomputed"), found.get("cache_id")) == ("expired", ours["id"]), found
    assert acme.delete(f"/v1/caches/{ours['id']}").status_code == 200


def test_a_question_that_may_store_caches_needs_a_key_that_writes(
    guarded: Guarded, acme: httpx.Client, other: httpx.Client
) -> None:
    cache_id = created(acme, document=DOCUMENT)["id"]
    body = {"prompt": "What rises?", "max_tokens": 2, "on_miss": "recompute"}
    with guarded.client(guarded.key("acme", "read")) as reader:
        assert reader.get("/v1/limits").json()["scopes"] == ["read"]
        for path, about in ((f"/v1/caches/{cache_id}/query", {}), ("/v1/query", {"cache_ids": [cache_id]})):
            refused(reader.post(path, json=body | about), 403, "forbidden")
            assert reader.post(path, json=body | about | {"on_miss": "error"}).status_code == 200
            assert acme.post(path, json=body | about).status_code == 200
        path, keeps = f"/v1/caches/{cache_id}/query", {"prompt": "What rises?", "max_tokens": 2, "store": True}
        refused(reader.post(path, json=keeps), 403, "forbidden")
        chat = {"cache_id": cache_id, "messages": [{"role": "user", "content": "What rises?"}], "store": True}
        refused(reader.post("/v1/chat/completions", json=chat), 403, "forbidden")
        asked = {"cache_id": cache_id, "input": "What rises?", "max_output_tokens": 2}
        refused(reader.post("/v1/responses", json=asked | {"store": True}), 403, "forbidden")
        assert not reader.post("/v1/responses", json=asked).json()["store"], "by default a reader keeps nothing"
        kept = acme.post("/v1/responses", json=asked).json()
        assert kept["stored_cache_id"]
        further = {"previous_response_id": kept["id"], "input": "And then?", "max_output_tokens": 2}
        assert reader.post("/v1/responses", json=further).status_code == 200
    refused(other.post("/v1/responses", json=further), 404, "response_not_found")


def test_openai_s_client_hears_who_may_do_what(guarded: Guarded, acme: httpx.Client) -> None:
    made = created(acme, document=DOCUMENT)
    asked: dict[str, Any] = {"model": made["model"], "extra_body": {"cache_id": made["id"]}}
    chat: dict[str, Any] = asked | {"messages": [{"role": "user", "content": "What rises?"}], "max_tokens": 2}
    response: dict[str, Any] = asked | {"input": "What rises?", "max_output_tokens": 2}

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{guarded.service.url}/v1", api_key=key, max_retries=0)

    with client("kvsk_wrong") as stranger:
        for call, body in ((stranger.chat.completions.create, chat), (stranger.responses.create, response)):
            with pytest.raises(openai.AuthenticationError) as unknown:
                call(**body)  # type: ignore[operator]
            assert unknown.value.code == "unauthorized"
    with client(guarded.key("acme", "read")) as reader, client(guarded.key("acme")) as writer:
        assert reader.chat.completions.create(**chat).choices
        assert reader.responses.create(**response).store is False  # type: ignore[attr-defined]
        kept = writer.responses.create(**response)
        assert reader.responses.retrieve(kept.id).output_text == kept.output_text
        for refusal in (
            lambda: reader.chat.completions.create(**chat, store=True),
            lambda: reader.responses.create(**response, store=True),
            lambda: reader.responses.delete(kept.id),
        ):
            with pytest.raises(openai.PermissionDeniedError, match="the scope 'write'"):
                refusal()
        with client(guarded.key("other")) as other:
            for unseen in (other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError, match="there is no response"):
                    unseen(kept.id)
        writer.responses.delete(kept.id)


def test_anthropic_s_client_hears_who_may_do_what(guarded: Guarded, acme: httpx.Client) -> None:
    model = acme.get("/v1/models").json()["data"][0]["id"]
    text = {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "What rises?"}]}

    def client(key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=guarded.service.url, api_key=key, max_retries=0)

    with client("kvsk_wrong") as stranger, pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.create(**body, system=[text])
    assert unknown.value.type == "authentication_error"
    with client(guarded.key("acme", "read")) as reader:
        with pytest.raises(anthropic.PermissionDeniedError) as forbidden:
            reader.messages.create(**body, system=[text])
        assert forbidden.value.type == "permission_error"
        with client(guarded.key("acme")) as writer:
            made = writer.messages.create(**body, system=[text])
        own = {"cache_id": made.cache_id}  # type: ignore[attr-defined]  # kvshelf's own field
        assert reader.messages.create(**body, extra_body=own).usage.cache_creation_input_tokens == 0
    assert acme.delete(f"/v1/caches/{own['cache_id']}").status_code == 200


def test_another_tenant_s_cache_grows_for_its_tenant_alone(acme: httpx.Client, other: httpx.Client) -> None:
    ours = created(acme, document=DOCUMENT)
    appended = acme.post(f"/v1/caches/{ours['id']}/append", json={"document": " Later, it falls."}).json()
    for path, body in (("append", {"document": "more"}), ("query", {"prompt": "What?", "store": True})):
        tried = (other.post(f"/v1/caches/{each}/{path}", json=body) for each in (appended["id"], UNKNOWN))
        same_but_for_the_id(*tried, appended["id"])
    seen = (other.get(f"/v1/caches/{each}/turns") for each in (appended["id"], UNKNOWN))
    same_but_for_the_id(*seen, appended["id"])
    assert other.get("/v1/caches", params={"parent_id": ours["id"]}).json()["data"] == []
    gone = (other.delete(f"/v1/caches/{each}", params={"cascade": "true"}) for each in (ours["id"], UNKNOWN))
    same_but_for_the_id(*gone, ours["id"])
    assert acme.get(f"/v1/caches/{appended['id']}").json()["parent_id"] == ours["id"]


def test_a_request_in_the_background_is_its_tenant_s_alone(acme: httpx.Client, other: httpx.Client) -> None:
    body = {"document": DOCUMENT + "Later."}
    ours, theirs = (
        client.post("/v1/caches", json=body, headers={"prefer": "respond-async"}).json() for client in (acme, other)
    )
    assert ours["id"] != theirs["id"]
    ended = acme.get(f"/v1/requests/{ours['id']}", params={"wait_s": 60}).json()
    assert ended["state"] == "done"
    found, unknown = (other.get(f"/v1/requests/{each}") for each in (ours["id"], path_of("{request_id}")))
    assert found.status_code == unknown.status_code == 404
    assert found.text.replace(ours["id"], path_of("{request_id}")) == unknown.text
    assert ended["cache_id"] in ids(acme)
    assert ended["cache_id"] not in ids(other)
    assert other.get(f"/v1/requests/{theirs['id']}", params={"wait_s": 60}).json()["cache_id"] in ids(other)


def test_keys_come_and_go_while_the_service_runs(guarded: Guarded, acme: httpx.Client) -> None:
    key = guarded.key("brief")
    with guarded.client(key) as client:
        good = guarded.file.path.read_text()
        guarded.file.path.write_text("{")
        await_log(guarded.service, "API keys stay as they were")
        assert client.get("/v1/limits").status_code == 200
        guarded.file.path.write_text(good)
        started = time.monotonic()
        guarded.file.revoke(key.split("_")[1])
        await_status(client, lambda status: status == 401)
        assert time.monotonic() - started < 5
    assert acme.get("/v1/limits").status_code == 200


def test_an_expired_key_is_refused(guarded: Guarded) -> None:
    _, key = guarded.file.create("brief", ["read"], ttl_s=6)
    with guarded.client(key) as client:
        await_status(client, lambda status: status == 200)
        await_status(client, lambda status: status == 401)
        assert "expired" in refused(client.get("/v1/limits"), 401, "unauthorized")["message"]


@pytest.mark.slow
def test_a_rate_is_kept_and_every_answer_says_how_much_is_left(guarded: Guarded, acme: httpx.Client) -> None:
    key = guarded.key("hasty")
    with guarded.client(key) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.get("/v1/limits"), range(PER_MINUTE)))
        while answers[-1].status_code == 200:  # the bucket fills meanwhile
            answers += threads.map(lambda _: client.get("/v1/limits"), range(200))
        kinds = {response.status_code for response in answers}
        assert kinds == {200, 429}
        late = next(response for response in answers if response.status_code == 429)
        refused(late, 429, "rate_limited")
        assert int(late.headers["retry-after"]) == 1
        for response in answers:
            assert response.headers["x-ratelimit-limit-requests"] == str(PER_MINUTE)
            assert re.fullmatch(r"\d+\.\d{3}s", response.headers["x-ratelimit-reset-requests"])
        assert int(late.headers["x-ratelimit-remaining-requests"]) <= 1
        assert 55 < float(late.headers["x-ratelimit-reset-requests"][:-1]) <= 60
        fresh = acme.get("/v1/limits")
        assert fresh.status_code == 200
        assert int(fresh.headers["x-ratelimit-remaining-requests"]) > 500
        time.sleep(1)
        assert client.get("/v1/limits").status_code == 200
        assert "x-ratelimit-limit-requests" in client.post("/v1/caches", json={"nonsense": 1}).headers


def test_limits_say_how_much_of_them_is_used(guarded: Guarded) -> None:
    with guarded.client(guarded.key("modest")) as client:
        before = client.get("/v1/limits").json()["tenant"]
        assert before["caches"] == {"limit": MOST_CACHES, "used": 0, "left": MOST_CACHES}
        assert before["bytes"] == {"limit": None, "used": 0, "left": None}
        assert before["batches"] == {"limit": 100, "used": 0, "left": 100}
        assert before["open_requests"] == {"limit": CONCURRENT, "used": 1, "left": CONCURRENT - 1}
        with ThreadPoolExecutor(8) as threads:  # faster than the bucket fills again
            told = list(threads.map(lambda _: client.get("/v1/limits").json()["tenant"], range(100)))
        rates = [tenant["requests_per_minute"] for tenant in told]
        assert all(rate["limit"] == PER_MINUTE == rate["used"] + rate["left"] for rate in rates)
        assert max(rate["used"] for rate in rates) > 0
        cache = created(client, document=DOCUMENT + "modest")
        after = client.get("/v1/limits").json()["tenant"]
        assert after["caches"] == {"limit": MOST_CACHES, "used": 1, "left": MOST_CACHES - 1}
        assert after["bytes"]["used"] == cache["bytes"]["stored"]
        upload = begin_upload(guarded.service.url, client.headers["authorization"].removeprefix("Bearer "))
        end = time.monotonic() + 10
        while client.get("/v1/limits").json()["tenant"]["open_requests"]["used"] != 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        upload.close()


def test_use_is_told_to_its_tenant_and_to_who_may_know_all(guarded: Guarded) -> None:
    key, admin_key = guarded.key("user"), guarded.key("ops", "admin")
    with guarded.client(key) as user, guarded.client(admin_key) as admin:
        cache = created(user, document=DOCUMENT)
        asked = {"prompt": ["What rises?", "When?"], "max_tokens": 3}
        answers = user.post(f"/v1/caches/{cache['id']}/query", json=asked).json()["data"]
        end = time.monotonic() + 60
        while not (rows := usage(user)["data"]) or rows[0]["answers"] < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        (row,) = rows
        told = [answer["usage"] for answer in answers]
        assert row["caches_created"] == 1
        assert row["cache_read_tokens"] == 2 * cache["tokens"]["document"]
        assert row["prefill_tokens"] == cache["tokens"]["document"] + sum(each["prefill_tokens"] for each in told)
        assert row["completion_tokens"] == sum(each["completion_tokens"] for each in told)
        assert row["saved_s"] == pytest.approx(2 * cache["timings"]["prefill_s"])
        assert 0 < row["worker_s"] < 60
        (stored,) = usage(user)["stored"]
        assert stored == {"tenant": "user", "caches": 1, "bytes": cache["bytes"]["stored"], "month": None}
        (grouped,) = usage(user, group_by="day,model,tenant")["data"]
        assert (grouped["model"], grouped["tenant"]) == (cache["model"], "user")
        turn = {"prompt": "What rises?", "max_tokens": 3, "conversation": "conv_1"}
        other = {"cache_id": cache["id"], "messages": [{"role": "user", "content": "When?"}], "max_tokens": 3}
        tokens = [user.post(f"/v1/caches/{cache['id']}/query", json=turn).json()["usage"] for _ in range(2)]
        user.post("/v1/chat/completions", json=other | {"prompt_cache_key": "app:2"})
        user.post("/v1/chat/completions", json=other | {"prompt_cache_key": "any text, as OpenAI takes it"})
        while sum(row["answers"] for row in usage(user, group_by="conversation")["data"]) < 6:
            assert time.monotonic() < end
            time.sleep(0.1)
        turns = usage(user, group_by="conversation")["data"]
        rows = {row["conversation"]: row for row in turns}
        assert {name: row["answers"] for name, row in rows.items()} == {"conv_1": 2, "app:2": 1, None: 3}
        read, prefilled = (sum(one[name] for one in tokens) for name in ("cache_read_tokens", "prefill_tokens"))
        assert (rows["conv_1"]["cache_read_tokens"], rows["conv_1"]["prefill_tokens"]) == (read, prefilled)
        assert rows["conv_1"]["hit_share"] == pytest.approx(read / (read + prefilled), abs=1e-3)
        assert rows[None]["hit_share"] < rows["conv_1"]["hit_share"], "the document was prefilled there"
        (whole,) = usage(user)["data"]
        for name in ("answers", "cache_read_tokens", "prefill_tokens", "completion_tokens", "caches_created"):
            assert whole[name] == sum(row[name] for row in turns)
        row = whole
        assert usage(user, **{"from": "2020-01-01", "to": "2020-02-01"})["data"] == []
        paid = usage(user, cost="true", label="team", group_by="tenant")
        assert (paid["currency"], paid["ttls"], row["cost"]) == ("EUR", [], None)
        assert paid["data"][0]["cost"] == pytest.approx({"worker": row["worker_s"], "saved": row["saved_s"]})
        assert paid["stored"][0]["month"] == pytest.approx(cache["bytes"]["stored"] * 1e-6)
        assert paid["labels"][0] | {"cost": None} == {
            "tenant": "user",
            "value": None,
            "caches": 1,
            "bytes": cache["bytes"]["stored"],
            "uses": 6,
            "made_s": pytest.approx(paid["labels"][0]["cost"]["worker"]),
            "saved_s": pytest.approx(row["saved_s"]),
            "month": pytest.approx(paid["stored"][0]["month"]),
            "cost": None,
        }
        refused(user.get("/v1/usage", params={"all_tenants": "true"}), 403, "forbidden")
        refused(admin.get("/v1/usage"), 403, "forbidden")
        everyone = usage(admin, all_tenants="true", group_by="tenant")
        (again,) = [each for each in everyone["data"] if each["tenant"] == "user"]
        assert again["cache_read_tokens"] == row["cache_read_tokens"]
        assert stored in everyone["stored"]


def usage(client: httpx.Client, **params: str) -> dict[str, Any]:
    response = client.get("/v1/usage", params=params)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_question_that_is_turned_away_is_counted_as_that(guarded: Guarded, acme: httpx.Client) -> None:
    cache_id = created(acme, document=DOCUMENT)["id"]
    asked = {"prompt": "?", "max_tokens": 1}
    chat = {"cache_id": cache_id, "messages": [{"role": "user", "content": "?"}]}
    key = guarded.key("keeper", "admin")
    with guarded.client(key) as admin, guarded.client("kvsk_wrong") as stranger, moving(admin) as moved:
        refused(stranger.post(f"/v1/caches/{cache_id}/query", json=asked), 401, "unauthorized")
        refused(stranger.post("/v1/chat/completions", json=chat), 401, "unauthorized")
        refused(stranger.post("/v1/estimate", json={"document": "?"}), 401, "unauthorized")
        refused(admin.post(f"/v1/caches/{cache_id}/query", json=asked), 403, "forbidden")
    assert moved("kvshelf_queries_total", result="unauthorized") == 2
    assert moved("kvshelf_queries_total", result="forbidden") == 1
    assert moved("kvshelf_queries_total") == 3


def begin_upload(url: str, key: str) -> socket.socket:
    """A creation of which only the head has been sent."""
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname, where.port))
    head = f"POST /v1/caches HTTP/1.1\r\nhost: kvshelf\r\nauthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n".encode())
    return connection


def test_a_tenant_has_so_many_requests_open_and_no_more(guarded: Guarded, acme: httpx.Client) -> None:
    key = guarded.key("crowd")
    with guarded.client(key) as client, ExitStack() as uploads:
        for _ in range(CONCURRENT):
            uploads.enter_context(begin_upload(guarded.service.url, key))
        end = time.monotonic() + 10
        while (response := client.get("/v1/limits")).status_code != 429:
            assert time.monotonic() < end
            time.sleep(0.1)  # else the rate would be used up, which is refused alike
        assert f"this tenant has {CONCURRENT} open requests" in refused(response, 429, "rate_limited")["message"]
        with (
            anthropic.Anthropic(base_url=guarded.service.url, api_key=key, max_retries=0) as crowd,
            pytest.raises(anthropic.RateLimitError) as limited,
        ):
            crowd.models.list()
        assert limited.value.type == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        assert acme.get("/v1/limits").status_code == 200
        uploads.close()
        await_status(client, lambda status: status == 200)


def test_a_flood_of_one_tenant_hardly_delays_another(guarded: Guarded, acme: httpx.Client) -> None:
    """While the one creation of a tenant waits and is done, few of another's many are: those that had their slots, and
    one that has its turn before. Counted, not timed."""
    key = guarded.key("flood")

    def create(number: int) -> None:
        body = {"token_ids": [5 + (n + number) % 700 for n in range(3000)], "policy": "full"}
        response = flood.post("/v1/caches", json=body)
        assert response.status_code == 201, response.text

    with guarded.client(key) as flood, ThreadPoolExecutor(20) as threads:
        creations = [threads.submit(create, number) for number in range(20)]
        while not (before := sum(creation.done() for creation in creations)):
            time.sleep(0.01)
        asked_at = time.time()
        stored_at = created(acme, token_ids=[11 + n % 701 for n in range(3000)], policy="full")["created_at"]
        for creation in creations:
            creation.result()
        theirs = flood.get("/v1/caches", params={"limit": 1000}).json()["data"]
        assert len(theirs) == 20
        assert before < 10
        assert sum(asked_at < cache["created_at"] < stored_at for cache in theirs) <= 6
        for cache in theirs:
            flood.delete(f"/v1/caches/{cache['id']}")


def test_an_upload_that_is_not_let_in_hears_why(guarded: Guarded) -> None:
    """More than fits into the buffers between: closing the connection on it would hide the answer."""
    with guarded.client("") as stranger:
        for content in (b"x" * (16 << 20), iter([b"x" * (1 << 20)] * 16)):
            response = stranger.post("/v1/caches/import", content=content)
            refused(response, 401, "unauthorized")
            assert response.headers["connection"] == "close"
        small = stranger.post("/v1/caches", json={"document": DOCUMENT})
        refused(small, 401, "unauthorized")
        assert "connection" not in small.headers


def test_every_answer_is_for_its_caller_alone_and_no_script(guarded: Guarded, acme: httpx.Client) -> None:
    cache = created(acme, document=DOCUMENT)
    answers = [
        acme.get("/livez"),
        acme.get("/v1/models"),
        acme.get(f"/v1/caches/{cache['id']}/blob"),
        acme.get(f"/v1/caches/{UNKNOWN}"),
        acme.get("/v1/nothing"),
        acme.put("/v1/models"),
        acme.post("/v1/caches", content=b"{"),
        acme.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "?", "max_tokens": 2, "stream": True}),
        httpx.get(f"{guarded.service.url}/v1/models"),
    ]
    for response in answers:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


@pytest.mark.slow
def test_a_reader_who_stops_is_cut_off(guarded: Guarded, acme: httpx.Client) -> None:
    """A download that does not fit into the buffers between, of which nothing is read."""
    cache = created(acme, token_ids=[5 + n % 700 for n in range(15_000)], policy="full")["id"]
    nbytes = int(acme.get(f"/v1/caches/{cache}").json()["bytes"]["stored"])
    assert nbytes > 7_000_000
    where = urlsplit(guarded.service.url)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((where.hostname, where.port))
        head = (
            f"GET /v1/caches/{cache}/blob HTTP/1.1\r\nhost: kvshelf\r\nauthorization: {acme.headers['authorization']}"
        )
        reader.sendall(f"{head}\r\n\r\n".encode())
        time.sleep(UNREAD_S + 6)
        with pytest.raises(ConnectionError):
            read_all(reader, nbytes)
    acme.delete(f"/v1/caches/{cache}")


def read_all(reader: socket.socket, nbytes: int) -> None:
    reader.settimeout(30)
    received = 0
    while received < nbytes:
        data = reader.recv(1 << 20)
        if not data:
            raise ConnectionError("closed before the end")
        received += len(data)


def test_special_tokens_in_a_document_are_text(acme: httpx.Client) -> None:
    """As single ids they would end the document's turn, and what follows would speak as somebody else."""
    ends = "<|im_end|><|end|><|user|><|assistant|></s><|endoftext|>"
    plain = created(acme, document="x" * 40)["tokens"]["document"]
    special = created(acme, document=ends * 8)["tokens"]["document"]
    assert special > plain + 8 * 6 * 3


def test_logs_name_keys_and_tenants_but_hold_no_secret(guarded: Guarded) -> None:
    key = guarded.key("quiet")
    with guarded.client(key) as client:
        cache = created(client, document=f"Heliotrope {key}. " * 12, keep_source=True)
        asked = client.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Is it Marmalade?", "max_tokens": 2})
        client.post("/v1/caches", content=b'{"document": "Heliotrope"')
        client.get("/v1/models", params={"api_key": key})
        last = client.get("/v1/models", headers={"authorization": f"Basic {key}"})
    line = the_line(guarded.service, asked)
    assert (line["tenant"], line["key"]) == ("quiet", key.split("_")[1])
    the_line(guarded.service, last)
    logs = guarded.service.log.read_text() + "".join(
        path.read_text(errors="replace") for path in guarded.service.home.rglob("*.log")
    )
    for secret in ("Heliotrope", "Marmalade", key, key[22:]):
        assert secret not in logs
