"""Extracts the text of one PDF or HTML file, or draws the pages of a PDF, from standard input to standard output, in an
expendable process.

`kvshelf.corpus.input.extract` starts this file by its path. It imports nothing of kvshelf, so it starts quickly, and it
limits its memory and processor time before it reads a byte. Its output is one word on a line (`text` or the reason of a
failure), then the text in UTF-8 or the library's message.
"""

from __future__ import annotations

import base64
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import BytesIO
from typing import Any, Final

NOT_SHOWN: Final = ["[hidden]", "template", "noscript", "datalist", "dialog:not([open])"]
"""Selectors of elements that no reader sees. What only a style sheet hides counts as seen, as does what is only hidden
from screen readers (`aria-hidden`), is folded (`details`) or lies beside the page for screen readers."""

_DISPLAY: Final = re.compile(
    "none|block|inline|inline-block|flow-root|flex|inline-flex|grid|inline-grid|contents|list-item|table|inline-table|"
    "table-(row|cell|caption|column|column-group|row-group|header-group|footer-group)|ruby|"
    "inherit|initial|unset|revert|revert-layer"
)
_VISIBILITY: Final = re.compile("visible|initial|hidden|collapse")
_ESCAPE: Final = re.compile(r"\\(?:([0-9a-fA-F]{1,6})\s?|([^\n]))")
_NUMBER: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)(%|[a-z]*)", re.IGNORECASE)
_FONT_SIZE: Final = re.compile(rf"(?:^|\s)({_NUMBER.pattern})(?=\s*/|\s+\S)", re.IGNORECASE)
_RELATIVE: Final = ("%", "em", "ex", "ch", "lh", "cap", "ic")


class Refused(Exception):
    """The file yields no text. Arguments: a reason of `kvshelf.corpus.input.extract`, and a detail."""


def pdf_text(data: bytes, charset: str) -> Iterable[str]:  # noqa: ARG001 - a `Reader`
    from pypdf import PdfReader
    from pypdf.errors import LimitReachedError

    try:
        reader = PdfReader(BytesIO(data))
        # Files that merely forbid printing are encrypted with an empty password; anybody may read them.
        if reader.is_encrypted and not reader.decrypt(""):
            raise Refused("encrypted", "")
        return [page.extract_text() for page in reader.pages]
    except LimitReachedError as error:
        raise Refused("expands", str(error)) from error


def pdf_pages(data: bytes, bounds: str) -> Iterator[str]:
    """Each page as a PNG file in base64. bounds: dots an inch, most pages, most pixels of a page and of all."""
    from pypdfium2 import PdfDocument, PdfiumError

    dots, most_pages, most_of_page, most_of_all = map(int, bounds.split())
    try:
        pdf = PdfDocument(data)
    except PdfiumError as error:
        raise Refused("encrypted" if "password" in str(error).lower() else "malformed", str(error)) from error
    if not 0 < len(pdf) <= most_pages:
        raise Refused("pages", str(len(pdf)))
    scale, total = dots / 72, 0
    for number in range(len(pdf)):
        width, height = (max(1, math.ceil(points * scale)) for points in pdf.get_page_size(number))
        total += width * height
        if width * height > most_of_page:
            raise Refused("pixels", f"a page {number + 1} of {width} x {height} pixels, and {most_of_page} are taken")
    if total > most_of_all:
        raise Refused("pixels", f"pages of {total} pixels together, and {most_of_all} are taken")
    for page in pdf:
        page.render(scale=scale).to_pil().convert("RGB").save(file := BytesIO(), "PNG")
        yield base64.b64encode(file.getvalue()).decode()


def html_text(data: bytes, charset: str) -> Iterable[str]:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5
    from resiliparse.parse.html import HTMLParserException, HTMLTree

    encoding = map_encoding_to_html5(charset) if charset else detect_encoding(data, from_html_meta=True)
    try:
        tree = HTMLTree.parse(bytes_to_str(data, encoding or "utf-8", errors="replace"))
        hide(tree.document)
        return [extract_plain_text(tree, skip_elements=NOT_SHOWN)]
    except HTMLParserException as error:  # as in a browser, any text is HTML: the only failure is its size
        raise MemoryError from error


def hide(document: Any) -> None:
    """Give `hidden` to the elements of a page that their style hides, and remove the texts that it hides in them. One
    walk: a collection of resiliparse makes all its elements again for each of them."""
    from resiliparse.parse.html import NodeType

    parents: list[tuple[Any, tuple[str, ...]]] = [(document, ())]
    hidden_texts = []
    while parents:
        parent, by = parents.pop()
        child = parent.first_child
        while child is not None:
            if child.type == NodeType.TEXT:
                hidden_texts += [child] if by else []
            elif child.type == NodeType.ELEMENT:
                style = child.getattr("style")
                if style is not None and is_hidden(style):
                    child.setattr("hidden", "")
                parents.append((child, by if style is None else inherited(style, by)))
            child = child.next
    for text in hidden_texts:
        text.decompose()


@lru_cache(4096)
def is_hidden(style: str) -> bool:
    """Whether a style hides an element with all that is in it."""
    styles = declarations(style)
    number = _NUMBER.fullmatch(styles.get("opacity", ""))
    clips = any(
        styles.get(name, "").startswith(("hidden", "clip")) for name in ("overflow", "overflow-x", "overflow-y")
    )
    flat = any(_is_zero(styles.get(name, "")) for name in ("width", "height", "max-width", "max-height"))
    return (
        styles.get("display") == "none"
        or styles.get("content-visibility") == "hidden"
        or (number is not None and float(number[1]) <= 0)
        or (clips and flat)
    )


@lru_cache(4096)
def inherited(style: str, by: tuple[str, ...]) -> tuple[str, ...]:
    """The properties by which the text of an element with this style is hidden. by: its parent's."""
    styles = declarations(style)
    states = dict.fromkeys(by, True)
    if "visibility" in styles:
        states["visibility"] = styles["visibility"] in ("hidden", "collapse")
    if "font-size" in styles:
        size = _NUMBER.fullmatch(styles["font-size"])
        if _is_zero(styles["font-size"]):
            states["font-size"] = True
        elif size is None or size[2].lower() not in _RELATIVE:  # a share of nothing is nothing
            states["font-size"] = False
    return tuple(name for name, hidden in states.items() if hidden)


def _is_zero(value: str) -> bool:
    number = _NUMBER.fullmatch(value.removeprefix("calc(").removesuffix(")").strip())
    return number is not None and float(number[1]) == 0


def declarations(style: str) -> dict[str, str]:
    """The declarations of a style attribute that count, in lower case: the last valid one of a property, unless an
    earlier one is important. `font` counts as its size."""
    values: dict[str, str] = {}
    important: set[str] = set()
    for declaration in _split(style):
        name, colon, value = declaration.partition(":")
        name, value = _plain(name), _plain(value)
        value, mark, priority = value.rpartition("!") if value.endswith("important") else (value, "", "")
        is_important = bool(mark) and priority.strip() == "important"
        value = value.strip()
        if name == "font":
            size = _FONT_SIZE.search(value)
            name, value = "font-size", size[1] if size else "medium"
        valid = {"display": _DISPLAY, "visibility": _VISIBILITY}.get(name)
        if not colon or (valid is not None and not valid.fullmatch(value)):
            continue
        if name in important and not is_important:
            continue
        values[name] = value
        important |= {name} if is_important else set()
    return values


def _split(style: str) -> Iterator[str]:
    """The declarations of a style attribute, without comments. A semicolon in a string, in brackets or escaped ends
    none."""
    part: list[str] = []
    closers: list[str] = []
    place = 0
    while place < len(style):
        char = style[place]
        if char == "\\":
            part.append(style[place : place + 2])
            place += 2
            continue
        if closers and closers[-1] in "\"'":
            if char == closers[-1]:
                closers.pop()
        elif style.startswith("/*", place):
            end = style.find("*/", place + 2)
            part.append(" ")
            place = len(style) if end < 0 else end + 2
            continue
        elif char in "\"'":
            closers.append(char)
        elif char in "([{":
            closers.append({"(": ")", "[": "]", "{": "}"}[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif char == ";" and not closers:
            yield "".join(part)
            part.clear()
            place += 1
            continue
        part.append(char)
        place += 1
    yield "".join(part)


def _plain(text: str) -> str:
    """In lower case, with escapes resolved and blanks as single spaces."""

    def character(match: re.Match[str]) -> str:
        code = int(match[1], 16) if match[1] else ord(match[2])
        return chr(code) if 0 < code < 0x110000 else "\ufffd"

    return " ".join(_ESCAPE.sub(character, text).lower().split())


Reader = Callable[[bytes, str], Iterable[str]]
"""Reads a file. The second argument is a charset, or bounds."""

READERS: Final[dict[str, Reader]] = {"pdf": pdf_text, "pages": pdf_pages, "html": html_text}


def cleaned(pieces: Iterable[str]) -> bytes:
    """The pieces in UTF-8 with blank lines between them. Removes NUL and replaces invalid characters."""
    text = "\n\n".join(piece.strip() for piece in pieces if piece.strip()).replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def extracted(kind: str, how: str, max_bytes: int) -> tuple[str, bytes]:
    """The word of the output, and what follows it."""
    try:
        text = cleaned(READERS[kind](sys.stdin.buffer.read(), how))
    except Refused as refusal:
        return refusal.args[0], refusal.args[1].encode()
    except MemoryError:
        return "memory", b""
    except Exception as error:
        # On hostile files the libraries raise any exception there is.
        return "malformed", f"{type(error).__name__}: {error}"[:200].encode(errors="replace")
    if not text:
        return "empty", b""
    return ("text", text) if len(text) <= max_bytes else ("long", str(len(text)).encode())


def bound(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process, and let other work go first where processors are few."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    kind, how, max_bytes, memory_bytes, cpu_s = sys.argv[1:]
    bound(int(memory_bytes), int(cpu_s))
    word, text = extracted(kind, how, int(max_bytes))
    sys.stdout.buffer.write(word.encode() + b"\n" + text)
