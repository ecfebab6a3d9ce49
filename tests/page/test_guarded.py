"""The page of a service with API keys; and a shelf of ten thousand caches, which one of its tenants has."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from kvshelf.artifact.identity import digest
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota, Writing
from tests.page.conftest import OpenPage
from tests.store.caches import make_cache

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.conftest import LiveService

MANY = 10_000


class Guarded(NamedTuple):
    url: str
    one: str
    many: str


@pytest.fixture(scope="module")
def guarded(
    browser: Browser,  # noqa: ARG001  without one nothing is to be started
    start_service: Callable[..., AbstractContextManager[LiveService]],
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Guarded]:
    """A service with two tenants: `one` has a cache, `many` has ten thousand. On a disk in memory: writes are many."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path_factory.mktemp("many")) as folder:
        file = KeyFile(Path(folder) / "api-keys.json")
        keys = {tenant: file.create(tenant, ["read", "write"])[1] for tenant in ("one", "many")}
        with start_service(Path(folder), tiny_folder, api_key_file=file.path) as running:
            fill(Path(folder) / "shelf")
            yield Guarded(running.url, keys["one"], keys["many"])


def fill(home: Path) -> None:
    """Manifests, published as a writer would; nobody reads their blobs here."""
    with DiskStore.open(home) as store:
        store.put(make_cache(1), tenant="one", name="the only one")
        template = store.put(make_cache(2), tenant="many", name="number 0")
        for number in range(1, MANY):
            cache_id = "kvs_" + digest("test.page", str(number))
            manifest = template.model_copy(update={"id": cache_id, "name": f"number {number}"})
            writing = Writing(cache_id, cache_id, "many", 1)
            store.index.begin(writing, Quota())
            store.index.publish(writing, manifest, over=None, cost_s=1.0, now=manifest.created_at)


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_the_page_asks_for_a_key_and_keeps_it_out_of_addresses(guarded: Guarded, open_page: OpenPage) -> None:
    page = open_page(url=guarded.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_text("this service needs an API key").wait_for()
    enter(page, "kvsk_" + "0" * 16 + "_" + "0" * 64)
    page.get_by_role("alert").get_by_text("unauthorized").wait_for()
    enter(page, guarded.one)
    page.locator(".grid .all [role=row]", has_text="the only one").wait_for()
    page.reload()
    page.locator(".grid .all [role=row]", has_text="the only one").wait_for()
    assert page.locator(".grid .all [role=row]").count() == 1
    secret = guarded.one.rpartition("_")[2]
    assert not any(secret in url for url in [*asked, page.url])
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.get_by_role("button", name="Forget key").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_stopped_answer_hangs_up(guarded: Guarded, open_page: OpenPage) -> None:
    """The random model of this service never ends an answer by itself; a slow connection makes it last a minute."""
    headers = {"authorization": f"Bearer {guarded.one}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=120) as http:
        cache = http.post("/v1/caches", json={"document": "The quay is long. " * 20}).json()["id"]
        page = open_page(f"ask/{cache}", url=guarded.url)
        enter(page, guarded.one)
        page.get_by_label("Question").fill("Tell me all of it.")
        slow = {"offline": False, "latency": 0, "downloadThroughput": 10_000, "uploadThroughput": 100_000}
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
        page.get_by_label("Maximum tokens").fill("4096")
        page.get_by_role("button", name="Ask").click()
        page.wait_for_function("() => document.querySelector('.answer .text').textContent.length > 20")
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("It was stopped.").wait_for()
        text = page.locator(".answer .text").inner_text()
        page.wait_for_timeout(300)
        assert page.locator(".answer .text").inner_text() == text
        http.delete(f"/v1/caches/{cache}")


def is_page(url: str) -> bool:
    """Whether it is a page of the shelf; the chosen cache asks for its children."""
    return "/v1/caches" in url and "parent_id=" not in url


def test_ten_thousand_caches_are_neither_fetched_nor_drawn_at_once(guarded: Guarded, open_page: OpenPage) -> None:
    page = open_page(url=guarded.url)
    lists: list[str] = []
    page.on("request", lambda request: lists.append(request.url) if is_page(request.url) else None)
    page.get_by_label("API key").wait_for()
    lists.clear()
    started = time.monotonic()
    enter(page, guarded.many)
    rows = page.locator(".grid .all [role=row]")
    rows.filter(has_text=f"number {MANY - 1}").wait_for()
    assert time.monotonic() - started < 5
    page.wait_for_timeout(300)
    assert len(lists) == 1
    assert rows.count() < 60
    assert page.locator(".grid").get_attribute("aria-rowcount") == "-1"

    rows.first.click()
    for _ in range(6):  # each leads to the last row there is, behind which the next page is fetched
        known = page.locator("output").inner_text()
        page.keyboard.press("End")
        page.wait_for_function(
            "(known) => !['loading …', known].includes(document.querySelector('output').innerText)", arg=known
        )
    assert len(lists) == 7
    assert rows.count() < 60
    current = page.locator(".grid [aria-selected=true]")
    assert int(current.get_attribute("aria-rowindex") or "0") > 1000
    assert current.evaluate("(row) => row === document.activeElement")
    boxes = current.bounding_box(), page.locator(".grid").bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[1]["y"] < boxes[0]["y"] < boxes[1]["y"] + boxes[1]["height"]
    page.keyboard.press("Home")
    page.get_by_role("complementary").get_by_text(f"number {MANY - 1}").wait_for()

    page.get_by_role("searchbox", name="Search").fill("number 77")  # 77, ten from 770, a hundred from 7700
    page.locator("output").get_by_text("111 of 10,000", exact=True).wait_for()
    assert len(lists) < 20
    assert rows.count() < 60
