"""Compress a long document's KV cache once, put it on a shelf, query it a thousand times."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvshelf import errors
from kvshelf._extras import needs_extra

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.client import AsyncClient, Client
    from kvshelf.engine.engine import Engine
    from kvshelf.engine.parallel.engine import ParallelEngine
    from kvshelf.store.url import open_store

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "CompressedCache",
    "Engine",
    "ParallelEngine",
    "__version__",
    "errors",
    "open_store",
]

# Imported on first use, so that `from kvshelf import Client` needs neither torch nor ray.
_HOMES = {
    "AsyncClient": "kvshelf.client",
    "Client": "kvshelf.client",
    "CompressedCache": "kvshelf.artifact.cache",
    "Engine": "kvshelf.engine.engine",
    "ParallelEngine": "kvshelf.engine.parallel.engine",
    "open_store": "kvshelf.store.url",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvshelf' has no attribute {name!r}")
    with needs_extra("serve", purpose=f"kvshelf.{name}"):
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
