"""Which frequency chunks of a model's heads find the best keys by themselves, for selector fasa.

After FASA: RoPE turns the channels c and c + D / 2 of a head together, at a frequency of their own. A few of these
chunks alone name most of the keys that a query attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.exclusions import rope_to_undo
from kvshelf.errors import InvalidRequest
from kvshelf.model.calibration import Chunks, ChunksOrigin
from kvshelf.training.journal import SearchJournal
from kvshelf.training.observing import measured_layers

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

TOP: Final = 256
"""Keys of a query whose agreement is measured; a quarter of what a shorter document has."""

_ROWS: Final = 32
"""Queries of a document that are measured, out of its second half."""

LEAST_TOKENS: Final = 64
"""Tokens of the shortest document."""


def agreement(queries: Tensor, keys: Tensor) -> Tensor:
    """`[kv_heads, D / 2]`: the share of the keys of greatest product that are also those of greatest product by one
    chunk alone, the mean over query heads and rows. queries: `[kv_heads, group, N, D]`, keys: `[kv_heads, N, D]`."""
    tokens, half = keys.shape[1], keys.shape[2] // 2
    before = tokens // 2
    top = min(TOP, before // 4)
    rows = torch.linspace(before, tokens - 1, min(_ROWS, tokens - before), device=keys.device).long()
    queries, candidates = queries[:, :, rows], keys[:, None, :before]  # the keys that every row sees
    best = torch.zeros(*queries.shape[:3], before, dtype=torch.bool, device=keys.device)
    best.scatter_(3, (queries @ candidates.transpose(2, 3)).topk(top, dim=3).indices, True)
    agreements = []
    for chunk in range(half):
        channels = [chunk, chunk + half]
        by_chunk = queries[..., channels] @ candidates[..., channels].transpose(2, 3)
        agreements.append(best.gather(3, by_chunk.topk(top, dim=3).indices).float().mean((1, 2, 3)))
    return torch.stack(agreements, dim=1)


def find_chunks(
    engine: Engine,
    documents: Sequence[Sequence[int]],
    *,
    journal: Path | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> Chunks:
    """Measure the chunks of `engine`'s model on documents, as token ids, of at least `LEAST_TOKENS`.

    journal: the file from which an interrupted search goes on; removed in the end. report: called with the number of
    documents read, and of all. Raises `InvalidRequest` for shorter documents, and `PolicyUnsupported` for a model
    whose layers do not all rotate the keys of heads.
    """
    rope_to_undo(engine.facts)
    if min(map(len, documents), default=0) < LEAST_TOKENS:
        raise InvalidRequest(f"chunks are measured on documents of {LEAST_TOKENS} tokens or more", param="text")
    all_ids = canonical_json([list(ids) for ids in documents])
    search = SearchJournal(journal, digest("kvshelf.chunks.search", engine.identity.fingerprint(), all_ids))
    total: list[Tensor] = []
    for number, ids in enumerate(documents):
        layers = [torch.tensor(layer) for layer in search.step(_agreements, engine, ids)]
        total = layers if not total else [a + b for a, b in zip(total, layers, strict=True)]
        report(number + 1, len(documents))
    search.remove()
    agreements = [tuple(map(tuple, (layer / len(documents)).tolist())) for layer in total]
    tokens = sum(map(len, documents))
    origin = ChunksOrigin(model=engine.name, documents=len(documents), tokens=tokens, top=TOP)
    return Chunks(weights=engine.identity.weights, agreement=tuple(agreements), origin=origin)


def _agreements(engine: Engine, ids: Sequence[int]) -> list[list[list[float]]]:
    """The agreement of each chunk on one document, by layer and KV head."""

    def measure(queries: Tensor, keys: Tensor) -> Tensor:
        return agreement(queries.float().view(len(keys), -1, *queries.shape[1:]), keys.float()).cpu()

    return [layer.tolist() for layer in measured_layers(engine, ids, measure)]
