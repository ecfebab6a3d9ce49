"""Observation windows with softmax and sums in C: see `native.c`. Products are torch's own, as in `eager`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvshelf.kernels.native import compiled, pointer
from kvshelf.kernels.window_scores import eager
from kvshelf.kernels.window_scores.eager import window_attention as window_attention  # its weights are its cost


def window_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    own_keys: Tensor | None = None,
    reduce: str = "mean",
    kernel: int = 1,
    pooling: str = "avg",
) -> Tensor:
    """See `kvshelf.kernels.window_scores.window_scores`."""
    return eager.scores_by(_add_weights, queries, keys, scale, own_keys, reduce, kernel, pooling)


def _add_weights(scores: Tensor, logits: Tensor, spare: Tensor, reduce: str) -> None:
    """See `eager.add_weights`."""
    native = compiled()
    rows, width = logits.shape
    native.kvshelf_add_weights(
        pointer(logits), pointer(spare), pointer(scores), ctypes.c_int64(rows), ctypes.c_int64(width),
        ctypes.c_int64(len(scores)), reduce == "max", torch.get_num_threads(),
    )  # fmt: skip
