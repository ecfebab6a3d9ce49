"""Asking from the page: answers stream, and two caches answer one question side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.page.conftest import ANSWER, QUESTION, OpenPage, document

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
    assert told["Tokens read"] == str(cache["tokens"]["document"])
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
        assert told["Tokens read"] == str(full["tokens"]["document"])
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
    assert facts(answer)["Tokens read"] == f"{right['tokens']['document'] + other['tokens']['document']:,}"
    sources = [text.rsplit(maxsplit=2) for text in answer.locator(".sources li").all_inner_texts()]
    assert [name for name, *_ in sources] == ["ticked with the code", "ticked with none"]
    shares = [float(share) for _, share, _ in sources]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares[0] > 60


def test_an_unknown_cache_is_named(open_page: OpenPage) -> None:
    page = open_page("ask/kvs_" + "0" * 40)
    page.get_by_text("cache_not_found").wait_for()
