"""One choice for all heads of a layer: how policies reduce layers with latents (MLA).

A policy sees the keys and values of every head, as the model makes them of the latents. Heads share the latents of a
token, so the token stays for all heads or for none, by the mean of its scores over the heads.
"""

from __future__ import annotations

from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept
from kvshelf.kernels.select import importance_of, keep_best, of_entries, total_of
from kvshelf.methods.policies.base import Policy, ScoringPolicy, only_scores
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import LayerView


def chooses_together(policy: Policy) -> bool:
    """Whether a policy can choose the same tokens for all heads: it does so anyway, or only scores."""
    return policy.by_position or policy.shared_by_heads or only_scores(type(policy))


def scores_together(policy: ScoringPolicy, layer: LayerView) -> Tensor:
    """The scores of a layer's tokens, `[1, N]` fp32."""
    scores = policy.score(layer)
    # The mean of equal scores may differ from them in its last bits: scores of a chunk would not stay equal.
    return scores[:1] if policy.shared_by_heads else scores.mean(dim=0, keepdim=True)


def importance_together(policy: ScoringPolicy, layer: LayerView) -> Tensor:
    """`ScoringPolicy.importance` of all heads together, `[1, N]` fp32."""
    return importance_of(scores_together(policy, layer), policy.protected(layer))


def reduce_together(policy: Policy, layer: LayerView, stored: LayerView, tokens: int) -> Kept:
    """Reduce a layer to `tokens` tokens. layer: as the policy sees it, with its keys and values expanded. stored: the
    same with latents in place of keys and rotated parts in place of values, of one head."""
    if policy.by_position:
        record = policy.reduce(stored, LayerBudget.uniform(1, tokens))
        assert isinstance(record, Kept), "a policy by position merges nothing"
        return record
    budget = LayerBudget.uniform(layer.kv_heads, tokens)
    if not (isinstance(policy, ScoringPolicy) and only_scores(type(policy))):
        record = policy.reduce(layer, budget)
        assert isinstance(record, Kept), "a policy that merges does not choose the same for all heads"
        return _first_head(record, stored)
    scores, protected = scores_together(policy, layer), policy.protected(layer)
    counts = policy.counts(layer, scores.expand(layer.kv_heads, -1), protected, budget)
    count = total_of(counts) // layer.kv_heads
    precedence = policy.precedence(layer, scores)
    keys, values, positions, importance = keep_best(stored.keys, stored.values, precedence, protected, [count])
    if precedence is not scores:
        importance = of_entries(importance_of(scores, protected), positions, [count])
    return Kept(keys=keys, values=values, entries_at=positions, offsets=offsets_of([count]), importance=importance)


def _first_head(record: Kept, stored: LayerView) -> Kept:
    """The tokens that a record keeps in its first head, and in each other one."""
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
