"""What a token of a long document costs on the disk, as a written file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept
from kvshelf.store.disk import DiskStore
from tests.store.caches import from_heads, make_identity

LAYERS, HEADS, DIM = 32, 8, 128  # of Llama-3.1-8B
TOKENS, KEPT = 32_768, 4_096
CODEC = "int4:group=64,residual=0"


def an_eighth() -> CompressedCache:
    """An eighth of the entries in bfloat16. Each head keeps other positions, at random: they cost the most then.

    All layers share their keys and values, which spares memory and changes no size.
    """
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(KEPT, DIM, generator=generator).to(torch.bfloat16) for _ in range(HEADS)]

    def layer() -> Kept:
        chosen = [torch.randperm(TOKENS, generator=generator)[:KEPT].sort().values for _ in range(HEADS)]
        return from_heads(rows, rows, chosen)

    return CompressedCache(tuple(layer() for _ in range(LAYERS)), TOKENS, TOKENS, make_identity(TOKENS))


@pytest.mark.slow
def test_bytes_per_document_token_of_llama_8b(home: Path) -> None:
    cache = an_eighth()
    assert cache.layers[0].keys.nbytes * 2 * LAYERS * (TOKENS // KEPT) == 131_072 * TOKENS, "the whole cache"
    with DiskStore.open(home) as store:
        cache_id = store.put(cache, codec=CODEC).id
        (file,) = (home / "blobs").iterdir()
        nbytes = file.stat().st_size / TOKENS
        found = store.get(cache_id)
    assert nbytes <= 4_750
    assert 4_640 < nbytes < 4_641, "docs/internals/format.md says where these bytes go"
    assert found.codec == CODEC
    assert all(
        torch.equal(a.entry_positions, b.entry_positions) for a, b in zip(found.layers, cache.layers, strict=True)
    )
