"""The pages of a PDF as images: what they show is drawn, and what is too much or no PDF is refused by name."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BytesIO

import anyio
import pytest
from PIL import Image

from kvshelf.corpus.input.extract import ExtractLimits, page_images
from kvshelf.errors import BodyTooLarge, InvalidRequest, MissingExtra
from tests.service.files import LINE, bomb, encrypted, laborious, own_ancestor, page_content, pdf, pdf_of

LIMITS = ExtractLimits(64 << 20, 1 << 30, 60.0)


def drawn(data: bytes, dots: int = 72, limits: ExtractLimits = LIMITS) -> list[Image.Image]:
    pages = anyio.run(page_images, data, limits, "report.pdf", dots)
    return [Image.open(BytesIO(base64.b64decode(page))) for page in pages]


@pytest.fixture(autouse=True)
def _extra() -> None:
    pytest.importorskip("pypdfium2", reason="the extra pages")


def test_each_page_is_an_image_at_its_dots() -> None:
    first, second = drawn(pdf(LINE, ""))
    assert (first.format, first.mode, first.size) == ("PNG", "RGB", (612, 792))
    assert first.getcolors(1 << 16) != second.getcolors() == [(612 * 792, (255, 255, 255))]
    left, top, right, bottom = first.convert("L").point(lambda value: 255 * (value < 128)).getbbox() or (0,) * 4
    assert (left in range(70, 76), top in range(75, 95), right < 400, bottom < 100) == (True,) * 4, (
        "where it is written"
    )
    assert drawn(pdf(LINE), 144)[0].size == (1224, 1584)
    again = drawn(pdf(LINE))[0]
    assert again.tobytes() == first.tobytes(), "the same pixels, so the same cache"


def sized(width: int, height: int, pages: int = 1) -> bytes:
    return pdf_of([page_content(LINE)] * pages).replace(b"0 0 612 792", b"0 0 %d %d" % (width, height))


@pytest.mark.parametrize(
    ("data", "dots", "reason", "words"),
    [
        (pdf(*[LINE] * 33), 72, "pages", "33 pages, and a document takes 1 to 32"),
        (sized(14400, 14400), 72, "pixels", "page 1 of 14400 x 14400 pixels, and 16777216"),
        (sized(3000, 3000, 8), 72, "pixels", "72000000 pixels together, and 67108864"),
        (encrypted(pdf(LINE), "secret"), 72, "encrypted", "encrypted with a password"),
        (b"%PDF-1.7\n" + b"no more " * 20, 72, "malformed", "report.pdf cannot be read"),
        (b"plain text", 72, None, "is no PDF"),
        (b"", 72, None, "is no PDF"),
    ],
    ids=["pages", "a large page", "all pages", "a password", "broken", "text", "nothing"],
)
def test_what_is_too_much_or_no_pdf_is_refused_before_a_page_is_drawn(
    data: bytes, dots: int, reason: str | None, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refusal:
        drawn(data, dots, ExtractLimits(64 << 20, 1 << 30, 5.0))
    assert refusal.value.details.get("reason") == reason
    assert refusal.value.param == "file"


@pytest.mark.parametrize("make", [bomb, partial(laborious, 30_000), own_ancestor])
def test_hostile_files_end_in_a_page_or_a_refusal(make: Callable[[], bytes]) -> None:
    with suppress(InvalidRequest):
        assert drawn(make())


def test_limits_are_those_of_the_process() -> None:
    with pytest.raises(BodyTooLarge, match="bytes of text or images"):
        drawn(pdf(LINE), 300, ExtractLimits(1024, 1 << 30, 60.0))
    with pytest.raises(InvalidRequest, match=r"report\.pdf ") as refusal:
        drawn(bomb(), limits=ExtractLimits(64 << 20, 200 << 20, 1.0))
    assert refusal.value.details["reason"] in ("memory", "time", "crashed")


@pytest.mark.parametrize(("module", "library"), [("pypdfium2", "pypdfium2"), ("PIL", "pillow")])
def test_without_a_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"need {library}; run: .*pages"):
        drawn(pdf(LINE))
