"""What policies that merge have in common: who goes, to whom, with what weight, and stored as what.

                 goes                       to whom                            weight             stored as
    `ems`        the next best by score     nearest center, keys and values    score              slots, own lengths
    `d2o`        what is not kept           nearest kept token, keys           e^cosine           means, or slots
    `kvmerger`   a run but for its pivot    the pivot of its run               Gaussian           means, or slots
    `cam`        those drawn, values alone  the next m kept tokens             1 / m              sums

A mean takes the share of the softmax of one token, whichever tokens it stands for. Slots give each of them its own
share, for 12 bytes each.
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
"""The heads and the tokens of some places of `[kv_heads, N]`, int64, head by head."""

NO_THRESHOLD: Final = -2.0
"""Of a layer that has dropped nothing yet: below every cosine."""


@dataclass(frozen=True, eq=False)
class MergePlan:
    """The entry that each token of a layer becomes part of. kept: `[kv_heads, N]` bool, tokens at whose positions
    entries stand. classes: `[kv_heads, N]` int64, the entry of a token as an index into its head's kept tokens, -1 if
    it is evicted. counts: entries and members of each head; on a device that is asked for them it waits."""

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
        """Every token is part of an entry. entries: of each head; None: asked of the device."""
        return cls(kept, classes, (counted(kept)[0] if entries is None else entries, [kept.shape[1]] * len(kept)))

    @cached_property
    def entries(self) -> Places:
        """Where entries stand, `[entries]`."""
        return places_of(self.kept, self.counts[0])

    @cached_property
    def members(self) -> Places:
        """The tokens that are part of an entry, `[members]`."""
        return places_of(self.classes >= 0, self.counts[1])

    @cached_property
    def owners(self) -> Tensor:
        """The entry of each member, as a row of all heads' entries: `[members]` int64."""
        counts = self.kept.sum(dim=1, keepdim=True)
        return (self.classes + counts.cumsum(0) - counts)[self.members]

    @cached_property
    def sizes(self) -> Tensor:
        """Members of each entry: `[entries]` int64."""
        none = torch.zeros(sum(self.counts[0]), dtype=torch.int64, device=self.kept.device)
        return none.index_add_(0, self.owners, torch.ones_like(self.owners))

    def totals(self, weights: Tensor) -> Tensor:
        """The sum `[entries]` of the weights `[kv_heads, N]` of each entry's members."""
        return weights.new_zeros(len(self.sizes)).index_add_(0, self.owners, weights[self.members])

    def means(self, states: Tensor, weights: Tensor) -> Tensor:
        """The weighted means `[entries, D]` of `states` `[kv_heads, N, D]`, in their dtype; a token alone in its entry
        stays bit by bit. weights: `[kv_heads, N]` fp32, positive."""
        of_members = states[self.members]
        # Nobody needs the directions, so they are of one channel.
        _, means = merge_weighted(of_members[:, :1], of_members, weights[self.members], self.owners, len(self.sizes))
        return self.or_alone(states, means.to(states.dtype))

    def or_alone(self, states: Tensor, merged: Tensor) -> Tensor:
        """`merged` `[entries, D]`, but for entries of one token that token's own of `states` `[kv_heads, N, D]`."""
        return torch.where((self.sizes == 1).unsqueeze(1), states[self.entries], merged)

    def made(
        self, states: tuple[Tensor, Tensor], weights: Tensor, importance: Tensor, *, slots: bool, shrinks: bool
    ) -> Kept | Merged:
        """The weighted means of keys and values, as of `means`, with the importance `[kv_heads, N]` fp32. slots: with
        one for each member. shrinks: as sums over the number of members, so that weights below 1 shorten them."""
        keys, values = (self.means(rows, weights) for rows in states)
        if shrinks:
            shares = (self.totals(weights) / self.sizes).unsqueeze(1)
            keys, values = (keys * shares).to(keys.dtype), (values * shares).to(values.dtype)
        return (self.as_merged if slots else self.as_kept)(keys, values, importance)

    def as_kept(self, keys: Tensor, values: Tensor, importance: Tensor) -> Kept:
        """The entries `[entries, D]` and `[entries, Dv]`, as tokens like others. importance: `[kv_heads, N]` fp32."""
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
        """The entries with a slot for each member. scales: of the members, `[members]` fp32; None: all have the key of
        their entry as it is."""
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
    """How many are set of each head, of masks `[kv_heads, N]`. Waits for the device, once for all of them."""
    return tuple(torch.stack([mask.sum(dim=1) for mask in masks]).tolist())


def places_of(mask: Tensor, counts: Sequence[int]) -> Places:
    """Where a mask `[kv_heads, N]` is set, of each head as often as `counts` says: to index `[kv_heads, N, ...]` with,
    for which a mask would wait for the device."""
    rows = marked(mask.flatten(), sum(counts))
    return rows // mask.shape[1], rows % mask.shape[1]


def over_heads(similarity: Tensor, goes: Tensor, places: Tensor, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Of each token the sum of `similarity` `[kv_heads, N]` fp32 over the heads that drop it, and their number, both
    `[tokens]` fp32. goes: `[kv_heads, N]` bool; places: of the tokens, of which each head may have others, likewise."""
    own = torch.stack([torch.where(goes, similarity, 0.0), goes.float()])  # [2, kv_heads, N]
    by_token = own.new_zeros(*own.shape[:2], int(places.max()) + 1)
    sums = by_token.scatter_(2, places.expand_as(own), own).sum(dim=1)
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
    """D2O's merge: a token that is not kept joins the kept one whose key is most like its own, where the mean of their
    cosines over the heads that drop it is at least a threshold: `tau`, or the mean of all these cosines, and the mean
    of this and the threshold `before`.

    keys: `[kv_heads, N, D]`; kept: bool, places: of the tokens, and the cosines of those that go, and the kept tokens
    that may take members, by default all: `[kv_heads, N]`. Returns the plan, the cosines and the threshold.
    """
    cosines, targets = nearest(keys, None, ~kept, kept, kept if centers is None else centers)
    sums, heads = over_heads(cosines, ~kept, places, ranks)
    now = sums.sum() / heads.sum().clamp_min(1) if tau is None else tau
    now = now if before is None else (before + now) / 2
    joins = ~kept & ((sums / heads.clamp_min(1))[places] >= now)
    return MergePlan.joining(kept, joins, targets), cosines, now


def nearest(keys: Tensor, values: Tensor | None, goes: Tensor, kept: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of `goes` the center that is most like it: the largest cosine of their keys, times that of their
    values unless `values` is None.

    keys: `[kv_heads, N, D]`, values: `[kv_heads, N, Dv]`; goes, kept and centers, which are some of the kept tokens:
    `[kv_heads, N]` bool. Returns `[kv_heads, N]` fp32, -inf for tokens that do not go or find no center, and the center
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
    found, rows = nearest_pair(keys[going], by[going], keys[central], by[central], of_goes, of_centers)
    # Two keys and two values that both point apart have a positive product, and no direction in common.
    apart = (keys[going].float() * keys[central][rows].float()).sum(dim=1) <= 0
    similarity[going] = found.masked_fill(apart, -torch.inf) if values is not None else found
    targets[going] = (kept.cumsum(1) - 1)[central][rows]
    return similarity, targets
