"""TOVA: keep what the last token attends to (Oren et al., 2024, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.chunked import ChunkedProbed
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class Tova(ChunkedProbed, ScoringPolicy):
    """In part, as nothing is dropped while it answers: keep what the prompt's last token attends to, in all heads
    alike.

    score_j = the mean over all query heads of the last row's softmax weight on token j; with several expected
    questions, the mean over their last rows. If the last row is the document's own, its token stays. With `prefill`
    "chunked" the last row of each chunk judges all entries. Departures: the document is reduced once, or once a chunk,
    while the paper drops one token at every decode step. `ProbedPolicy` says which token is the last.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA, arXiv 2401.06104"
    advice: ClassVar[str] = "with expected questions, or as the baseline that looks from the last token alone."
    shared_by_heads: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Tensor:
        window = layer.window(1)
        return window.pad(layer.all_heads(window.mean()).mean(dim=0)).repeat(layer.kv_heads, 1)

    def protected(self, layer: LayerView) -> Tensor:
        return super().protected(layer) | layer.window(1).protect_tail()
