"""DuoAttention: heads that retrieve keep everything, others stream (Xiao et al., 2024, arXiv 2410.10819)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvshelf.artifact.records import Kept
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget, require_room
from kvshelf.methods.policies.calibrated import CalibratedPolicy, calibration_of, retrieval_scores
from kvshelf.methods.policies.streaming_llm import StreamingLLM
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class DuoAttention(CalibratedPolicy):
    """In part, as heads are measured and not trained: keep all of a document in the KV heads that retrieve most, and
    the first and last tokens in the others.

    Every head keeps `sink` first and `recent` last tokens. The rest of the budget completes the document in as many KV
    heads of the model as it can, those with the highest retrieval scores first; a remainder adds last tokens to the
    other heads, so that the total is exact.

    Departures: the paper learns a gate for each head by distillation and takes a share of the heads (half of them with
    GQA); here `kvshelf calibrate` measured a head's score on its best query head, and the share follows from the
    budget. The paper's 64 first and 256 last tokens shrink, in proportion, to half the budget.
    """

    name: ClassVar[str] = "duo_attention"
    source: ClassVar[str] = "DuoAttention, arXiv 2410.10819"
    advice: ClassVar[str] = "for models that have a calibration, as the baseline that chooses heads and no tokens."
    budgets_heads: ClassVar[bool] = True

    sink: int = parameter(64, "first tokens that each head keeps", minimum=0)
    recent: int = parameter(256, "last tokens that each head keeps", minimum=1)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        room = budget.tokens // 2
        sink = self.sink if "sink" in given else max(document.protected_prefix, min(self.sink, room // 5))
        recent = self.recent if "recent" in given else max(1, min(self.recent, room - sink))
        require_room("sink", sink, budget.tokens - 1, budget.tokens)
        require_room("recent", recent, budget.tokens - sink, budget.tokens)
        return replace(policy, sink=sink, recent=recent)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        counts = layer.own_heads(self._counts(layer, budget.total // layer.kv_heads))
        return StreamingLLM(sink=self.sink).reduce(layer, LayerBudget(tuple(counts)))

    def _counts(self, layer: LayerView, mean: int) -> Sequence[int]:
        """Entries of each KV head of the layer, all processes' heads together."""
        heads = layer.kv_heads * (layer.ranks.size if layer.ranks is not None else 1)
        scores = retrieval_scores(calibration_of(layer.document), heads)
        streaming = max(self.sink, layer.protected_prefix) + self.recent
        whole, remainder = divmod((mean - streaming) * len(scores), max(1, layer.num_tokens - streaming))
        best = sorted(range(len(scores)), key=lambda head: -scores[head])
        counts = [layer.num_tokens] * len(scores)
        for place, head in enumerate(best[whole:]):
            more, rest = divmod(remainder, len(scores) - whole)
            counts[head] = streaming + more + (place < rest)
        return counts[layer.layer_idx * heads : (layer.layer_idx + 1) * heads]
