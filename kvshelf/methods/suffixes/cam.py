"""CaM: the values of entries that leave go into those that follow (Zhang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.draws import drawn
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, ends

_AT_ONCE = 256
"""Entries that leave together: one system of equations, whose size is the square of their number."""


@dataclass(frozen=True)
class CaM(PeriodicPolicy):
    """Keep the question and the most recent tokens, as `window` does, and add the values of leaving entries to others.

    An entry that leaves the window draws whether it merges, with the probability p = A / (mean A of the window), at
    most 1, where A is the sum of the weights that an entry received from tokens of the answer. If it does, 1 / m of its
    value is added to each of the m = `merge` entries behind it; its key is dropped. Entries leave one after the other,
    the oldest first, so that a value may travel on.

    Draws come from a hash of (`seed`, layer, head, position): an answer is the same in any batch. Departures: means
    over a GQA group; a reduction after every 32nd token. The authors' code looks for infinite probabilities where it
    should look for NaN; here 0 / 0 is 0.
    """

    name: ClassVar[str] = "cam"
    source: ClassVar[str] = "CaM, ICML 2024 (proceedings.mlr.press/v235/zhang24n)"
    advice: ClassVar[str] = "in place of `window` where old values still count; it watches every token's attention."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"sum": 0.0}

    merge: int = parameter(32, "entries that share the value of one that leaves", minimum=1)
    probability: float | None = parameter(None, "of a merge; null: by the attention received", minimum=0, maximum=1)
    seed: int = parameter(0, "of the draws", minimum=0)

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        columns["sum"] += weights.mean(1)

    def reduce(self, suffix: Suffix) -> Reduction:
        going = suffix.stored - suffix.budget
        others = suffix.values[:, suffix.protected :].to(torch.float32, copy=True)  # leaving entries, then the window
        weights = self._drawn(suffix, going) / self.merge
        for first in range(0, going, _AT_ONCE):
            stop = min(first + _AT_ONCE, going)
            _pass_on(others[:, first : stop + self.merge], weights[:, first:stop], self.merge)
        values = torch.cat([suffix.values[:, : suffix.protected], others[:, going:].to(suffix.values.dtype)], dim=1)
        return Reduction(ends(suffix).expand(len(values), -1), values=values)

    def _drawn(self, suffix: Suffix, going: int) -> Tensor:
        """1 for each entry that leaves and merges, 0 for the others: `[kv_heads, going]` fp32."""
        leaving = slice(suffix.protected, suffix.protected + going)
        sums = suffix.columns["sum"]
        of_window = sums[:, leaving.stop :].mean(1, keepdim=True)
        positions = suffix.positions[:, leaving]
        return drawn(self.seed, suffix.layer, positions, sums[:, leaving], of_window, self.probability).float()


def _pass_on(values: Tensor, weights: Tensor, merge: int) -> None:
    """Let the first n of values `[kv_heads, n + merge or fewer, Dv]` leave, in place: each adds its value times its
    weight `[kv_heads, n]` to the next `merge`, also to those that leave after it."""
    count = weights.shape[1]
    rows = torch.arange(values.shape[1], device=values.device).unsqueeze(1)
    columns = torch.arange(count, device=values.device)
    near = (rows > columns) & (rows <= columns + merge)
    shares = torch.where(near, weights.unsqueeze(1), 0.0)  # [kv_heads, entries, n]
    within, beyond = shares[:, :count], shares[:, count:]
    # The leaving values are v_j = values_j + sum of shares_ji v_i over the i before: a triangular system.
    system = torch.eye(count, device=values.device) - within
    leaving = torch.linalg.solve_triangular(system, values[:, :count], upper=False, unitriangular=True)
    values[:, :count] = leaving
    values[:, count:] += beyond @ leaving
