"""Text cut into segments, and operations on all segments of a document at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SENTENCE = 256
"""Tokens; a longer sentence is cut."""


def starts_of(ends: Tensor, longest: int) -> Tensor:
    """The first token of each segment, `[K]`: cut after each token where `ends` `[M]` bool is set, and wherever a
    segment has `longest` tokens."""
    tokens = torch.arange(len(ends), device=ends.device)
    first = torch.ones_like(ends)
    first[1:] = ends[:-1]
    begun = torch.where(first, tokens, 0).cummax(0).values  # where the segment of each token begins
    return ((tokens - begun) % longest == 0).nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Segments:
    """M tokens in K consecutive segments, laid out as rows of equal width: short ones are padded.

    index: `[K, width]` int64, the token of each place; inside: `[K, width]` bool, the places that are not padding.
    """

    index: Tensor
    inside: Tensor

    @classmethod
    def cut(cls, ends: Tensor, longest: int) -> Segments:
        """As `starts_of` says."""
        starts = starts_of(ends, longest)
        lengths = torch.diff(starts, append=torch.tensor([len(ends)], device=ends.device))
        places = torch.arange(int(lengths.max()), device=ends.device)
        index = starts.unsqueeze(1) + places
        return cls(index.clamp_max(len(ends) - 1), places < lengths.unsqueeze(1))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each segment, `[K]`."""
        return self.inside.sum(dim=1)

    def rows(self, values: Tensor) -> Tensor:
        """`[M]` as `[K, width]`, zero or false where there is no token."""
        return values[self.index].masked_fill(~self.inside, 0)

    def tokens(self, rows: Tensor) -> Tensor:
        """`[K, width]` as `[M]`: undoes `rows`."""
        return rows[self.inside]
