"""What people have reported of other servers of models, tried here: docs/internals/reports.md names each report."""

from __future__ import annotations

import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.attack.conftest import Attacked
from tests.service.conftest import created

QUESTION: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def mine(attacked: Attacked) -> str:
    with attacked.client("mallory") as client:
        return str(created(client, document="The quay keeper writes in the ledger. " * 20, policy="full")["id"])


def raw(url: str, sent: bytes) -> bytes:
    """All that the service says to these bytes until it closes the connection, or is silent."""
    where, said = urlsplit(url), b""
    with socket.create_connection((where.hostname, where.port), timeout=3) as connection:
        connection.sendall(sent)
        try:
            while piece := connection.recv(65536):
                said += piece
        except TimeoutError:
            pass
    return said


SMUGGLED = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
FRAMES = {
    "a length and chunks": (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "two lengths": (b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
    "a signed length": (b"Content-Length: +%d\r\n" % len(SMUGGLED), SMUGGLED),
    "a negative length": (b"Content-Length: -1\r\n", SMUGGLED),
    "an end of a chunk that is none": (b"Transfer-Encoding: chunked\r\n", b"1\r\n{xx0\r\n\r\n" + SMUGGLED),
    "a coding that is none": (b"Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n", b"0\r\n\r\n" + SMUGGLED),
}


@pytest.mark.parametrize("name", FRAMES)
def test_no_body_hides_a_second_request(attacked: Attacked, name: str) -> None:
    headers, body = FRAMES[name]
    key = (
        f"Authorization: {attacked.headers('mallory')['authorization']}\r\nContent-Type: application/json\r\n".encode()
    )
    said = raw(attacked.url, b"POST /v1/caches HTTP/1.1\r\nHost: 127.0.0.1\r\n" + key + headers + b"\r\n" + body)
    statuses = [line.split()[1] for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert statuses[:1] in ([b"400"], []), said[:300]
    assert len(statuses) <= 1, "what stands in the body, or behind a broken one, is no request"


NUMBERS: dict[str, Any] = {
    "n": [0, -1, 17, 10**9, 2**64, 1.5, True],
    "max_tokens": [0, -1, 2**31, 2**64, 1e400, "9"],
    "temperature": [-1, 1e400, float("nan"), float("-inf"), "hot"],
    "top_p": [-0.1, 1.1, float("nan")],
    "seed": [2**64, 1.5, -(2**70)],
    "top_logprobs": [-1, 21, 2**31],
    "ttl_s": [-1, 0, float("nan"), 1e400],
    "stop": [["x"] * 10_000, [""], "x" * 100_000],
    "logit_bias": [{str(n): 1 for n in range(10_000)}],
    "bad_words": [["x"] * 10_000],
    "prompt_logprobs": [-1],
    "kv_transfer_params": [{"tp_size": 2**40}],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_of_a_question_is_taken_beyond_its_bounds(mallory: httpx.Client, mine: str, name: str) -> None:
    for value in NUMBERS[name]:
        body = json.dumps(QUESTION | ({"logprobs": True} if name == "top_logprobs" else {}) | {name: value})
        headers = {"content-type": "application/json"}
        answer = mallory.post(f"/v1/caches/{mine}/query", content=body, headers=headers)
        assert answer.status_code == 400, (value, answer.text[:200])
        assert name in answer.text, answer.text


@pytest.mark.parametrize(
    "told",
    [{"chat_template": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"}]
    + [{name: "x"} for name in ("tokenize", "tools", "messages", "__class__", "add_generation_prompt")],
    ids=lambda told: next(iter(told)),
)
def test_no_request_brings_a_template_of_its_own(mallory: httpx.Client, mine: str, told: dict[str, Any]) -> None:
    began = time.monotonic()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template_kwargs": told}
    answer = mallory.post(f"/v1/caches/{mine}/query", json=body)
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - began < 10


NAMES = ["../../up.jsonl", "/etc/passwd", "..\\..\\up.jsonl", "a\r\nX-Evil: yes", 'a"; filename="b', "a\0b", "." * 300]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_home_or_into_a_header(attacked: Attacked, mallory: httpx.Client, name: str) -> None:
    line = json.dumps({"custom_id": "1", "body": {"document": "x"}}).encode()
    uploaded = mallory.post("/v1/files", files={"file": (name, line)}, data={"purpose": "batch"})
    assert uploaded.status_code in (200, 201, 400), uploaded.text
    if uploaded.status_code != 400:
        back = mallory.get(f"/v1/files/{uploaded.json()['id']}/content")
        assert back.content == line
        assert "x-evil" not in back.headers
    home = attacked.service.home
    assert not list(home.parent.rglob("up.jsonl")), "no file has a name from outside"
    named = mallory.post("/v1/caches", json={"document": "A named document. " * 9, "name": name})
    if named.status_code in (200, 201):
        blob = mallory.get(f"/v1/caches/{named.json()['id']}/blob")
        assert (blob.status_code, "x-evil" in blob.headers) == (200, False)
    for path in ("/v1/caches/..%2f..%2fshelf.sqlite3", "/v1/files/%2e%2e/content", "/docs/..%2f..%2fetc%2fpasswd"):
        assert mallory.get(path).status_code in (400, 404)
    chosen = mallory.post("/v1/caches", json={"document": "x y z", "model": "../../" + name})
    assert chosen.status_code in (400, 404), chosen.text


def test_many_ranges_cost_no_more_than_none(mallory: httpx.Client, mine: str) -> None:
    began = time.monotonic()
    ranges = ",".join(f"{n}-{n}" for n in range(0, 12_000, 2))
    answer = mallory.get(f"/v1/caches/{mine}/blob", headers={"range": f"bytes={ranges}"})
    assert answer.status_code in (200, 400, 416, 431)
    assert len(answer.content) < 2 << 20
    assert time.monotonic() - began < 5


def urls(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    file = {"role": "user", "content": [{"type": "input_file", "file_url": url}]}
    seen = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
    about = {"model": "random-tiny", "max_tokens": 1}
    return {
        "chat": ("/v1/chat/completions", about | {"cache_id": "{id}", "messages": [image]}),
        "responses": ("/v1/responses", {"model": "random-tiny", "cache_id": "{id}", "input": [file]}),
        "messages": ("/v1/messages", about | {"messages": [seen]}),
        "caches": ("/v1/caches", {"document_url": url}),
        "a model": ("/v1/caches", {"document": "x", "model": url}),
    }


@pytest.mark.parametrize("name", urls(""))
def test_no_url_of_a_request_is_fetched(mallory: httpx.Client, mine: str, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.5)
        path, body = urls(f"http://127.0.0.1:{listening.getsockname()[1]}/secret")[name]
        answer = mallory.post(path, json=json.loads(json.dumps(body).replace("{id}", mine)))
        assert answer.status_code in (400, 404), answer.text
        with pytest.raises(TimeoutError):
            listening.accept()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_no_body_is_decompressed(mallory: httpx.Client, coding: str) -> None:
    bomb = gzip.compress(b'{"document":"' + b"x" * (50 << 20) + b'"}')
    headers = {"content-encoding": coding, "content-type": "application/json"}
    began = time.monotonic()
    answer = mallory.post("/v1/caches", content=bomb, headers=headers)
    assert answer.status_code in (400, 415), answer.text
    assert time.monotonic() - began < 5


def test_no_pickle_is_read(attacked: Attacked, mallory: httpx.Client, tmp_path: Path) -> None:
    """As a blob, as a file and as a body: of other servers each was an order to the machine."""
    made = tmp_path / "made"
    order = b"cposix\nsystem\n(S'touch " + str(made).encode() + b"'\ntR."
    for content in (order, b"KVSB" + order, b"\x80\x04" + order):
        headers = {"content-type": "application/octet-stream"}
        assert mallory.put("/v1/caches/import", content=content, headers=headers).status_code >= 400
        assert mallory.post("/v1/caches/import", content=content, headers=headers).status_code >= 400
        refused = mallory.post("/v1/caches", content=content, headers={"content-type": "application/json"})
        assert refused.status_code == 400
    assert not made.exists()
    assert httpx.get(f"{attacked.url}/livez").status_code == 200


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
def test_no_page_of_another_site_reaches_the_server_of_mcp(
    attacked: Attacked, mcp_server: tuple[str, int], headers: dict[str, str]
) -> None:
    listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"accept": "application/json, text/event-stream"} | attacked.headers("mallory")
    own, other = (httpx.post(f"{mcp_server[0]}/mcp", json=listed, headers=accept | more) for more in ({}, headers))
    assert (own.status_code, other.status_code) == (200, 403), other.text
