"""SAGE-KV: sinks, what each query head asks for, and the most recent (Wang et al., 2025, arXiv 2503.08879)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import select
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import ProbedPolicy, keep
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView, LayerView

_SMALL = 1e-6
"""0.29 * 100 is 28.99...; with this it is 29."""


@dataclass(frozen=True)
class Sage(ProbedPolicy):
    """Keep the first and the most recent tokens, and between them those that each query head asks for with the prompt's
    last token.

    A KV head with G query heads keeps B entries: S = `sinks` * B first tokens, G * k chosen between them, where k is
    `chosen` * B / G rounded down to a multiple of `multiple`, and R = B - S - G * k most recent ones (the paper's Qwen
    row, G = 7 and B = 8192, has k = 512 and R = 2560: a multiple of 512). Query head h chooses the k tokens of greatest
    q_h . k_j, and the KV head keeps the union of these. Keys keep their original positions. A budget of which each
    query head would choose none is refused: that would be `streaming_llm`.

    If heads choose the same tokens, the union is smaller than G * k. The paper leaves this open. In kvshelf,
    `union="refill"` adds the tokens of greatest max_h q_h . k_j; "ragged" keeps between B - (G - 1) * k and B entries.

    Departures: the document's last token counts as a recent one; the paper keeps it in addition to B. A chat template
    of more than S tokens takes its place out of all shares (chosen tokens get their part of the rest). With several
    expected questions, a token counts by the best of their last rows. No recent token leaves while decoding, because a
    stored cache never changes. `ProbedPolicy` says which token is the last while no question is known.
    """

    name: ClassVar[str] = "sage"
    source: ClassVar[str] = "SAGE-KV, arXiv 2503.08879"
    advice: ClassVar[str] = "with expected questions; at other times its sinks and recent tokens carry it."

    sinks: float = parameter(0.25, "part of the budget for the first tokens", minimum=0, maximum=1)
    chosen: float = parameter(0.5, "part of the budget that the query heads choose together", minimum=0, maximum=1)
    multiple: int = parameter(1, "what each query head chooses is rounded down to a multiple of this", minimum=1)
    union: str = parameter("refill", "what follows when heads choose alike", choices=("refill", "ragged"))

    @property
    def exact(self) -> bool:
        return self.union == "refill"

    @property
    def ragged(self) -> bool:
        return not self.exact

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        if self.sinks + self.chosen > 1:
            raise PolicyUnsupported(
                f"sinks {self.sinks:g} and chosen {self.chosen:g} are parts of one budget and add up to more than 1; "
                "lower one of them",
                param="policy_params.chosen",
            )
        group = document.group or 1
        if self.shares(budget.tokens, group, document.protected_prefix)[1] == 0:
            share = self.chosen * budget.tokens / group
            raise PolicyUnsupported(
                f"each of the {group} query heads of a KV head would choose {share:.6g} of the budget of "
                f"{budget.tokens} entries, rounded down to a multiple of {self.multiple}: none; lower multiple or "
                "raise the budget, or take policy streaming_llm",
                param="policy_params.multiple",
            )
        return self

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        masks, importance = [], []
        for head, count in enumerate(budget.per_head):
            logits = self._logits(layer, head)  # [group, columns]
            sinks, chosen, recent = self.shares(count, len(logits), layer.protected_prefix)
            between = slice(sinks, layer.num_tokens - recent)
            mask = torch.ones_like(layer.positions, dtype=torch.bool)
            mask[between] = self._chosen(logits[:, between], chosen)
            masks.append(mask)
            importance.append(torch.full(mask.shape, torch.inf, device=mask.device))
            importance[-1][between] = logits[:, between].amax(dim=0)
        counts = budget.per_head if self.exact else None
        return keep(layer, torch.stack(masks), torch.stack(importance), counts)

    def shares(self, budget: int, group: int, protected_prefix: int) -> tuple[int, int, int]:
        """(S, k, R) of a KV head with `group` query heads: S + group * k + R = budget."""
        sinks = max(int(self.sinks * budget + _SMALL), protected_prefix)
        # A template of more than its share leaves less for both others; the last token is always a recent one.
        together = min(self.chosen * budget, self.chosen / max(1 - self.sinks, _SMALL) * (budget - sinks))
        chosen = min(int(together / group + _SMALL), (budget - sinks - 1) // group)
        chosen -= chosen % self.multiple
        return sinks, chosen, budget - sinks - group * chosen

    def _chosen(self, logits: Tensor, count: int) -> Tensor:
        """The union `[M]` bool of the best `count` of each query head. logits: `[group, M]`, M >= group * count."""
        nothing = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        union = select(logits, nothing, [count] * len(logits)).any(dim=0)
        if self.union == "ragged":
            return union
        return select(logits.amax(dim=0, keepdim=True), union, [count * len(logits)])[0]

    def _logits(self, layer: LayerView, kv_head: int) -> Tensor:
        """q_h . k_j of the last row, `[group, columns]` fp32: within a head its order is that of the softmax. NaN in
        place of -inf, which a maximum over the rows or the group would hide."""
        window = layer.window(1)
        keys = layer.keys[kv_head, : window.columns].float()  # [columns, D]
        logits = torch.matmul(window.queries(kv_head).float(), keys.T)  # [group, rows, columns]
        return logits.masked_fill(~logits.isfinite(), torch.nan).amax(dim=1)
