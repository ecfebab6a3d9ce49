"""The shelf's table, and what can be done with a cache from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.page.conftest import OpenPage, document

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Put = Callable[..., dict[str, Any]]

MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


def rows(page: Page) -> Locator:
    return page.locator(".grid .all [role=row]")


def row_of(page: Page, name: str) -> Locator:
    return rows(page).filter(has_text=name)


def awaited(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_row_tells_what_the_api_tells(open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    cache = put(policy="snapkv", compression_ratio=0.75, codec="int8", name="tide tables", ttl_s=86_400 * 3 + 60)
    http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Hm?", "max_tokens": 2})
    awaited(lambda: http.get(f"/v1/caches/{cache['id']}").json()["uses"] >= 1)
    page = open_page()
    cells = row_of(page, "tide tables").locator("[role=gridcell]")
    cells.first.wait_for()
    told = dict(
        zip(
            [head.strip() for head in page.locator("[role=columnheader]").all_inner_texts()],
            cells.all_inner_texts(),
            strict=True,
        )
    )
    stored = cache["bytes"]["stored"] / 1024
    assert told["Policy"] == "snapkv"
    assert told["Removed"] == "75 %"
    assert told["Size"] in (f"{stored:.0f} KiB", f"{stored:.1f} KiB")
    assert told["Expires"] == "in 3 days"
    assert int(told["Hits"]) >= 1
    assert told["Pinned"] == ""
    if cache["quality"] is not None:
        assert float(told["Quality"].partition(" %")[0]) == pytest.approx(100 * cache["quality"]["agreement"], abs=0.06)
    row_of(page, "tide tables").click()
    card = page.get_by_role("complementary", name="The chosen cache")
    for fact in (cache["id"], cache["document_id"], "int8", "stored with the cache"):
        assert fact in card.inner_text()


def test_filters_ask_the_service(open_page: OpenPage, put: Put) -> None:
    one = put(
        document=document(21), policy="knorm", compression_ratio=0.5, name="filtered one", labels={"team": "quay"}
    )
    put(document=document(22), policy="lagkv", compression_ratio=0.5, name="filtered two", labels={"team": "pier"})
    page = open_page()
    row_of(page, "filtered one").wait_for()
    page.get_by_label("Policy").select_option("lagkv")
    row_of(page, "filtered one").wait_for(state="detached")
    row_of(page, "filtered two").wait_for()
    page.get_by_label("Policy").select_option("")
    for label, value in (("Label", "team=quay"), ("Document", one["document_id"])):
        page.get_by_label(label, exact=True).fill(value)
        page.keyboard.press("Enter")
        row_of(page, "filtered two").wait_for(state="detached")
        row_of(page, "filtered one").wait_for()
        page.get_by_label(label, exact=True).fill("")
        page.keyboard.press("Enter")
        row_of(page, "filtered two").wait_for()
    page.get_by_label("Label", exact=True).fill("no such thing=at all")
    page.keyboard.press("Enter")
    assert page.get_by_role("alert").inner_text().count("invalid_request") == 1


def test_a_cache_is_pinned_kept_longer_and_labelled(open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    cache = put(document=document(23), name="to be changed", ttl_s=3600)
    path = f"/v1/caches/{cache['id']}"
    page = open_page()
    row_of(page, "to be changed").click()
    page.get_by_role("button", name="Pin", exact=True).click()
    row_of(page, "to be changed").get_by_text("pinned", exact=True).wait_for()
    assert http.get(path).json()["pinned"]
    page.get_by_label("Keep for").fill("2")
    page.get_by_role("button", name="Set", exact=True).click()
    row_of(page, "to be changed").get_by_text("in 1 day", exact=True).wait_for()  # a little less than two days
    assert http.get(path).json()["expires_at"] == pytest.approx(time.time() + 2 * 86_400, abs=60)
    page.get_by_role("button", name="For ever").click()
    row_of(page, "to be changed").get_by_text("never", exact=True).wait_for()
    assert http.get(path).json()["expires_at"] is None
    page.get_by_label("Name", exact=True).fill("has been changed")
    page.get_by_label("Labels, one").fill("team=quay\nstage=draft")
    page.get_by_role("button", name="Save").click()
    row_of(page, "has been changed").wait_for()
    assert http.get(path).json()["labels"] == {"team": "quay", "stage": "draft"}
    page.get_by_label("Labels, one").fill("no value")
    page.get_by_role("button", name="Save").click()
    assert "name=value" in page.get_by_role("alert").inner_text()


def test_a_cache_is_deleted_only_when_that_is_confirmed(open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    cache = put(document=document(24), name="to be deleted")
    page = open_page(f"shelf/{cache['id']}")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Keep", exact=True).click()
    assert http.get(f"/v1/caches/{cache['id']}").status_code == 200
    page.get_by_role("button", name="Delete", exact=True).click()
    page.keyboard.press("Escape")
    assert http.get(f"/v1/caches/{cache['id']}").status_code == 200
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    row_of(page, "to be deleted").wait_for(state="detached")
    assert http.get(f"/v1/caches/{cache['id']}").status_code == 404


def test_what_has_gone_meanwhile_is_told_with_its_code(open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    cache = put(document=document(25), name="gone meanwhile")
    page = open_page()
    row_of(page, "gone meanwhile").click()
    http.delete(f"/v1/caches/{cache['id']}")
    page.get_by_role("button", name="Pin", exact=True).click()
    told = page.get_by_role("alert").inner_text()
    assert "cache_not_found" in told
    assert cache["id"] in told


def test_markup_is_text_wherever_it_stands(open_page: OpenPage, put: Put) -> None:
    text = (MARKUP + " The harbour is closed.\n") * 30
    cache = put(document=text, name=MARKUP, labels={"note": MARKUP}, compression_ratio=0.25)
    page = open_page()
    row_of(page, "<script>").first.click()
    assert MARKUP in page.get_by_role("complementary").inner_text()
    for view in ("ask", "kept"):
        page.goto(page.url.split("#")[0] + f"#{view}/{cache['id']}")
        page.locator("main :not(option)", has_text=MARKUP).last.wait_for()
    assert MARKUP in page.locator(".heat").inner_text()
    assert page.locator("main img, main script").count() == 0
    assert "broken" not in page.title()
