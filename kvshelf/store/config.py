"""How a store is opened, as plain values that can be written down, shown, and sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvshelf.store.base import Store
from kvshelf.store.index import Quota
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.url import open_store


@dataclass(frozen=True)
class StoreConfig:
    """The URL of a store, and the rules that every process which uses it must share (`Rules` has their meaning).

    It holds the path of the key file, never a key: each process reads the file itself, at the same absolute path.
    """

    url: str = field(repr=False)
    default_ttl_s: float | None = None
    max_ttl_s: float | None = None
    tenant_max_caches: int | None = None
    tenant_max_bytes: int | None = None
    encryption_key_file: str | None = None

    def open(self) -> Store:
        """Raises as `open_store` does, and `InvalidRequest` for a key file that cannot be used."""
        return open_store(self.url, rules=self.rules())

    def rules(self) -> Rules:
        return Rules(
            default_ttl_s=self.default_ttl_s,
            max_ttl_s=self.max_ttl_s,
            quota=Quota(max_caches=self.tenant_max_caches, max_bytes=self.tenant_max_bytes),
            keyring=None if self.encryption_key_file is None else Keyring.read(self.encryption_key_file),
        )
