"""Where the service puts bytes: the configuration of the store, and temporary files.

A module of its own, because processes without torch import the settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvshelf.errors import StorageFull
from kvshelf.service.settings import Settings
from kvshelf.store.url import StoreConfig


def store_config(settings: Settings) -> StoreConfig:
    return StoreConfig(
        url=settings.store,
        default_ttl_s=settings.default_ttl_s,
        max_ttl_s=settings.max_ttl_s,
        tenant_max_caches=settings.tenant_max_caches,
        tenant_max_bytes=settings.tenant_max_bytes,
        tenant_promised_bytes=settings.tenant_promised_bytes,
        promised_bytes=settings.promised_bytes,
        encryption_key_file=settings.encryption_key_file,
    )


@contextmanager
def space_for(what: str) -> Iterator[None]:
    """For blocks that write temporary files: turns `OSError`, such as that of a full disk, into `StorageFull`."""
    try:
        yield
    except OSError as error:
        raise StorageFull(f"no place for {what}: {error.strerror}; make room for temporary files") from error
