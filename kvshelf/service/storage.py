"""Where the service puts bytes: the configuration of the store, which needs torch, and temporary files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from kvshelf.errors import StorageFull
from kvshelf.service.settings import Settings
from kvshelf.store.url import StoreConfig


def store_config(settings: Settings) -> StoreConfig:
    rules = [field.name for field in fields(StoreConfig) if field.name != "url"]
    return StoreConfig(settings.store, **{name: getattr(settings, name) for name in rules})


@contextmanager
def space_for(what: str) -> Iterator[None]:
    """For blocks that write temporary files: turns `OSError`, such as that of a full disk, into `StorageFull`."""
    try:
        yield
    except OSError as error:
        raise StorageFull(f"no place for {what}: {error.strerror}; make room for temporary files") from error
