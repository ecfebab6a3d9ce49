"""Locret: a gate foretells how much an answer will attend to a token (Huang et al., 2024, arXiv 2410.01805)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import Budget, require_room
from kvshelf.methods.policies.gate_file import Family, Target
from kvshelf.methods.policies.gates.base import TokenGate
from kvshelf.methods.policies.view import DocumentView


@dataclass(frozen=True)
class Locret(TokenGate):
    """Keep what a gate foretells that answers will attend to.

    The gate of a layer is s = W2 silu(W1 x) + b, where x is the token's query, key and value of all heads before RoPE,
    each channel in its own scale. It is trained on documents with questions and answers: the label of a token is the
    largest weight that a row which writes an answer, of any head of the GQA group, gives it. The loss is smooth L1,
    and 0.0025 times the mean square of the difference between neighbours. Each head keeps its best. The last `recent`
    tokens of the document stay, as the authors leave the last 100 of the prompt.

    With `prefill` "chunked" the document is read as in the paper, in a cache of fixed size: behind each chunk the best
    of all entries stay, and the last `stabilizers` of a chunk until the next has been read. By default these are the
    authors' 2,500 of 6,000 entries and chunks of 3,072 tokens, or the same part of a smaller budget or chunk.

    Departures: s foretells the logarithm of the label, because labels lie orders of magnitude apart. By default the
    document is read in one pass, in which no token is dropped while others still have to read it.
    """

    name: ClassVar[str] = "locret"
    source: ClassVar[str] = "Locret, arXiv 2410.01805"
    advice: ClassVar[str] = "for a model whose gates were trained on questions like those to come."
    family: ClassVar[Family] = "importance"
    target: ClassVar[Target] = "answers"

    in_chunks: ClassVar[frozenset[str]] = frozenset({"chunk", "stabilizers"})

    recent: int = parameter(100, "last tokens of the document, always kept", minimum=0)
    stabilizers: int = parameter(2500, "last tokens of a chunk that stay until the next is read", minimum=0, added=True)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        largest = budget.tokens - max(policy.sink, document.protected_prefix)
        if "recent" not in given:
            policy = replace(policy, recent=min(self.recent, budget.tokens // 8, largest))
        require_room("recent", policy.recent, largest, budget.tokens)
        if "stabilizers" in given:
            require_room("stabilizers", self.stabilizers, largest, budget.tokens)
        elif policy.chunked:
            part = min(budget.tokens * 5 // 12, policy.chunk * 2500 // 3072)
            policy = replace(policy, stabilizers=min(self.stabilizers, part, largest))
        return policy

    def stays(self, positions: Tensor, prefix: int, read: int, *, ended: bool) -> Tensor:
        last = self.recent if ended else self.stabilizers
        return super().stays(positions, prefix, read, ended=ended) | (positions >= read - last)
