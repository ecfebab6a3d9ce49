"""A service without API keys answers programs of this machine, and no web page of another origin."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from kvshelf.errors import Forbidden
from kvshelf.service.access.keys import require_local
from tests.service.conftest import refused

ALLOWED = ("shelf.example",)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8765"},
        {"host": "LOCALHOST"},
        {"host": "[::1]:8765"},
        {"host": "Shelf.Example:80"},
        {"host": "localhost:8765", "origin": "http://localhost:8765", "sec-fetch-site": "same-origin"},
        {"host": "127.0.0.1:8765", "sec-fetch-site": "none"},
    ],
)
def test_programs_and_the_own_page_are_let_in(headers: dict[str, str]) -> None:
    require_local(Headers(headers), ALLOWED)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8765"},
        {"host": "localhost.evil.example"},
        {"host": "[::1].evil.example"},
        {"host": "192.168.1.5:8765"},
        {"host": "localhost:8765", "origin": "http://evil.example"},
        {"host": "localhost:8765", "origin": "http://localhost:3000"},
        {"host": "localhost:8765", "origin": "null"},
        {"host": "localhost:8765", "sec-fetch-site": "cross-site"},
    ],
)
def test_foreign_hosts_and_pages_are_not(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        require_local(Headers(headers), ALLOWED)


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}],
)
def test_nothing_is_done_for_them(http: httpx.Client, cache: dict[str, Any], headers: dict[str, str]) -> None:
    refused(http.get("/v1/caches", headers=headers), 403, "forbidden")
    refused(http.delete(f"/v1/caches/{cache['id']}", headers=headers), 403, "forbidden")
    form = {"files": {"file": b"A text of another site."}, "data": {"policy": "full"}}
    refused(http.post("/v1/caches", headers=headers, **form), 403, "forbidden")
    assert http.get(f"/v1/caches/{cache['id']}").status_code == 200
