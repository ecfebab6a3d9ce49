"""Conversations on the page: turns, branches and what is appended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.page.conftest import ANSWER, QUESTION, OpenPage, document
from tests.page.test_keyboard import tab_to

pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

AGAIN = "What was the access code of the amber falcon?"
MORE = document(62, words=150)

# What a browser does when somebody drops a file, anywhere in the view.
_DROP = """
([name, type, text]) => {
  const files = new DataTransfer();
  files.items.add(new File([text], name, { type }));
  for (const kind of ["dragover", "drop"]) {
    document.querySelector("main").dispatchEvent(
      new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true }));
  }
}
"""


@pytest.fixture
def root(put: Callable[..., dict[str, Any]], http: httpx.Client) -> Iterator[dict[str, Any]]:
    """A document on the shelf; what grows from it is deleted with it."""
    cache = put(document=document(61), policy="full", name="talked about")
    yield cache
    http.delete(f"/v1/caches/{cache['id']}?cascade=true")


def turns(page: Page, count: int) -> Locator:
    """The turns of the view, once there are so many and none is being answered."""
    found = page.locator(".turns > .turn:not([aria-busy])")
    expect(found).to_have_count(count, timeout=30_000)
    return found


def current(page: Page) -> str:
    return page.url.rpartition("/")[2]


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()


def drop(page: Page, name: str, kind: str, text: str) -> None:
    page.evaluate(_DROP, [name, kind, text])


def told(http: httpx.Client, cache_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get(f"/v1/caches/{cache_id}/turns").json()["data"]
    return found


def test_turns_follow_each_other_and_branch(open_page: OpenPage, root: dict[str, Any], http: httpx.Client) -> None:
    page = open_page(f"ask/{root['id']}")
    ask(page, QUESTION)
    page.get_by_role("link", name="Conversation").last.click()
    expect(turns(page, 1)).to_contain_text(f"{root['tokens']['document']} tokens, full, 0 % removed")
    ask(page, QUESTION)
    first = turns(page, 2).nth(1)
    middle = current(page)
    expect(first.locator(".bubble.user")).to_contain_text(QUESTION)
    expect(first.locator(".bubble.assistant")).to_contain_text(ANSWER)
    ask(page, QUESTION)
    second = turns(page, 3).nth(2)
    end = current(page)
    chain = told(http, end)
    assert [turn["cache_id"] for turn in chain] == [root["id"], middle, end]
    expect(page.get_by_label("Question")).to_have_value("")
    expect(second).to_contain_text(f"{chain[2]['tokens']} tokens · {chain[1]['total_tokens']} from the shelf, ")
    prefilled = int(second.inner_text().split(" from the shelf, ")[1].split(" prefilled")[0])
    assert 0 < prefilled < chain[2]["tokens"]
    expect(second).to_contain_text("first token after")

    page.go_back()  # to the branch point
    turns(page, 2).nth(1).get_by_text("1 continuation").wait_for()
    ask(page, AGAIN)
    page.locator(".bubble", has_text=AGAIN).wait_for()
    branch = turns(page, 3).nth(1)
    assert len({end, middle, current(page)}) == 3
    assert told(http, current(page))[1]["cache_id"] == middle
    branch.get_by_text("1 other branch").click()
    branch.locator(".picker").get_by_role("link", name=QUESTION).click()
    page.wait_for_url(f"**/#talk/{end}")
    turns(page, 3).first.get_by_role("link", name="Go back to here").click()
    page.wait_for_url(f"**/#talk/{root['id']}")
    turns(page, 1).get_by_text("1 continuation").click()
    page.locator(".picker").get_by_role("link", name=QUESTION).click()
    turns(page, 3)  # the newest end, not the first turn of the branch
    assert told(http, current(page))[2]["messages"][0]["content"] == AGAIN


def test_files_are_appended_and_the_view_moves_on(
    open_page: OpenPage, root: dict[str, Any], http: httpx.Client
) -> None:
    page = open_page(f"talk/{root['id']}")
    turns(page, 1)
    page.get_by_label("Policy").select_option("keydiff")
    page.get_by_label("Share removed").fill("0.25")
    file: Any = {"name": "more.txt", "mimeType": "text/plain", "buffer": MORE.encode()}
    page.get_by_label("Choose files").set_input_files(file)
    expect(turns(page, 2).nth(1)).to_contain_text("more.txt")
    chain = told(http, current(page))
    assert (chain[1]["parent_id"], chain[1]["name"]) == (root["id"], "more.txt")
    assert (chain[1]["policy"], chain[1]["compression_ratio"]) == ("keydiff", 0.25)
    expect(turns(page, 2).nth(1)).to_contain_text(f"appended {chain[1]['tokens']} tokens, keydiff, 25 % removed")

    ask(page, QUESTION)
    expect(turns(page, 3).nth(2)).to_contain_text(ANSWER)
    behind = current(page)
    page.get_by_label("Policy").select_option("")
    drop(page, "a.pdf", "application/pdf", "%PDF-")
    page.get_by_role("alert").get_by_text("not_a_text").wait_for()
    assert current(page) == behind
    drop(page, "last.md", "", "The harbour master has two deputies. " * 5)
    expect(turns(page, 4).nth(3)).to_contain_text("last.md")
    last = told(http, current(page))[3]
    assert (last["parent_id"], last["policy"]) == (behind, "full")
    assert page.get_by_role("alert").count() == 0
    ask(page, QUESTION)
    expect(turns(page, 5).nth(4)).to_contain_text(f"{last['total_tokens']:,} from the shelf")


def test_what_is_not_kept_or_refused_is_told(open_page: OpenPage, root: dict[str, Any]) -> None:
    page = open_page(f"talk/{root['id']}")
    # With the answer's first digit as the end, the answer is empty, and such a turn is not kept.
    page.route("**/query", lambda route: route.continue_(post_data=route.request.post_data_json | {"stop": ANSWER[0]}))
    ask(page, QUESTION)
    page.get_by_role("alert").get_by_text("the answer is empty").wait_for()
    assert current(page) == root["id"]
    expect(page.get_by_label("Question")).to_have_value(QUESTION)
    page.unroute("**/query")
    ask(page, "word " * 70_000)
    page.get_by_role("alert").get_by_text("invalid_request").wait_for()
    drop(page, "empty.txt", "text/plain", "")
    page.get_by_role("alert").get_by_text("is empty").wait_for()
    page.goto(page.url.replace(root["id"], "kvs_" + "0" * 40))
    page.get_by_text("cache_not_found").wait_for()


def test_a_phone_and_the_keyboard_are_enough(open_page: OpenPage, root: dict[str, Any], http: httpx.Client) -> None:
    phone: Any = {"viewport": {"width": 360, "height": 740}}
    page = open_page(f"shelf/{root['id']}", **phone)
    page.locator(".facts").wait_for()
    page.get_by_role("heading", name="Shelf").focus()  # behind the navigation, which leads to all conversations
    tab_to(page, "Conversation")
    page.keyboard.press("Enter")
    turns(page, 1)
    tab_to(page, "Question")
    for count in (2, 3):  # the field keeps the focus
        page.keyboard.insert_text(QUESTION)
        page.keyboard.press("Control+Enter")
        turns(page, count)
    expect(page.get_by_role("button", name="Ask")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    end = current(page)
    with page.expect_file_chooser() as chooser:
        tab_to(page, "Choose files")
        page.keyboard.press("Enter")
    file: Any = {"name": "more.txt", "mimeType": "text/plain", "buffer": MORE.encode()}
    chooser.value.set_files(file)
    turns(page, 4)
    assert told(http, current(page))[3]["parent_id"] == end
    tab_to(page, "Go back to here", back=True)
    page.keyboard.press("Enter")
    turns(page, 3)
    tab_to(page, "1 continuation", back=True)
    page.keyboard.press("Enter")
    tab_to(page, "more.txt")
    page.keyboard.press("Enter")
    turns(page, 4)


def test_a_cache_names_its_family_and_is_deleted_with_it(
    open_page: OpenPage, root: dict[str, Any], http: httpx.Client
) -> None:
    def grown(cache_id: str, name: str) -> str:
        found: str = http.post(f"/v1/caches/{cache_id}/append", json={"document": MORE, "name": name}).json()["id"]
        return found

    child = grown(root["id"], "the child")
    grandchild = grown(child, "the grandchild")
    page = open_page(f"shelf/{child}")
    card = page.get_by_role("complementary", name="The chosen cache")
    card.get_by_role("link", name=root["id"][:12]).click()
    card.get_by_role("heading", name="talked about").wait_for()
    expect(card).to_contain_text("1: the child")
    page.locator(".grid [role=row]", has_text="the grandchild").first.click()
    expect(card).to_contain_text("none")
    page.locator(".grid [role=row]", has_text="the child").first.click()
    card.get_by_role("link", name=root["id"][:12]).click()  # the address names it already
    card.get_by_role("heading", name="talked about").wait_for()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_text("2 others were appended").wait_for()
    page.get_by_role("button", name="Keep", exact=True).click()
    assert http.get(f"/v1/caches/{root['id']}").status_code == 200
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_role("button", name="Delete all 3").click()
    page.locator(".grid [role=row]", has_text="the grandchild").first.wait_for(state="detached")
    for cache_id in (root["id"], child, grandchild):
        assert http.get(f"/v1/caches/{cache_id}").status_code == 404
