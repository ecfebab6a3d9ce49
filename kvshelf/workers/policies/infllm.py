"""InfLLM's index: every entry stays, in blocks with representative keys (Xiao et al., 2024, arXiv 2402.04617)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.store.artifact.records import Indexed
from kvshelf.workers.policies.base import Observes, Policy, parameter
from kvshelf.workers.policies.budgets import LayerBudget
from kvshelf.workers.policies.full import Full
from kvshelf.workers.policies.view import LayerView


@dataclass(frozen=True)
class InfLLM(Policy):
    """Keep every entry, and index blocks of them, so that selector `infllm` reads the blocks that a question needs.

    A block has `block` tokens, the same for all heads. For each query head, its `representatives` are the tokens to
    which the document's later tokens attend most (section 3.2 of the paper), and its summary is the mean of their keys
    without rotation; those of all query heads stand side by side. They cost 2 * q_heads * D bytes for each block of a
    layer, in a blob before the rows. `block` divides the entries that share a scale of the codec.

    Departure: in the paper the next 4,096 tokens judge; here all later ones do.
    """

    name: ClassVar[str] = "infllm"
    source: ClassVar[str] = "InfLLM, arXiv 2402.04617"
    advice: ClassVar[str] = "with selector infllm, which reads a long document in part from disk or Redis."
    observes: ClassVar[Observes] = Observes.QUERIES | Observes.ROPE
    takes_budget: ClassVar[bool] = False
    by_position: ClassVar[bool] = True
    indexes: ClassVar[bool] = True

    block: int = parameter(128, "tokens of a block", minimum=8)
    representatives: int = parameter(4, "tokens of a block whose keys stand for it", minimum=1)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Indexed:
        kept = Full().reduce(layer, budget)
        own: dict[str, Any] = {each.name: getattr(kept, each.name) for each in fields(kept)}
        return Indexed(**own, block=self.block, summaries=self._summaries(layer).to(torch.bfloat16))

    def _summaries(self, layer: LayerView) -> Tensor:
        """`[blocks, q_heads * D]` fp32."""
        received, _ = layer.column_sums()  # [q_heads, N]
        keys = layer.keys_unrotated()  # [kv_heads, N, D]
        missing = -layer.num_tokens % self.block
        of_blocks = F.pad(received, (0, missing), value=-torch.inf).view(len(received), -1, self.block)
        most, places = of_blocks.topk(
            min(self.representatives, self.block), dim=2
        )  # [q_heads, blocks, representatives]
        there = most.isfinite()  # the last block may have fewer tokens
        first = torch.arange(of_blocks.shape[1], device=keys.device) * self.block
        rows = torch.where(there, places + first[:, None], 0)
        heads = torch.arange(len(received), device=keys.device) // (len(received) // len(keys))
        chosen = keys[heads[:, None, None], rows] * there.unsqueeze(3)  # [q_heads, blocks, representatives, D]
        means: Tensor = chosen.sum(dim=2) / there.sum(dim=2, keepdim=True)
        return means.transpose(0, 1).flatten(1)
