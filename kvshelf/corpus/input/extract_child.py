"""Extracts the text of one PDF or HTML file, from standard input to standard output, in an expendable process.

`kvshelf.corpus.input.extract` starts this file by its path. It imports nothing of kvshelf, so it starts quickly, and
limits its memory and processor time before it reads a byte. Its output is one word on a line (`text` or the reason of
a failure), followed by the text in UTF-8 or the library's message.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Final

NOT_SHOWN: Final = ["[hidden]", "[style*='display:none']", "[style*='display: none']", "template"]
"""Selectors of elements that no reader sees, as far as one can tell without style sheets."""


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


def html_text(data: bytes, charset: str) -> Iterable[str]:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5
    from resiliparse.parse.html import HTMLParserException

    encoding = map_encoding_to_html5(charset) if charset else detect_encoding(data, from_html_meta=True)
    try:
        page = bytes_to_str(data, encoding or "utf-8", errors="replace")
        return [extract_plain_text(page, skip_elements=NOT_SHOWN)]
    except HTMLParserException as error:  # as in a browser, any text is HTML: the only failure is its size
        raise MemoryError from error


Reader = Callable[[bytes, str], Iterable[str]]
READERS: Final[dict[str, Reader]] = {"pdf": pdf_text, "html": html_text}


def cleaned(pieces: Iterable[str]) -> bytes:
    """The pieces in UTF-8 with blank lines between them. Removes NUL and replaces invalid characters."""
    text = "\n\n".join(piece.strip() for piece in pieces if piece.strip()).replace("\0", "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def extracted(kind: str, charset: str, max_bytes: int) -> tuple[str, bytes]:
    """The word of the output, and what follows it."""
    try:
        text = cleaned(READERS[kind](sys.stdin.buffer.read(), charset))
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
    kind, charset, max_bytes, memory_bytes, cpu_s = sys.argv[1:]
    bound(int(memory_bytes), int(cpu_s))
    word, behind = extracted(kind, charset, int(max_bytes))
    sys.stdout.buffer.write(word.encode() + b"\n" + behind)
