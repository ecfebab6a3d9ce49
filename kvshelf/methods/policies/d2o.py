"""D2O: heavy hitters and recent tokens, into which similar tokens merge (Wan et al., 2024, arXiv 2406.13035)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Entries, Kept, Merged
from kvshelf.kernels.select import importance_of, select
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Phase, Policy
from kvshelf.methods.policies.budgets import Budget, LayerBudget, WholeLayers
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.merging import MergePlan, nearest
from kvshelf.methods.policies.parameters import fitted_sink
from kvshelf.methods.policies.sharing import fill, largest_remainders
from kvshelf.methods.policies.view import DocumentView, LayerView, Ranks

_TINY = 1e-30
"""No weight of a mean may be zero."""


class _LayerScores(NamedTuple):
    """What is left to know of a layer when all layers are there. scores: `[kv_heads, N]` fp32. claim: its weight where
    layers share the budget. always: first tokens that stay."""

    scores: Tensor
    claim: float
    always: int
    place: int
    ranks: Ranks | None


@dataclass(frozen=True)
class D2O(Policy):
    """In part, as nothing is decided while it answers: keep heavy hitters and recent tokens, give layers that attend
    evenly more of the budget, and merge an evicted token into the kept one whose key is most like its own, if it is
    like enough.

    Scores are those of `h2o`. A layer's claim is e^-v: v is the variance of its attention columns' sums, brought to 0
    to 1 over the layer's heads, and their mean. A head drops a token at cosine u to the nearest kept key; the token
    merges where the mean of u over the heads that drop it is at least `tau`, by default the mean of all u. An entry
    becomes the mean of its kept token, with weight e, and of the merged ones, each with weight e^u. `form="code"` does
    what the authors' code does: it adds u times each merged token and divides by their number, which shrinks keys and
    values. `store="slots"` gives each merged token its own share of the softmax.

    The layers' shares are known when the last layer is there, so the whole cache is in memory until then. The paper
    leaves layers 0, 1 and the last whole: `first=2,last=1`; the others pay for them. Departures: one threshold for the
    whole document, where the authors move it with each decoded token; no layer keeps less than `sink` tokens; a GQA
    group shares the mean of its scores.
    """

    name: ClassVar[str] = "d2o"
    source: ClassVar[str] = "D2O, arXiv 2406.13035"
    advice: ClassVar[str] = "to see what merging by key similarity is worth beside h2o; ems keeps more of what merges."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.SUMS
    merges: ClassVar[bool] = True

    recent: float = parameter(0.5, "part of a layer's budget for its last tokens", minimum=0, maximum=1)
    sink: int = parameter(4, "first tokens always kept", minimum=0)
    tau: float | None = parameter(None, "least cosine at which a token merges; above 1 none do; null: the mean")
    form: str = parameter("paper", "how a merged token counts", choices=("paper", "code"))
    store: str = parameter("means", "one token an entry, or a slot for each merged token", choices=("means", "slots"))
    first: int = parameter(0, "first layers that stay whole", minimum=0)
    last: int = parameter(0, "last layers that stay whole", minimum=0)

    @property
    def phase(self) -> Phase:
        return "after"

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        count = WholeLayers(self.first, self.last).fewest(
            document.num_layers,
            document.num_tokens,
            budget.tokens,
            document.protected_prefix + 1,
            "first" if self.first else "last",
        )
        return replace(self, sink=fitted_sink(self.sink, count, room=count - 1, given="sink" in given))

    def noted(self, layer: LayerView) -> _LayerScores:
        columns, _ = layer.column_sums()  # [q_heads, N]
        spread = layer.all_heads(columns.var(dim=1))
        spread = (spread - spread.min()) / (spread.max() - spread.min() + 1e-6)
        claim = math.exp(-float(spread.mean()))
        always = max(self.sink, layer.protected_prefix)
        return _LayerScores(layer.grouped(columns).mean(dim=1), claim, always, layer.place, layer.ranks)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        """All of the layer: `finished` reduces it."""
        return Full().reduce(layer, budget)

    def finished(
        self, records: Mapping[int, Entries], notes: Mapping[int, _LayerScores], budget: Budget
    ) -> Mapping[int, Entries]:
        counts = self._counts(list(notes.values()), budget)
        return {layer: self._merged(records[layer], note, counts[note.place]) for layer, note in notes.items()}

    def _counts(self, notes: Sequence[_LayerScores], budget: Budget) -> list[int]:
        """Entries of each KV head of each layer, by its place."""
        tokens, always = notes[0].scores.shape[1], notes[0].always
        sharing = notes[self.first : len(notes) - self.last]
        paid = budget.tokens * len(notes) - tokens * (self.first + self.last) - always * len(sharing)
        # A claim that is not a number: its layer's scores are none, either, and the engine refuses the cache for them.
        claims = [note.claim if math.isfinite(note.claim) else 1.0 for note in sharing]
        shares = largest_remainders(fill(claims, paid, tokens - always))
        return [tokens] * self.first + [always + share for share in shares] + [tokens] * self.last

    def _merged(self, record: Entries, note: _LayerScores, count: int) -> Kept | Merged:
        assert isinstance(record, Kept)
        scores = note.scores  # [kv_heads, N]
        keys, values = (states.view(*scores.shape, -1) for states in record.rows if isinstance(states, Tensor))
        positions = torch.arange(scores.shape[1], device=scores.device)
        recent = min(int(self.recent * count), count - note.always)
        protected = (positions < note.always) | (positions >= len(positions) - recent)
        kept = select(scores, protected, [count] * len(scores))
        plan, cosines = self._plan(keys, kept, note.ranks)
        weights = torch.where(kept, 1.0, cosines)
        weights = weights.clamp_min(_TINY) if self.form == "code" else weights.exp()
        merged_keys, merged_values = (plan.means(states, weights) for states in (keys, values))
        if self.form == "code":
            shrink = plan.totals(weights) / plan.sizes
            merged_keys, merged_values = ((x * shrink.unsqueeze(1)).to(x.dtype) for x in (merged_keys, merged_values))
        make = plan.as_merged if self.store == "slots" else plan.as_kept
        return make(merged_keys, merged_values, importance_of(scores, protected))

    def _plan(self, keys: Tensor, kept: Tensor, ranks: Ranks | None) -> tuple[MergePlan, Tensor]:
        """Who merges into whom, and the cosine of each token with the nearest kept one, `[kv_heads, N]` fp32."""
        goes = ~kept
        cosines, targets = nearest(keys, None, goes, kept, kept)
        own = torch.stack([torch.where(goes, cosines, 0.0).sum(dim=0), goes.sum(dim=0)])  # [2, N]
        sums, heads = own if ranks is None else ranks.gathered(own.unsqueeze(0)).sum(dim=0)
        tau = sums.sum() / heads.sum().clamp_min(1) if self.tau is None else self.tau
        joins = goes & (sums / heads.clamp_min(1) >= tau)
        return MergePlan.joining(kept, joins, targets), cosines
