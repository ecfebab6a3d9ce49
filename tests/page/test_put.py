"""Putting documents on the shelf from the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.page.conftest import OpenPage, document

pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

# What a browser does when somebody drops files.
_DROP = """
([name, text]) => {
  const files = new DataTransfer();
  files.items.add(new File([text], name, { type: "text/plain" }));
  const zone = document.querySelector(".drop");
  for (const kind of ["dragover", "drop"]) {
    zone.dispatchEvent(new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true }));
  }
}
"""
_WATCH_STATES = """
window.states = [];
new MutationObserver(() => document.querySelectorAll(".job .state").forEach((node) => {
  if (states.at(-1) !== node.textContent) states.push(node.textContent);
})).observe(document.querySelector(".jobs"), { childList: true, subtree: true, characterData: true });
"""


def drop(page: Page, name: str, text: str) -> None:
    page.locator(".drop").wait_for()
    page.evaluate(_DROP, [name, text])
    page.locator(".drop .to-send", has_text=name).wait_for()


def send(page: Page) -> None:
    page.get_by_role("button", name=re.compile("^Put .* on the shelf$")).click()


def sent(page: Page) -> list[str]:
    """Filled with the creations that the page asks for from now on."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url) if request.method == "POST" else None)
    return found


def open_more(page: Page) -> None:
    page.get_by_text("Name, labels, expiry, text").click()


def test_a_dropped_file_goes_to_the_shelf_and_tells_how_far_it_is(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page("put")
    posts = sent(page)
    drop(page, "quay.txt", document(41))
    page.get_by_label("Policy").select_option("lagkv")
    page.get_by_label("Removed").fill("0.75")
    page.get_by_label("Codec").select_option("int4")
    open_more(page)
    page.get_by_label("Labels").fill("from=page")
    page.evaluate(_WATCH_STATES)
    assert posts == []  # before the policy is chosen, nothing is sent
    send(page)
    job = page.locator(".drop .job", has_text="quay.txt")
    job.get_by_text("is on the shelf").wait_for()
    assert len(posts) == 1
    assert page.locator(".to-send").count() == 0
    states = " / ".join(page.evaluate("states"))
    assert states.index("is being sent") < states.index("is on the shelf")
    assert "100 %" in states
    assert "is being compressed" in states or "waits for the model" in states
    assert page.get_by_role("progressbar", name="Progress of quay.txt").get_attribute("value") == "1"
    job.get_by_role("link", name="Show").click()
    page.wait_for_url("**/#shelf/*")
    cache = http.get(f"/v1/caches/{page.url.rpartition('/')[2]}").json()
    assert (cache["policy"], cache["compression_ratio"], cache["codec"].partition(":")[0]) == ("lagkv", 0.75, "int4")
    assert (cache["name"], cache["labels"], cache["has_source"]) == ("quay.txt", {"from": "page"}, True)
    page.locator(".grid [aria-selected=true]", has_text="quay.txt").wait_for()
    page.get_by_role("link", name="Put").click()
    page.locator(".job", has_text="quay.txt").wait_for()


def test_chosen_files_can_be_removed_and_an_ended_one_chosen_again(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page("put")
    button = page.get_by_role("button", name=re.compile("^Put .* on the shelf$"))
    assert button.is_disabled()
    files = [{"name": f"{name}.txt", "mimeType": "text/plain", "buffer": document(46).encode()} for name in "ab"]
    page.get_by_label("Choose files").set_input_files(files)  # type: ignore[arg-type]
    assert button.inner_text() == "Put 2 documents on the shelf"
    page.get_by_role("button", name="Remove a.txt").click()
    send(page)
    page.locator(".job", has_text="is on the shelf").wait_for()
    page.get_by_role("button", name="Choose again").click()
    page.get_by_label("Policy").select_option("knorm")
    send(page)
    page.locator(".job", has_text="is on the shelf").nth(1).wait_for()
    shelved = [cache for cache in http.get("/v1/caches").json()["data"] if cache["name"] in ("a.txt", "b.txt")]
    assert [(cache["name"], cache["policy"]) for cache in shelved] == [("b.txt", "knorm"), ("b.txt", "full")]


def test_on_a_phone_what_is_on_its_way_comes_into_view(open_page: OpenPage) -> None:
    page = open_page("put", viewport={"width": 390, "height": 844})
    drop(page, "phone.txt", document(47))
    page.get_by_label("Policy").select_option("knorm")
    send(page)
    expect(page.locator(".drop .job", has_text="phone.txt").locator(".state")).to_be_in_viewport()


def test_pasted_text_goes_to_the_shelf(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page("put")
    open_more(page)
    page.get_by_role("textbox", name="Name", exact=True).fill("pasted")
    page.get_by_label("Or paste a text").fill(document(42))
    send(page)
    page.locator(".job", has_text="pasted").get_by_role("link", name="Ask").click()
    page.get_by_label("Question").wait_for()
    names = [cache["name"] for cache in http.get("/v1/caches").json()["data"]]
    assert "pasted" in names


def test_what_is_refused_is_told_with_its_code(open_page: OpenPage) -> None:
    page = open_page("put")
    drop(page, "empty.txt", "")
    send(page)
    page.locator(".job", has_text="empty.txt").get_by_text("invalid_request").wait_for()
    open_more(page)
    page.get_by_label("Labels").fill("nothing")
    drop(page, "labelled.txt", document(43))
    send(page)
    page.get_by_role("alert").get_by_text("and this one is not: nothing").wait_for()
    assert page.locator(".job", has_text="labelled.txt").count() == 0
    page.locator(".to-send", has_text="labelled.txt").wait_for()


def test_several_files_wait_for_their_turn(open_page: OpenPage) -> None:
    page = open_page("put")
    for number in range(5):
        drop(page, f"many-{number}.txt", document(50 + number, words=120))
    send(page)
    for number in range(5):
        page.locator(".job", has_text=f"many-{number}.txt").get_by_text("is on the shelf").wait_for()
    page.get_by_role("button", name="Clear").click()
    page.locator(".job").first.wait_for(state="detached")


def test_a_job_goes_on_while_the_service_cannot_be_asked(browser: Browser, bundled_service: str) -> None:
    """It is away for a moment, or another takes its place. What it has accepted is done all the same."""
    with browser.new_context() as context:  # the errors in its console are wanted here
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.goto(f"{bundled_service}/#put")
        failures: list[Callable[[Route], None]] = [
            lambda route: route.abort("connectionreset"),
            lambda route: route.fulfill(status=503, json={"error": {"message": "replaced", "code": "worker_crashed"}}),
        ]
        page.route("**/v1/requests/*", lambda route: failures.pop(0)(route) if failures else route.continue_())
        drop(page, "patient.txt", document(44))
        send(page)
        job = page.locator(".job", has_text="patient.txt")
        job.get_by_text("connection_failed").wait_for()
        job.get_by_text("worker_crashed").wait_for()
        job.get_by_text("is on the shelf").wait_for()
        assert job.get_by_text("worker_crashed").count() == 0
        assert failures == []
