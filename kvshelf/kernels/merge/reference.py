"""The naive forms: one pair of tokens at a time, one token of a class at a time, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def similarities(keys: Tensor, values: Tensor, center_keys: Tensor, center_values: Tensor) -> Tensor:
    """cos(key_i, key_j) * cos(value_i, value_j) of every token and center, `[M, C]`; 0 where a vector is zeros."""
    pairs = torch.zeros(keys.shape[0], center_keys.shape[0], dtype=torch.float64)
    for i in range(keys.shape[0]):
        for j in range(center_keys.shape[0]):
            pairs[i, j] = cosine(keys[i], center_keys[j]) * cosine(values[i], center_values[j])
    return pairs


def merge_weighted(states: Tensor, weights: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """See `kvshelf.kernels.merge.eager.merge_weighted`."""
    means = torch.zeros(num_classes, states.shape[1], dtype=torch.float64)
    for c in range(num_classes):
        members = [i for i in range(states.shape[0]) if int(classes[i]) == c]
        for i in members:
            means[c] += weights[i].double() * states[i].double()
        if members:
            means[c] /= sum(float(weights[i]) for i in members)
    return means


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two vectors; 0 if one is zeros."""
    length = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / length if length else 0.0
