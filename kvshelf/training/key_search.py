"""How much each layer's keys change where a document is read in blocks: the sensitivity by which policy `epicache`
shares a budget among layers (EpiCache, arXiv 2509.17396).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvshelf.training.observing import measured_layers

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

BLOCK: Final = 128
SINK: Final = 4
"""Tokens of a block, and first tokens that every block sees. The paper's block of 2,048 is as large a share of its
conversations as this one is of the documents that heads are measured on."""


def key_similarities(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Of each layer, the mean cosine over heads and tokens between its keys in a prefill of `ids` and in one where a
    token sees only the first `SINK` tokens and its own block. ids: more than `SINK`, and these are not counted."""
    whole = measured_layers(engine, ids, _keys)
    sums = torch.zeros(len(whole), dtype=torch.float64)
    for start in range(SINK, len(ids), BLOCK):
        end = min(start + BLOCK, len(ids))
        tokens, positions = [*ids[:SINK], *ids[start:end]], [*range(SINK), *range(start, end)]
        block = measured_layers(engine, tokens, _keys, positions)
        for layer, (keys, others) in enumerate(zip(whole, block, strict=True)):
            sums[layer] += cosine_similarity(keys[:, start:end], others[:, SINK:], dim=-1).double().mean(0).sum().cpu()
    similarities: list[float] = (sums / (len(ids) - SINK)).tolist()
    return similarities


def _keys(queries: Tensor, keys: Tensor) -> Tensor:  # noqa: ARG001
    return keys.float()
