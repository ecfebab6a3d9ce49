"""How the page looks, to eyes and to assistive technology: its headers, sizes, schemes, and what axe-core finds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from tests.page.conftest import QUESTION, OpenPage, document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Put = Callable[..., dict[str, Any]]

VIEWS = ("shelf", "put", "ask", "talk", "kept", "batches", "failed batch")


class Shelf(NamedTuple):
    """Ids of what is there to be looked at."""

    caches: list[str]
    talk: str
    resting: str
    failed: str


@pytest.fixture(scope="module")
def shelf(put: Put, http: httpx.Client) -> Iterator[Shelf]:
    """Some caches of one document, as a user would have them, of which the newest is under EMS; a batch that waits for
    its time of day, and one that could not be begun. Neither takes a worker's time."""
    ways = [
        {"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5},
        {"policy": "snapkv", "compression_ratio": 0.75, "codec": "int8", "ttl_s": 86_400 * 8},
        {"policy": "ems", "compression_ratio": 0.75, "ttl_s": 86_400 * 30},
    ]  # fmt: skip
    label = {"report": "harbour"}
    made = [put(document=document(71), name="Harbour report", labels=label, **way)["id"] for way in ways]
    http.patch(f"/v1/caches/{made[0]}", json={"pinned": True})
    talk = ask(http, ask(http, made[1], QUESTION), QUESTION)
    ask(http, made[1], QUESTION.replace("What is", "What was"))  # a branch
    resting, failed = (begin_batch(http, rows) for rows in ('{"custom_id": "a", "document": "b"}\n' * 2, ""))
    yield Shelf(made, talk, resting, failed)
    http.post(f"/v1/batches/{resting}/cancel")
    for cache_id in made:
        http.delete(f"/v1/caches/{cache_id}?cascade=true")


def ask(http: httpx.Client, cache_id: str, question: str) -> str:
    """The cache of a question and its answer."""
    answer = http.post(f"/v1/caches/{cache_id}/query", json={"prompt": question, "store": True}).json()
    stored: str = answer["stored_cache_id"]
    return stored


def begin_batch(http: httpx.Client, rows: str) -> str:
    """A batch whose time of day is hours away; its id."""
    hours = [datetime.datetime.now() + datetime.timedelta(hours=hours) for hours in (8, 10)]
    sent = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("harbour.jsonl", rows.encode())})
    assert sent.status_code in (200, 201), sent.text
    body = {"input_file_id": sent.json()["id"], "window": f"{hours[0]:%H:%M}-{hours[1]:%H:%M}"}
    begun = http.post("/v1/batches", json=body | {"endpoint": "/v1/caches"})
    assert begun.status_code in (200, 201), begun.text
    found: str = begun.json()["id"]
    return found


def show(page: Page, view: str, shelf: Shelf) -> None:
    """Go to a view and have it filled."""
    caches = shelf.caches
    address = {"ask": f"ask/{caches[1]}/{caches[0]}", "kept": f"kept/{caches[3]}", "shelf": f"shelf/{caches[1]}"}
    address |= {"talk": f"talk/{shelf.talk}"}
    address |= {"batches": f"batches/{shelf.resting}", "failed batch": f"batches/{shelf.failed}"}
    page.goto(page.url.split("#")[0] + "#" + address.get(view, view))
    if view == "shelf":
        page.locator(".grid [aria-selected=true]").wait_for()
    elif view == "put":
        page.get_by_text("Keep every entry").wait_for()
    elif view == "ask":
        page.get_by_label("Question").fill(QUESTION)
        page.get_by_label("Read").select_option("quest")
        page.get_by_role("button", name="Ask").click()
        page.locator(".heat .chosen").nth(1).wait_for()
    elif view == "talk":
        page.locator(".turn").nth(2).wait_for()
        page.locator("summary").click()
        page.locator(".turn .picker a").wait_for()
    elif view == "batches":
        page.get_by_role("heading", name="paused, 0 of 2 rows").wait_for()
    elif view == "failed batch":
        page.get_by_role("alert").get_by_text("empty_file").wait_for()
    else:
        page.locator(".heat .chosen").wait_for()


def test_every_file_has_the_policy_and_its_type(bundled_service: str) -> None:
    with httpx.Client(base_url=bundled_service) as client:
        for path, kind in (("/", "text/html"), ("/page/app.js", "javascript"), ("/page/styles/base.css", "text/css")):
            response = client.get(path)
            assert response.status_code == 200
            assert kind in response.headers["content-type"]
            policy = response.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert response.headers["cache-control"] == "no-cache"
            assert client.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304
            assert client.head(path).status_code == 200
        for path in ("/page/nothing.js", "/page/", "/page/%2e%2e/app.py", "/page/views"):
            assert client.get(path).status_code == 404, path
        assert client.post("/").status_code == 405


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: Any, open_page: OpenPage, shelf: Shelf) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core comes with this package")
    page = open_page(color_scheme=scheme)
    for view in VIEWS:
        show(page, view, shelf)
        if view == "shelf":
            page.get_by_role("button", name="Delete", exact=True).click()  # the dialog is looked at, too
        found = axe.Axe().run(page)
        assert found.violations_count == 0, f"{view}, {scheme}:\n{found.generate_report()}"
        if view == "shelf":
            page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_an_empty_shelf_while_files_are_chosen_or_in_the_reference(
    scheme: Any, open_page: OpenPage, bundled_service: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core comes with this package")
    page = open_page("put", color_scheme=scheme, viewport={"width": 360, "height": 740})
    page.route(
        "**/v1/caches?*",
        lambda route: route.fulfill(json={"object": "list", "data": [], "has_more": False, "last_id": None}),
    )

    def look(view: str) -> None:
        found = axe.Axe().run(page)
        assert found.violations_count == 0, f"{view}:\n{found.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view

    page.get_by_label("Choose files").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    page.get_by_text("Name, labels, expiry, text").click()
    look("chosen")
    page.get_by_role("link", name="Shelf").click()
    page.get_by_text("The shelf is empty.").wait_for()
    look("empty")
    page.get_by_role("link", name="API").click()
    page.wait_for_url(f"{bundled_service}/docs")
    look("docs")
    page.get_by_role("link", name="CreateCache").first.click()
    assert 0 <= page.locator("h2#createcache").evaluate("(heading) => heading.getBoundingClientRect().top") < 200


@pytest.mark.parametrize(("width", "height"), [(360, 740), (3840, 2160)], ids=["phone", "4k"])
def test_it_is_readable_on_small_and_on_large_screens(
    width: int, height: int, open_page: OpenPage, shelf: Shelf
) -> None:
    page = open_page(viewport={"width": width, "height": height})
    for view in VIEWS:
        show(page, view, shelf)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        sizes = page.evaluate(
            "[...document.querySelectorAll('main *')].filter((node) => node.innerText?.trim())"
            ".map((node) => parseFloat(getComputedStyle(node).fontSize))"
        )
        assert min(sizes) >= (13 if width == 360 else 20), view


def test_an_address_that_changes_before_the_first_frame_is_followed(browser: Browser, bundled_service: str) -> None:
    page = browser.new_page()
    page.add_init_script("addEventListener('DOMContentLoaded', () => { location.hash = '#put'; })")
    page.goto(bundled_service)
    page.get_by_role("heading", name="Put").wait_for(timeout=10_000)
    page.close()


def test_nothing_moves_while_a_view_is_filled(open_page: OpenPage, shelf: Shelf) -> None:
    for view in VIEWS:
        page = open_page()
        show(page, view, shelf)
        assert page.evaluate("told.shift") < 0.05, view


def test_pictures(open_page: OpenPage, shelf: Shelf, tmp_path: Path) -> None:
    """Those of docs/use/clients.md; with PICTURES=docs/images in the environment they are renewed."""
    folder = Path(os.environ.get("PICTURES", tmp_path))
    small: dict[str, Any] = {"viewport": {"width": 1360, "height": 680}}
    for name, view, scheme in (
        ("shelf-light", "shelf", "light"),
        ("shelf-dark", "shelf", "dark"),
        ("heatmap", "kept", "light"),
    ):
        page = open_page(color_scheme=scheme, **small)
        show(page, view, shelf)
        if view == "shelf":  # only what a user would have there
            page.get_by_label("Label", exact=True).fill("report=harbour")
            page.keyboard.press("Enter")
            page.get_by_text("4 in all").wait_for()
            page.get_by_label("Label", exact=True).blur()
        picture = page.screenshot(path=folder / f"{name}.png")
        assert len(picture) < 200_000
        darkness = sum(picture_ground(page)) / 3
        assert (darkness < 60) == (scheme == "dark")


def picture_ground(page: Page) -> list[int]:
    """Red, green and blue behind everything."""
    color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
