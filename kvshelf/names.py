"""Names of files as texts: on Linux a name is bytes, and need not be UTF-8."""

from __future__ import annotations

import os


def as_text(path: str | os.PathLike[str]) -> str:
    """A path as a text that can be written anywhere: bytes that are not UTF-8 as `\\xe9`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_text(path: str) -> bool:
    """Whether a path is UTF-8."""
    return as_text(path) == path
