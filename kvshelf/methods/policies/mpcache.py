"""MPCache's static half: the tokens to which some row at the end of the prompt attends (arXiv 2501.06807)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.view import LayerView

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class MPCache(ScoringPolicy):
    """Keep the tokens to which some row of the last fifth of the document attends, with the mean of all heads.

    The score of a token is the largest weight that a row gives it, of the rows of the last `rows` of the document; a
    row's weights are the mean over the layer's heads, so all heads keep the same tokens. The paper keeps what exceeds a
    threshold chosen for each data set; a budget keeps the same order. Selector `mpcache` is the dynamic half.

    Departures: a row sees no later token (the authors' code has no mask among these rows, so rows before a token may
    judge it). Rows are of the document, as no question is known.
    """

    name: ClassVar[str] = "mpcache"
    source: ClassVar[str] = "MPCache, arXiv 2501.06807"
    advice: ClassVar[str] = "with selector mpcache, which chooses among what it keeps."
    needs: ClassVar[Needs] = Needs.QUERIES
    shared_by_heads: ClassVar[bool] = True

    rows: float = parameter(0.2, "part of the document, at its end, whose rows judge", minimum=0.001, maximum=1)

    def score(self, layer: LayerView) -> Tensor:
        first = min(layer.num_tokens - 1, round(layer.num_tokens * (1 - self.rows)))
        queries = layer.grouped(layer.all_queries)[:, :, first:]  # [kv_heads, group, R, D]
        best = torch.zeros(layer.num_tokens, device=queries.device)
        for start in range(0, queries.shape[2], _ROWS_AT_ONCE):
            rows = queries[:, :, start : start + _ROWS_AT_ONCE].float()
            sums = layer.all_heads(self._sum(layer, rows, first + start).unsqueeze(0))  # [ranks, R, N]
            best = torch.maximum(best, sums.sum(0).amax(0))
        heads = len(layer.all_queries) * len(sums)
        return (best / heads).expand(layer.kv_heads, -1).contiguous()

    def _sum(self, layer: LayerView, rows: Tensor, first: int) -> Tensor:
        """Weights of rows `[kv_heads, group, R, D]` from position `first` on, summed over the heads, `[R, N]` fp32."""
        logits = torch.matmul(rows, layer.keys.float().unsqueeze(1).transpose(2, 3)) * layer.scaling
        positions = torch.arange(first, first + rows.shape[2], device=rows.device).unsqueeze(1)
        return logits.masked_fill_(layer.positions > positions, -torch.inf).softmax(dim=3).sum(dim=(0, 1))
