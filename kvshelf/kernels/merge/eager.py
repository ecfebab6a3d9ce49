"""The two halves of EMS's merge (arXiv:2412.08521, equation 5 and the weighted mean): similarity and sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_PAIRS_PER_BLOCK = 1 << 20
"""Most similarities held at once, twice: 4 MiB of fp32 for keys and as much for values."""


def nearest_pair(keys: Tensor, values: Tensor, center_keys: Tensor, center_values: Tensor) -> tuple[Tensor, Tensor]:
    """For each token i the center j with the largest cos(key_i, key_j) * cos(value_i, value_j).

    keys: `[M, D]`, values: `[M, Dv]`, center_keys: `[C, D]`, center_values: `[C, Dv]`. Returns that product, `[M]`
    fp32, and j, `[M]` int64; of equals the smallest j. A vector of zeros has cosine 0 with everything. Without centers
    the similarity is -inf and j is -1. Computed in fp32.
    Bytes: the centers once per block of tokens, of at most 2^20 pairs, and the block's two matrices in cache. FLOPs:
    2 * M * C * (D + Dv).
    """
    similarity = keys.new_full(keys.shape[:1], -torch.inf, dtype=torch.float32)
    index = torch.full(keys.shape[:1], -1, dtype=torch.int64, device=keys.device)
    num_centers = center_keys.shape[0]
    if num_centers == 0:
        return similarity, index
    center_keys_t, center_values_t = _unit(center_keys).T, _unit(center_values).T
    step = max(1, _PAIRS_PER_BLOCK // num_centers)
    for start in range(0, keys.shape[0], step):
        block = slice(start, start + step)
        product = torch.matmul(_unit(keys[block]), center_keys_t)  # [rows, C]
        product *= torch.matmul(_unit(values[block]), center_values_t)
        similarity[block], index[block] = product.max(dim=1)
    return similarity, index


def merge_weighted(states: Tensor, weights: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """The weighted mean of the states of each class: sum_i w_i x_i / sum_i w_i.

    states: `[T, D]`, weights: `[T]`, positive, classes: `[T]` int64 from 0 to num_classes - 1. Returns
    `[num_classes, D]`, computed and returned in fp32; a class without members is 0. On CUDA the order of the sums, and
    so the last bit, may change from run to run unless torch's deterministic algorithms are on.
    Bytes: the states once, and T + num_classes rows of fp32. FLOPs: 2 * T * D.
    """
    weights = weights.float()
    sums = states.new_zeros(num_classes, states.shape[1], dtype=torch.float32)
    sums.index_add_(0, classes, states.float() * weights.unsqueeze(1))
    totals = torch.zeros_like(sums[:, 0]).index_add_(0, classes, weights)
    return sums.div_(totals.masked_fill_(totals == 0, 1.0).unsqueeze(1))


def _unit(states: Tensor) -> Tensor:
    """Rows of length 1, fp32; a row of zeros stays."""
    return functional.normalize(states.float(), dim=1)
