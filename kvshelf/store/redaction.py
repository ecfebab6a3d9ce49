"""URLs as people may see them."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?<=://)(?!/).*@", re.DOTALL)


def without_secret(url: str) -> str:
    """A URL, or several joined by `+`, with user and password replaced by stars.

    Everything before the last @ goes, so that a password that should have been quoted does not show either. The path
    of a folder (three slashes) stays.
    """
    return _SECRET.sub("***@", url)
