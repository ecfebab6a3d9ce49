"""The shelf's table, and what can be done with a cache from there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf.cli.output.common import megabytes
from tests.page.conftest import OpenPage, document

pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
from playwright.sync_api import expect

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
    assert told["Policy"] == "snapkv"
    assert told["Removed"] == "75 %"
    assert told["Size"] == megabytes(cache["bytes"]["stored"])
    assert told["Expires"] == "in 3 days"
    assert int(told["Hits"]) >= 1
    assert told["Pinned"] == ""
    assert told["Created"].endswith(" ago")
    assert float(told["Quality"].removesuffix(" %")) == pytest.approx(100 * cache["quality"]["agreement"], abs=0.06)
    row_of(page, "tide tables").click()
    card = page.get_by_role("complementary", name="The chosen cache")
    for fact in (cache["id"], cache["document_id"], "int8", "stored with the cache"):
        assert fact in card.inner_text()


def test_filters_ask_the_service(open_page: OpenPage, put: Put) -> None:
    put(document=document(21), policy="knorm", compression_ratio=0.5, name="filtered one", labels={"team": "quay"})
    put(document=document(22), policy="lagkv", compression_ratio=0.5, name="filtered two", labels={"team": "pier"})
    page = open_page()
    row_of(page, "filtered one").wait_for()
    page.get_by_label("Policy").select_option("lagkv")
    row_of(page, "filtered one").wait_for(state="detached")
    row_of(page, "filtered two").wait_for()
    page.get_by_label("Policy").select_option("")
    page.get_by_label("Label", exact=True).fill("team=quay")
    page.keyboard.press("Enter")
    row_of(page, "filtered two").wait_for(state="detached")
    row_of(page, "filtered one").wait_for()
    page.get_by_label("Label", exact=True).fill("no such thing=at all")
    page.keyboard.press("Enter")
    assert page.get_by_role("alert").inner_text().count("invalid_request") == 1


SORTED = "sorted for the test"
ORDERS = {
    "Newest first": ["full", "knorm", "streaming_llm"],
    "Oldest first": ["streaming_llm", "knorm", "full"],
    "Largest first": ["full", "streaming_llm", "knorm"],
    "Smallest first": ["knorm", "streaming_llm", "full"],
}


def test_search_and_orders_hold_for_the_whole_shelf(open_page: OpenPage, put: Put) -> None:
    ways = [{"policy": "streaming_llm", "compression_ratio": 0.5}, {"policy": "knorm", "compression_ratio": 0.75}, {}]
    made = [put(**{"document": document(26), "policy": "full", "name": SORTED} | way) for way in ways]
    page = open_page()
    # Pages of two caches: what is searched and sorted is not on the first one.
    page.route("**/v1/caches?*", lambda route: route.continue_(url=re.sub(r"limit=\d+", "limit=2", route.request.url)))
    search, order = page.get_by_role("searchbox", name="Search"), page.get_by_label("Sort by")
    search.fill(SORTED.upper())
    expect(page.locator("output")).to_contain_text(re.compile(r"^3 of \d+$"))
    policies = rows(page).locator(".policy")
    for name, expected in ORDERS.items():
        order.select_option(name)
        expect(page.locator("output")).to_contain_text(re.compile(r"^3 of \d+$"))
        assert in_order(page) == expected, name
    shares = sorted((cache["quality"]["agreement"] for cache in made), reverse=True)
    for name, wanted in (("Best quality first", shares), ("Worst quality first", shares[::-1])):
        order.select_option(name)
        told = [float(text.removesuffix(" %")) for text in cells_in_order(page, "quality")]
        assert told == pytest.approx([100 * share for share in wanted], abs=0.06), name
    for text in (made[0]["id"], made[0]["policy"]):
        search.fill(text)
        row_of(page, SORTED).first.wait_for()
        expect(policies.first).to_have_text("streaming_llm")
        assert set(in_order(page)) == {"streaming_llm"}
    search.fill("nothing has this in it")
    page.get_by_text("No cache matches.").wait_for()


def cells_in_order(page: Page, column: str) -> list[str]:
    """The texts of a column, from the first row on: rows are drawn in any order."""
    drawn = rows(page).evaluate_all(
        "(rows, column) => rows.map((row) => [+row.ariaRowIndex || +row.getAttribute('aria-rowindex'),"
        " row.querySelector('.' + column).textContent])",
        column,
    )
    return [text for _, text in sorted(drawn)]


def in_order(page: Page) -> list[str]:
    return cells_in_order(page, "policy")


WIDEST = {
    "codec": "mixed",
    "removed": "87.5 %", "size": "99.99 MB", "quality": "99.08 %", "hits": "999", "age": "26 min. ago",
    "expiry": "in 29 days", "pinned": "pinned",
}  # fmt: skip


@pytest.mark.parametrize("width", [360, 390, 1280], ids=str)
def test_only_long_names_of_documents_are_cut(width: int, open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    put(document=document(27), name="wide enough")
    page = open_page(viewport={"width": width, "height": 800})
    row = row_of(page, "wide enough").first
    row.wait_for()
    cut = "(cell, text) => { cell.textContent = text; return cell.scrollWidth > cell.clientWidth; }"
    policies = [policy["id"] for policy in http.get("/v1/policies").json()["data"]]
    assert [name for name in [*policies, "x" * 60] if row.locator(".policy").evaluate(cut, name)] == ["x" * 60]
    row.locator(".policy").evaluate(cut, "")
    assert row.locator(".codec").is_visible() == (width > 1000)
    assert [name for name, text in WIDEST.items() if row.locator(f".{name}").evaluate(cut, text)] == []
    assert page.locator(".grid").evaluate("(grid) => grid.scrollWidth <= grid.clientWidth")


def test_labels_beside_each_other_are_in_line(open_page: OpenPage, bundled_service: str) -> None:
    page = open_page()
    for view, group in (("shelf", ".filters"), ("batches", ".inline")):
        page.goto(f"{bundled_service}/#{view}")
        labels = page.locator(f"{group} > label")
        labels.first.wait_for()
        tops = labels.evaluate_all("(labels) => labels.slice(0, 2).map((label) => label.getBoundingClientRect().top)")
        assert len(tops) == 2
        assert len(set(tops)) == 1, view


def test_on_a_phone_the_chosen_cache_comes_into_view(open_page: OpenPage, put: Put) -> None:
    cache = put(document=document(28), name="far below")
    phone: Any = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
    page = open_page(**phone)
    card = page.get_by_role("complementary", name="The chosen cache")
    row_of(page, "far below").first.wait_for()
    expect(card).not_to_be_in_viewport(ratio=0.3)
    row_of(page, "far below").first.tap()
    expect(card.get_by_role("heading", name="far below")).to_be_in_viewport()
    expect(card.get_by_role("link", name="Ask")).to_be_in_viewport()
    page = open_page(f"shelf/{cache['id']}", **phone)
    expect(page.get_by_role("heading", name="far below")).to_be_in_viewport()


def test_an_empty_shelf_tells_how_to_begin(open_page: OpenPage, bundled_service: str) -> None:
    page = open_page("batches")
    nothing = {"object": "list", "data": [], "has_more": False, "last_id": None}
    page.route("**/v1/caches?*", lambda route: route.fulfill(json=nothing))
    for view in ("shelf", "ask", "kept"):
        page.goto(f"{bundled_service}/#{view}")
        page.get_by_text("The shelf is empty.").wait_for()
        assert (
            f"export KVSHELF_URL={bundled_service}\nkvshelf sample > report.txt\n" in page.locator("pre").inner_text()
        )
    page.get_by_role("link", name="Put a document on the shelf").click()
    page.locator(".drop").wait_for()


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


def test_the_facts_of_a_cache_say_until_when_it_is_guaranteed(open_page: OpenPage, put: Put) -> None:
    put(document=document(24), name="by promise", guaranteed_until=time.time() + 86_400)
    put(document=document(25), name="by nobody")
    page = open_page()
    for name, told in (("by nobody", 0), ("by promise", 1)):
        row_of(page, name).first.click()
        page.get_by_role("heading", name=name, exact=True).wait_for()
        expect(page.locator("dt", has_text="Guaranteed")).to_have_count(told)
    expect(page.locator("dd", has_text="until ")).to_have_count(1)


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
