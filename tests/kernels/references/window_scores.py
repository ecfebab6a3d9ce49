"""The naive form: one softmax per row over every key the row may see."""

from __future__ import annotations

import torch
from torch import Tensor


def window_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    own_keys: Tensor | None = None,
    reduce: str = "mean",
    kernel: int = 1,
    pooling: str = "avg",
) -> Tensor:
    """See `kvshelf.kernels.window_scores.window_scores`; computed in fp64."""
    scores = torch.zeros(keys.shape[:2], dtype=torch.float64, device=keys.device)
    for head, group in enumerate(queries.reshape(keys.shape[0], -1, *queries.shape[1:])):
        weights = window_attention(group, keys[head], scale, None if own_keys is None else own_keys[head])
        reduced = weights.amax(dim=(0, 1)) if reduce == "max" else weights.mean(dim=(0, 1))
        for j in range(len(reduced)):
            neighbours = reduced[max(0, j - kernel // 2) : j + kernel // 2 + 1]
            scores[head, j] = neighbours.max() if pooling == "max" else neighbours.sum() / kernel
    return scores


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    """See `kvshelf.kernels.window_scores.window_attention`; computed in fp64."""
    group, num_rows, _ = queries.shape
    num_tokens = keys.shape[0]
    every = keys if own_keys is None else torch.cat([keys, own_keys])
    weights = torch.zeros(group, num_rows, every.shape[0], dtype=torch.float64, device=keys.device)
    for head in range(group):
        for row in range(num_rows):
            visible = every[: every.shape[0] - num_rows + row + 1].double()
            logits = scale * visible @ queries[head, row].double()
            weights[head, row, : visible.shape[0]] = torch.softmax(logits, dim=0)
    return weights[:, :, :num_tokens]


def pass_scores(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor) -> Tensor:
    """See `kvshelf.kernels.window_scores.pass_scores`."""
    scores = torch.zeros(keys.shape[:2], dtype=torch.float64, device=keys.device)
    for rows, own in zip(queries, own_keys, strict=True):
        scores = torch.maximum(scores, window_scores(rows, keys, scale, own, "max", 1, "avg"))
    return scores
