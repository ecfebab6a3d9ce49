"""SirLLM: the tokens that surprised the model most (Yao et al., 2024, arXiv 2405.12528)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, fitted_sink, require_room
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class SirLLM(ScoringPolicy):
    """In part, as nothing fades: keep the tokens that surprised the model most, and the first ones; the same tokens in
    every head of every layer.

    A token's score is what the paper calls its entropy, -log p by the model itself after all tokens before it. The
    first token has none and counts as much as the largest, as in the authors' code. The first `sink` tokens always
    stay, and so do the last `recent`, of which there are none in the authors' runs. The model reads the document twice,
    once to its end to score and once to reduce layer by layer. That takes the time of a second prefill, with the logits
    behind every token, and the memory of one layer.

    Departures: after each round of a dialogue the paper multiplies all earlier scores by a ratio. Here a document is
    compressed once, and an appended turn is scored by itself. The paper's model reads on over its kept entries; here p
    comes from the whole document. Where one of the best tokens is among the first ones, the authors' code keeps one
    more recent token, and kvshelf the next best.
    """

    name: ClassVar[str] = "sirllm"
    source: ClassVar[str] = "SirLLM, arXiv 2405.12528"
    advice: ClassVar[str] = "as a baseline that looks at neither queries nor keys: it keeps what could not be foretold."
    needs: ClassVar[Needs] = Needs.SURPRISALS
    shared_by_heads: ClassVar[bool] = True

    sink: int = parameter(4, "first tokens always kept", minimum=0)
    recent: int = parameter(0, "last tokens always kept", minimum=0)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens, requested="sink" in given)
        require_room("recent", self.recent, budget.tokens - max(sink, document.protected_prefix), budget.tokens)
        return replace(self, sink=sink)

    def score(self, layer: LayerView) -> Tensor:
        surprisals = layer.document.surprisals
        assert surprisals is not None, "the policy must say that it needs them"
        of_all = layer.all_heads(surprisals.to(layer.keys.device).unsqueeze(0))  # [ranks, N]
        return of_all[:1].expand(layer.kv_heads, -1).contiguous()

    def protected(self, layer: LayerView) -> Tensor:
        late = layer.positions >= layer.num_tokens - self.recent
        return super().protected(layer) | late | (layer.positions < self.sink)
