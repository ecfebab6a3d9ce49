"""The common mechanism of policies that merge tokens.

                 merging tokens             into                               weight             stored as
    `ems`        the next best by score     nearest center, keys and values    score              slots, own lengths
    `d2o`        what is not kept           nearest kept token, keys           e^cosine           means, or slots
    `kvmerger`   a run but for its pivot    the pivot of its run               Gaussian           means, or slots
    `cam`        drawn ones, values alone   the next m kept tokens             1 / m              sums

A mean takes one token's share of the softmax, whichever tokens it stands for. Slots give each its own, for 12 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from kvshelf.artifact.identity import RopeMode
from kvshelf.artifact.packed import marked, offsets_of
from kvshelf.artifact.records import Kept, Merged
from kvshelf.kernels.merge import merge_weighted, nearest_pair
from kvshelf.methods.policies.view import Ranks

Places = tuple[Tensor, Tensor]
"""Indices into `[kv_heads, N]`, heads and tokens, int64, head by head."""

NO_THRESHOLD: Final = -2.0
"""The threshold of a layer that has dropped nothing yet: below every cosine."""


@dataclass(frozen=True, eq=False)
class MergePlan:
    """The entry that each token of a layer becomes part of. kept: `[kv_heads, N]` bool, the tokens whose positions
    entries have. classes: `[kv_heads, N]` int64, the entry of a token as an index into its head's kept tokens, -1 if it
    is evicted. counts: entries and members of each head."""

    kept: Tensor
    classes: Tensor
    counts: tuple[Sequence[int], Sequence[int]]

    @classmethod
    def joining(cls, kept: Tensor, joins: Tensor, targets: Tensor) -> MergePlan:
        """Kept tokens stay, those of `joins` `[kv_heads, N]` bool become part of the entry that `targets` `[kv_heads,
        N]` int64 names, and all others are evicted. Waits for the device, once."""
        classes = torch.where(kept, kept.cumsum(1) - 1, torch.where(joins, targets, -1))
        entries, members = counted(kept, classes >= 0)
        return cls(kept, classes, (entries, members))

    @classmethod
    def of_all(cls, kept: Tensor, classes: Tensor, entries: Sequence[int] | None) -> MergePlan:
        """Every token is part of an entry. entries: of each head; None: counted, which waits for the device."""
        return cls(kept, classes, (counted(kept)[0] if entries is None else entries, [kept.shape[1]] * len(kept)))

    @cached_property
    def entries(self) -> Places:
        """The kept tokens, `[entries]`."""
        return places_of(self.kept, self.counts[0])

    @cached_property
    def members(self) -> Places:
        """The tokens that are part of an entry, `[members]`."""
        return places_of(self.classes >= 0, self.counts[1])

    @cached_property
    def owners(self) -> Tensor:
        """The row of each member's entry among the entries of all heads: `[members]` int64."""
        counts = self.kept.sum(dim=1, keepdim=True)
        return (self.classes + counts.cumsum(0) - counts)[self.members]

    @cached_property
    def sizes(self) -> Tensor:
        """Members of each entry: `[entries]` int64."""
        sizes = torch.zeros(sum(self.counts[0]), dtype=torch.int64, device=self.kept.device)
        return sizes.index_add_(0, self.owners, torch.ones_like(self.owners))

    def totals(self, weights: Tensor) -> Tensor:
        """The sum `[entries]` of the weights `[kv_heads, N]` of each entry's members."""
        return weights.new_zeros(len(self.sizes)).index_add_(0, self.owners, weights[self.members])

    def means(self, states: Tensor, weights: Tensor) -> Tensor:
        """The weighted means `[entries, D]` of `states` `[kv_heads, N, D]`, in their dtype; a token alone in its entry
        stays bit by bit. weights: `[kv_heads, N]` fp32, positive."""
        rows = states[self.members]
        # Nobody needs the directions, so they are of one channel.
        _, means = merge_weighted(rows[:, :1], rows, weights[self.members], self.owners, len(self.sizes))
        return self.or_alone(states, means.to(states.dtype))

    def or_alone(self, states: Tensor, merged: Tensor) -> Tensor:
        """`merged` `[entries, D]`, but with the token's own `states` `[kv_heads, N, D]` for entries of one token."""
        return torch.where((self.sizes == 1).unsqueeze(1), states[self.entries], merged)

    def merged(
        self, states: tuple[Tensor, Tensor], weights: Tensor, importance: Tensor, *, slots: bool, shrinks: bool
    ) -> Kept | Merged:
        """The record of the weighted means of keys and values, as of `means`. importance: `[kv_heads, N]` fp32. slots:
        with a slot for each member. shrinks: weighted sums are divided by the number of members, not by their weights.
        """
        keys, values = (self.means(rows, weights) for rows in states)
        if shrinks:
            shares = (self.totals(weights) / self.sizes).unsqueeze(1)
            keys, values = (keys * shares).to(keys.dtype), (values * shares).to(values.dtype)
        return (self.as_merged if slots else self.as_kept)(keys, values, importance)

    def as_kept(self, keys: Tensor, values: Tensor, importance: Tensor) -> Kept:
        """The record of entries `[entries, D]` and `[entries, Dv]` without slots. importance: `[kv_heads, N]` fp32."""
        return Kept(
            keys=keys,
            values=values,
            entries_at=self.entries[1].to(torch.int32),
            offsets=offsets_of(self.counts[0]),
            importance=importance[self.entries],
        )

    def as_merged(
        self,
        keys: Tensor,
        values: Tensor,
        importance: Tensor,
        scales: Tensor | None = None,
        rope_mode: RopeMode = "baked",
    ) -> Merged:
        """The record of entries with a slot for each member. scales: `[members]` fp32, by which members multiply the
        key of their entry; None: 1."""
        kept = self.as_kept(keys, values, importance)
        return Merged(
            keys=keys,
            values=values,
            entries_at=kept.entry_positions,
            offsets=kept.offsets,
            rope_mode=rope_mode,
            importance=kept.importance,
            slot_scales=torch.ones(len(self.owners), device=keys.device) if scales is None else scales,
            slot_classes=self.classes[self.members].to(torch.int32),
            slot_positions=self.members[1].to(torch.int32),
            slot_offsets=offsets_of(self.counts[1]),
        )


def counted(*masks: Tensor) -> tuple[list[int], ...]:
    """The number of set places of each head, of masks `[kv_heads, N]`. Waits for the device once for all masks."""
    return tuple(torch.stack([mask.sum(dim=1) for mask in masks]).tolist())


def places_of(mask: Tensor, counts: Sequence[int]) -> Places:
    """The set places of a mask `[kv_heads, N]`, `counts[h]` of head h, as indices into `[kv_heads, N, ...]`: to index
    with the mask would wait for the device."""
    rows = marked(mask.flatten(), sum(counts))
    return rows // mask.shape[1], rows % mask.shape[1]


def over_heads(similarity: Tensor, goes: Tensor, places: Tensor, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """For each token the sum of `similarity` `[kv_heads, N]` fp32 over the heads that drop it, and the number of these
    heads, both `[tokens]` fp32. goes: `[kv_heads, N]` bool. places: `[kv_heads, N]`, the token of each place."""
    by_place = torch.stack([torch.where(goes, similarity, 0.0), goes.float()])  # [2, kv_heads, N]
    by_token = by_place.new_zeros(*by_place.shape[:2], int(places.max()) + 1)
    sums = by_token.scatter_(2, places.expand_as(by_place), by_place).sum(dim=1)
    of_all, heads = sums if ranks is None else ranks.gathered(sums.unsqueeze(0)).sum(dim=0)
    return of_all, heads


def by_threshold(
    keys: Tensor,
    kept: Tensor,
    places: Tensor,
    ranks: Ranks | None,
    *,
    tau: Tensor | float | None,
    before: Tensor | float | None,
    centers: Tensor | None = None,
) -> tuple[MergePlan, Tensor, Tensor | float]:
    """D2O's merge: a dropped token joins the kept one whose key is most like its own, where the mean of their cosines
    over the heads that drop it is at least a threshold. This is `tau`, or else the mean of all these cosines; with the
    threshold `before` it is the mean of both.

    keys: `[kv_heads, N, D]`. kept, centers: `[kv_heads, N]` bool, the kept tokens, and those that may take members, by
    default all of them. places: as of `over_heads`. Returns the plan, the cosines `[kv_heads, N]` and the threshold.
    """
    cosines, targets = nearest(keys, None, ~kept, kept, kept if centers is None else centers)
    sums, heads = over_heads(cosines, ~kept, places, ranks)
    now = sums.sum() / heads.sum().clamp_min(1) if tau is None else tau
    now = now if before is None else (before + now) / 2
    joins = ~kept & ((sums / heads.clamp_min(1))[places] >= now)
    return MergePlan.joining(kept, joins, targets), cosines, now


def nearest(keys: Tensor, values: Tensor | None, goes: Tensor, kept: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of `goes` the center most like it: with the largest cosine of their keys, times that of their
    values unless `values` is None.

    keys: `[kv_heads, N, D]`, values: `[kv_heads, N, Dv]`; goes, kept and centers, which are some of the kept tokens:
    `[kv_heads, N]` bool. Returns the similarity, `[kv_heads, N]` fp32, -inf for tokens without a center, and the center
    as an index into its head's kept tokens, `[kv_heads, N]` int64.
    """
    similarity = torch.full(goes.shape, -torch.inf, device=keys.device)
    targets = torch.full(goes.shape, -1, dtype=torch.int64, device=keys.device)
    of_goes, of_centers = counted(goes, centers)
    if not any(of_centers):
        return similarity, targets
    going, central = places_of(goes, of_goes), places_of(centers, of_centers)
    # Ones have cosine 1 with each other: the keys alone decide.
    by = keys.new_ones(*goes.shape, 1) if values is None else values
    largest, rows = nearest_pair(keys[going], by[going], keys[central], by[central], of_goes, of_centers)
    # Two keys and two values that both point apart have a positive product, and no direction in common.
    apart = (keys[going].float() * keys[central][rows].float()).sum(dim=1) <= 0
    similarity[going] = largest.masked_fill(apart, -torch.inf) if values is not None else largest
    targets[going] = (kept.cumsum(1) - 1)[central][rows]
    return similarity, targets
