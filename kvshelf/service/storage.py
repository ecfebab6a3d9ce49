"""How every process of the service opens the store. Beside the settings, because those are read without torch."""

from __future__ import annotations

from kvshelf.service.settings import Settings
from kvshelf.store.config import StoreConfig


def store_config(settings: Settings) -> StoreConfig:
    return StoreConfig(
        url=settings.store,
        default_ttl_s=settings.default_ttl_s,
        max_ttl_s=settings.max_ttl_s,
        tenant_max_caches=settings.tenant_max_caches,
        tenant_max_bytes=settings.tenant_max_bytes,
        encryption_key_file=settings.encryption_key_file,
    )
