"""What the tests of the HTTP interface share: plain HTTP, no client of kvshelf in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


@pytest.fixture(scope="session")
def http(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def cache(http: httpx.Client) -> dict[str, Any]:
    """A stored cache that no test changes."""
    response = http.post("/v1/caches", json={"document": DOCUMENT, "compression_ratio": 0.75})
    assert response.status_code in (200, 201), response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture(autouse=True)
def _still_ready(http: httpx.Client) -> Iterator[None]:
    """Whatever a test sends, the service is ready afterwards."""
    yield
    response = http.get("/readyz")
    assert response.status_code == 200, response.text
