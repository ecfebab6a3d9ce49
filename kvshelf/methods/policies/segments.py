"""Text cut into segments, and operations on all segments of a document at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.kernels.transfer import upload

MAX_SENTENCE = 256
"""Most tokens of a sentence; a longer one is cut."""


def starts_of(ends: Tensor, longest: int) -> Tensor:
    """The first token of each segment, `[K]`: cut after each token where `ends` `[M]` bool is set, and wherever a
    segment has `longest` tokens."""
    tokens = torch.arange(len(ends), device=ends.device)
    first = torch.ones_like(ends)
    first[1:] = ends[:-1]
    starts = torch.where(first, tokens, 0).cummax(0).values  # of each token's segment
    return ((tokens - starts) % longest == 0).nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Segments:
    """M tokens in K consecutive segments, laid out as rows of equal width: short ones are padded.

    index: `[K, width]` int64, the token of each place. inside: `[K, width]` bool, the places that are not padding.
    places: `[M]` int64, the place of each token in the flattened rows.
    """

    index: Tensor
    inside: Tensor
    places: Tensor

    @classmethod
    def cut(cls, ends: Tensor, longest: int, device: torch.device) -> Segments:
        """The segments of `starts_of`, on a device. ends: on the CPU, which knows their number without a wait."""
        starts = starts_of(ends, longest)
        lengths = torch.diff(starts, append=torch.tensor([len(ends)]))
        columns = torch.arange(int(lengths.max()))
        index = (starts.unsqueeze(1) + columns).clamp_max(len(ends) - 1)
        inside = columns < lengths.unsqueeze(1)
        index, places = upload([index, inside.flatten().nonzero().squeeze(1)], device)
        return cls(index, upload([inside], device)[0], places)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each segment, `[K]`."""
        return self.inside.sum(dim=1)

    def rows(self, values: Tensor) -> Tensor:
        """`[M]` as `[K, width]`, zero or false where there is no token."""
        return values[self.index].masked_fill(~self.inside, 0)

    def tokens(self, rows: Tensor) -> Tensor:
        """`[K, width]` as `[M]`: undoes `rows`."""
        return rows.flatten().index_select(0, self.places)


def best_blocks(scores: Tensor, inside: Tensor, counts: Tensor, size: int) -> Tensor:
    """Take the tokens of each row's best blocks until there are `counts` of them: `[rows, width]` bool.

    scores: `[rows, width]`, not negative, zero where `inside` is not set. A block is `size` neighbours, counted from
    the row's first token; the last can be shorter. Blocks rank by their means. One with too many gives its best.
    """
    rows, width = scores.shape
    shape = (rows, -(-width // size), size)
    tokens, valid = (F.pad(values, (0, -width % size)).view(shape) for values in (scores, inside))
    lengths = valid.sum(dim=2)  # [rows, blocks]
    means = (tokens.sum(dim=2) / lengths.clamp_min(1)).masked_fill(lengths == 0, -1)
    order = means.sort(dim=1, descending=True, stable=True).indices
    ordered = lengths.gather(1, order)
    missing = counts.unsqueeze(1) - (ordered.cumsum(dim=1) - ordered)  # tokens, when a block's turn comes
    quotas = torch.zeros_like(missing).scatter_(1, order, missing)
    ranks = tokens.masked_fill(~valid, -1).sort(dim=2, descending=True, stable=True).indices.argsort(dim=2)
    return ((ranks < quotas.unsqueeze(2)) & valid).flatten(1)[:, :width]
