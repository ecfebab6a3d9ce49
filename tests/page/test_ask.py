"""Asking from the page: answers stream, and two caches answer one question side by side."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.page.conftest import ANSWER, QUESTION, OpenPage, document
from tests.page.test_kept import require_shares

Put = Callable[..., dict[str, Any]]

# Counts the texts an answer has had. It watches what the page shows, not what the network brings.
_COUNT_TEXTS = """
window.texts = new Set();
new MutationObserver(() => document.querySelectorAll(".answer .text").forEach((node) => texts.add(node.textContent)))
  .observe(document.querySelector(".answers"), { childList: true, subtree: true, characterData: true });
"""


def facts(answer: Any) -> dict[str, str]:
    return dict(zip(answer.locator("dt").all_inner_texts(), answer.locator("dd").all_inner_texts(), strict=True))


def test_an_answer_comes_piece_by_piece(open_page: OpenPage, put: Put) -> None:
    cache = put(policy="full")
    page = open_page(f"ask/{cache['id']}")
    page.get_by_label("Question").fill(QUESTION)
    page.evaluate(_COUNT_TEXTS)
    page.keyboard.press("Control+Enter")
    answer = page.locator(".answer")
    answer.get_by_text("ended: stop").wait_for()
    assert ANSWER in answer.locator(".text").inner_text()
    whole = answer.locator(".text").inner_text()
    pieces = [text for text in page.evaluate("[...texts]") if text not in ("", whole)]
    assert pieces
    assert all(whole.startswith(text) for text in pieces)
    told = facts(answer)
    assert told["Document tokens"] == str(cache["tokens"]["document"])
    assert 0 < int(told["Tokens prefilled"]) < 60
    assert told["First token"].endswith(("ms", "s"))
    assert told["Load"].endswith("ms")


def test_two_caches_answer_side_by_side(open_page: OpenPage, put: Put) -> None:
    full, poor = put(policy="full", name="all of it"), put(policy="knorm", compression_ratio=0.95, name="hardly any")
    page = open_page(f"ask/{poor['id']}")
    page.get_by_label("Second cache").select_option(full["id"])
    page.wait_for_url(f"**/#ask/{poor['id']}/{full['id']}")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    answers = page.locator(".answer")
    answers.get_by_text("ended:").nth(1).wait_for()
    assert ["hardly any" in heading for heading in answers.locator("h2").all_inner_texts()] == [True, False]
    assert ANSWER in answers.nth(1).locator(".text").inner_text()
    boxes = [answers.nth(at).bounding_box() for at in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    for at in (0, 1):
        told = facts(answers.nth(at))
        assert told["Document tokens"] == str(full["tokens"]["document"])
        assert "…" not in told.values()


def test_ticked_caches_are_asked_together(open_page: OpenPage, put: Put) -> None:
    """One by the mouse, one by the space bar, one ticked and unticked again; the right document is the first source."""
    right = put(policy="full", name="ticked with the code", document=document(91))
    other = put(policy="full", name="ticked with none", document="The harbour master keeps the tide tables. " * 40)
    put(policy="full", name="ticked not", document="The ferry crosses the sound twice a day. " * 40)
    page = open_page()
    page.get_by_role("checkbox", name="Ask ticked with the code").click()
    page.get_by_role("checkbox", name="Ask ticked not").click()
    page.locator(".grid .all [role=row]", has_text="ticked with none").click()
    page.keyboard.press("Space")
    page.get_by_role("link", name="Ask the ticked (3)").wait_for()
    page.get_by_role("checkbox", name="Ask ticked not").click()
    page.get_by_role("link", name="Ask the ticked (2)").click()
    page.wait_for_url(f"**/#ask/{right['id']}+{other['id']}")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    answer = page.locator(".answer")
    answer.get_by_text("ended: stop").wait_for()
    assert answer.locator("h2").inner_text() == "2 documents together"
    assert ANSWER in answer.locator(".text").inner_text()
    assert facts(answer)["Document tokens"] == f"{right['tokens']['document'] + other['tokens']['document']:,}"
    sources = [text.rsplit(maxsplit=2) for text in answer.locator(".sources li").all_inner_texts()]
    assert [name for name, *_ in sources] == ["ticked with the code", "ticked with none"]
    shares = [float(share) for _, share, _ in sources]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares[0] > 60


def test_an_answer_reads_what_a_selector_chooses(open_page: OpenPage, put: Put) -> None:
    cache = put(policy="full", codec="int4", document=document(91))
    page = open_page(f"ask/{cache['id']}")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Read").select_option("fasa")
    page.get_by_label("Entries at most").fill("120")
    page.get_by_role("button", name="Ask").click()
    answer = page.locator(".answer")
    answer.get_by_text("ended: stop").wait_for()
    assert ANSWER in answer.locator(".text").inner_text()
    assert facts(answer)["Entries read"] == "120"
    page.get_by_label("Entries at most").fill("3")
    page.get_by_role("button", name="Ask").click()
    answer.get_by_text("always reads").wait_for()


def test_the_text_of_a_document_shows_what_an_answer_read(open_page: OpenPage, put: Put, http: httpx.Client) -> None:
    text = document(91)
    cache = put(policy="full", codec="int4", document=text)
    body = {"prompt": QUESTION, "select": {"method": "fasa", "tokens": 120, "passages": True}}
    (told,) = http.post(f"/v1/caches/{cache['id']}/query", json=body).json()["passages"]
    shares = [byte / 255 for byte in base64.b64decode(told["shares"])]
    page = open_page(f"ask/{cache['id']}")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Read").select_option("fasa")
    page.get_by_label("Entries at most").fill("120")
    page.get_by_role("button", name="Ask").click()
    read = page.get_by_role("region", name="What the answer read of").first
    tokens = http.get(f"/v1/caches/{cache['id']}/kept").json()["tokens"]
    require_shares(page, shares, tokens)
    most = shares.index(max(shares))
    read.get_by_text(f"Token {most:,} of {len(shares):,}: 100 % of the heads").wait_for()
    some = next(token for token in range(100, 200) if 0 < shares[token] < 0.99 and tokens[token].strip())
    read.locator(f"[data-token='{some}']").click()
    percent = f"{float(f'{100 * shares[some]:.1f}'):g} %"
    read.get_by_text(f"Token {some} of {len(shares):,}: {percent} of the heads").wait_for()


def test_without_its_text_a_document_is_a_strip_and_several_load_theirs_when_asked(
    open_page: OpenPage, put: Put, http: httpx.Client
) -> None:
    bare = put(policy="full", codec="int4", name="without text", document=document(92), keep_source=False)
    page = open_page(f"ask/{bare['id']}")

    def ask() -> None:
        page.get_by_label("Question").fill(QUESTION)
        page.get_by_label("Read").select_option("fasa")
        page.get_by_role("button", name="Ask").click()

    ask()
    page.get_by_text("The shelf does not store the text of this document.").wait_for()
    page.get_by_role("img", name="What the answer read of without text").click()  # in its middle
    token = int(re.findall(r"Token ([\d,]+) of", page.locator(".passages").inner_text())[0].replace(",", ""))
    assert token == pytest.approx(bare["tokens"]["document"] / 2, abs=5)
    other = put(policy="full", name="with text", document=document(93))
    page.goto(page.url.split("#")[0] + f"#ask/{bare['id']}+{other['id']}")
    page.reload()
    ask()
    page.locator(".answer").get_by_text("ended: stop").wait_for()
    regions = page.locator("section.passages")
    assert regions.count() == 2
    assert page.locator(".heat").count() == 0
    regions.nth(1).get_by_role("button", name="Show its text").click()
    page.locator(".heat .chosen").wait_for()
    tokens = http.get(f"/v1/caches/{other['id']}/kept").json()["tokens"]
    assert page.locator(".heat").inner_text().split() == "".join(tokens).split()


def test_an_unknown_cache_is_named(open_page: OpenPage) -> None:
    page = open_page("ask/kvs_" + "0" * 40)
    page.get_by_text("cache_not_found").wait_for()
