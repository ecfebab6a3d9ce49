"""D2O: heavy hitters and recent tokens, into which similar tokens merge (Wan et al., 2024, arXiv 2406.13035)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from kvshelf.artifact.records import Entries, Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of, select
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Phase
from kvshelf.methods.policies.budgets import Budget, LayerBudget, WholeLayers, fitted_sink
from kvshelf.methods.policies.chunked import ChunkedPolicy, LayerPast
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.merging import NO_THRESHOLD, by_threshold
from kvshelf.methods.policies.sharing import by_claims
from kvshelf.methods.policies.view import DocumentView, LayerView, Ranks


class _OfLayer(NamedTuple):
    """The note of a layer. claim: its weight where layers share the budget. always: first tokens that stay. share, tau:
    entries of each head, and the threshold, once the first chunk has been cut."""

    claim: float
    always: int
    ranks: Ranks | None
    share: int | None = None
    tau: Tensor | float | None = None


@dataclass(frozen=True)
class D2O(KeepsScores, ChunkedPolicy):
    """Keep heavy hitters and recent tokens, give layers that attend evenly more of the budget, and merge an evicted
    token into the kept one whose key is most like its own, if it is like enough.

    Scores are those of `h2o`. A layer's claim is e^-v: v is the mean over its heads of the variance of attention
    columns' sums, scaled to 0 to 1 over these heads. u is the cosine of a dropped token's key and the nearest kept one;
    the token merges where the mean of u over the heads that drop it is at least `tau`, by default the mean of all u. An
    entry becomes the mean of its kept token, with weight e, and of the merged ones, each with weight e^u. `form="code"`
    follows the authors' code: it adds u times each merged token and divides by their number, which shrinks keys and
    values. `store="slots"` gives each merged token its own share of the softmax.

    With `prefill` "chunked" the first chunk shares out the budget; behind each later one sums go on, and the threshold
    becomes the mean of the one before and the chunk's mean of u. In one pass the whole cache is in memory until the
    last layer is there. The paper leaves layers 0, 1 and the last whole: `first=2,last=1`; the others pay. Suffix
    policy `d2o` goes on by `keep_scores`. Departures: no layer keeps less than `sink` tokens; a GQA group shares
    the mean of its scores.
    """

    name: ClassVar[str] = "d2o"
    source: ClassVar[str] = "D2O, arXiv 2406.13035"
    advice: ClassVar[str] = "to see what merging by key similarity is worth beside h2o; ems keeps more of what merges."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.SUMS
    merges: ClassVar[bool] = True
    phase: ClassVar[Phase] = "after"
    ragged: ClassVar[bool] = True
    column_names: ClassVar[tuple[str, ...]] = ("sum", "tau")
    required: ClassVar[Mapping[str, Any]] = {"store": "means"}

    recent: float = parameter(0.5, "part of a layer's budget for its last tokens", minimum=0, maximum=1)
    sink: int = parameter(4, "first tokens always kept", minimum=0)
    tau: float | None = parameter(None, "least cosine at which a token merges; above 1 none do; null: the mean")
    form: str = parameter("paper", "how a merged token counts", choices=("paper", "code"))
    store: str = parameter("means", "one token an entry, or a slot for each merged token", choices=("means", "slots"))
    first: int = parameter(0, "first layers that stay whole", minimum=0)
    last: int = parameter(0, "last layers that stay whole", minimum=0)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        if self.chunked and self.store == "slots":
            raise PolicyUnsupported("in chunks entries have no slots; take store=means", param="policy_params.store")
        whole, least = WholeLayers(self.first, self.last), document.protected_prefix + 1
        param = "first" if self.first else "last"
        count = whole.fewest(document.num_layers, document.num_tokens, budget.tokens, least, param)
        return replace(self, sink=fitted_sink(self.sink, count, room=count - 1, requested="sink" in given))

    def noted(self, layer: LayerView) -> tuple[Tensor, _OfLayer]:
        """The scores `[kv_heads, N]` fp32 of the tokens, and the layer's note."""
        columns, _ = layer.column_sums()  # [q_heads, N]
        spread = layer.all_heads(columns.var(dim=1))
        spread = (spread - spread.min()) / (spread.max() - spread.min() + 1e-6)
        claim = math.exp(-float(spread.mean()))
        return layer.grouped(columns).mean(dim=1), _OfLayer(claim, max(self.sink, layer.protected_prefix), layer.ranks)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        """All of the layer: `finished` reduces it."""
        return Full().reduce(layer, budget)

    def finished(
        self, records: Mapping[int, Entries], notes: Mapping[int, _OfLayer | tuple[Tensor, _OfLayer]], budget: Budget
    ) -> Mapping[int, Entries]:
        in_one_pass = {layer: note for layer, note in notes.items() if not isinstance(note, _OfLayer)}
        if not in_one_pass:  # the last chunk has been cut
            return records
        whole = [
            LayerPast(cast("Kept", records[layer]), scores.shape[1], columns={"sums": scores.flatten()}, note=note)
            for layer, (scores, note) in in_one_pass.items()
        ]
        shares = zip(notes, whole, self.shares(whole, budget), strict=True)
        return {layer: self.recorded(self.cut(past, counts)) for layer, past, counts in shares}

    def recorded(self, past: LayerPast) -> Kept:
        sums, tau = past.columns["sums"], NO_THRESHOLD if past.note.tau is None else past.note.tau
        return self.keeping(past.record, sum=sums, tau=torch.zeros_like(sums) + tau)

    def take(self, past: LayerPast, chunk: LayerView) -> LayerPast:
        joined = past.joined(chunk, {"sums": torch.zeros(chunk.keys.shape[:2], device=chunk.keys.device)})
        scores, note = self.noted(joined.layer(chunk))
        sums = joined.columns["sums"] + scores.flatten()
        return replace(joined, columns={"sums": sums}).judged(sums, past.note or note)

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        """The first chunk shares out the budget."""
        notes, heads = [past.note for past in pasts], pasts[0].record.kv_heads
        shares = [note.share for note in notes]
        if None in shares:
            claims, whole = [note.claim for note in notes], WholeLayers(self.first, self.last)
            shares = by_claims(claims, whole, budget.tokens, notes[0].always, pasts[0].num_tokens)
        return [(share,) * heads for share in shares]

    def cut(self, past: LayerPast, counts: Sequence[int]) -> LayerPast:
        """Each head keeps `counts[0]` entries, once it has more; the others merge, and move the threshold."""
        record, note, scores = past.record, past.note, past.columns["sums"].view(past.record.kv_heads, -1)
        keys, values = (states.view(*scores.shape, -1) for states in record.rows if isinstance(states, Tensor))
        places = record.entry_positions.view(scores.shape).long()
        rows, share = torch.arange(scores.shape[1], device=scores.device), counts[0]
        recent = min(int(self.recent * share), share - note.always)
        protected = (rows < note.always) | (rows >= len(rows) - recent)
        kept = select(scores, protected, [min(share, len(rows))] * len(scores))
        plan, cosines, tau = by_threshold(keys, kept, places, note.ranks, tau=self.tau, before=note.tau)
        weights, code, slots = torch.where(kept, 1.0, cosines), self.form == "code", self.store == "slots"
        weights = weights.clamp_min(1e-30) if code else weights.exp()  # no weight of a mean may be zero
        merged = plan.merged((keys, values), weights, importance_of(scores, protected), slots=slots, shrinks=code)
        merged = replace(merged, entries_at=places[plan.entries].to(torch.int32))
        note = note._replace(share=share, tau=tau if len(rows) > share else note.tau)
        return replace(past, record=cast("Kept", merged), columns={"sums": scores[plan.entries]}, note=note)
