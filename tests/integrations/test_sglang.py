"""SGLang's own factory loads the backend, and its pages are what transformers prefills; SGLang itself needs a GPU.

`make test-sglang` fetches the wheel. Of it the interface alone is imported, which needs no other package.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvshelf import Engine, open_store
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model.source import bundled_folder
from kvshelf.store.types import TokenIds

WHEEL = os.environ.get("TESTS_SGLANG_WHEEL")
if WHEEL is None:
    pytest.skip("TESTS_SGLANG_WHEEL names no wheel of SGLang: make test-sglang", allow_module_level=True)

PAGE = 16
DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 30
INTERFACE = ("environ.py", "mem_cache/hicache_storage.py", "mem_cache/storage/backend_factory.py")


@pytest.fixture(scope="module", autouse=True)
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of the interface, and no `__init__` that would import the rest."""
    folder = tmp_path_factory.mktemp("sglang")
    with zipfile.ZipFile(str(WHEEL)) as wheel:
        for name in INTERFACE:
            wheel.extract(f"sglang/srt/{name}", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@dataclass
class HostPool:
    """What the backend reads of SGLang's host memory for keys and values, and where SGLang puts its pages."""

    layout: str
    layer_num: int
    head_num: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    page_size: int = PAGE
    pages: list[Tensor] = field(default_factory=list)

    def set_from_flat_data_page(self, page: Tensor) -> None:
        """Keys and values `[2, layers, page, heads, D]`, reshaped as `MHATokenToKVPoolHost` does in 0.5.23."""
        layers, heads, size = self.layer_num, self.head_num, self.head_dim
        shape, order = {
            "layer_first": ((2, layers, PAGE, heads, size), (0, 1, 2, 3, 4)),
            "page_first": ((2, PAGE, layers, heads, size), (0, 2, 1, 3, 4)),
            "page_first_direct": ((2, layers, PAGE, heads, size), (0, 1, 2, 3, 4)),
            "page_head": ((2, heads, PAGE, layers, size), (0, 3, 2, 1, 4)),
        }[self.layout]
        self.pages.append(page.reshape(shape).permute(order))


@pytest.fixture(scope="module")
def shelf(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """A store with the document under two policies and another one as a text, and the token ids of its prompt."""
    url = f"disk://{tmp_path_factory.mktemp('shelf')}/shelf"
    encoded = tiny.encode_document(DOCUMENT)
    ids = TokenIds(tuple(encoded.token_ids), encoded.protected_prefix)
    with open_store(url) as store:
        store.put(tiny.compress(DOCUMENT, policy="full"), source=ids)
        store.put(tiny.compress(DOCUMENT[:300], policy="full"), source=DOCUMENT[:300])
        store.put(tiny.compress(DOCUMENT, policy="keydiff", compression_ratio=0.5), source=ids)
    return url, list(ids.ids)


def backend(url: str, pool: HostPool | None = None, **config: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    own = {"backend_name": "kvshelf", "module_path": "kvshelf.integrations.sglang", "class_name": "ShelfStorage"}
    fields = {name: config.pop(name) for name in ("tp_rank", "tp_size", "is_mla_model") if name in config}
    parallel = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    about = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "m"}
    extra = own | {"store": url, "model": bundled_folder("kvshelf-tiny")} | config
    made = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(**parallel | about | fields, extra_config=extra), pool
    )
    if pool is not None:
        made.register_mem_pool_host(pool)
    return made


def keys(ids: list[int]) -> list[str]:
    from kvshelf.integrations.sglang import page_keys

    return list(page_keys(ids, PAGE))


def test_keys_are_those_that_sglang_computes() -> None:
    from kvshelf.integrations.sglang import page_keys

    # recorded from `get_hash` of SGLang 0.5.23, compiled from hash_binding.cpp
    assert list(page_keys([1, 2, 3, 4, 5, 6, 7, 70000, 9], 4)) == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "cbbed74da08f7a1ae5fc51af0b7cbbf4c80237c254977ac7bfdffac729c5b984",
    ]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_are_what_transformers_prefills(
    shelf: tuple[str, list[int]], tiny: Engine, layout: str, ranks: int
) -> None:
    url, ids = shelf
    with torch.no_grad():
        past = tiny.passes.model(torch.tensor([ids]), past_key_values=DynamicCache()).past_key_values
    expected = torch.stack(
        [torch.stack([layer.keys[0], layer.values[0]]) for layer in past.layers], 1
    )  # [2, L, H, N, D]
    heads = expected.shape[2] // ranks
    asked = keys(ids)
    assert len(asked) == len(ids) // PAGE > 10
    for rank in range(ranks):
        pool = HostPool(layout, expected.shape[1], heads, expected.shape[4])
        storage = backend(url, pool, tp_rank=rank, tp_size=ranks)
        assert storage.batch_exists(asked) == len(asked)
        for page in storage.batch_get(asked):
            pool.set_from_flat_data_page(page)
        own = expected[:, :, rank * heads : (rank + 1) * heads, : len(asked) * PAGE].transpose(2, 3)
        torch.testing.assert_close(torch.cat(pool.pages, 2), own, rtol=1e-4, atol=1e-4)
        storage.close()


def of_layers(tiny: Engine) -> HostPool:
    layer = tiny.passes.layer_shapes[0]
    return HostPool("page_first", len(tiny.passes.layer_shapes), layer.kv_heads, layer.key_dim)


def test_only_whole_prompts_hit_and_writes_keep_nothing(shelf: tuple[str, list[int]], tiny: Engine) -> None:
    url, ids = shelf
    storage = backend(url, of_layers(tiny))
    other = keys([*ids[: 3 * PAGE], *ids[:PAGE], *ids[4 * PAGE :]])
    assert storage.batch_exists(other) == 3
    assert [page is None for page in storage.batch_get(other[:5])] == [False, False, False, True, True]
    assert not storage.exists(keys(ids[1:])[0])
    assert storage.set("a" * 64, torch.zeros(4))
    assert not storage.exists("a" * 64)
    assert storage.get("a" * 64) is None


def test_a_cache_of_another_model_or_damaged_is_no_hit(
    shelf: tuple[str, list[int]], tiny: Engine, tiny_folder: Path, tmp_path: Path
) -> None:
    url, ids = shelf
    other = Engine.load(str(tiny_folder), device="cpu").passes.layer_shapes
    pool = HostPool("page_first", len(other), other[0].kv_heads, other[0].key_dim)
    storage = backend(url, pool, model=str(tiny_folder))
    assert storage.batch_get(keys(ids)[:2]) == [None, None]  # not asked for before
    assert storage.batch_exists(keys(ids)) > 0
    assert storage.batch_get(keys(ids)[:2]) == [None, None]
    assert storage.batch_exists(keys(ids)) == 0

    damaged = f"disk://{tmp_path}/shelf"
    with open_store(damaged) as store:
        store.put(tiny.compress(DOCUMENT, policy="full"), source=TokenIds(tuple(ids)))
    blob = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[-1000] ^= 1
    blob.write_bytes(data)
    storage = backend(damaged, of_layers(tiny))
    assert storage.batch_exists(keys(ids)) > 0
    assert storage.get(keys(ids)[0]) is None


def test_another_cache_of_the_document_gives_the_pages_of_one_that_is_gone(tiny: Engine, tmp_path: Path) -> None:
    url, encoded = f"disk://{tmp_path}/shelf", tiny.encode_document(DOCUMENT)
    ids = list(encoded.token_ids)
    with open_store(url) as store:
        cache = tiny.compress(DOCUMENT, policy="full")
        made = [store.put(each, source=TokenIds(tuple(ids))).id for each in (cache.encoded("int8"), cache)]
        storage = backend(url, of_layers(tiny), refresh_s=0.0)
        assert storage.exists(keys(ids)[0])
        store.delete(made[1])  # the newest one, which is listed first
        plain, asked = storage.get(keys(ids)[0]), keys(ids)[:2]
        assert plain is None
        assert storage.batch_exists(asked) == 2
        rounded = storage.batch_get(asked)
        exact = tiny.export(cache, "absolute").layers[0].keys[0, :, :PAGE].transpose(0, 1)  # page_first: layer 0
        keys_read = rounded[0].view(2, PAGE, -1, *exact.shape[1:])[0, :, 0]
        assert 0 < (keys_read - exact).abs().max() < 0.05 * exact.abs().max()


def test_what_it_is_not_for_is_refused_by_name(shelf: tuple[str, list[int]], tiny: Engine) -> None:
    url, _ = shelf
    with pytest.raises(PolicyUnsupported, match="latent attention"):
        backend(url, is_mla_model=True)
    with pytest.raises(InvalidRequest, match="refresh_s is 'soon'"):
        backend(url, refresh_s="soon")
    with pytest.raises(InvalidRequest, match="needs model, the folder"):
        backend(url, model=None)
    pool = of_layers(tiny)
    pool.head_num += 1
    with pytest.raises(PolicyUnsupported, match="SGLang's pages are page_first"):
        backend(url, pool)
    with pytest.raises(PolicyUnsupported, match="layer_page_first"):
        backend(url, HostPool("layer_page_first", pool.layer_num, pool.head_num - 1, pool.head_dim))
