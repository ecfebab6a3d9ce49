"""MiKV: no entry is lost, the less important ones have fewer bits (Yang et al., 2024, arXiv 2402.18096)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from kvshelf.artifact.records import Entries, Kept
from kvshelf.errors import InvalidRequest
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.around import Around, scorers
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.blocks import BlockPolicy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.h2o import H2O
from kvshelf.methods.policies.sharing import LayerStats
from kvshelf.methods.policies.view import DocumentView, LayerView, Ranks


class _LayerClaim(NamedTuple):
    """The note of a layer. weight: its claim where layers share a budget."""

    weight: float
    document: DocumentView
    ranks: Ranks | None

    def of_all(self, record: Entries) -> list[Tensor]:
        """The importance of the entries of each head, of all processes."""
        assert isinstance(record, Kept)
        assert record.importance is not None
        importance = record.importance.view(record.kv_heads, -1)  # nothing is evicted
        return list(importance if self.ranks is None else self.ranks.gathered(importance))

    def of_own(self, of_all: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of this process's heads, of those of all heads."""
        if self.ranks is None:
            return of_all
        heads = len(of_all) // self.ranks.size
        return of_all[self.ranks.rank * heads : (self.ranks.rank + 1) * heads]


@dataclass(frozen=True)
class MiKV(Around):
    """Keep every entry, and let another policy choose those with more bits: those that it would keep of a budget of
    `high`.

    It takes effect under the codec `mixed:share=policy` (`high=none` for the paper's 16 bits, `low=int2`, `int3` or
    `int4`). Where the base's layers and heads share one budget (kvzip), they share the precise entries. Under `mixed`
    with a number, each head's most important entries by the base have more bits. Other codecs treat all entries alike.

    Departures: any base may choose the important entries, in the paper H2O does. The paper quantizes by token. Its
    balancer multiplies each channel of a key and divides that of the query, so that outliers do not spoil the steps of
    their token. kvshelf quantizes keys by channel, where such a factor would change no code; it is left out.
    """

    name: ClassVar[str] = "mikv"
    source: ClassVar[str] = "MiKV, arXiv 2402.18096"
    advice: ClassVar[str] = "with codec mixed:share=policy, where every entry has to stay and int4 takes too much."
    takes_budget: ClassVar[bool] = False
    sets_precision: ClassVar[bool] = True
    takes: ClassVar[str] = "a policy that scores tokens, and gives heads equal budgets or lets all layers share one"

    base: str = parameter("h2o", "the policy that scores; its own parameters are given beside this one")
    high: float = parameter(0.5, "part of the entries that has more bits", minimum=0, maximum=1)
    inner: ScoringPolicy = field(default_factory=H2O)

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[ScoringPolicy]]:
        return {
            name: base
            for name, base in scorers(known).items()
            if base.counts is ScoringPolicy.counts or base.build({}, known).phase == "cascade"
        }

    def build_inner(self, base: type[Policy], params: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Policy:
        inner = base.build(params, known)
        if isinstance(inner, BlockPolicy) and inner.across == "layer":
            raise InvalidRequest(
                "mikv lets the heads of all layers share the precise entries, or gives each as many; take across=cache "
                "or head",
                param="policy_params.across",
            )
        return inner

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        return replace(self, inner=self.inner.fitted(document, self._precise(budget, document), given))

    def noted(self, layer: LayerView) -> _LayerClaim:
        weight = 1.0 if self.inner.sharing is None else self.inner.weight(layer)
        return _LayerClaim(weight, layer.document, layer.ranks)

    def finished(
        self, records: Mapping[int, Entries], notes: Mapping[int, _LayerClaim], budget: Budget
    ) -> Mapping[int, Entries]:
        counts = self._counts(records, notes, budget)
        return {
            layer: replace(record, precise=counts[layer])
            for layer, record in records.items()
            if isinstance(record, Kept)
        }

    def _counts(
        self, records: Mapping[int, Entries], notes: Mapping[int, _LayerClaim], budget: Budget
    ) -> dict[int, tuple[int, ...]]:
        """How many entries of each head of each layer have more bits."""
        first = next(iter(notes.values()))
        precise, sharing = self._precise(budget, first.document), self.inner.sharing
        if sharing is None:
            return {layer: (precise.tokens,) * record.kv_heads for layer, record in records.items()}
        stats = [LayerStats(note.of_all(records[layer]), note.weight) for layer, note in notes.items()]
        counts = sharing.counts(stats, precise, len(stats))
        return {layer: note.of_own(of_all) for (layer, note), of_all in zip(notes.items(), counts, strict=True)}

    def _precise(self, budget: Budget, document: DocumentView) -> Budget:
        """The base's budget of precise entries: never less than it always keeps."""
        tokens = max(int(self.high * budget.tokens + 1e-9), document.protected_prefix + 1)
        return replace(budget, tokens=min(tokens, budget.tokens))
