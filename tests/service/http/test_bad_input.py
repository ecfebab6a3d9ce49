"""Every bad input gets its named error before any work, and the service stays ready (see the autouse fixture)."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import open_store
from tests.service.conftest import other_model, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

FINE = {"document": "A short note about nothing in particular."}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"colour": "red"}, "colour"),
        ({"document": 3}, "document"),
        ({"document": None}, "document"),
        ({"messages": [{"role": "user", "content": "x"}]}, "document"),
        ({"document": None, "messages": []}, "messages"),
        ({"document": None, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"document": None, "token_ids": [1, "2"]}, "token_ids[1]"),
        ({"document": None, "token_ids": [1, True]}, "token_ids[1]"),
        ({"document": None, "token_ids": [1, -1]}, "token_ids[1]"),
        ({"document": None, "token_ids": [1, 10**6]}, "token_ids"),
        ({"document": None, "token_ids": [1], "layout": "chat"}, "layout"),
        ({"layout": "round"}, "layout"),
        ({"episodes": {"count": 0}}, "episodes.count"),
        ({"episodes": {"count": 65}}, "episodes.count"),
        ({"episodes": {"windows": 3}}, "episodes.windows"),
        ({"episodes": True}, "episodes"),
        ({"episodes": {}, "split": True}, "episodes"),
        ({"episodes": {}, "levels": [0.5]}, "episodes"),
        ({"episodes": {}, "min_quality": 0.9}, "episodes"),
        ({"episodes": {}, "policy": "kvzip"}, "policy"),
        ({"episodes": {}, "policy_params": {"probe": "x"}}, "policy_params.probe"),
        ({"episodes": {}, "policy_params": {"across": "cache"}}, "policy_params.across"),
        ({"episodes": {}, "labels": {"episode": "1"}}, "labels"),
        ({"document": None, "token_ids": [1], "episodes": {}}, "episodes"),
        ({"model": "gpt-17"}, "model"),
        ({"policy": "magic"}, "policy"),
        ({"policy": "lagkv", "policy_params": {"lags": 3}}, "policy_params.lags"),
        ({"policy": "lagkv", "policy_params": {"lag": "3"}}, "policy_params.lag"),
        ({"policy": "lagkv", "policy_params": {"lag": -3}}, "policy_params.lag"),
        ({"compression_ratio": 1}, "compression_ratio"),
        ({"compression_ratio": -0.1}, "compression_ratio"),
        ({"compression_ratio": "0.5"}, "compression_ratio"),
        ({"compression_ratio": True}, "compression_ratio"),
        ({"compression_ratio": 0.5, "budget_tokens": 9}, "budget_tokens"),
        ({"budget_tokens": 0}, "budget_tokens"),
        ({"budget_tokens": 2.5}, "budget_tokens"),
        ({"policy": "full", "compression_ratio": 0.5}, "compression_ratio"),
        ({"codec": "zip"}, "codec"),
        ({"codec": "int4:group=3"}, "codec"),
        ({"codec": "int4:share=0.5"}, "codec"),
        ({"codec": "mixed:high=int2"}, "codec"),
        ({"codec": "int4:group=64 "}, "codec"),
        ({"codec": "int8" * 99}, "codec"),
        ({"codec": "klt:step=2,classes=1/2,shares=5/5"}, "codec"),
        ({"codec": "klt:classes=1/2,shares=50/20", "compression_ratio": 0.5}, "codec"),
        ({"levels": []}, "levels"),
        ({"levels": 0.5}, "levels"),
        ({"levels": [0.5, 1.0]}, "levels[1]"),
        ({"levels": [0.5, 0.25, 0.5]}, "levels"),
        ({"levels": [n / 20 for n in range(17)]}, "levels"),
        ({"levels": [0.5], "compression_ratio": 0.5}, "levels"),
        ({"levels": [0.5], "budget_tokens": 9}, "levels"),
        ({"levels": [0.5], "policy": "full"}, "levels"),
        ({"min_quality": 1.1}, "min_quality"),
        ({"min_quality": True}, "min_quality"),
        ({"policy": "auto", "levels": [0.5]}, "levels"),
        ({"policy": "auto", "codec": "none"}, "codec"),
        ({"policy": "auto", "compression_ratio": 0.5}, "compression_ratio"),
        ({"policy": "auto", "budget_tokens": 9}, "budget_tokens"),
        ({"policy": "auto", "policy_params": {"sink": 4}}, "policy_params"),
        ({"policy": "auto", "expected_questions": ["why?"]}, "expected_questions"),
        ({"expected_questions": ["why?"], "policy": "keydiff"}, "expected_questions"),
        ({"expected_questions": [""], "policy": "snapkv"}, "expected_questions[0]"),
        *(
            ({"keep_source": wrong}, "keep_source")
            for wrong in ("yes", "text", "Tokens", "true", 1, 2.5, ["tokens"], {})
        ),
        ({"keep_source": "tokens", "source_ttl_s": 0}, "source_ttl_s"),
        ({"keep_source": "tokens", "source_ttl_s": "60"}, "source_ttl_s"),
        ({"keep_source": "tokens", "source_ttl_s": -1e300}, "source_ttl_s"),
        ({"source_ttl_s": 60}, "source_ttl_s"),
        ({"keep_source": True, "document": None, "token_ids": [5] * 9}, "keep_source"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 5, "expires_at": 5}, "expires_at"),
        ({"expires_at": 1000}, "expires_at"),
        ({"ttl_renew": True}, "ttl_renew"),
        ({"ttl_renew": True, "expires_at": 5e9}, "ttl_renew"),
        ({"ttl_renew": 1, "ttl_s": 5}, "ttl_renew"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"labels": {"a b": "1"}}, "labels.a b"),
        ({"name": "x" * 300}, "name"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_creations(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in (FINE | change).items() if value is not None}
    assert refused(http.post("/v1/caches", json=body), 400, "invalid_request")["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"colour": "red"}, "colour"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a"], "stream": True}, "stream"),
        ({"prompt": None}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": None, "messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 0.5}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"compare": "yes"}, "compare"),
        ({"compare": True, "stream": True}, "compare"),
        ({"on_miss": "guess"}, "on_miss"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_queries(http: httpx.Client, cache: dict[str, Any], change: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in ({"prompt": "Why?"} | change).items() if value is not None}
    response = http.post(f"/v1/caches/{cache['id']}/query", json=body)
    assert refused(response, 400, "invalid_request")["param"] == param


def test_empty_and_over_long_documents(http: httpx.Client) -> None:
    refused(http.post("/v1/caches", json={"document": ""}), 422, "document_too_short")
    refused(http.post("/v1/caches", json={"token_ids": []}), 422, "document_too_short")
    error = refused(http.post("/v1/caches", json={"token_ids": [5] * 16385}), 413, "document_too_long")
    assert "16384" in error["message"]


def test_a_question_that_leaves_no_room(http: httpx.Client) -> None:
    cache = http.post("/v1/caches", json={"token_ids": [5] * 16380, "policy": "streaming_llm"}).json()
    response = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Is there any room left in this place?"})
    refused(response, 400, "invalid_request")


@pytest.mark.parametrize("cache_id", ["kvs_" + "0" * 40, "kvs_x", "doc_1", "%00", "a" * 500])
def test_unknown_ids(http: httpx.Client, cache_id: str) -> None:
    refused(http.get(f"/v1/caches/{cache_id}"), 404, "cache_not_found")
    refused(http.delete(f"/v1/caches/{cache_id}"), 404, "cache_not_found")
    refused(http.get(f"/v1/caches/{cache_id}/blob"), 404, "cache_not_found")
    refused(http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "?"}), 404, "cache_not_found")
    chat = {"cache_id": "kvs_" + "0" * 40, "messages": [{"role": "user", "content": "?"}]}
    refused(http.post("/v1/chat/completions", json=chat), 404, "cache_not_found")
    refused(http.get("/v1/requests/req_nothing"), 404, "request_not_found")


def test_an_id_is_never_a_path(http: httpx.Client) -> None:
    for path in ("/v1/caches/..%2F..%2Fetc%2Fpasswd", "/v1/caches/../../etc/passwd/blob", "/v1/caches/%2E%2E"):
        assert http.get(path).status_code == 404


def test_an_expired_cache(http: httpx.Client) -> None:
    asked_at = time.time()
    cache = http.post("/v1/caches", json={"document": "This will not last. " * 9, "ttl_s": 0.2}).json()
    assert asked_at + 0.2 <= cache["expires_at"] <= time.time() + 0.2
    time.sleep(0.3)
    error = refused(http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "?"}), 410, "cache_expired")
    assert error["miss_reason"] == "expired"
    time.sleep(2)  # the sweeper has been there, and the id still says what happened
    refused(http.get(f"/v1/caches/{cache['id']}"), 410, "cache_expired")


def test_a_cache_of_another_model(http: httpx.Client, service: LiveService, tiny_folder: Path) -> None:
    foreign = other_model(tiny_folder).compress("Another model's. " * 9)
    with open_store(f"disk://{service.home}/shelf") as store:
        cache_id = store.put(foreign).id
    error = refused(http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "?"}), 409, "model_mismatch")
    assert error["miss_reason"] == "model_changed"
    assert error["details"]["field"] == "weights"
    assert error["details"]["cache_fingerprint"] != error["details"]["model_fingerprint"]


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def _truncate(data: bytearray) -> None:
    del data[-100:]


@pytest.mark.parametrize("damage", [_flip, _truncate])
def test_a_damaged_blob(http: httpx.Client, service: LiveService, damage: Callable[[bytearray], None]) -> None:
    document = {"document": f"This one is damaged by {damage.__name__}. " * 9}
    cache_id = http.post("/v1/caches", json=document).json()["id"]
    (path,) = (service.home / "shelf" / "blobs").glob(f"{cache_id.removeprefix('kvs_')}-*")
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    error = refused(http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "?"}), 424, "cache_corrupt")
    assert error["miss_reason"] == "corrupt"
    refused(http.get(f"/v1/caches/{cache_id}/blob"), 424, "cache_corrupt")
    again = http.post("/v1/caches", json=document)
    assert (again.status_code, again.json()["id"]) == (201, cache_id)
    assert http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "?", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"document": "\xff"}',
        b'{"document": "\\ud800"}',
        b'{"compression_ratio": NaN}',
        b"[" * 10**5,
    ],
    ids=["empty", "cut off", "a list", "not UTF-8", "half a character", "NaN", "deep"],
)
def test_bodies_that_are_not_what_they_say(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/caches", content=body, headers={"content-type": "application/json"})
    refused(response, 400, "invalid_request")


def test_media_types(http: httpx.Client) -> None:
    refused(
        http.post("/v1/caches", content=b"x", headers={"content-type": "text/plain"}), 415, "unsupported_media_type"
    )
    for url in (
        "/v1/caches",
        "/v1/estimate",
        "/v1/files",
        "/v1/caches/import",
    ):
        refused(http.post(url, content=b'{"document": "x"}'), 415, "unsupported_media_type")
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(http.post("/v1/caches", content=b"x", headers=packed), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": b"\xff\xfe"}, {}, "file"),
        ({"file": b"text"}, {"colour": "red"}, "colour"),
        ({"file": b"text"}, {"document": "text"}, "document"),
        ({"file": b"text"}, {"compression_ratio": "half"}, "compression_ratio"),
        ({"file": b"text"}, {"compression_ratio": "1.5"}, "compression_ratio"),
        ({"file": b"text"}, {"name": b"\xff"}, "name"),
        ({"other": b"text"}, {}, "other"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_forms(http: httpx.Client, files: dict[str, bytes], data: dict[str, Any], param: str) -> None:
    response = http.post("/v1/caches", files=files, data=data)
    assert refused(response, 400, "invalid_request")["param"] == param


def test_a_form_that_is_none(http: httpx.Client) -> None:
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=x"):
        response = http.post("/v1/caches", content=b"nothing", headers={"content-type": content_type})
        refused(response, 400, "invalid_request")


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"from": "2026-02-01", "to": "2026-01-31"}, "from"),
        ({"from": "2020-01-01", "to": "2026-01-31"}, "from"),
        ({"from": "2020-01-01"}, "from"),
        ({"from": "yesterday"}, "from"),
        ({"from": "1767225600"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"to": "2026-02-28T10:00:00"}, "to"),
        ({"group_by": "week"}, "group_by"),
        ({"group_by": "day,,model"}, "group_by"),
        ({"all_tenants": "perhaps"}, "all_tenants"),
        ({"cost": "true"}, "cost"),
        ({"label": ""}, "label"),
        ({"tenant": "other"}, "tenant"),
        ({"label.a": "b"}, "labels"),
    ],
    ids=str,
)
def test_questions_about_usage(http: httpx.Client, params: dict[str, str], param: str) -> None:
    assert refused(http.get("/v1/usage", params=params), 400, "invalid_request")["param"] == param


def test_routes_and_methods_that_are_not_there(http: httpx.Client) -> None:
    refused(http.get("/v2/caches"), 404, "not_found")
    response = http.put("/v1/caches", json={})
    refused(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET, POST"
    # Also the path of a cache, of a name that none has: what that one could do is not told.
    assert http.put("/v1/caches/import").headers["allow"] == "POST"


def test_a_body_over_the_cap_with_its_length(http: httpx.Client) -> None:
    assert http.get("/v1/limits").json()["max_body_bytes"] == 1 << 20
    response = http.post("/v1/caches", json={"document": "x" * (8 << 20)})
    assert str(1 << 20) in refused(response, 413, "body_too_large")["message"]


def test_a_body_over_the_cap_without_its_length(http: httpx.Client) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in itertools.count():
            sent += 1 << 16
            yield b" " * (1 << 16)

    response = http.post("/v1/caches", content=endless(), headers={"content-type": "application/json"})
    refused(response, 413, "body_too_large")
    assert sent >= 1 << 20


def test_a_slow_upload(http: httpx.Client) -> None:
    head = (
        b"POST /v1/caches HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n"
    )
    started = time.monotonic()
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30) as connection:
        connection.sendall(head + b'{"document": "')
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert '"request_timeout"' in answer
    assert 0.9 < time.monotonic() - started < 15  # the grace time is 1 s


def test_a_caller_that_hangs_up_while_sending(http: httpx.Client) -> None:
    head = (
        b"POST /v1/caches HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n"
    )
    for _ in range(20):
        with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30) as connection:
            connection.sendall(head + b"{")
    assert http.get("/livez").text == "ok\n"
