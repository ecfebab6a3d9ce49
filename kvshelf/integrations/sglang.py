"""The class that SGLang loads as a dynamic backend of HiCache: it gives pages of documents that the shelf has.

A page's key is a hash of all tokens up to its end, so SGLang asks for what stands in the prompt. Only a cache with
every entry of its document has these pages: policy `full`, under any codec, with its token ids kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

import structlog
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from kvshelf.errors import CacheExpired, CacheNotFound, InvalidRequest, KvshelfError, PolicyUnsupported
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import TokenIds
from kvshelf.store.url import StoreConfig

log = structlog.get_logger("kvshelf.sglang")

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
        """Raises `InvalidRequest` where the model or the store is missing, and for a wrong type."""
        own = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        own.setdefault("store", os.environ.get("KVSHELF_STORE"))
        for name, about in (("model", "the folder of the model"), ("store", "the URL of the shelf")):
            if not isinstance(own.get(name), str):
                raise InvalidRequest(f"hicache-storage-backend-extra-config needs {name}, {about}", param=name)
        if type(own.get("refresh_s", 0)) not in (int, float):
            raise InvalidRequest(f"refresh_s is {own['refresh_s']!r:.80}; give seconds", param="refresh_s")
        return cls(**own)


class ShelfStorage(HiCacheStorage):  # type: ignore[misc]  # without SGLang its type is unknown
    """Pages of stored documents for SGLang's prefetch. What SGLang computes itself is not kept: a write does nothing
    and says that it is done, because SGLang would log each one that is not.

    Raises `InvalidRequest` and `PolicyUnsupported` where SGLang's settings are not for it. Identities are compared
    before a page is given, and digests checked; a cache that is refused or damaged is no hit, and the log says why.
    """

    def __init__(self, storage_config: Any, _: Mapping[str, Any]) -> None:
        conflicts = {
            "latent attention (MLA)": storage_config.is_mla_model,
            "pipeline parallelism": storage_config.pp_size > 1,
            "context parallelism": storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1,
        }
        if refused := [what for what, there in conflicts.items() if there]:
            raise PolicyUnsupported(f"kvshelf's backend does not take {', '.join(refused)}", param="model")
        self._settings = SglangSettings.parse(storage_config.extra_config or {})
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
        theirs = (pool.layer_num, pool.head_num * self._ranks, pool.head_dim)
        same = all(theirs == (len(layers), layer.kv_heads, layer.key_dim) for layer in layers)
        if pool.layout not in _LAYOUTS or not same:
            raise PolicyUnsupported(
                f"SGLang's pages are {pool.layout} of {theirs[0]} layers with {theirs[1]} heads of {theirs[2]}, and "
                f"kvshelf fills {', '.join(_LAYOUTS)} of the {len(layers)} of {self._settings.model!r} with "
                f"{layers[0].kv_heads} of {layers[0].key_dim}",
                param="model",
            )
        self._heads = slice(self._rank * pool.head_num, (self._rank + 1) * pool.head_num)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many of the keys, from the first one on, are pages of stored documents."""
        with self._lock:
            if keys and keys[0] not in self._pages and time.monotonic() - self._listed_at > self._settings.refresh_s:
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
        """Learn the pages of caches that came since. A store that does not answer has none."""
        self._listed_at = time.monotonic()
        tenant, after = self._settings.tenant, None
        try:
            while True:
                listed = self._store.list(tenant=tenant, policy="full", limit=100, after=after)
                for manifest in listed.data:
                    if manifest.id not in self._listed:
                        self._listed.add(manifest.id)
                        self._learn(manifest)
                if not listed.has_more:
                    return
                after = listed.data[-1].id
        except KvshelfError as error:
            log.warning("the shelf cannot be listed", code=error.code, error=error.message)

    def _learn(self, manifest: Manifest) -> None:
        whole = manifest.kept_tokens == manifest.num_tokens and not manifest.identity["parent"]
        if not whole or manifest.source is None or manifest.source.form != "tokens":
            return
        source = self._store.source(manifest.id, tenant=self._settings.tenant)
        assert isinstance(source, TokenIds)
        for number, key in enumerate(page_keys(source.ids, self.mem_pool_host.page_size)):
            self._pages.setdefault(key, PageOfCache(manifest.id, number))

    def _page(self, page: PageOfCache) -> Tensor | None:
        size = self.mem_pool_host.page_size
        try:
            entries = self._entries(page.cache_id)[:, :, page.number * size : (page.number + 1) * size]
        except KvshelfError as error:
            log.warning("refused", cache_id=page.cache_id, code=error.code, error=error.message)
            if not isinstance(error, CacheNotFound | CacheExpired):  # one that is gone may come again
                self._refused.add(page.cache_id)
            self._listed = {*self._refused}  # others may have the same pages
            self._pages = {key: at for key, at in self._pages.items() if at.cache_id != page.cache_id}
            return None
        return entries.permute(_LAYOUTS[self.mem_pool_host.layout]).flatten()

    def _entries(self, cache_id: str) -> Tensor:
        """Keys and values `[2, layers, N, heads, D]` of a cache. The last one stays in memory: its pages are asked in
        batches."""
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
