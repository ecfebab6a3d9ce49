"""Both halves with torch's own operations: similarities as two products of matrices, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_PAIRS_PER_BLOCK = 1 << 18
"""Most similarities held at once: 1 MiB of fp32 for keys and as much for values, so that both stay in the L2 cache."""

_GROUP = 64
"""Centers of a group: the search finds the group of the largest similarity first, then the center in that group."""


def nearest_pair(
    keys: Tensor,
    values: Tensor,
    center_keys: Tensor,
    center_values: Tensor,
    token_counts: Sequence[int],
    center_counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    similarity = keys.new_full(keys.shape[:1], -torch.inf, dtype=torch.float32)
    index = torch.full(keys.shape[:1], -1, dtype=torch.int64, device=keys.device)
    first_token = first_center = 0
    for num_tokens, num_centers in zip(token_counts, center_counts, strict=True):
        tokens = slice(first_token, first_token + num_tokens)
        centers = slice(first_center, first_center + num_centers)
        if num_centers:
            states = keys[tokens], values[tokens], center_keys[centers], center_values[centers]
            similarity[tokens], place = _nearest_of_head(*states)
            index[tokens] = place + first_center
        first_token, first_center = tokens.stop, centers.stop
    return similarity, index


def _nearest_of_head(keys: Tensor, values: Tensor, center_keys: Tensor, center_values: Tensor) -> tuple[Tensor, Tensor]:
    """`nearest_pair` for one head that has centers: `[T]` fp32, and `[T]` int64 rows of `center_keys`."""
    similarity = keys.new_empty(keys.shape[0], dtype=torch.float32)
    index = torch.empty(keys.shape[0], dtype=torch.int64, device=keys.device)
    center_keys_t, center_values_t = _unit(center_keys).T, _unit(center_values).T
    num_centers = center_keys.shape[0]
    step = max(1, _PAIRS_PER_BLOCK // num_centers)
    groups = -(-num_centers // _GROUP)
    products = keys.new_full((min(step, keys.shape[0]), groups * _GROUP), -torch.inf, dtype=torch.float32)
    for start in range(0, keys.shape[0], step):
        block = slice(start, start + step)
        product = products[: keys[block].shape[0]]
        cosines = product[:, :num_centers]
        torch.matmul(_unit(keys[block]), center_keys_t, out=cosines)
        cosines *= torch.matmul(_unit(values[block]), center_values_t)
        # torch finds an index seven times slower than a value: it is searched only in the group of the largest value.
        grouped = product.view(-1, groups, _GROUP)
        group = grouped.amax(dim=2).max(dim=1).indices
        similarity[block], place = grouped[torch.arange(len(grouped), device=keys.device), group].max(dim=1)
        index[block] = group * _GROUP + place
    return similarity, index


def merge_weighted(
    keys: Tensor, values: Tensor, weights: Tensor, classes: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.merge`. On CUDA the order of the sums, and so the last bit, may change from run to run
    unless torch's deterministic algorithms are on."""
    lengths = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float32).clamp_min_(1e-12)
    totals = weights.new_zeros(num_classes).index_add_(0, classes, weights)
    totals = totals.masked_fill_(totals == 0, 1.0).unsqueeze(1)
    directions = _sums(keys, weights / lengths, classes, num_classes)
    return directions.div_(totals), _sums(values, weights, classes, num_classes).div_(totals)


def _sums(states: Tensor, weights: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    sums = states.new_zeros(num_classes, states.shape[1], dtype=torch.float32)
    return sums.index_add_(0, classes, states.float() * weights.unsqueeze(1))


def _unit(states: Tensor) -> Tensor:
    """Rows scaled to length 1, fp32; a row of zeros stays zero."""
    return functional.normalize(states.float(), dim=1)
