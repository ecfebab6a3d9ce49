"""How sparse and how redundant the heads of a model are, by equations 3 and 4 of EMS (arXiv 2412.08521).

A head is sparse if few tokens have most of the score of equation 2, and redundant if many tokens have an earlier one
much like them; the constants are the paper's (figure 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from rich.table import Table
from torch import Tensor

from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.engine import Engine
from kvshelf.kernels.column_sums import column_sums
from kvshelf_bench.measure import Spread
from kvshelf_bench.options import ratio

MASS: Final = 0.95
"""Zeta of equation 3: the part of a head's score that the fewest tokens have whose count `sparsity` is about."""

WINDOW: Final = 32
"""Last rows of a document whose attention is s_loc of equation 2."""

TAU: Final = 0.6
"""Tau of equation 4: similarity from which a token is redundant."""

_ROWS: Final = 512  # of a similarity matrix at once


@dataclass(frozen=True)
class Head:
    """One KV head, means over documents. sparsity: p of eq. 3, share of the tokens outside the smallest set with `MASS`
    of the Global-Local score (eq. 2, the mean over the group's query heads, not pooled). redundancy: mean over tokens
    of the greatest similarity to an earlier token, R = cos(k_i, k_j) * cos(v_i, v_j); 0 for the first token. mergeable:
    r of eq. 4, share of the tokens for which that is at least `TAU`. A token is not compared with itself, as its 1
    would make every token redundant."""

    layer: int
    kv_head: int
    sparsity: float
    redundancy: float
    mergeable: float


def heads(engine: Engine, documents: Sequence[Sequence[int]]) -> list[Head]:
    """All heads of the layers that see a whole document, by documents given as token ids, of at least two tokens."""
    by_document: list[dict[int, Tensor]] = []
    for ids in documents:
        statistics = HeadStatistics()
        inputs = {"input_ids": torch.tensor([list(ids)]), "position_ids": torch.arange(len(ids)).unsqueeze(0)}
        engine.passes.causal(
            {name: tensor.to(engine.passes.devices.inputs) for name, tensor in inputs.items()}, statistics
        )
        by_document.append(statistics.of_layers)
    return [
        Head(layer, head, *(fmean(float(one[layer][number, head]) for one in by_document) for number in range(3)))
        for layer in sorted(by_document[0])
        for head in range(by_document[0][layer].shape[1])
    ]


class HeadStatistics(ForwardContext):
    """Of one document: sparsity, redundancy and mergeable, `[3, kv_heads]` for each layer."""

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}

    def after_attention(self, layer: Attended) -> None:
        if layer.window is not None or layer.chunk is not None:
            return  # policies reduce no such layer
        queries, keys, values = layer.queries[0], layer.keys[0], layer.values[0]
        lse = None if layer.lse is None else layer.lse[0]
        everywhere, local = column_sums(queries, keys, layer.scaling, min(WINDOW, keys.shape[1]), lse=lse)
        aligned = everywhere * (local.mean(dim=1, keepdim=True) / everywhere.mean(dim=1, keepdim=True))
        sums = torch.maximum(aligned, local)  # eq. 2, [q_heads, N]
        nearest = nearest_similarity(keys, values)
        redundancy, mergeable = nearest.mean(dim=1), (nearest >= TAU).float().mean(dim=1)
        scores = sums.view(len(keys), -1, keys.shape[1]).mean(dim=1)
        self.of_layers[layer.layer_idx] = torch.stack([sparsity(scores), redundancy, mergeable]).cpu()


def sparsity(scores: Tensor) -> Tensor:
    """p of eq. 3, `[kv_heads]`: share of the tokens outside the smallest set with `MASS` of scores `[kv_heads, N]`."""
    ranked = scores.sort(dim=1, descending=True).values.cumsum(dim=1)
    needed = 1 + (ranked < MASS * ranked[:, -1:]).sum(dim=1)
    return 1 - needed / scores.shape[1]


def nearest_similarity(keys: Tensor, values: Tensor) -> Tensor:
    """max(R_k,1:k) of eq. 4, `[kv_heads, N]`: of each token the similarity of the most similar earlier one, 0 of the
    first. keys: `[kv_heads, N, D]`, values: `[kv_heads, N, Dv]`. Keys that point apart are not similar, whatever their
    values."""
    k, v = (F.normalize(rows.float(), dim=2) for rows in (keys, values))
    maxima = []
    for start in range(0, k.shape[1], _ROWS):
        rows = slice(start, start + _ROWS)
        columns = slice(start + _ROWS)
        alike = (k[:, rows] @ k[:, columns].mT).clamp_min(0) * (v[:, rows] @ v[:, columns].mT)  # [kv_heads, rows, seen]
        earlier = torch.ones_like(alike, dtype=torch.bool).tril(start - 1)
        maxima.append(alike.masked_fill(~earlier, -torch.inf).amax(dim=2))
    nearest = torch.cat(maxima, dim=1)
    nearest[:, 0] = 0
    return nearest


def heads_table(heads: Sequence[Head]) -> Table:
    """One row for each layer: median and range over its KV heads."""
    table = Table("layer", "heads", "sparsity", "redundancy", "mergeable")
    table.title = (
        f"share of tokens beyond those that receive {MASS:.0%} of the attention; similarity of the most similar other "
        f"token; share of tokens where it is {TAU} or more"
    )
    for layer in dict.fromkeys(head.layer for head in heads):
        of_layer = [head for head in heads if head.layer == layer]
        columns = ([getattr(head, name) for head in of_layer] for name in ("sparsity", "redundancy", "mergeable"))
        table.add_row(str(layer), str(len(of_layer)), *(ratio(Spread.of(column)) for column in columns))
    return table
