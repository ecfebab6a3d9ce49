"""CompressKV: what a few heads known to retrieve attend to (Lin et al., 2025, arXiv 2508.02401)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.transfer import upload_numbers
from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import TailPolicy, pooling_kernel
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.calibrated import CalibratedPolicy, calibration_of
from kvshelf.methods.policies.sharing import fill, largest_remainders
from kvshelf.methods.policies.view import DocumentView, LayerView

_LEAST = 32  # entries of a layer, whatever its error
_MOST = 3  # times an even share


@dataclass(frozen=True)
class CompressKV(CalibratedPolicy, TailPolicy):
    """Keep what each layer's retrieval heads attend to from the end of the prompt; layers that suffer more keep more.

    `kvshelf calibrate` measures once per model which query heads retrieve, and how much each layer's output suffers
    under compression (e_l, adding up to 1). The weights of the last `window` rows in the `heads` best heads of a layer
    are summed over the rows, pooled over neighbours (average) and averaged over these heads: one set of tokens for all
    KV heads. Layer l of L keeps 32 + e_l (B L - 32 L) entries, 3 B at most.

    Departures: `ProbedPolicy` says what the prompt's end is. The paper takes 4 of 32 heads; kvshelf takes an eighth of
    the heads in smaller models. The entries for which a layer has no room go to the others in proportion, and shares
    are rounded by largest remainders, so that the total is exact. The 32 shrink to the budget, and a layer keeps at
    least its window and the chat template's tokens.
    """

    name: ClassVar[str] = "compresskv"
    source: ClassVar[str] = "CompressKV, arXiv 2508.02401"
    advice: ClassVar[str] = "for calibrated models; one set of tokens per layer suits engines that store heads alike."
    shared_by_heads: ClassVar[bool] = True

    window: int = parameter(8, "last tokens that observe; those of the document are kept", minimum=1)
    heads: int = parameter(4, "query heads of each layer that are asked", minimum=1)
    kernel: int = pooling_kernel(5)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        query_heads = calibration_of(document).query_heads
        if "heads" in given and self.heads > query_heads:
            raise PolicyUnsupported(
                f"heads is {self.heads}, and the layers of this model have {query_heads}",
                param="policy_params.heads",
            )
        return policy if "heads" in given else replace(policy, heads=min(self.heads, max(1, query_heads // 8)))

    def score(self, layer: LayerView) -> Tensor:
        window = layer.window(self.window)
        group = layer.all_queries.shape[0] // layer.kv_heads
        best = calibration_of(layer.document).best_heads(layer.layer_idx, self.heads)
        rows = []
        for kv_head in range(layer.kv_heads):
            if heads := [head % group for head in best if head // group == layer.first_kv_head + kv_head]:
                weights = window.attention(kv_head)[upload_numbers(heads, layer.keys.device)]
                rows.append(weights.sum(dim=1))  # [chosen heads of the group, columns]
        none = torch.zeros(1, window.columns, device=layer.keys.device)  # where other processes have the best heads
        total = pooled(torch.cat(rows), self.kernel).sum(dim=0, keepdim=True) if rows else none
        return window.pad(layer.all_heads(total).sum(dim=0) / len(best)).repeat(layer.kv_heads, 1)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        mean = budget.total // len(budget.per_head)
        errors = calibration_of(layer.document).layer_errors
        lowest = min(mean, max(_LEAST, self.always(layer)))
        highest = min(_MOST * mean, layer.num_tokens)
        return (layer_counts(errors, mean * len(errors), lowest, highest)[layer.layer_idx],) * len(budget.per_head)


def layer_counts(errors: Sequence[float], total: int, lowest: int, highest: int) -> list[int]:
    """Share exactly `total`, which must be possible: `lowest` each, the rest by their errors, `highest` at most."""
    rest = fill(errors, total - lowest * len(errors), highest - lowest)
    return [lowest + share for share in largest_remainders(rest)]
