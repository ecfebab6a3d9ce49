"""One choice for all heads of a layer: how policies reduce layers with latents (MLA).

A policy sees the keys and values of every head, as the model makes them of the latents. Heads share the latents of a
token, so it stays for all heads or for none: by the mean of its scores over the heads.
"""

from __future__ import annotations

from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept, LayerRecord
from kvshelf.kernels.select import importance_of, keep_best, of_entries, total_of
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import LayerView


def chooses_together(policy: Policy) -> bool:
    """Whether a policy can choose the same tokens for all heads: it scores and leaves the rest to `ScoringPolicy`, or
    it chooses the same for every head anyway."""
    return policy.by_position or policy.shared_by_heads or _only_scores(policy)


def scores_together(policy: ScoringPolicy, layer: LayerView) -> Tensor:
    """The scores of a layer's tokens, `[1, N]` fp32."""
    scores = policy.score(layer)
    # Of equal scores the mean may differ in its last bits, and those of a chunk would not stay equal.
    return scores[:1] if policy.shared_by_heads else scores.mean(dim=0, keepdim=True)


def importance_together(policy: ScoringPolicy, layer: LayerView) -> Tensor:
    """`ScoringPolicy.importance` of all heads together, `[1, N]` fp32."""
    return importance_of(scores_together(policy, layer), policy.protected(layer))


def reduce_together(policy: Policy, layer: LayerView, stored: LayerView, tokens: int) -> Kept:
    """Reduce a layer to `tokens` tokens. layer: as the policy sees it, with its keys and values expanded. stored: the
    same with latents in place of keys and rotated parts in place of values, of one head."""
    if policy.by_position:
        return _kept(policy.reduce(stored, LayerBudget.uniform(1, tokens)))
    budget = LayerBudget.uniform(layer.kv_heads, tokens)
    if not _only_scores(policy):
        return _first_head(_kept(policy.reduce(layer, budget)), stored)
    assert isinstance(policy, ScoringPolicy)
    scores, protected = scores_together(policy, layer), policy.protected(layer)
    counts = policy.counts(layer, scores.expand(layer.kv_heads, -1), protected, budget)
    count = total_of(counts) // layer.kv_heads
    decides = policy.precedence(layer, scores)
    keys, values, positions, importance = keep_best(stored.keys, stored.values, decides, protected, [count])
    if decides is not scores:
        importance = of_entries(importance_of(scores, protected), positions, [count])
    return Kept(keys=keys, values=values, entries_at=positions, offsets=offsets_of([count]), importance=importance)


def _only_scores(policy: Policy) -> bool:
    return isinstance(policy, ScoringPolicy) and type(policy).reduce is ScoringPolicy.reduce


def _kept(record: LayerRecord) -> Kept:
    assert isinstance(record, Kept), "a policy that merges does not choose the same for all heads"
    return record


def _first_head(record: Kept, stored: LayerView) -> Kept:
    """The tokens that a record keeps in its first head, and in all others."""
    first = record.positions[0]
    assert all(head.equal(first) for head in record.positions), "a policy shared by heads keeps the same in each"
    rows = first.long()
    importance = None if record.importance is None else record.importance[: len(first)]
    return Kept(
        keys=stored.keys[0, rows],
        values=stored.values[0, rows],
        entries_at=first,
        offsets=offsets_of([len(first)]),
        importance=importance,
    )
