"""The whole run by keyboard: put a document, find it, ask it, look at what it kept, delete it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from tests.page.conftest import ANSWER, QUESTION, OpenPage, document

if TYPE_CHECKING:
    from playwright.sync_api import Page

_FOCUSED = """
() => {
  const node = document.activeElement;
  const label = node.labels?.[0]?.innerText.split("\\n")[0].trim();
  return node.getAttribute("aria-label") ?? label ?? node.innerText?.trim() ?? "";
}
"""
_OUTLINED = """
() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
}
"""


def tab_to(page: Page, name: str, *, back: bool = False, limit: int = 60) -> None:
    """Press Tab until what has this name has the focus, which must be seen at every stop."""
    for _ in range(limit):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate(_FOCUSED).startswith(name):
            assert page.evaluate(_OUTLINED), name
            return
    raise AssertionError(f"{name} cannot be reached with Tab")


def test_all_of_it_by_keyboard_alone(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page()
    page.locator(".grid").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate(_FOCUSED) == "Skip to content"
    tab_to(page, "Put")
    page.keyboard.press("Enter")
    tab_to(page, "Or paste a text")
    page.keyboard.insert_text(document(81))
    # Typing into a list chooses among the options that it has by then, and these come from the service.
    page.get_by_label("Policy").locator("option", has_text="keydiff").wait_for(state="attached")
    tab_to(page, "Policy")
    page.keyboard.type("keyd")  # the default removes nothing
    page.get_by_text("Removed: 50 %").wait_for()
    tab_to(page, "Removed")
    page.keyboard.press("Home")
    tab_to(page, "Name, labels")
    page.keyboard.press("Space")
    tab_to(page, "Name")
    page.keyboard.insert_text("by keyboard")
    tab_to(page, "Put it on the shelf")
    page.keyboard.press("Space")
    page.locator(".job", has_text="by keyboard").get_by_text("is on the shelf").wait_for()

    tab_to(page, "Shelf", back=True)
    page.keyboard.press("Enter")
    page.locator(".grid .all [role=row]").first.wait_for()
    tab_to(page, "by keyboard")  # the newest is the first row, and rows are one stop
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert page.evaluate(_FOCUSED).startswith("by keyboard")
    page.keyboard.press("Enter")
    assert page.evaluate(_FOCUSED) == "Ask"
    cache_id = page.locator(".facts code").first.inner_text()
    page.keyboard.press("Enter")
    tab_to(page, "Question")
    page.keyboard.insert_text(QUESTION)
    page.keyboard.press("Control+Enter")
    page.locator(".answer").get_by_text("ended:").wait_for()
    assert ANSWER in page.locator(".answer .text").inner_text()

    page.goto(page.url.split("#")[0] + f"#kept/{cache_id}")
    page.locator(".heat .chosen").wait_for()
    tab_to(page, "Layer")
    page.keyboard.press("ArrowDown")
    tab_to(page, "Head")
    tab_to(page, "Number of the token")
    before = page.locator(".heat .chosen").get_attribute("data-token")
    page.keyboard.press("ArrowUp")
    page.locator(f".heat .chosen:not([data-token='{before}'])").wait_for()

    page.goto(page.url.split("#")[0] + f"#shelf/{cache_id}")
    page.locator(".facts").wait_for()
    tab_to(page, "Delete")
    page.keyboard.press("Enter")
    assert page.evaluate(_FOCUSED) == "Keep"  # what does no harm is nearest
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".grid [role=row]", has_text="by keyboard").wait_for(state="detached")
    assert http.get(f"/v1/caches/{cache_id}").status_code == 404
