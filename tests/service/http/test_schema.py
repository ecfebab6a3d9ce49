"""Whatever schemathesis makes of our own OpenAPI document is answered, as documented, and never with a server error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from opentelemetry.trace import NoOpTracer
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema

from kvshelf.service.app import create_app
from kvshelf.service.http import reference
from kvshelf.service.settings import Settings
from tests.service.conftest import created

ROOT = Path(__file__).resolve().parents[3]

# What JSON Schema cannot say is refused with these, too: that only some policies take questions, that an upload is not
# UTF-8, that two fields exclude each other, that a cache has expired; and a body may be refused for its size alone.
BY_OTHER_RULES = [400, 404, 405, 406, 409, 410, 412, 413, 415, 422, 424, 429, 503]
CONFIG = {
    "checks": {
        "positive_data_acceptance": {"expected-statuses": ["2xx", "3xx", *BY_OTHER_RULES]},
        "negative_data_rejection": {"expected-statuses": BY_OTHER_RULES},
    }
}

# No route is called here, so no store and no workers are needed: the document is the application's alone.
DOCUMENT = create_app(Settings(), {}, None, NoOpTracer(), None).openapi()  # type: ignore[arg-type]
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations]
# Any text may be an id or a header.
WITH_RULES = [
    (method, path)
    for method, path in OPERATIONS
    for operation in [DOCUMENT["paths"][path][method]]
    if "requestBody" in operation or any(found["in"] == "query" for found in operation.get("parameters", ()))
]
LONGEST_ANSWER = 100
ON_A_CACHE = [(m, p) for m, p in OPERATIONS if "{cache_id}" in p and m != "delete"]


@pytest.fixture(scope="session")
def api(service_url: str) -> BaseSchema:
    config = SchemathesisConfig.from_dict(CONFIG)
    return schemathesis.openapi.from_url(f"{service_url}/openapi.json", config=config)


def shorten(body: dict[str, Any]) -> None:
    """Ask for a short answer: the model of these tests never ends one, and 16,000 tokens of it take a minute."""
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] = min(body[name], LONGEST_ANSWER)


def is_sent(body: Any, media_type: str | None) -> bool:
    """Whether all of a body reaches the service: a form has no part for an empty list, so its mistake is not sent."""
    return (
        media_type != "multipart/form-data"
        or not isinstance(body, dict)
        or not any(v in ([], {}) for v in body.values())
    )


def hold(api: BaseSchema, method: str, path: str, mode: GenerationMode, examples: int, **fixed: Any) -> None:
    """Send that many requests made for one route, valid or invalid ones, and run all of schemathesis' checks."""

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode, **fixed))
    def each(case: Case) -> None:
        assume(mode is GenerationMode.POSITIVE or is_sent(case.body, case.media_type))
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):  # else it might mend what is invalid
            shorten(case.body)
        case.call_and_validate(timeout=60)

    each()


@pytest.fixture(scope="module")
def some_cache(http: httpx.Client) -> dict[str, Any]:
    """Requests that are made here change it, and may have it expire."""
    return created(http, document="Nobody knows what will be asked about this. " * 12)


@pytest.fixture
def examples(soak: bool) -> int:
    """Of each kind for every route: 54 kinds make some 320 requests, in a soak 54,000."""
    return 1000 if soak else 6


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_valid_requests(api: BaseSchema, method: str, path: str, examples: int) -> None:
    hold(api, method, path, GenerationMode.POSITIVE, examples)


@pytest.mark.parametrize(("method", "path"), WITH_RULES)
def test_invalid_requests(api: BaseSchema, method: str, path: str, examples: int) -> None:
    hold(api, method, path, GenerationMode.NEGATIVE, examples)


@pytest.mark.parametrize(("method", "path"), ON_A_CACHE)
def test_requests_about_a_cache_that_is_there(
    api: BaseSchema, some_cache: dict[str, Any], method: str, path: str, examples: int
) -> None:
    hold(api, method, path, GenerationMode.POSITIVE, examples, path_parameters={"cache_id": some_cache["id"]})


def test_the_page_of_the_api_is_made_of_the_document() -> None:
    assert reference.markdown(DOCUMENT) == (ROOT / "docs" / "api.md").read_text(), "run scripts/publish_api.py"


def test_the_service_shows_its_reference(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.text == reference.page(DOCUMENT)
    anchors = re.findall(r' id="([^"]+)"', page.text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r'href="#([^"]+)"', page.text)) == set(anchors)
    for method, path in OPERATIONS:
        assert f">{method.upper()} {path}</h2>" in page.text
    assert "<script" not in page.text
    assert set(re.findall(r'(?:href|src)="([^#"]+)"', page.text)) == {
        "./", "openapi.json", "page/icon.svg", "page/styles/base.css", "page/styles/reference.css"
    }  # fmt: skip


def test_the_document_is_complete(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == DOCUMENT
    for method, path in OPERATIONS:
        operation = DOCUMENT["paths"][path][method]
        assert operation["responses"]["default"]["content"]["application/json"], (method, path)
        assert operation["description"], (method, path)
