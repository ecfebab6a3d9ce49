"""Which kept token an evicted one resembles most, and the weighted mean of the tokens that resemble each other: the two
halves of EMS's merge (arXiv:2412.08521, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation


def nearest_pair(
    keys: Tensor,
    values: Tensor,
    center_keys: Tensor,
    center_values: Tensor,
    token_counts: Sequence[int],
    center_counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """For each token i the center j of its head with the largest cos(key_i, key_j) * cos(value_i, value_j) (eq. 5).

    keys: `[T, D]`, values: `[T, Dv]`, center_keys: `[C, D]`, center_values: `[C, Dv]`, head after head; token_counts
    and center_counts say how many each head has. Keys may have another dtype than values. Returns that product, `[T]`
    fp32, and j as a row of `center_keys`, `[T]` int64; of equal products the smallest j wins. A vector of zeros has
    cosine 0 with everything. A token of a head without centers has similarity -inf and j -1. A NaN product counts as
    the largest. Computed in fp32. Raises `InvalidTensor` for other shapes.

    Bytes: tokens and centers once, 12 a token written; no T x C similarities in memory. FLOPs: 2 * (D + Dv) a pair of
    one head, so the arithmetic is the limit. Two launches on CUDA. Share of the limit on a GPU: not measured.
    """
    states = {"keys": keys, "values": values, "center_keys": center_keys, "center_values": center_values}
    require_states("nearest_pair", {"keys": 2, "center_keys": 2}, keys=keys, center_keys=center_keys)
    require_states("nearest_pair", {"values": 2, "center_values": 2}, values=values, center_values=center_values)
    require(
        keys.device == values.device
        and keys.shape[1] == center_keys.shape[1]
        and values.shape[1] == center_values.shape[1]
        and len(token_counts) == len(center_counts)
        and min([*token_counts, *center_counts], default=0) >= 0
        and keys.shape[0] == values.shape[0] == sum(token_counts)
        and center_keys.shape[0] == center_values.shape[0] == sum(center_counts),
        "nearest_pair",
        "keys must be [T, D], values [T, Dv], center_keys [C, D] and center_values [C, Dv] on one device, and the "
        f"counts of all heads must add up to T and C (given {list(token_counts)} and {list(center_counts)})",
        **states,
    )
    form = implementation("merge", keys.device)
    similarity, index = form.nearest_pair(*states.values(), token_counts, center_counts)
    return similarity.float(), index


def merge_weighted(
    keys: Tensor, values: Tensor, weights: Tensor, classes: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """The weighted means of each class: of its keys' directions, sum_i w_i k_i / |k_i|, and of its values, sum_i w_i
    v_i, both over sum_i w_i.

    keys: `[T, D]`, values: `[T, Dv]`, of any floating dtype each, weights: `[T]` fp32, positive, classes: `[T]` int64
    from 0 to num_classes - 1 (not checked on CUDA). Returns `[num_classes, D]` and `[num_classes, Dv]`, computed and
    returned in fp32; a class without members is 0, and a key of zeros has direction 0. The order of the sums is that of
    the tokens, so every run gives the same bits. Raises `InvalidTensor` for other shapes.

    Bytes: keys, values, weights and classes once, 4 * (D + Dv) a class written. FLOPs: 4 * D + 2 * Dv a token, so the
    memory is the limit. On CUDA a sort of the classes, a search for their ends and one launch. Share of the limit on a
    GPU: not measured.
    """
    require_states("merge_weighted", {"keys": 2}, keys=keys)
    require_states("merge_weighted", {"values": 2}, values=values)
    require(
        keys.shape[:1] == values.shape[:1] == weights.shape == classes.shape
        and keys.device == values.device == weights.device == classes.device
        and (weights.dtype, classes.dtype) == (torch.float32, torch.int64)
        and num_classes >= 0,
        "merge_weighted",
        "keys must be [T, D], values [T, Dv], weights [T] float32 and classes [T] int64 on one device, and num_classes "
        f"from 0 (given {num_classes})",
        keys=keys,
        values=values,
        weights=weights,
        classes=classes,
    )
    form = implementation("merge", keys.device)
    directions, means = form.merge_weighted(keys, values, weights, classes, num_classes)
    return directions.float(), means.float()
