"""Nothing removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvshelf.artifact.records import Kept
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class Full(Policy):
    """Keep every entry: the answers of the plain model, without its prefill.

    It ranks entries by position alone: codecs that store some entries with more bits choose the most recent ones.
    """

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "the model itself"
    advice: ClassVar[str] = (
        "when nothing may be lost; under int8 it takes 59 % of a 16-bit cache on SmolLM2, under int4, which may lose a "
        "little, a third."
    )
    takes_budget: ClassVar[bool] = False
    by_position: ClassVar[bool] = True

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:  # noqa: ARG002
        heads, num_tokens = layer.kv_heads, layer.num_tokens
        return Kept(
            # Heads packed one after the other. The layer's own memory is token-major and is freed after this copy.
            keys=layer.keys.reshape(heads * num_tokens, -1).contiguous(),
            values=layer.values.reshape(heads * num_tokens, -1).contiguous(),
            entries_at=layer.positions.to(torch.int32).repeat(heads),
            offsets=tuple(range(0, heads * num_tokens + 1, num_tokens)),
            importance=layer.positions.float().repeat(heads),
        )
