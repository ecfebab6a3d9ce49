"""KVzip's scores, foretold by a gate (after Fast KVzip, arXiv 2601.17668, and KVzap, arXiv 2601.07891)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.gate_file import Family, Target
from kvshelf.methods.policies.gates.base import TokenGate
from kvshelf.methods.policies.sharing import GlobalSharing, Sharing


@dataclass(frozen=True)
class KVzipGate(TokenGate):
    """In part, as its network is another one: keep what a gate expects `kvzip` to keep, without `kvzip`'s passes.

    The gate of a layer is s = W2 silu(W1 x) + b, where x is the token's query, key and value of all heads before RoPE,
    each channel in its own scale. It is trained on documents without questions: s foretells the logarithm of the score
    that `kvzip` gives the token. All layers and heads share one budget (`across="cache"`), or each head has its own.

    Departures: the authors' gates read the hidden state, which has no more in it; that of Fast KVzip compares a low
    rank query and key with learned sinks; kvshelf's is that of Locret and KVzap. Recent tokens may go.
    """

    name: ClassVar[str] = "kvzip_gate"
    source: ClassVar[str] = "after Fast KVzip, arXiv 2601.17668, and KVzap, arXiv 2601.07891"
    advice: ClassVar[str] = "first, for a model that has gates: it keeps like kvzip or better, without its passes."
    family: ClassVar[Family] = "importance"
    target: ClassVar[Target] = "kvzip"

    across: str = parameter("cache", "who shares a budget", choices=("cache", "head"))

    @property
    def sharing(self) -> Sharing | None:
        return GlobalSharing() if self.across == "cache" else None
