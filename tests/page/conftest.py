"""A real browser on the real page of a real service. Where there is no Chromium, these tests skip and say so."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf.samples.tasks import Fact, write_document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FACT = Fact("access code", "the amber falcon", "482913")
QUESTION = "What is the access code of the amber falcon?"
ANSWER = "482913"

# What the browser tells of itself. A refused resource is told as an error, a breach of the content security policy too.
_WATCH = """
window.told = { violations: [], shift: 0 };
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) => {
  told.violations.push(`${violatedDirective} ${blockedURI}`);
});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) told.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""


def document(seed: int, words: int = 500) -> str:
    """A text of many paragraphs that holds `FACT`."""
    return write_document(random.Random(seed), [FACT], "prose", words, lambda text: len(text.split())).text


def _chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each module: while playwright runs, this thread has an event loop, and other tests need their own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
    path = _chromium()
    if path is None:
        pytest.skip("the page is tested in Chromium: none is in $CHROMIUM or on the path (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        # Without its sandbox Chromium runs as root too, as in CI; it sees nothing here but our own page.
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def http(bundled_service: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_service, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def put(http: httpx.Client) -> Callable[..., dict[str, Any]]:
    """Put a document on the shelf; returns its cache."""

    def create(**body: Any) -> dict[str, Any]:
        response = http.post("/v1/caches", json={"document": document(5), "keep_source": True} | body)
        assert response.status_code in (200, 201), response.text
        found: dict[str, Any] = response.json()
        return found

    return create


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, bundled_service: str) -> Iterator[OpenPage]:
    """Open a view in a tab of its own. When the test ends, none of its tabs may have broken the policy or failed."""
    opened: list[Page] = []
    wrong: list[str] = []

    def hear(message: Any) -> None:
        if message.type == "error" and "the server responded with a status of 4" not in message.text:
            wrong.append(message.text)

    def open_view(address: str = "", *, url: str = bundled_service, **options: Any) -> Page:
        # Without motion: in the 120 ms of a transition, axe would measure a colour that no style names.
        still: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
        context = browser.new_context(**still | options)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.add_init_script(_WATCH)
        page.on("pageerror", lambda error: wrong.append(f"exception: {error}"))
        page.on("console", hear)
        page.goto(f"{url}/#{address}")
        opened.append(page)
        return page

    yield open_view
    for page in opened:
        wrong += page.evaluate("told.violations")
        page.context.close()
    assert wrong == []
