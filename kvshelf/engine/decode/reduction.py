"""A suffix policy at work on one answer: what it noted of each layer, and which entries are left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.engine.decode.hooks import RowHook, Shown, Wants
from kvshelf.engine.decode.suffixes import SuffixRow, capacity_for
from kvshelf.errors import InvalidRequest
from kvshelf.methods.suffixes.base import DEFAULT_BUDGET, Columns, Reduction, Suffix, SuffixPolicy


class SuffixReducer(RowHook):
    """One row of a batch uses it. Layers share no state, and rows none.

    most: the most entries of a KV head that the row ever has.
    """

    def __init__(self, policy: SuffixPolicy, question_tokens: int, budget: int | None, layers: Sequence[int]) -> None:
        """budget: entries of a KV head (default: `DEFAULT_BUDGET` beside those that are protected). layers: those that
        attend. Raises `InvalidRequest` for a budget below what the policy always keeps."""
        self._policy = policy
        self._question = question_tokens
        self._protected = question_tokens if policy.protect_question else 0
        self._budget = self._protected + max(DEFAULT_BUDGET, policy.least) if budget is None else budget
        least = self._protected + policy.least
        if self._budget < least:
            of_question = f"{self._protected} of the question, which stay, and " if self._protected else ""
            raise InvalidRequest(
                f"suffix.budget is {budget}, and policy {policy.name!r} always keeps {least} entries here: "
                f"{of_question}{policy.least} by its parameters; give more, or change these",
                param="suffix.budget",
            )
        self.most = max(self._budget, question_tokens) + policy.interval
        self._layers = {layer: _Noted(policy, self.most) for layer in layers}

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:
        observes = answering and self._policy.observes_at(row.logical + 1 - self._question)
        return Wants.WEIGHTS if observes else Wants.NOTHING

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        """Note what the newest token, which the row has by now, gave to each entry, itself included."""
        for layer, weights in shown.weights.items():
            assert row.slab is not None
            heads = row.slab.of_row(layer, row)[0].shape[0]
            positions, columns = self._layers[layer].of(row, heads, weights.device)
            by_group = weights.view(heads, -1, row.stored)  # [kv_heads, group, S]
            self._policy.observe(columns, by_group, positions, row.logical - self._question)

    def reduced(self, row: SuffixRow) -> int | None:
        """Move the entries that stay to the front of the row's slot, if it is time. Returns how many entries it has
        before the next reduction. If it raises, some layers may be reduced."""
        answered = row.logical - self._question
        if answered <= 0 or answered % self._policy.interval or row.stored <= self._budget:
            return None
        assert row.slab is not None
        left = row.stored
        for layer, noted in self._layers.items():
            keys, values = row.slab.of_row(layer, row)
            suffix = Suffix(
                layer,
                keys[:, : row.stored],
                values[:, : row.stored],
                *noted.of(row, len(keys), keys.device),
                self._protected,
                row.logical,
                self._budget,
            )
            reduction = self._policy.reduce(suffix)
            left = reduction.kept.shape[1]
            keys[:, :left], values[:, :left] = _states(suffix, reduction)
            noted.reduced(suffix, reduction)
        row.stored = left
        return left + self._policy.interval


def _states(suffix: Suffix, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Keys and values that stay, not where they stood: they move over each other."""
    heads = torch.arange(len(suffix.keys), device=suffix.keys.device).unsqueeze(1)
    keys = suffix.keys[heads, reduction.kept] if reduction.keys is None else reduction.keys
    values = suffix.values[heads, reduction.kept] if reduction.values is None else reduction.values
    return keys, values


class _Noted:
    """Of one layer, the place of each stored entry among all tokens, and the policy's columns. A column has its first
    value where no entry is yet. Their memory grows with the row, by the capacities of slabs: budget and interval are
    the caller's, and may be far beyond what the answer will ever have."""

    def __init__(self, policy: SuffixPolicy, most: int) -> None:
        self._first = policy.columns
        self._most = most
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._columns: Columns = {}
        self._tokens = 0
        """How many of the row's tokens it has a position for, or had."""

    def of(self, row: SuffixRow, heads: int, device: torch.device) -> tuple[Tensor, Columns]:
        """Positions `[kv_heads, S]` int64 and columns of the row's entries, not copies."""
        if row.stored > self._positions.shape[1]:
            self._grow(heads, capacity_for(row.stored, self._most), device)
        if new := row.logical - self._tokens:
            places = torch.arange(self._tokens, row.logical, device=device)
            self._positions[:, row.stored - new : row.stored] = places
            self._tokens = row.logical
        columns = {name: column[:, : row.stored] for name, column in self._columns.items()}
        return self._positions[:, : row.stored], columns

    def _grow(self, heads: int, capacity: int, device: torch.device) -> None:
        had = self._positions.shape[1]
        positions = torch.empty(heads, capacity, dtype=torch.int64, device=device)
        columns = {name: torch.full((heads, capacity), first, device=device) for name, first in self._first.items()}
        if had:
            positions[:, :had] = self._positions
            for name, column in self._columns.items():
                columns[name][:, :had] = column
        self._positions, self._columns = positions, columns

    def reduced(self, suffix: Suffix, reduction: Reduction) -> None:
        """Keep what was noted of the entries that stay."""
        left = reduction.kept.shape[1]
        self._positions[:, :left] = suffix.positions.gather(1, reduction.kept)
        for name, column in suffix.columns.items():
            given = None if reduction.columns is None else reduction.columns[name]
            column[:, :left] = column.gather(1, reduction.kept) if given is None else given
            column[:, left:] = self._first[name]
