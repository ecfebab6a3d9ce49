"""The rotation in C: see `native.c`. Every number is read once, as it lies, and written once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvshelf.kernels.native import TYPES, compiled, pointer
from kvshelf.kernels.rotate import eager

_WIDTHS = range(16, 257, 16)
"""Head sizes in whole vectors."""


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    """See `kvshelf.kernels.rotate`."""
    dim = states.shape[2]
    # C reads where a partner says: an index that is none is torch's to refuse.
    if states.dtype not in TYPES or dim not in _WIDTHS or not 0 <= int(partners.min()) <= int(partners.max()) < dim:
        return eager.rotate(states, cos, sin, partners)
    cos, sin, partners = cos.contiguous(), sin.contiguous(), partners.contiguous()
    out = torch.empty(states.shape, dtype=torch.float32)
    sizes = (*states.shape, *(stride * states.itemsize for stride in states.stride()[:2]))
    compiled().kvshelf_rotate(
        pointer(states), pointer(cos), pointer(sin), pointer(partners), pointer(out),
        (ctypes.c_int64 * len(sizes))(*sizes), TYPES[states.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
