"""In which directions the queries of a model's heads differ most, for selector infinigen (arXiv 2406.19707)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.model.calibration import Skews
from kvshelf.training.observing import measured_layers

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

LEAST_TOKENS: Final = 64
"""Tokens of the shortest text."""


def skew(queries: Tensor, keys: Tensor) -> Tensor:
    """`[q_heads, D, D]` fp32: the right singular vectors of each head's queries, a column each, in the descending order
    of the absolute sums of the products of queries and keys with them. queries: `[q_heads, N, D]`, keys: `[kv_heads, N,
    D]`, with their rotation (section 4.2 of the paper)."""
    queries, keys = queries.float(), keys.float().repeat_interleave(len(queries) // len(keys), dim=0)
    basis: Tensor = torch.linalg.eigh((queries.mT @ queries).double()).eigenvectors.float()
    sums = (queries @ basis).abs().sum(1) + (keys @ basis).abs().sum(1)
    order = sums.argsort(dim=1, descending=True)
    return basis.gather(2, order.unsqueeze(1).expand_as(basis))


def find_skews(engine: Engine, token_ids: Sequence[int]) -> Skews:
    """The skews of `engine`'s model over a text. Raises `InvalidRequest` below `LEAST_TOKENS` (the paper: 2,048)."""
    if len(token_ids) < LEAST_TOKENS:
        raise InvalidRequest(f"skews are found over a text of {LEAST_TOKENS} tokens or more", param="text")
    layers = measured_layers(engine, token_ids, lambda queries, keys: skew(queries, keys).half().cpu())
    return Skews(engine.identity.weights, tuple(layers))
