"""Uploaded files: which types are accepted, and the text of PDF and HTML (extra `documents`).

Files may be hostile, and the libraries that parse them expect honest ones. So each file is parsed in its own process
(`extract_child.py`), without the service's environment and with limits on memory and processor time that the system
enforces. A thread would not do: it cannot be ended, and it shares the front end's memory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvshelf.errors import BodyTooLarge, DeadlineExceeded, InvalidRequest, NoWorker, UnsupportedMediaType
from kvshelf.service.fair_queue import FairQueue
from kvshelf.service.http.expendable import ended_by, run
from kvshelf.service.settings import Settings

Kind = Literal["text", "pdf", "html"]

AT_ONCE: Final = 2
"""Files that are parsed at once; others wait for their tenant's turn."""

_CHILD: Final = Path(__file__).with_name("extract_child.py")
_LIBRARIES: Final[dict[Kind, str]] = {"pdf": "pypdf", "html": "resiliparse"}

_PDF_TYPES: Final = ("application/pdf", "application/x-pdf")
_HTML_TYPES: Final = ("text/html", "application/xhtml+xml")
_ANY_TYPE: Final = ("", "application/octet-stream")
_TEXT_TYPES: Final = ("application/json", "application/xml", "application/javascript", "application/x-ndjson",
    "application/yaml", "application/x-yaml", "application/toml", "application/x-sh", "application/sql")  # fmt: skip

_MAGIC: Final = {
    b"%PDF-": "a PDF",
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


@dataclass(frozen=True)
class Upload:
    """A file as it arrived. `media_type` is the sender's, in lower case without parameters, or empty; `charset` is the
    media type's parameter, or empty."""

    data: bytes
    media_type: str = ""
    charset: str = ""

    @property
    def kind(self) -> Kind:
        """The kind by media type and first bytes. Raises `UnsupportedMediaType` if they disagree or are unsupported."""
        found = next((what for magic, what in _MAGIC.items() if self.data.startswith(magic)), None)
        is_pdf = found == "a PDF"
        if is_pdf and self.media_type in _PDF_TYPES + _ANY_TYPE:
            return "pdf"
        if found is not None or self.media_type in _PDF_TYPES:
            raise _not_taken(f"the file is {found or 'no PDF'}, and was sent as {self.media_type or 'no type'!r:.80}")
        if self.media_type in _HTML_TYPES or (self.media_type in _ANY_TYPE and _begins_as_html(self.data)):
            return "html"
        if self.media_type.startswith("text/") or self.media_type in _TEXT_TYPES + _ANY_TYPE:
            return "text"
        if self.media_type.endswith(("+json", "+xml")) and not self.media_type.startswith("image/"):
            return "text"
        raise _not_taken(f"the file was sent as {self.media_type!r:.80}")


def _begins_as_html(data: bytes) -> bool:
    begin = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return begin.startswith((b"<!doctype html", b"<html"))


def _not_taken(what: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"{what}; send UTF-8 text, PDF or HTML with its own media type", param="file")


class Extractor:
    """Extracts the text of uploaded files. One per service, used on its event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turns = FairQueue("reading PDF and HTML", AT_ONCE, settings.max_queued_requests)

    async def text(self, upload: Upload, kind: Literal["pdf", "html"], tenant: str) -> str:
        """The text of a file. Raises `UnsupportedMediaType` without the extra, `InvalidRequest` (with a one-word
        `reason`) or `BodyTooLarge` for bad files, `QueueFull`, `DeadlineExceeded`. The child ends with this call."""
        library = _LIBRARIES[kind]
        if importlib.util.find_spec(library) is None:
            raise UnsupportedMediaType(
                f"to take {kind.upper()}, the service needs {library}, which is not installed there. Install the extra "
                "documents of kvshelf there, or send the text of the document",
                param="file",
            )
        settings = self._settings
        limits = (settings.max_body_bytes, settings.extract_memory_bytes, math.ceil(settings.extract_cpu_s))
        command = [sys.executable, "-PB", str(_CHILD), kind, upload.charset, *map(str, limits)]
        try:
            async with self._turns.turn(tenant, settings.request_deadline_s) as left_s, asyncio.timeout(left_s):
                code, said = await run(command, upload.data, settings.max_body_bytes + 1024)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the {kind.upper()} was not read in {settings.request_deadline_s:g} s") from exc
        except OSError as exc:
            raise NoWorker(f"no process could be started to read the file: {exc.strerror}; try again later") from exc
        word, _, behind = said.partition(b"\n")
        if code == 0 and word == b"text":
            return behind.decode()
        raise self._refusal(kind, word.decode() if code == 0 else ended_by(code), behind.decode(errors="replace"))

    def _refusal(self, kind: str, reason: str, detail: str) -> InvalidRequest | BodyTooLarge:
        settings, what = self._settings, f"file: this {kind.upper()}"
        if reason == "long":
            limit: dict[str, Any] = {"max_body_bytes": settings.max_body_bytes}
            return BodyTooLarge(
                f"{what} has {detail} bytes of text, more than {settings.max_body_bytes}; send less, or raise the "
                "service's max_body_bytes",
                param="file",
                **limit,
            )
        because = {
            "encrypted": "is encrypted with a password; save it without one",
            "empty": "has no text, perhaps only scanned pages; run text recognition (OCR) on it first",
            "malformed": f"cannot be read ({detail}); repair it, or send its text",
            "expands": f"expands to an unreasonable size ({detail}); send its text",
            "memory": f"needs more than {settings.extract_memory_bytes} bytes of memory to be read "
            "(extract_memory_bytes); split it, or send its text",
            "time": f"needs more than {settings.extract_cpu_s:g} s of processor time to be read (extract_cpu_s); split "
            "it, or send its text",
        }
        cannot = "cannot be read: the parser crashed, as it may on hostile files; send its text"
        return InvalidRequest(f"{what} {because.get(reason, cannot)}", param="file", reason=reason)
