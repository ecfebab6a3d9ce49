"""Which rows of a document a query reads: units of consecutive rows, scored from summaries, the best until a budget is
full.

    score[h, u] = group_g of (low[h, u] . q_g + scale * span[h, u] . (linear * q_g + relu * max(q_g, 0)))

With low and scale * span the least value of a channel in a unit and its range, linear 0 and relu 1, this is an upper
bound of q . k for every key of the unit (Quest, arXiv 2406.10774, section 3.2).

Guesses (InfiniGen, arXiv 2406.19707, section 4.3) have a basis of each query head, and a summary for it of each unit:

    guess[g, u] = low[g, u] . (q_g @ basis[g]),  score[h, u] = max_g (guess[g, u] - max_v guess[g, v]),

and units with a score of -alpha or more are critical. All KV heads read the same number of units, the mean number of
critical ones, at least one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from kvshelf.kernels.checks import require
from kvshelf.kernels.dispatch import implementation


@dataclass(frozen=True, eq=False)
class Units:
    """The units of one prefix, packed by head: head h owns `counts[h]` of them. They never change.

    low: `[units, W]` fp32 or bf16, the summaries. span: the same shape and dtype, or None; times `scale`. ends:
    `[units]` int32, the row of the head after the unit's last one. forced: `[units]` bool, read whatever their scores.
    by_column: low and span are `[W, units]`, which is faster for many units of few columns. parents: coarser units of
    the same rows, each of `children` of these (the last of a head may have fewer): only units of the better half of
    them are chosen. views: low and span are memory of the prefix.
    """

    low: Tensor
    span: Tensor | None
    ends: Tensor
    forced: Tensor
    counts: tuple[int, ...]
    scale: float = 1.0
    by_column: bool = False
    parents: Units | None = None
    children: int = 1
    views: bool = False

    @property
    def width(self) -> int:
        """W."""
        return self.low.shape[0] if self.by_column else self.low.shape[1]

    @cached_property
    def size(self) -> int:
        """Rows of each unit; 0 if they differ."""
        return _only(self.sizes)

    @cached_property
    def free_size(self) -> int:
        """Rows of each unit that is not forced; 0 if they differ."""
        return _only(self.sizes[~self.forced])

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The first unit of each head, and the end of the last head."""
        return tuple(accumulate(self.counts, initial=0))

    @cached_property
    def starts(self) -> Tensor:
        """`begins` on the device of the units, `[kv_heads + 1]` int32."""
        return torch.tensor(self.begins, dtype=torch.int32).to(self.ends.device)

    @cached_property
    def sizes(self) -> Tensor:
        """Rows of each unit, `[units]` int64."""
        ends = self.ends.long()
        before = torch.cat([ends.new_zeros(1), ends[:-1]])
        first = [begin for begin, count in zip(self.begins, self.counts, strict=False) if count]
        before.index_fill_(0, torch.tensor(first, dtype=torch.int64, device=before.device), 0)
        return ends - before

    @cached_property
    def longest(self) -> int:
        """Rows of the head that has most."""
        return int(self.ends.max()) if len(self.ends) else 0

    @cached_property
    def forced_rows(self) -> tuple[int, ...]:
        """Rows of the forced units of each head."""
        heads = torch.split(torch.where(self.forced, self.sizes, 0), list(self.counts))
        return tuple(int(head.sum()) for head in heads)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory beside the prefix."""
        summaries = [table for table in (self.low, self.span) if table is not None and not self.views]
        parents = 0 if self.parents is None else self.parents.nbytes
        return parents + sum(table.nbytes for table in (*summaries, self.ends, self.forced))


def _only(sizes: Tensor) -> int:
    distinct = set(sizes.tolist())
    return int(distinct.pop()) if len(distinct) == 1 else 0


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rows chosen of one prefix: head h reads `rows[h, :counts[h]]`, ascending.

    rows: `[kv_heads, most]` int32, counts: `[kv_heads]` int32. Each choice overwrites both.
    """

    rows: Tensor
    counts: Tensor

    @classmethod
    def room(cls, lengths: Sequence[int], budget: int, device: torch.device) -> Chosen:
        """Room for the choice of a prefix whose heads have these rows."""
        most = min(budget, max(lengths, default=0))
        rows = torch.zeros(len(lengths), most, dtype=torch.int32, device=device)
        return cls(rows, torch.zeros(len(lengths), dtype=torch.int32, device=device))


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of a query at one layer, over the units of all its prefixes together.

    budget: most rows of a KV head, of all prefixes, those of forced units included. linear, relu, group: see the
    formula. columns: the channel of the query that each of the W columns stands for, `[kv_heads, W]` int64; None: W is
    the head size. basis: of guesses, `[kv_heads, group, D, V]` fp32 contiguous, over units by column whose W is
    group * V, those of the first query head first; such a choice has no span, parents or forced units. alpha: see
    above. cut: whether the last unit is cut where the budget ends; otherwise it is left out, with all that rank
    below it. force: whether forced units are read; otherwise they rank as the others.
    """

    units: tuple[Units, ...]
    chosen: tuple[Chosen, ...]
    budget: int
    linear: float = 0.0
    relu: float = 0.0
    group: Literal["max", "mean"] = "max"
    columns: Tensor | None = None
    basis: Tensor | None = None
    alpha: float = math.inf
    cut: bool = False
    force: bool = True

    def __post_init__(self) -> None:
        if self.basis is not None:
            assert self.basis.is_contiguous()
            width = self.basis.shape[1] * self.basis.shape[3]
            plain = (u.by_column and u.span is None and u.parents is None and u.width == width for u in self.units)
            assert all(plain)
        assert self.budget >= self.forced_rows, "the rows that are always read have no room"
        assert all(
            chosen.rows.shape[1] >= min(self.budget, units.longest)
            for units, chosen in zip(self.units, self.chosen, strict=True)
        )

    @property
    def width(self) -> int:
        """Columns of a summary."""
        return self.units[0].width if self.basis is None else self.basis.shape[3]

    @property
    def forced_rows(self) -> int:
        """Rows that a query reads whatever the scores, of the head that has most."""
        if not self.force:
            return 0
        return max(map(sum, zip(*(units.forced_rows for units in self.units), strict=True)))


def better_half(parents: int) -> int:
    """The size of the better half of this many parents."""
    return -(-parents // 2)


def choose(queries: Tensor, choice: Choice) -> None:
    """Fill `choice.chosen` with the rows that one token chooses. queries: `[q_heads, D]`, query head h reads KV head
    h // (q_heads // kv_heads).

    Units rank by score, those with a NaN or infinite score first; equal ones by the earlier prefix and the smaller
    number. Bytes: each summary once. FLOPs: 4 * q_heads * units * W.
    """
    heads = len(choice.units[0].counts)
    require(
        queries.dim() == 2 and queries.shape[0] % heads == 0 and len(choice.units) == len(choice.chosen) > 0,
        "choose",
        f"queries must be [q_heads, D] of {heads} KV heads, and each prefix needs room for its rows",
        queries=queries,
    )
    implementation("choose", queries.device).choose(queries, choice)
