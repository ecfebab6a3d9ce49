"""Observation windows with softmax, sums and the products of few rows in C: see `native.c`. The products of many rows
are torch's own, as in `eager`."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from kvshelf.kernels.native import FEW_ROWS, TYPES, WIDTHS, compiled, pointer
from kvshelf.kernels.window_scores import eager
from kvshelf.kernels.window_scores.eager import window_attention as window_attention  # writing weights is its cost


def _multiply(rows: Tensor, keys: Tensor, out: Tensor) -> None:
    (count, dim), whole = rows.shape, keys.stride(1) == 1 and out.stride(1) == 1
    if rows.dtype not in TYPES or keys.dtype != rows.dtype or count > FEW_ROWS or dim not in WIDTHS or not whole:
        eager.multiply(rows, keys, out)
        return
    rows = rows.contiguous()
    sizes = (ctypes.c_int64 * 5)(count, len(keys), dim, out.stride(0), keys.stride(0))
    compiled().kvshelf_few_logits(
        pointer(rows), pointer(keys), pointer(out), sizes, TYPES[rows.dtype], torch.get_num_threads()
    )


def _add_weights(scores: Tensor, logits: Tensor, spare: Tensor, reduce: str) -> None:
    rows, width = logits.shape
    compiled().kvshelf_add_weights(
        pointer(logits), pointer(spare), pointer(scores), ctypes.c_int64(rows), ctypes.c_int64(width),
        ctypes.c_int64(len(scores)), reduce == "max", torch.get_num_threads(),
    )  # fmt: skip


window_scores = partial(eager.scores_by, _multiply, _add_weights)
pass_scores = partial(eager.pass_scores_by, _multiply, _add_weights)
