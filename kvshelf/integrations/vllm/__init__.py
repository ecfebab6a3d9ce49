"""vLLM answers from stored caches: a KV connector, and what builds its requests (docs/use/engines.md).

Names are imported on first use, because whoever builds requests needs no vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvshelf._extras import needs_extra

if TYPE_CHECKING:
    from kvshelf.integrations.vllm.connector import ShelfConnector
    from kvshelf.integrations.vllm.request import ShelfRequest, shelf_request

__all__ = ["ShelfConnector", "ShelfRequest", "shelf_request"]

_HOMES = {"ShelfConnector": "connector", "ShelfRequest": "request", "shelf_request": "request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra("serve,vllm", purpose=f"{__name__}.{name}"):
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
