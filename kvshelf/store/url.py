"""A store is chosen by one URL."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvshelf.errors import InvalidRequest
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore

_SUPPORTED = "this version supports disk:///absolute/path"
_TIER = re.compile(r"\+[a-z]+:")


def open_store(url: str) -> Store:
    """Open the shelf that a URL names, and make it if it is not there: `disk:///absolute/path`.

    Raises `InvalidRequest` for any other URL (redis and ram tiers are not in this version), `StoreUnavailable` when the
    place does not work.
    """
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss", "ram") or _TIER.search(url):
        raise _refused(url, "redis and ram tiers are not in this version")
    if parts.scheme != "disk":
        raise _refused(url, f"unknown scheme {parts.scheme!r}")
    if parts.query or parts.fragment:
        extra = (parts.query or parts.fragment).split("=")[0]
        raise _refused(url, f"it has no parameter {extra!r}")
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/" or "\0" in path or ".." in Path(path).parts:
        raise _refused(url, "the path must be absolute, with three slashes and without '..'")
    return DiskStore.open(Path(path))


def _refused(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"cannot open the store {url!r}: {why}; {_SUPPORTED}", param="store")
