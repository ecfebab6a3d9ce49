"""The rotation in C: see `native.c`. Every number is read once, as it lies, and written once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.native import TYPES, WIDTHS, compiled, pointer, row_sizes
from kvshelf.kernels.rotate import eager


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    dim = states.shape[2]
    # C reads at any index in `partners`; torch raises an error for an index that is out of range.
    if states.dtype not in TYPES or dim not in WIDTHS or not 0 <= int(partners.min()) <= int(partners.max()) < dim:
        return eager.rotate(states, cos, sin, partners)
    cos, sin, partners = cos.contiguous(), sin.contiguous(), partners.contiguous()
    out = torch.empty(states.shape, dtype=torch.float32)
    compiled().kvshelf_rotate(
        pointer(states), pointer(cos), pointer(sin), pointer(partners), pointer(out),
        row_sizes(states), TYPES[states.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
