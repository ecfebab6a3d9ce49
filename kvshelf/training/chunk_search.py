"""Which frequency chunks of a model's heads tell the best keys by themselves, for selector fasa.

After FASA: RoPE turns the channels c and c + D / 2 of a head together, at a frequency of their own. A few of these
chunks alone name most of the keys that a query attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.errors import InvalidRequest
from kvshelf.model.calibration import Chunks, ChunksOrigin
from kvshelf.training.journal import SearchJournal

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine
from kvshelf.engine.exclusions import rope_to_undo

TOP: Final = 256
"""Keys of a query whose agreement is measured; a quarter of what a shorter document has."""

_ROWS: Final = 32
"""Queries of a document that are asked, out of its second half."""

LEAST_TOKENS: Final = 64
"""Tokens of the shortest document."""


class _Agreements(ForwardContext):
    """Of one document: the agreement of each chunk, `[kv_heads, D / 2]` for each layer."""

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}

    def after_attention(self, layer: Attended) -> None:
        queries, keys = layer.queries[0].float(), layer.keys[0].float()
        self.of_layers[layer.layer_idx] = agreement(queries.view(len(keys), -1, *queries.shape[1:]), keys).cpu()


def agreement(queries: Tensor, keys: Tensor) -> Tensor:
    """`[kv_heads, D / 2]`: the share of the keys of greatest product that are also those of greatest product by one
    chunk alone, the mean over query heads and rows. queries: `[kv_heads, group, N, D]`, keys: `[kv_heads, N, D]`."""
    tokens, half = keys.shape[1], keys.shape[2] // 2
    before = tokens // 2
    top = min(TOP, before // 4)
    rows = torch.linspace(before, tokens - 1, min(_ROWS, tokens - before), device=keys.device).long()
    asked, candidates = queries[:, :, rows], keys[:, None, :before]  # those that every row sees
    best = torch.zeros(*asked.shape[:3], before, dtype=torch.bool, device=keys.device)
    best.scatter_(3, (asked @ candidates.transpose(2, 3)).topk(top, dim=3).indices, True)
    found = []
    for chunk in range(half):
        channels = [chunk, chunk + half]
        by_chunk = asked[..., channels] @ candidates[..., channels].transpose(2, 3)
        found.append(best.gather(3, by_chunk.topk(top, dim=3).indices).float().mean((1, 2, 3)))
    return torch.stack(found, dim=1)


def find_chunks(
    engine: Engine,
    documents: Sequence[Sequence[int]],
    *,
    journal: Path | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> Chunks:
    """Measure the chunks of `engine`'s model on documents, given as token ids, of at least `LEAST_TOKENS`.

    journal: the file from which a search that was interrupted goes on; it is gone in the end. report: called with the
    documents read, and with their number. Raises `InvalidRequest` for shorter ones, and
    `PolicyUnsupported` for a model whose layers do not all rotate the keys of heads.
    """
    rope_to_undo(engine.facts)
    if min(map(len, documents), default=0) < LEAST_TOKENS:
        raise InvalidRequest(f"chunks are measured on documents of {LEAST_TOKENS} tokens or more", param="text")
    read = canonical_json([list(ids) for ids in documents])
    kept = SearchJournal(journal, digest("kvshelf.chunks.search", engine.identity.fingerprint(), read))
    total: list[Tensor] = []
    for number, ids in enumerate(documents):
        found = [torch.tensor(layer) for layer in kept.step(partial(_agreements, engine, ids))]
        total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
        report(number + 1, len(documents))
    kept.remove()
    agreements = [tuple(map(tuple, (layer / len(documents)).tolist())) for layer in total]
    tokens = sum(map(len, documents))
    origin = ChunksOrigin(model=engine.name, documents=len(documents), tokens=tokens, top=TOP)
    return Chunks(weights=engine.identity.weights, agreement=tuple(agreements), origin=origin)


def _agreements(engine: Engine, ids: Sequence[int]) -> list[list[list[float]]]:
    """Of one document: the agreement of each chunk, by layer and KV head."""
    seen = _Agreements()
    inputs = {"input_ids": torch.tensor([list(ids)]), "position_ids": torch.arange(len(ids)).unsqueeze(0)}
    engine.passes.causal({name: each.to(engine.passes.devices.inputs) for name, each in inputs.items()}, seen)
    return [seen.of_layers[layer].tolist() for layer in sorted(seen.of_layers)]
