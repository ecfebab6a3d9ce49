"""InfLLM's index: every entry stays, in blocks with representative keys (Xiao et al., 2024, arXiv 2402.04617)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.artifact.records import Indexed
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class InfLLM(Policy):
    """Keep every entry, and index blocks of them, so that selector `infllm` reads the blocks that a question needs.

    A block has `block` tokens, the same for all heads. Its summary is the keys, without rotation, of the
    `representatives` of each KV head: the tokens of the block to which the document's later tokens attend most (section
    3.2 of the paper). They cost 2 * kv_heads * representatives * D bytes for each block of a layer, and a blob has them
    before the rows. `block` must be a multiple of the entries that share a scale of the codec.

    Departures: the next 4,096 tokens judge in the paper; here all later ones do. The authors' code has representatives
    of each query head and stores the mean of their keys; here each KV head has its own, and each key is stored. Of 52
    questions at a quarter of the entries, blocks of 32, means find 33 % and single keys 54 % (kvshelf-tiny). A trial
    with all 32 keys of each block found no more than with four.
    """

    name: ClassVar[str] = "infllm"
    source: ClassVar[str] = "InfLLM, arXiv 2402.04617"
    advice: ClassVar[str] = "with selector infllm, which reads a long document in part from disk or Redis."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.SUMS | Needs.ROPE
    takes_budget: ClassVar[bool] = False
    by_position: ClassVar[bool] = True
    indexes: ClassVar[bool] = True
    stored: ClassVar[Mapping[str, str]] = {"block": "block", "vectors": "representatives"}

    block: int = parameter(128, "tokens of a block", minimum=8)
    representatives: int = parameter(4, "tokens of a block and KV head whose keys stand for it", minimum=1)

    @property
    def index_block(self) -> int:
        return self.block

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Indexed:
        kept = Full().reduce(layer, budget)
        summaries = self._summaries(layer).to(torch.bfloat16)
        assert kept.importance is not None
        importance = kept.importance.where(summaries.isfinite().all(), torch.nan)  # see `require_finite_scores`
        values: dict[str, Any] = {field.name: getattr(kept, field.name) for field in fields(kept)}
        return Indexed(**values | {"importance": importance}, block=self.block, summaries=summaries)

    def _summaries(self, layer: LayerView) -> Tensor:
        """`[blocks, kv_heads * representatives * D]` fp32."""
        received, _ = layer.column_sums()  # [q_heads, N]
        keys = layer.keys_unrotated()  # [kv_heads, N, D]
        missing = -layer.num_tokens % self.block
        of_heads = F.pad(layer.grouped(received).sum(dim=1), (0, missing), value=-torch.inf)
        most, places = of_heads.view(len(keys), -1, self.block).topk(min(self.representatives, self.block), dim=2)
        # A short last block may have fewer tokens: its first representative stands in for the others.
        places = torch.where(most == -torch.inf, places[..., :1], places)  # [kv_heads, blocks, representatives]
        rows = places + torch.arange(0, layer.num_tokens, self.block, device=keys.device)[:, None]
        heads = torch.arange(len(keys), device=keys.device)[:, None, None]
        chosen: Tensor = keys[heads, rows]  # [kv_heads, blocks, representatives, D]
        return chosen.transpose(0, 1).flatten(1)
