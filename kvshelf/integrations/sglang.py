"""The class that SGLang loads as a dynamic backend of HiCache: it gives pages of documents that the shelf has.

A page's key is a hash of all tokens up to its end, so SGLang asks for the pages of its prompt.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import torch
from packaging.version import Version
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from kvshelf.artifact.identity import digest
from kvshelf.engine.inputs.prepare import as_bytes
from kvshelf.errors import CacheExpired, CacheNotFound, InvalidRequest, PolicyUnsupported, SourceNotKept, StoreError
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import TokenIds
from kvshelf.store.url import StoreConfig

log = structlog.get_logger("kvshelf.sglang")

_SINCE: Final = "0.5.23"
"""The version whose keys were read: its `storage_namespace_seed` has a request's salt and extra key in them."""

_PASSING: Final = (CacheNotFound, CacheExpired, SourceNotKept, StoreError)
"""Errors after which a cache may be given later."""

_LAYOUTS: Final = {
    "layer_first": (0, 1, 2, 3, 4),
    "page_first": (0, 2, 1, 3, 4),
    "page_first_direct": (0, 1, 2, 3, 4),
    "page_head": (0, 3, 2, 1, 4),
}
"""By SGLang's name: the order of `[2, layers, page, heads, D]` in a flat page of its host memory."""


def page_keys(ids: Sequence[int], page: int) -> Iterator[str]:
    """SGLang's keys of the whole pages of a prompt: SHA-256 of the key before and of the page's ids, 4 bytes each."""
    before = b""
    for first in range(0, len(ids) - page + 1, page):
        before = sha256(before + b"".join(id_.to_bytes(4, "little") for id_ in ids[first : first + page])).digest()
        yield before.hex()


class PageOfCache(NamedTuple):
    """The page at `number` of a stored document."""

    cache_id: str
    number: int


@dataclass(frozen=True)
class SglangSettings:
    """`hicache_storage_backend_extra_config` beside SGLang's own fields. model: the folder of the model that SGLang
    runs. store: the URL of the shelf, by default `KVSHELF_STORE` of the environment; encryption_key_file: absolute path
    of the keys of a sealed one. Whoever may ask this SGLang reads the documents of `tenant`. refresh_s: how long an
    unknown page is taken to be on no shelf before the shelf is listed again."""

    model: str
    store: str
    tenant: str = "default"
    encryption_key_file: str | None = None
    refresh_s: float = 10.0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> SglangSettings:
        """Raises `InvalidRequest` where the model or the store is missing, for a wrong type, and for SGLang's
        `interface_v1`, under which it calls other methods."""
        if config.get("interface_v1"):
            raise InvalidRequest("kvshelf's backend has no interface_v1; leave it out", param="interface_v1")
        fields = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        fields.setdefault("store", os.environ.get("KVSHELF_STORE"))
        for name, about in (("model", "the folder of the model"), ("store", "the URL of the shelf")):
            if not isinstance(fields.get(name), str):
                raise InvalidRequest(f"hicache-storage-backend-extra-config needs {name}, {about}", param=name)
        if type(fields.get("refresh_s", 0)) not in (int, float):
            raise InvalidRequest(f"refresh_s is {fields['refresh_s']!r:.80}; give seconds", param="refresh_s")
        return cls(**fields)


class ShelfStorage(HiCacheStorage):  # type: ignore[misc]  # without SGLang its type is unknown
    """Pages of stored documents for SGLang's prefetch: of caches that have every entry of their document (policy
    `full`, under any codec) and its token ids. What SGLang computes itself is not kept: a write does nothing and says
    that it is done, because SGLang would log each one that is not.

    Raises `InvalidRequest` and `PolicyUnsupported` where SGLang's settings are not for it. Identities are compared
    before a page is given, and digests checked; a cache that is refused or damaged is no hit, and the log says why.
    """

    def __init__(self, storage_config: Any, _: Mapping[str, Any]) -> None:
        conflicts = {
            "latent attention (MLA)": storage_config.is_mla_model,
            "pipeline parallelism": storage_config.pp_size > 1,
            "context parallelism": storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1,
        }
        if refused := [what for what, holds in conflicts.items() if holds]:
            raise PolicyUnsupported(f"kvshelf's backend does not take {', '.join(refused)}", param="model")
        if Version(version("sglang")) < Version(_SINCE):
            raise PolicyUnsupported(
                f"SGLang is {version('sglang')}, whose keys may leave out the salt and the adapter of a request; "
                f"kvshelf's backend takes {_SINCE} and newer",
                param="model",
            )
        self._settings = SglangSettings.parse(storage_config.extra_config or {})
        runs = storage_config.model_name  # the served name, which is by default the folder
        if runs and Path(runs).is_dir() and Path(runs).resolve() != Path(self._settings.model).resolve():
            raise InvalidRequest(f"SGLang runs {runs!r}, and model is {self._settings.model!r}", param="model")
        self._store: Store = StoreConfig(
            self._settings.store, encryption_key_file=self._settings.encryption_key_file
        ).open()
        self._rank, self._ranks = storage_config.tp_rank, storage_config.tp_size
        self._lock = threading.Lock()  # SGLang looks up and reads in threads of its own
        self._pages: dict[str, PageOfCache] = {}
        self._listed, self._refused = set[str](), set[str]()
        self._listed_at = float("-inf")
        self._open: tuple[str, Tensor] | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises `PolicyUnsupported` for a layout or heads that are not those of the model's plain pages."""
        super().register_mem_pool_host(mem_pool_host)
        pool, dtype = mem_pool_host, str(mem_pool_host.dtype).removeprefix("torch.")
        self._model = ReadingModel.of(self._settings.model, dtype)
        layers = self._model.layers
        pages = (pool.layer_num, pool.head_num * self._ranks, pool.head_dim)
        same = all(pages == (len(layers), layer.kv_heads, layer.key_dim) for layer in layers)
        if pool.layout not in _LAYOUTS or not same:
            raise PolicyUnsupported(
                f"SGLang's pages are {pool.layout} of {pages[0]} layers with {pages[1]} heads of {pages[2]}, and "
                f"kvshelf fills {', '.join(_LAYOUTS)} of the {len(layers)} of {self._settings.model!r} with "
                f"{layers[0].kv_heads} of {layers[0].key_dim}",
                param="model",
            )
        self._heads = slice(self._rank * pool.head_num, (self._rank + 1) * pool.head_num)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many of the keys, from the first one on, are pages of stored documents."""
        with self._lock:
            stale = time.monotonic() - self._listed_at > self._settings.refresh_s
            if stale and any(key not in self._pages for key in keys):
                self._list()
            return next((at for at, key in enumerate(keys) if key not in self._pages), len(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,  # noqa: ARG002 - the arguments are SGLang's
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[Tensor | None]:
        """Flat pages in SGLang's layout and dtype; None from the first one on that cannot be read."""
        pages: list[Tensor | None] = []
        with self._lock:
            self._forget_ended({self._pages[key].cache_id for key in keys if key in self._pages})
            for key in keys:
                page = self._page(self._pages[key]) if key in self._pages else None
                if page is None:
                    return [*pages, *[None] * (len(keys) - len(pages))]
                pages.append(page)
        return pages

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], target_location, target_sizes)[0]

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        return True

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None:
        self._store.close()

    def _list(self) -> None:
        """Learn the pages of new caches; a store that does not answer has none. An error would end SGLang's thread."""
        self._listed_at = time.monotonic()
        tenant, after = self._settings.tenant, None
        try:
            while True:
                listed = self._store.list(tenant=tenant, policy="full", limit=100, after=after)
                for manifest in listed.data:
                    if manifest.id not in self._listed:
                        try:
                            self._learn(manifest)
                        except Exception as error:
                            self._refuse(manifest.id, error)
                if not listed.has_more:
                    return
                after = listed.data[-1].id
        except Exception as error:
            log.warning("the shelf cannot be listed", error=repr(error))

    def _learn(self, manifest: Manifest) -> None:
        """Raises as `Store.source`, and `PolicyUnsupported` for ids that are not those of the cache: whoever stores it
        says what they are. A template that writes the day hides them: then the digest is of others."""
        whole = manifest.kept_tokens == manifest.num_tokens and not manifest.identity["parent"]
        if not whole or manifest.source is None or manifest.source.form != "tokens":
            return
        source = self._store.source(manifest.id, tenant=self._settings.tenant)
        assert isinstance(source, TokenIds)
        document = digest("kvshelf.tokens", as_bytes(source.ids))
        if document != manifest.identity["document"]:
            raise PolicyUnsupported(
                f"the token ids that are kept with {manifest.id} are not known to be its document's: their digest is "
                f"{document[:12]}, and its is {manifest.identity['document'][:12]}",
                param="source",
            )
        self._listed.add(manifest.id)
        for number, key in enumerate(page_keys(source.ids, self.mem_pool_host.page_size)):
            self._pages.setdefault(key, PageOfCache(manifest.id, number))

    def _page(self, page: PageOfCache) -> Tensor | None:
        size = self.mem_pool_host.page_size
        try:
            entries = self._entries(page.cache_id)[:, :, page.number * size : (page.number + 1) * size]
        except Exception as error:
            self._refuse(page.cache_id, error)
            return None
        return entries.permute(_LAYOUTS[self.mem_pool_host.layout]).flatten()

    def _forget_ended(self, cache_ids: Iterable[str]) -> None:
        """Refuse those that were deleted, erased or have expired: what is in memory would not show it."""
        for cache_id in cache_ids:
            try:
                self._store.stat(cache_id, tenant=self._settings.tenant)
            except Exception as error:
                self._refuse(cache_id, error)

    def _refuse(self, cache_id: str, error: Exception) -> None:
        """Give no page of a cache: never, or until the shelf lists it again."""
        log.warning("refused", cache_id=cache_id, error=repr(error))
        if not isinstance(error, _PASSING):
            self._refused.add(cache_id)
        if self._open is not None and self._open[0] == cache_id:
            self._open = None
        pages = {key: at for key, at in self._pages.items() if at.cache_id != cache_id}
        if len(pages) < len(self._pages):
            self._listed.clear()  # others may have the same pages
        self._pages = pages
        self._listed |= self._refused

    def _entries(self, cache_id: str) -> Tensor:
        """Keys and values `[2, layers, N, heads, D]` of a cache. The last one stays in memory for its next pages."""
        if self._open is None or self._open[0] != cache_id:
            self._open = None  # before the next one takes its memory
            with self._store.open_cache(cache_id, tenant=self._settings.tenant) as cache:
                self._model.require_own(cache, self._store.transforms)
                cache.read(together=True)
                layers = [
                    torch.stack(self._model.layer(cache, index, cache.num_tokens, self._heads))
                    for index in range(len(self._model.layers))
                ]
            self._open = cache_id, torch.stack(layers, 1)
        return self._open[1]
