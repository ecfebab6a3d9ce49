"""How much each layer's keys change where a document is read in blocks: the sensitivity by which policy `epicache`
shares a budget among layers (EpiCache, arXiv 2509.17396).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvshelf.engine.attention.function import Attended, ForwardContext

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

BLOCK: Final = 128
SINK: Final = 4
"""Tokens of a block, and first tokens that every block sees. Not the paper's block of 2,048, which is of conversations
of tens of thousands of tokens: these are a share as large of the documents that heads are measured on."""


class _Keys(ForwardContext):
    """The keys of each layer, `[kv_heads, N, D]` fp32."""

    def __init__(self) -> None:
        self.of_layers: list[Tensor] = []

    def after_attention(self, layer: Attended) -> None:
        self.of_layers.append(layer.keys[0].float())


def key_similarities(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Of each layer, the mean cosine over heads and tokens between its keys in a prefill of `ids` and in one where a
    token sees the first `SINK` and those of its own block: what the blocks before have lost all of their entries for.
    ids: more than `SINK`. The first `SINK` are not counted, which are the same in both."""
    whole = _keys(engine, ids, range(len(ids)))
    sums = torch.zeros(len(whole), dtype=torch.float64)
    for start in range(SINK, len(ids), BLOCK):
        end = min(start + BLOCK, len(ids))
        block = _keys(engine, [*ids[:SINK], *ids[start:end]], [*range(SINK), *range(start, end)])
        for layer, (keys, others) in enumerate(zip(whole, block, strict=True)):
            sums[layer] += cosine_similarity(keys[:, start:end], others[:, SINK:], dim=-1).double().mean(0).sum().cpu()
    similarities: list[float] = (sums / (len(ids) - SINK)).tolist()
    return similarities


def _keys(engine: Engine, ids: Sequence[int], positions: Sequence[int]) -> list[Tensor]:
    """The keys of each layer in a forward pass over these tokens at these positions."""
    seen = _Keys()
    tokens = torch.tensor([list(ids)])
    inputs = {
        "input_ids": tokens,
        "position_ids": torch.tensor([list(positions)]),
        "attention_mask": torch.ones_like(tokens),  # or a gap in the positions would separate two sequences
    }
    device = engine.passes.devices.inputs
    engine.passes.causal({name: tensor.to(device) for name, tensor in inputs.items()}, seen)
    return seen.of_layers
