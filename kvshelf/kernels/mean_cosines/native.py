"""The cosines in C: see `native.c`. Rows are read in place, without an fp32 copy. Threads sum blocks of rows, and the
blocks' sums are added in order: the result does not depend on the number of threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.kernels.mean_cosines import eager
from kvshelf.kernels.native import TYPES, compiled, pointer, row_sizes

_BLOCK_ROWS = 256
"""Rows of a block, as in `rows.h`."""

_MOST_DIM = 256


def mean_cosines(states: Tensor) -> Tensor:
    heads, num_rows, dim = states.shape
    if states.dtype not in TYPES or dim > _MOST_DIM:
        return eager.mean_cosines(states)
    inverses = torch.empty(heads, num_rows, dtype=torch.float32)
    cosines = torch.empty_like(inverses)
    sums = torch.empty(heads, -(-num_rows // _BLOCK_ROWS), dim, dtype=torch.float32)

    def go_over_rows(axes: Tensor | None) -> None:
        compiled().kvshelf_mean_cosines(
            pointer(states), pointer(inverses), pointer(sums), pointer(axes) if axes is not None else None,
            pointer(cosines), row_sizes(states), TYPES[states.dtype], torch.get_num_threads(),
        )  # fmt: skip

    go_over_rows(None)
    go_over_rows(F.normalize(sums.sum(dim=1), dim=-1))
    return cosines
