"""The naive forms: one pair of tokens at a time, one token of a class at a time, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nearest_pair(
    keys: Tensor,
    values: Tensor,
    center_keys: Tensor,
    center_values: Tensor,
    token_counts: Sequence[int],
    center_counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.merge`."""
    similarity = torch.full(keys.shape[:1], -torch.inf, dtype=torch.float64)
    index = torch.full(keys.shape[:1], -1)
    first_token = first_center = 0
    for num_tokens, num_centers in zip(token_counts, center_counts, strict=True):
        for i in range(first_token, first_token + num_tokens):
            for j in range(first_center, first_center + num_centers):
                product = cosine(keys[i], center_keys[j]) * cosine(values[i], center_values[j])
                if product > similarity[i]:
                    similarity[i], index[i] = product, j
        first_token, first_center = first_token + num_tokens, first_center + num_centers
    return similarity, index


def merge_weighted(
    keys: Tensor, values: Tensor, weights: Tensor, classes: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.merge`."""
    directions = torch.zeros(num_classes, keys.shape[1], dtype=torch.float64)
    means = torch.zeros(num_classes, values.shape[1], dtype=torch.float64)
    for c in range(num_classes):
        members = [i for i in range(keys.shape[0]) if int(classes[i]) == c]
        total = sum(float(weights[i]) for i in members)
        for i in members:
            share = float(weights[i]) / total
            length = float(keys[i].double().norm())
            directions[c] += share * keys[i].double() / (length or 1.0)
            means[c] += share * values[i].double()
    return directions, means


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of two vectors; 0 if one is all zeros."""
    length = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / length if length else 0.0
