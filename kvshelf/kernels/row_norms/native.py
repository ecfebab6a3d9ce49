"""Norms of rows in C: see `native.c`.

Torch makes an fp32 copy of bf16 states first; here each number is read once, as it lies, and nothing is written but the
norms. On x86 they equal torch's bit by bit where D is a multiple of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.native import TYPES, compiled, pointer, row_sizes
from kvshelf.kernels.row_norms import eager


def row_norms(states: Tensor) -> Tensor:
    if states.dtype not in TYPES:
        return eager.row_norms(states)
    norms = torch.empty(states.shape[:2], dtype=torch.float32)
    compiled().kvshelf_row_norms(
        pointer(states), pointer(norms), row_sizes(states), TYPES[states.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return norms
