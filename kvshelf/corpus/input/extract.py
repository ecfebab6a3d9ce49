"""Files that people made: which types are read, the text of PDF and HTML (extra `documents`), and the pages of a PDF as
images (extra `pages`).

Files may be hostile, so each is parsed in a process of its own (`extract_child.py`), without the caller's environment
and with limits on memory and processor time that the system enforces. A thread cannot be ended, and shares memory.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from kvshelf._extras import install_command
from kvshelf.api.options import MAX_IMAGE_PIXELS, MAX_IMAGES, MAX_PIXELS
from kvshelf.corpus.input.expendable import ended_by, run
from kvshelf.errors import BodyTooLarge, InvalidRequest, MissingExtra, NoWorker, UnsupportedMediaType

Kind = Literal["text", "pdf", "html"]

_CHILD: Final = Path(__file__).with_name("extract_child.py")
_LIBRARIES: Final[dict[Kind, str]] = {"pdf": "pypdf", "html": "resiliparse"}

_PDF_TYPES: Final = ("application/pdf", "application/x-pdf")
_HTML_TYPES: Final = ("text/html", "application/xhtml+xml")
_ANY_TYPE: Final = ("", "application/octet-stream")
_TEXT_TYPES: Final = ("application/json", "application/xml", "application/javascript", "application/x-ndjson",
    "application/yaml", "application/x-yaml", "application/toml", "application/x-sh", "application/sql")  # fmt: skip

_PDF: Final = b"%PDF-"
_MAGIC: Final = {
    _PDF: "a PDF",
    b"PK\x03\x04": "a ZIP archive, as office documents and e-books are",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an office document of the old kind",
    b"{\\rtf": "rich text (RTF)",
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"(\xb5/\xfd": "compressed with zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"\x89PNG\r\n": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"\x7fELF": "a program",
}
"""First bytes of files that are not text, whatever media type their sender gives."""

_INSIDE: Final = {_PDF: re.compile(rb"\d \d+ obj\b"), b"{\\rtf": re.compile(rb"\\[a-z]")}
"""Patterns behind the first bytes of these kinds, even of files that have only characters."""

_NO_TEXT: Final = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
"""Control characters that no text has. An escape colours the log of a terminal."""


@dataclass(frozen=True)
class Upload:
    """A file as it arrived. `media_type` is the sender's, in lower case without parameters, or empty; `charset` is the
    media type's parameter, or empty."""

    data: bytes
    media_type: str = ""
    charset: str = ""

    @cached_property
    def file_type(self) -> str | None:
        """The type by the first bytes, with an article, such as "a PDF"; None if the file may be text."""
        magic = next((magic for magic in _MAGIC if self.data.startswith(magic)), None)
        return None if magic is None or self._is_text_about(magic) else _MAGIC[magic]

    def _is_text_about(self, magic: bytes) -> bool:
        """Whether the file is a text that merely begins with the characters of `magic`."""
        inside = _INSIDE.get(magic)
        if not magic.isascii() or (inside is not None and inside.search(self.data, len(magic))):
            return False
        if len(self.data.translate(None, _NO_TEXT)) < len(self.data):
            return False
        try:
            self.data.decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def kind(self) -> Kind:
        """The kind by media type and first bytes. Raises `UnsupportedMediaType` if they disagree or are unsupported."""
        magic = self.file_type
        if self.media_type in _PDF_TYPES and self.data.startswith(_PDF):
            return "pdf"
        if magic == _MAGIC[_PDF] and self.media_type in _ANY_TYPE:
            return "pdf"
        if magic is not None or self.media_type in _PDF_TYPES:
            raise _not_taken(f"the file is {magic or 'no PDF'}, and was sent as {self.media_type or 'no type'!r:.80}")
        begin = self.data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        begins_as_html = begin.startswith((b"<!doctype html", b"<html"))
        if self.media_type in _HTML_TYPES or (self.media_type in _ANY_TYPE and begins_as_html):
            return "html"
        if self.media_type.startswith("text/") or self.media_type in _TEXT_TYPES + _ANY_TYPE:
            return "text"
        if self.media_type.endswith(("+json", "+xml")) and not self.media_type.startswith("image/"):
            return "text"
        raise _not_taken(f"the file was sent as {self.media_type!r:.80}")


def plain_text(data: bytes, name: str, param: str | None = None) -> str:
    """The text of a file in UTF-8, without a byte order mark: the same however it is sent, so one file has one id.
    name: of the file, for messages. Raises `InvalidRequest` about `param`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"byte {error.start} of {name} is not valid UTF-8; convert it, or leave it out if it is no text",
            param=param,
        ) from error
    if "\0" in text:
        raise InvalidRequest(f"{name} holds zero bytes, so it is no text; leave it out", param=param)
    if not text.strip():
        raise InvalidRequest(f"{name} is empty; a document has at least one character", param=param)
    return text


def _not_taken(what: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"{what}; send UTF-8 text, PDF or HTML with its own media type", param="file")


@dataclass(frozen=True)
class ExtractLimits:
    """Limits for one file, named as the settings of a service. max_body_bytes: of its text."""

    max_body_bytes: int
    extract_memory_bytes: int
    extract_cpu_s: float


def missing_library(kind: Kind) -> str | None:
    """The library that reads files of this kind, if it is not installed."""
    library = _LIBRARIES.get(kind)
    return library if library is not None and importlib.util.find_spec(library) is None else None


async def extract(upload: Upload, kind: Literal["pdf", "html"], limits: ExtractLimits, name: str) -> str:
    """The text of a PDF or HTML file. name: of the file, for messages; the text about the file follows it. Raises
    `InvalidRequest` (with a one-word `reason`) or `BodyTooLarge` for bad files, `NoWorker` if no process starts. The
    process ends with this call."""
    return await _read_in_child(kind, upload.charset, upload.data, limits, name)


async def page_images(data: bytes, limits: ExtractLimits, name: str, dots: int) -> list[str]:
    """The pages of a PDF as PNG files in base64, each an `ImagePart`'s data, at so many dots an inch. Raises as
    `extract`, and `InvalidRequest` before any page is drawn where they are more images or pixels than a document may
    have; `MissingExtra`."""
    if not data.startswith(_PDF):
        raise InvalidRequest(f"{name} is no PDF; give others as they are, or as --image", param="file")
    for library, module in {"pypdfium2": "pypdfium2", "pillow": "PIL"}.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"{name}: pages as images need {library}; run: {install_command('pages')}")
    bounds = f"{dots} {MAX_IMAGES} {MAX_IMAGE_PIXELS} {MAX_PIXELS}"
    return (await _read_in_child("pages", bounds, data, limits, name)).split()


async def _read_in_child(kind: str, how: str, data: bytes, limits: ExtractLimits, name: str) -> str:
    """The text that a process of `extract_child` makes of a file. kind, how: its first arguments."""
    bounds = (limits.max_body_bytes, limits.extract_memory_bytes, math.ceil(limits.extract_cpu_s))
    command = [sys.executable, "-PB", str(_CHILD), kind, how, *map(str, bounds)]
    try:
        code, output = await run(command, data, limits.max_body_bytes + 1024)
    except OSError as exc:
        raise NoWorker(f"no process could be started to read the file: {exc.strerror}; try again later") from exc
    word, _, text = output.partition(b"\n")
    if code == 0 and word == b"text":
        return text.decode()
    raise _refusal(name, limits, word.decode() if code == 0 else ended_by(code), text.decode(errors="replace"))


def _refusal(name: str, limits: ExtractLimits, reason: str, detail: str) -> InvalidRequest | BodyTooLarge:
    if reason == "long":
        most = limits.max_body_bytes
        message = f"{name} has {detail} bytes of text or images, more than {most}; send less"
        return BodyTooLarge(message, param="file", max_body_bytes=most)
    because = {
        "encrypted": "is encrypted with a password; save it without one",
        "empty": "has no text, perhaps only scanned pages; run text recognition (OCR) on it first",
        "pages": f"has {detail} pages, and a document takes 1 to {MAX_IMAGES} as images; split it, or send its text",
        "pixels": f"has {detail}; lower the dots an inch (--dpi), or split it",
        "malformed": f"cannot be read ({detail}); repair it, or send its text",
        "expands": f"expands to an unreasonable size ({detail}); send its text",
        "memory": f"needs more than {limits.extract_memory_bytes} bytes of memory to be read (extract_memory_bytes); "
        "split it, or send its text",
        "time": f"needs more than {limits.extract_cpu_s:g} s of processor time to be read (extract_cpu_s); split it, "
        "or send its text",
    }
    cannot = "cannot be read: the parser crashed, as it may on hostile files; send its text"
    return InvalidRequest(f"{name} {because.get(reason, cannot)}", param="file", reason=reason)
