"""What the clients do with answers, busy services and broken connections; both clients, over httpx's transport seam."""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvshelf import errors
from kvshelf.client import AsyncClient, Client, Retries, Timeouts

URL = "http://service.test:1"
CACHE = {
    "id": "kvs_1",
    "document_id": "doc_1",
    "model": "m",
    "layout": "chat",
    "policy": "keydiff",
    "policy_params": {},
    "compression_ratio": 0.75,
    "codec": "none",
    "tokens": {"document": 8, "kept": 2},
    "bytes": {"full": 800, "full_16bit": 400, "stored": 200},
    "created_at": 1.0,
}
Handler = Callable[[httpx.Request], httpx.Response]


def no_pause(max_retries: int = 2, **changes: float) -> Retries:
    return Retries(max_retries=max_retries, backoff_s=0.0, **changes)


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`call(handler, use)` gives the result of `use(client)`, awaited or read to its end; `handler` is the service."""

    def sync_call(handler: Handler, use: Callable[[Any], Any], **options: Any) -> Any:
        with Client(URL, transport=httpx.MockTransport(handler), **options) as client:
            result = use(client)
            return list(result) if inspect.isgenerator(result) else result

    def async_call(handler: Handler, use: Callable[[Any], Any], **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(URL, transport=httpx.MockTransport(handler), **options) as client:
                result = use(client)
                return await result if inspect.isawaitable(result) else [item async for item in result]

        return asyncio.run(main())

    chosen = sync_call if request.param == "sync" else async_call
    return lambda handler, use, **options: chosen(handler, use, **{"retries": no_pause(), **options})


class Script:
    """A service that gives prepared answers, one per request, and remembers the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def wire_error(status: int, code: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"error": {"message": f"about {code}", "type": "t", "param": None, "code": code} | fields}
    return httpx.Response(status, json=body, headers=headers)


def retrieve(client: Any) -> Any:
    return client.caches.retrieve("kvs_1")


@pytest.mark.parametrize("code", sorted(errors.by_code()))
def test_every_wire_code_comes_back_as_its_own_class(call: Callable[..., Any], code: str) -> None:
    cls = errors.by_code()[code]
    service = Script(wire_error(cls.status or 400, code, {"x-request-id": "r-7"}, param="policy", details={"k": 1}))
    with pytest.raises(cls) as caught:
        call(service, retrieve, retries=no_pause(0))
    assert type(caught.value) is cls
    key = " (the commands take a key from KVSHELF_API_KEY, the clients also as api_key)"
    assert caught.value.message == f"about {code}" + (key if code == "unauthorized" else "")
    assert caught.value.param == "policy"
    assert caught.value.details == {"k": 1, "request_id": "r-7"}


def test_why_a_cache_was_missed_is_kept(call: Callable[..., Any]) -> None:
    with pytest.raises(errors.CacheExpired) as caught:
        call(Script(wire_error(410, "cache_expired", miss_reason="expired")), retrieve)
    assert caught.value.details == {"miss_reason": "expired"}


def test_an_unknown_code_of_a_newer_service_is_a_plain_error_that_keeps_it(call: Callable[..., Any]) -> None:
    with pytest.raises(errors.KvshelfError) as caught:
        call(Script(wire_error(418, "teapot")), retrieve)
    assert type(caught.value) is errors.KvshelfError
    assert caught.value.details["code"] == "teapot"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "queue_full"),
        (429, "rate_limited"),
        (503, "no_worker"),
        (503, "worker_crashed"),
        (503, "store_unavailable"),
    ],
)
def test_a_busy_service_is_asked_again(call: Callable[..., Any], status: int, code: str) -> None:
    service = Script(wire_error(status, code), wire_error(status, code), httpx.Response(200, json=CACHE))
    assert call(service, retrieve).id == "kvs_1"
    assert len(service.requests) == 3


def test_after_the_last_repeat_the_error_is_raised(call: Callable[..., Any]) -> None:
    service = Script(*[wire_error(429, "queue_full")] * 3)
    with pytest.raises(errors.QueueFull):
        call(service, retrieve)
    assert len(service.requests) == 3


@pytest.mark.parametrize(("status", "code"), [(429, "quota_exceeded"), (500, "internal"), (404, "cache_not_found")])
def test_what_a_repeat_cannot_cure_is_not_repeated(call: Callable[..., Any], status: int, code: str) -> None:
    service = Script(wire_error(status, code))
    with pytest.raises(errors.by_code()[code]):
        call(service, retrieve)
    assert len(service.requests) == 1


def test_retry_after_replaces_the_pause(call: Callable[..., Any]) -> None:
    service = Script(wire_error(429, "queue_full", {"retry-after": "0.3"}), httpx.Response(200, json=CACHE))
    began = time.monotonic()
    call(service, retrieve)
    assert time.monotonic() - began >= 0.3


def test_retry_after_may_be_a_date(call: Callable[..., Any]) -> None:
    # The date has whole seconds: two seconds from now is at least one second of waiting.
    began = time.monotonic()
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    service = Script(wire_error(503, "no_worker", {"retry-after": date}), httpx.Response(200, json=CACHE))
    call(service, retrieve)
    assert time.monotonic() - began >= 0.9


def test_a_retry_after_that_is_too_long_is_handed_to_the_caller(call: Callable[..., Any]) -> None:
    service = Script(wire_error(429, "queue_full", {"retry-after": "3600"}))
    with pytest.raises(errors.QueueFull) as caught:
        call(service, retrieve)
    assert caught.value.details["retry_after_s"] == 3600.0
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "failure", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("cut")]
)
def test_a_post_is_repeated_after_a_broken_connection(call: Callable[..., Any], failure: Exception) -> None:
    service = Script(failure, httpx.Response(201, json=CACHE))
    assert call(service, lambda c: c.caches.create(document="text", policy="keydiff")).id == "kvs_1"
    first, second = service.requests
    assert first.content == second.content
    assert json.loads(first.content) == {"document": "text", "policy": "keydiff"}


def test_a_deletion_that_may_have_happened_is_not_repeated(call: Callable[..., Any]) -> None:
    service = Script(httpx.ReadError("reset"))
    with pytest.raises(errors.ConnectionFailed):
        call(service, lambda c: c.caches.delete("kvs_1"))
    assert len(service.requests) == 1


@pytest.mark.parametrize("code", ["store_unavailable", "worker_crashed"])
def test_a_deletion_is_not_repeated_where_the_service_failed_at_it(call: Callable[..., Any], code: str) -> None:
    """The store may have done it before its answer was lost: the second one would say that there is no such cache."""
    service = Script(wire_error(503, code))
    with pytest.raises(errors.by_code()[code]):
        call(service, lambda c: c.caches.delete("kvs_1"))
    assert len(service.requests) == 1


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limited"), (429, "queue_full"), (503, "no_worker")])
def test_a_deletion_that_was_refused_before_it_began_is_repeated(
    call: Callable[..., Any], status: int, code: str
) -> None:
    service = Script(wire_error(status, code), httpx.Response(200, json={"id": "kvs_1", "deleted": True}))
    assert call(service, lambda c: c.caches.delete("kvs_1")).deleted


def test_a_deletion_takes_descendants_along_if_asked(call: Callable[..., Any]) -> None:
    gone = httpx.Response(200, json={"id": "kvs_1", "deleted": True, "descendants": ["kvs_3", "kvs_2"]})
    refused = wire_error(409, "cache_has_children")
    service = Script(refused, gone)
    with pytest.raises(errors.CacheHasChildren):
        call(service, lambda c: c.caches.delete("kvs_1"))
    assert call(service, lambda c: c.caches.delete("kvs_1", cascade=True)).descendants == ["kvs_3", "kvs_2"]
    assert [request.url.query for request in service.requests] == [b"", b"cascade=true"]


def test_a_deletion_that_was_never_sent_is_repeated(call: Callable[..., Any]) -> None:
    service = Script(httpx.ConnectError("refused"), httpx.Response(200, json={"id": "kvs_1", "deleted": True}))
    assert call(service, lambda c: c.caches.delete("kvs_1")).deleted


def test_an_unreachable_service_says_how_to_start_it(call: Callable[..., Any]) -> None:
    with pytest.raises(errors.ConnectionFailed, match="kvshelf serve") as caught:
        call(Script(*[httpx.ConnectError("refused")] * 3), retrieve)
    assert URL in caught.value.message


@pytest.mark.parametrize("name", ["connect", "read", "write", "pool"])
def test_each_timeout_has_its_own_message(call: Callable[..., Any], name: str) -> None:
    failure = getattr(httpx, f"{name.capitalize()}Timeout")("timed out")
    with pytest.raises(errors.ConnectionFailed, match=f"{name}_s"):
        call(Script(failure), retrieve, retries=no_pause(0))


def test_each_timeout_reaches_httpx(call: Callable[..., Any]) -> None:
    service = Script(httpx.Response(200, json=CACHE))
    call(service, retrieve, timeouts=Timeouts(connect_s=1, read_s=2, write_s=3, pool_s=4))
    assert service.requests[0].extensions["timeout"] == {"connect": 1, "read": 2, "write": 3, "pool": 4}


def test_a_wait_lengthens_the_read_timeout(call: Callable[..., Any]) -> None:
    service = Script(httpx.Response(200, json={"id": "req_1", "state": "queued"}))
    call(service, lambda c: c.requests.retrieve("req_1", wait_s=30), timeouts=Timeouts(read_s=2))
    assert service.requests[0].extensions["timeout"]["read"] == 32
    assert service.requests[0].url.params["wait_s"] == "30"


@pytest.mark.parametrize(
    ("status", "content"), [(502, b"<html>"), (200, b"hello"), (200, b'{"a": 1}'), (404, b'{"error": "not found"}')]
)
def test_an_answer_of_something_else_is_named(call: Callable[..., Any], status: int, content: bytes) -> None:
    with pytest.raises(errors.ConnectionFailed, match="not an answer of kvshelf"):
        call(Script(httpx.Response(status, content=content)), retrieve)


def test_the_list_follows_its_pages(call: Callable[..., Any]) -> None:
    pages = [
        {"data": [CACHE | {"id": "kvs_1"}, CACHE | {"id": "kvs_2"}], "has_more": True, "last_id": "kvs_2"},
        {"data": [CACHE | {"id": "kvs_3"}], "has_more": False, "last_id": "kvs_3"},
    ]
    service = Script(*[httpx.Response(200, json=page) for page in pages])
    found = call(service, lambda c: c.caches.list(policy="keydiff", labels={"team": "law"}, limit=2))
    assert [cache.id for cache in found] == ["kvs_1", "kvs_2", "kvs_3"]
    asked = [dict(request.url.params) for request in service.requests]
    assert asked[0] == {"policy": "keydiff", "label.team": "law", "limit": "2"}
    assert asked[1] == asked[0] | {"after": "kvs_2"}


def test_a_change_says_only_what_changes_and_none_is_said_too(call: Callable[..., Any]) -> None:
    service = Script(*[httpx.Response(200, json=CACHE) for _ in range(2)])
    call(service, lambda c: c.caches.update("kvs_1", ttl_s=None, labels={"team": "law"}))
    call(service, lambda c: c.caches.update("kvs_1", pinned=False))
    assert [request.method for request in service.requests] == ["PATCH", "PATCH"]
    bodies = [json.loads(request.content) for request in service.requests]
    assert bodies == [{"ttl_s": None, "labels": {"team": "law"}}, {"pinned": False}]


def test_a_blob_is_sent_as_it_is_again_after_a_broken_connection(call: Callable[..., Any]) -> None:
    service = Script(httpx.ReadError("reset"), httpx.Response(201, json=CACHE))
    blob = bytes(range(256)) * 9
    call(service, lambda c: c.caches.import_blob(blob, ttl_s=5, name=None, labels={"team": "law"}))
    assert [request.content for request in service.requests] == [blob, blob]
    assert service.requests[1].headers["content-type"] == "application/octet-stream"
    assert dict(service.requests[1].url.params) == {"ttl_s": "5.0", "label.team": "law"}


def test_creation_in_the_background_prefers_async(call: Callable[..., Any]) -> None:
    service = Script(httpx.Response(202, json={"id": "req_1", "state": "queued"}))
    assert call(service, lambda c: c.caches.create(document="text", respond_async=True)).id == "req_1"
    assert service.requests[0].headers["prefer"] == "respond-async"


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b'data: {"error": {"message": "it died", "type": "worker_error", "code": "worker_crashed"}}\n\n',
    ],
    ids=["a broken connection", "a dead worker"],
)
def test_events_that_break_off_are_followed_by_an_ordinary_creation(call: Callable[..., Any], end: bytes) -> None:
    going = {"object": "cache.progress", "phase": "prefill", "done": 1, "total": 2, "seconds": 0.5}
    service = Script(
        httpx.Response(200, content=b"data: " + json.dumps(going).encode() + b"\n\n" + end),
        httpx.Response(201, json=CACHE),
    )
    event, made = call(service, lambda c: c.caches.create_events(document="text", policy="full"))
    assert (event.done, event.total) == (1, 2)
    assert made.id == CACHE["id"]
    assert [request.headers["accept"] for request in service.requests] == ["text/event-stream", "*/*"]


def test_the_key_goes_into_the_header(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_API_KEY", "from-the-environment")
    service = Script(*(httpx.Response(200, json=CACHE) for _ in range(3)))
    call(service, retrieve)
    call(service, retrieve, api_key="given")
    call(service, retrieve, api_key="")
    keys = [request.headers.get("authorization") for request in service.requests]
    assert keys == ["Bearer from-the-environment", "Bearer given", None]


@pytest.mark.parametrize("key", ["kvsk_1\n", "kvsk_1\r", "ключ", "kvsk_\x00"])
def test_what_is_no_key_is_refused_and_not_shown(call: Callable[..., Any], key: str) -> None:
    service = Script()
    with pytest.raises(errors.InvalidRequest, match="the API key has") as refused:
        call(service, retrieve, api_key=key)
    assert refused.value.param == "api_key"
    assert key.strip() not in str(refused.value)
    assert not service.requests


@pytest.mark.parametrize(
    ("use", "param"),
    [
        (lambda c: c.caches.create(), "document"),
        (lambda c: c.caches.create(document="a", token_ids=[1]), "document"),
        (lambda c: c.caches.create(document="a", compression_ratio=1.0), "compression_ratio"),
        (lambda c: c.caches.create(document="a", colour="red"), "colour"),
        (lambda c: c.caches.create(file="/nowhere/at/all.txt"), "file"),
        (lambda c: c.caches.create(file=__file__, document="a"), "file"),
        (lambda c: c.estimate(file=__file__, document="a"), "file"),
        (lambda c: c.caches.query("kvs_1"), "prompt"),
        (lambda c: c.caches.query("kvs_1", "a", temperature=-1), "temperature"),
        (lambda c: c.caches.query("kvs_1", "a", seed=1.5), "seed"),
        (lambda c: c.caches.create(token_ids=[1], keep_source=True), "keep_source"),
        (lambda c: c.caches.create(token_ids=[1], split=True), "split"),
        (lambda c: c.caches.create(document="a", split=True, levels=[0.5]), "split"),
        (lambda c: c.caches.create(document="a", split={"overlap": 5}), "split.overlap"),
        (lambda c: c.caches.create(document="a", split=True, labels={"part": "1/2"}), "labels"),
        (lambda c: c.estimate(document="a", split=True), "split"),
        (lambda c: c.caches.update("kvs_1"), None),
        (lambda c: c.caches.update("kvs_1", ttl_s=None, expires_at=None), "expires_at"),
        (lambda c: c.caches.update("kvs_1", name=None), "name"),
        (lambda c: c.caches.update("kvs_1", ttl_s=float("nan")), "ttl_s"),
        (lambda c: c.caches.update("", pinned=True), "id"),
        (lambda c: c.caches.import_blob("text"), "blob"),
        (lambda c: c.caches.import_blob(b"", ttl_s=-1), "ttl_s"),
        (lambda c: c.caches.import_blob(b"", ttl_s=1, expires_at=5e9), "expires_at"),
        (lambda c: c.caches.import_blob(b"", labels={"a b": "c"}), "labels.a b"),
        (lambda c: c.caches.verify(""), "id"),
        (lambda c: c.caches.list(limit=0), "limit"),
        (lambda c: c.caches.retrieve(""), "id"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(call: Callable[..., Any], use: Any, param: str | None) -> None:
    service = Script()
    with pytest.raises(errors.InvalidRequest) as caught:
        call(service, use)
    assert caught.value.param == param
    assert service.requests == []


def test_an_id_cannot_leave_its_place_in_the_path(call: Callable[..., Any]) -> None:
    service = Script(wire_error(404, "cache_not_found"))
    with pytest.raises(errors.CacheNotFound):
        call(service, lambda c: c.caches.retrieve("../models?x=1"))
    assert service.requests[0].url.raw_path == b"/v1/caches/..%2Fmodels%3Fx%3D1"


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "http://[::1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        Client(url)
    assert caught.value.param == "url"


@pytest.mark.parametrize(
    "make", [lambda: Timeouts(read_s=0), lambda: Retries(max_retries=-1), lambda: Retries(backoff_s=float("nan"))]
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        make()
