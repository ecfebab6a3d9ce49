"""Decoding in C: see `native.c`. The library takes four times as long, holds the interpreter's lock meanwhile, and
decodes one run after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvshelf.kernels.ans.tables import Tables
from kvshelf.kernels.native import compiled, pointer


def decode(
    data: Tensor, sizes: Sequence[int], rows: Sequence[int], tables: Tables, order: Sequence[int]
) -> tuple[Tensor, list[bool]]:
    """See `kvshelf.kernels.ans`."""
    starts, places = (torch.from_numpy(np.cumsum([0, *counts])) for counts in (sizes, rows))
    out = torch.empty(len(order), int(places[-1]), dtype=torch.float32)
    bad = torch.zeros(len(sizes), dtype=torch.int32)
    channels = torch.tensor(order, dtype=torch.int32)
    compiled().kvshelf_ans_decode(
        pointer(data), pointer(starts), pointer(places), pointer(channels), pointer(tables.slots), pointer(out),
        pointer(bad), (ctypes.c_int64 * 2)(len(sizes), len(order)), torch.get_num_threads(),
    )  # fmt: skip
    return out, (bad == 0).tolist()
