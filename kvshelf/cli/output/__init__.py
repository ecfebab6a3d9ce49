"""Where the commands write: results to stdout, everything else to stderr.

Names, labels, answers and messages are texts of others. A terminal must not obey what is in them, and none of them may
end a command, whatever stdout can print. So every command writes through this module.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvshelf.names import as_text

if TYPE_CHECKING:
    from pydantic import BaseModel

_CONTROL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_TURNING: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the order in which text is shown
_BREAKING: Final = "\u2028\u2029"
_SURROGATES: Final = "\ud800-\udfff"
_HARMFUL: Final = re.compile(f"[{_CONTROL}{_TURNING}{_BREAKING}{_SURROGATES}]")


def harmless(text: str) -> str:
    """The text with each character that a terminal would obey, line breaks and tabs aside, as its escape in Python."""
    return _HARMFUL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def say(*parts: object, end: str = "\n") -> None:
    """Write a line on stdout, at once."""
    texts = (as_text(part) if isinstance(part, PathLike) else str(part) for part in parts)
    print(*map(harmless, texts), end=end, flush=True)


def say_json(value: BaseModel | Any, **options: Any) -> None:
    """Write a value as JSON on stdout, at once. options: of `json.dumps`."""
    text = json.dumps(value, ensure_ascii=False, **options) if _is_plain(value) else value.model_dump_json()
    text = _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    print(text if _prints(text) else json.dumps(json.loads(text), **options), flush=True)


def _is_plain(value: object) -> bool:
    return isinstance(value, dict | list | str)


def _prints(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def prepare() -> None:
    """Make stdout and stderr write what their encoding lacks as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def abandon() -> None:
    """Let what stdout did not take go, so that the end of the process does not try once more."""
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class HarmlessConsole(Console):
    """A console whose texts are `harmless`. Its own colours are not text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)
