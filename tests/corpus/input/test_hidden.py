"""What a page hides from its readers is not its text."""

from __future__ import annotations

import pytest

from kvshelf.corpus.input.extract_child import declarations, html_text
from tests.timing import least_s

HIDING = [
    'style="display:none"',
    'style="DISPLAY:NONE"',
    'style="display : none"',
    'style="display:\tnone ;"',
    'style="color:red;display:none!important;display:block"',
    'style="display:/* a; b */none"',
    'style="display:none;display:bogus"',
    'style="d\\69splay:none"',
    "style='background:url(a;display:block);display:none'",
    'STYLE="Display:None"',
    'style="display&#58;none"',
    'style="visibility:hidden"',
    'style="Visibility: COLLAPSE"',
    'style="opacity:0"',
    'style="opacity:.0%"',
    'style="font-size:0"',
    'style="font-size: 0.0px"',
    'style="font: 0/0 a"',
    'style="font: bold 0px serif"',
    'style="content-visibility:hidden"',
    'style="height:0;overflow:hidden"',
    "hidden",
    'HIDDEN="until-found"',
]
SHOWING = [
    'style="display:block"',
    'style="display:none;display:block"',
    "style=\"background:url('display:none')\"",
    "style=\"content:';display:none'\"",
    'style="--x:display:none"',
    'style="/* display:none */"',
    'style="display:nonesuch"',
    'style="opacity:0.5"',
    'style="font-size:10px"',
    'style="font: 12px serif"',
    'style="font-weight:0"',
    'style="height:0"',
    'style="visibility:visible"',
    'aria-hidden="true"',
    'class="hidden"',
    'data-x="display:none"',
    'style="display"',
    'style=""',
]


def text(page: str) -> str:
    (text,) = html_text(page.encode(), "utf-8")
    return " ".join(text.split())


@pytest.mark.parametrize("attribute", HIDING)
def test_hidden_elements_are_not_text(attribute: str) -> None:
    assert text(f"<p>before</p><div {attribute}>secret <b>and <i>more</i></b></div><p>after</p>") == "before after"


@pytest.mark.parametrize("attribute", SHOWING)
def test_shown_elements_are_text(attribute: str) -> None:
    assert text(f"<p>before</p><div {attribute}>told <b>and <i>more</i></b></div>") == "before told and more"


@pytest.mark.parametrize("tag", ["template", "noscript", "datalist", "dialog", "script", "style"])
def test_elements_that_no_browser_shows(tag: str) -> None:
    assert text(f"<p>before</p><{tag}>secret</{tag}><p>after</p>") == "before after"


def test_an_open_dialog_and_a_folded_part_are_text() -> None:
    assert text("<dialog open>one</dialog><details><summary>two</summary> three</details>") == "one two three"


def test_a_descendant_may_show_itself_again() -> None:
    page = '<div style="visibility:hidden">a<p>b</p><p style="visibility:visible">c<b>d</b></p>e</div>f'
    assert text(page) == "cd f"
    page = '<div style="font-size:0">a<span style="font-size:16px">b</span><i style="font-size:2em">c</i></div>'
    assert text(page) == "b", "a common way to join blocks; twice nothing is nothing"
    page = '<div style="font-size:0"><p style="visibility:hidden;font-size:9px">a</p></div>'
    assert text(page) == ""
    page = '<div style="visibility:hidden"><p style="display:none">a<b style="visibility:visible">b</b></p></div>c'
    assert text(page) == "c"


def test_declarations() -> None:
    values = declarations("Color : RED ; font:italic 12pt/1.5 'a;b' ! important; font-size:0; width:")
    assert values == {"color": "red", "font-size": "12pt", "width": ""}


def test_styles_take_time_in_proportion_to_their_length() -> None:
    def read(count: int) -> None:
        for unit in ("a:(", "/*", '"', "\\", ";", "a:b!important;", "0e", "(''"):
            declarations(unit * count)
            declarations("font:" + unit * count)
        declarations("font:" + "1" * count)

    assert least_s(lambda: read(40_000), 3) < 8 * least_s(lambda: read(10_000))


@pytest.mark.parametrize("element", ['<!-- a --><i style="color:red">a</i>', '<i style="visibility:hidden">a'])
def test_a_page_takes_time_in_proportion_to_its_styled_elements(element: str) -> None:
    """Beside each other and within each other: 1,600 took 6 s, and four times as many sixteen times as long."""
    assert least_s(lambda: text(element * 6400), 3) < 8 * least_s(lambda: text(element * 1600))
