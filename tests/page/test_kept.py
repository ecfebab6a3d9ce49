"""The heat map shows what the API tells, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvshelf import Client
from tests.page.conftest import OpenPage, document

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from kvshelf.api.inspect import KeptTokens

Put = Callable[..., dict[str, Any]]

_TOKENS = """
() => [...document.querySelectorAll(".heat span[data-token]")].map((span) => [
  Number(span.dataset.token), span.textContent,
  Number(span.style.getPropertyValue("--level")), span.classList.contains("merged"),
])
"""


def drawn(page: Page) -> dict[int, tuple[str, int, bool]]:
    """Text, level and whether it is merged, of every token that has an element."""
    page.locator(".heat span[data-token]").first.wait_for()
    return {token: (text, level, merged) for token, text, level, merged in page.evaluate(_TOKENS)}


def expected(found: KeptTokens, layer: int | None = None, head: int | None = None) -> list[float]:
    """The share of heads that kept each token."""
    if layer is None:
        return [count / found.num_heads for count in found.counts]
    heads = range(len(found.layers[layer].kept)) if head is None else [head]
    kept = [set(found.layers[layer].positions(each)) for each in heads]
    return [sum(token in each for each in kept) / len(kept) for token in range(found.num_tokens)]


def require_shares(page: Page, shares: list[float], tokens: list[str]) -> None:
    shown = drawn(page)
    assert len(shown) > 300
    for token, (text, level, _) in shown.items():
        assert text == tokens[token]
        assert (level == 0) == (shares[token] == 0), token
        assert (level == 8) == (shares[token] > 7 / 8), token
        assert abs(level / 8 - shares[token]) <= 1 / 8, token


def test_kept_tokens_are_highlighted_as_the_api_tells(open_page: OpenPage, put: Put, bundled_service: str) -> None:
    cache = put(policy="snapkv", compression_ratio=0.75)
    with Client(bundled_service) as client:
        found = client.caches.kept(cache["id"])
    page = open_page(f"kept/{cache['id']}")
    require_shares(page, expected(found), found.tokens)
    page.get_by_role("combobox", name="Layer").select_option("1")
    require_shares(page, expected(found, 1), found.tokens)
    page.get_by_role("combobox", name="Head").select_option("0")
    require_shares(page, expected(found, 1, 0), found.tokens)
    page.get_by_role("combobox", name="Layer").select_option("")
    require_shares(page, expected(found), found.tokens)
    assert page.locator(".heat").inner_text().replace("\n", "") == "".join(found.tokens).replace("\n", "")


def test_a_token_tells_which_heads_kept_it(open_page: OpenPage, put: Put, bundled_service: str) -> None:
    cache = put(policy="ems", compression_ratio=0.75)
    with Client(bundled_service) as client:
        found = client.caches.kept(cache["id"])
    assert found.merged_counts is not None
    page = open_page(f"kept/{cache['id']}")
    some = next(token for token, count in enumerate(found.merged_counts) if count and token > 20)
    page.get_by_label("Number of the token").fill(str(some))
    card = page.get_by_role("complementary", name="The chosen token")
    card.get_by_text(f"{found.merged_counts[some]} merged it into another").wait_for()
    for layer in found.layers:
        states = card.locator("tbody tr").nth(layer.layer).locator(".head").all_inner_texts()
        kept = [some in layer.positions(head) for head in range(len(layer.kept))]
        assert [state.endswith("kept") for state in states] == kept
    assert found.meaning in card.inner_text()
    for token, (_, _, merged) in drawn(page).items():
        assert merged == (found.merged_counts[token] > 0)


def test_the_caller_s_own_text_is_shown_if_it_is_the_document(open_page: OpenPage, put: Put) -> None:
    text = document(61)
    cache = put(document=text, keep_source=False, compression_ratio=0.5)
    page = open_page(f"kept/{cache['id']}")
    page.get_by_label("Or paste its text").fill(text + " And more.")
    page.get_by_role("button", name="Show the kept tokens").click()
    page.get_by_text("state_conflict").wait_for()
    page.get_by_label("Or paste its text").fill(text)
    page.get_by_role("button", name="Show the kept tokens").click()
    assert len(drawn(page)) > 300


def test_a_long_document_has_few_elements_and_any_token_can_be_seen(open_page: OpenPage, put: Put, soak: bool) -> None:
    words = 9000 if soak else 3000
    cache = put(document=document(62, words=words), policy="keydiff", compression_ratio=0.5)
    tokens = cache["tokens"]["document"]
    page = open_page(f"kept/{cache['id']}")
    assert len(drawn(page)) < 2600 < tokens
    page.get_by_label("Number of the token").fill(str(tokens - 2))
    page.wait_for_function(_SEEN, arg=tokens - 2)
    assert page.evaluate("document.querySelectorAll('.heat span').length") < 4000
    canvas = page.get_by_role("img", name="Kept entries").bounding_box()
    assert canvas is not None
    page.mouse.click(canvas["x"] + canvas["width"] / 2, canvas["y"] + 3)
    page.locator(".heat .chosen").wait_for()
    chosen = int(page.locator(".heat .chosen").get_attribute("data-token") or 0)
    assert abs(chosen - tokens / 2) < tokens / 50


_SEEN = """
(token) => {
  const box = document.querySelector(".heat").getBoundingClientRect();
  const mark = document.querySelector(`.heat .chosen[data-token="${token}"]`)?.getBoundingClientRect();
  return mark && mark.top >= box.top && mark.bottom <= box.bottom;
}
"""


def test_a_hundred_thousand_tokens_are_drawn_at_once(open_page: OpenPage) -> None:
    """The parts of the view, given an answer of the size that no small model has."""
    page = open_page("kept")
    told = page.evaluate(_HUGE)
    assert told["spans"] < 4000
    assert told["seconds"] < 10, told


_HUGE = """
async () => {
  const { h, render } = await import("/page/vendor/preact.js");
  const { HeatText } = await import("/page/heat-text.js");
  const { Kept } = await import("/page/heat.js");
  const tokens = Array.from({ length: 100_000 }, (_, at) => (at % 97 ? " harbour" : "\\n"));
  const bits = btoa(String.fromCharCode(...new Uint8Array(12_500).map((_, at) => at % 251)));
  const layers = Array.from({ length: 8 }, (_, layer) => ({ layer, kept: Array(8).fill(bits), merged: null }));
  const started = performance.now();
  const counts = tokens.map((_, at) => at % 65);
  const kept = new Kept({ tokens, counts, merged_counts: null, num_heads: 64, num_layers: 8, layers });
  const box = document.body.appendChild(document.createElement("div"));
  render(h(HeatText, { kept, shares: kept.shares(), chosen: 50_000, onChoose() {} }), box);
  while (!box.querySelector(".chosen")) await new Promise(requestAnimationFrame);
  return { spans: box.querySelectorAll("span").length, seconds: (performance.now() - started) / 1000 };
}
"""
