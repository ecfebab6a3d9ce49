"""What no HTTP client would send, over plain sockets: endless, slow and malformed requests, and ids that are no ids."""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.service.conftest import refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

MEBIBYTE = 1 << 20


def connected(http: httpx.Client) -> socket.socket:
    return socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode("latin-1")


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of the response; the other side closes the connection, or the body is complete."""
    data = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(65536):
            data += chunk
            if data.rstrip().endswith(b"}}"):
                break
    first, _, rest = data.partition(b"\r\n")
    body = rest.partition(b"\r\n\r\n")[2].decode()
    return int(first.split()[1]), json.loads(body[body.index("{") : body.rindex("}") + 1])["error"]


def memory_mib(service: LiveService) -> float:
    status = Path(f"/proc/{service.front_end_pid()}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


PATHS = ["/v1/caches", "/v1/estimate", "/v1/caches/import", "/v1/chat/completions"]


def endless(connection: socket.socket, path: str, *, announced: bool, listening: bool) -> int:
    """Begin to send ten gigabytes; how many went out before an answer came (`listening`) or the other side hung up."""
    kind = "application/octet-stream" if path.endswith("import") else "application/json"
    length = f"content-length: {10 << 30}" if announced else "transfer-encoding: chunked"
    piece = b" " * MEBIBYTE
    framed = piece if announced else f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    connection.sendall(head(path, f"content-type: {kind}", length))
    sent = 0
    with suppress(OSError):
        while sent < 10 << 30 and not (listening and select.select([connection], [], [], 0.05)[0]):
            connection.sendall(framed)
            sent += len(piece)
    return sent


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_ten_gigabytes_are_refused_at_the_cap(http: httpx.Client, path: str, announced: bool) -> None:
    with connected(http) as connection:
        sent = endless(connection, path, announced=announced, listening=True)
        status, error = answer_of(connection)
    assert (status, error["code"]) == (413, "body_too_large")
    assert sent < 64 * MEBIBYTE


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_who_goes_on_sending_is_cut_off(http: httpx.Client, service: LiveService, announced: bool) -> None:
    """For a moment the rest is read and thrown away, so that the refusal can be read; then the connection ends."""
    before, started = memory_mib(service), time.monotonic()
    with connected(http) as connection:
        sent = endless(connection, "/v1/caches", announced=announced, listening=False)
    assert sent < 10 << 30
    assert time.monotonic() - started < 30
    assert memory_mib(service) - before < 64


@pytest.mark.parametrize("path", ["/v1/caches", "/v1/caches/import"])
def test_a_byte_a_second(http: httpx.Client, path: str) -> None:
    kind = "application/octet-stream" if path.endswith("import") else "application/json"
    started = time.monotonic()
    with connected(http) as connection:
        connection.sendall(head(path, f"content-type: {kind}", "content-length: 9000"))
        with suppress(OSError):
            while time.monotonic() - started < 20:
                connection.sendall(b" ")
                connection.settimeout(1)
                with suppress(TimeoutError):
                    if connection.recv(1, socket.MSG_PEEK):
                        break
        connection.settimeout(10)
        status, error = answer_of(connection)
    assert (status, error["code"]) == (408, "request_timeout")
    assert 0.9 < time.monotonic() - started < 15


def form(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + end


FILE = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\ntext'


@pytest.mark.parametrize(
    "body",
    [
        form(FILE, end=b""),
        form(FILE, end=b"--x"),
        b"--y\r\n" + FILE,
        form(b'content-disposition: form-data; filename="a"\r\n\r\ntext'),
        form(b"content-disposition: attachment\r\n\r\ntext"),
        form(b"no colon here\r\n\r\ntext"),
        form(b"content-disposition\r\n\r\ntext"),
        form(FILE, FILE),
        form(FILE, *[b'content-disposition: form-data; name="name"\r\n\r\na'] * 80),
        form(FILE, b'content-disposition: form-data; name="name"\r\n\r\n' + b"a" * 400),
        form(b'content-disposition: form-data; name="' + b"n" * 70_000 + b'"\r\n\r\ntext'),
        form(FILE, b'content-disposition: form-data; name="labels"\r\n\r\n{"a": '),
        form(FILE, b'content-disposition: form-data; name="\xff"\r\n\r\na'),
        form(FILE, b'content-disposition: form-data; name="expires_at"\r\n\r\n1e999'),
        b"\0" * 1000,
    ],
    ids=lambda body: repr(body[:40]) + str(len(body)),
)
def test_forms_that_are_broken(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/caches", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    refused(response, 400, "invalid_request")


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "9" * 5000, "0." + "1" * 5000 + "e-5000", "1E+99999999999", "-0", "1" * 30]
)
@pytest.mark.parametrize("field", ["budget_tokens", "ttl_s", "expires_at", "policy_params"])
def test_numbers_beyond_all_bounds(http: httpx.Client, field: str, number: str) -> None:
    value = f'{{"window": {number}}}' if field == "policy_params" else number
    body = f'{{"document": "a b c d e f g h", "policy": "snapkv", "{field}": {value}}}'
    response = http.post("/v1/caches", content=body.encode(), headers={"content-type": "application/json"})
    if response.status_code == 422:  # an integer, and a window that no document has
        refused(response, 422, "policy_unsupported")
    else:
        refused(response, 400, "invalid_request")


@pytest.mark.parametrize(
    "content_type", ["text/html", "application/xml", "application/json, text/plain", "/", "a" * 5000]
)
@pytest.mark.parametrize("path", PATHS)
def test_wrong_content_types(http: httpx.Client, path: str, content_type: str) -> None:
    response = http.post(path, content=b"{}", headers={"content-type": content_type})
    assert len(refused(response, 415, "unsupported_media_type")["message"]) < 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_nothing_is_unpacked(http: httpx.Client, encoding: str) -> None:
    """A body that grows when it is unpacked cannot hurt a service that unpacks nothing."""
    headers = {"content-type": "application/json", "content-encoding": encoding}
    refused(http.post("/v1/caches", content=b"\x1f\x8b", headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "odd_id", ["%2F..%2F..%2Fetc%2Fpasswd", "a%2Fb", "%0d%0aset-cookie:%20a=b", "%00", "%ff%fe", "%F0%9F%90%9F"]
)
def test_ids_that_are_none(http: httpx.Client, odd_id: str) -> None:
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("PATCH", ""), ("GET", "/blob"), ("POST", "/query"), ("POST", "/verify")
    ):  # fmt: skip
        content = {"PATCH": {"name": "a"}, "POST": {"prompt": "a"}}.get(method)
        response = http.request(method, f"/v1/caches/{odd_id}{path}", json=content)
        assert response.status_code in (404, 405), (method, path, response.text)
        assert response.json()["error"]["message"]
        assert "set-cookie" not in response.headers


def test_lines_cannot_be_put_into_headers(http: httpx.Client) -> None:
    evil = "a\r\nset-cookie: stolen=1"
    body = {"document": "A note about nothing. " * 9, "name": evil, "labels": {"a": evil}}
    response = http.post("/v1/caches", json=body)
    assert response.status_code == 201
    assert response.json()["name"] == evil  # in JSON it is a text like any other
    refusal = http.get("/v1/caches", params={"after": evil, "label.a": evil})
    for found in (response, refusal):
        assert "set-cookie" not in found.headers
        assert "stolen" not in str(found.headers)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\na\0b: c\r\n\r\n",
        b"POST /v1/caches HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/caches HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST /v1/caches HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 4096,
    ],
    ids=lambda raw: repr(raw[:50]),
)
def test_what_is_no_http(http: httpx.Client, raw: bytes) -> None:
    """Refused by the HTTP server itself, which has no envelope: 4xx, or the connection ends."""
    with connected(http) as connection:
        connection.settimeout(5)
        connection.sendall(raw)
        with suppress(ConnectionError, TimeoutError):
            answer = connection.recv(65536)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
