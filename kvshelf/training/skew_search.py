"""In which directions the queries of a model's heads differ most, for selector infinigen (arXiv 2406.19707)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.errors import InvalidRequest
from kvshelf.model.calibration import Skews

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

LEAST_TOKENS: Final = 64
"""Tokens of the shortest text."""


class _Skewing(ForwardContext):
    """Of one text: the skews of each layer."""

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}

    def after_attention(self, layer: Attended) -> None:
        self.of_layers[layer.layer_idx] = skew(layer.queries[0], layer.keys[0]).half().cpu()


def skew(queries: Tensor, keys: Tensor) -> Tensor:
    """`[q_heads, D, D]` fp32: the right singular vectors of each head's queries, a column each, in the descending order
    of the sums of what queries and keys have in them, absolute. queries: `[q_heads, N, D]`, keys: `[kv_heads, N, D]`,
    with their rotation (section 4.2 of the paper)."""
    queries, keys = queries.float(), keys.float().repeat_interleave(len(queries) // len(keys), dim=0)
    basis: Tensor = torch.linalg.eigh((queries.mT @ queries).double()).eigenvectors.float()
    sums = (queries @ basis).abs().sum(1) + (keys @ basis).abs().sum(1)
    order = sums.argsort(dim=1, descending=True)
    return basis.gather(2, order.unsqueeze(1).expand_as(basis))


def find_skews(engine: Engine, token_ids: Sequence[int]) -> Skews:
    """The skews of `engine`'s model over a text, given as token ids, at least `LEAST_TOKENS` (the paper: 2,048). Raises
    `InvalidRequest` for a shorter one."""
    if len(token_ids) < LEAST_TOKENS:
        raise InvalidRequest(f"skews are found over a text of {LEAST_TOKENS} tokens or more", param="text")
    seen, ids = _Skewing(), torch.tensor([list(token_ids)], device=engine.passes.devices.inputs)
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    engine.passes.causal({"input_ids": ids, "position_ids": positions}, seen)
    return Skews(engine.identity.weights, tuple(seen.of_layers[layer] for layer in sorted(seen.of_layers)))
