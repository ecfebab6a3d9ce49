"""Decoding in C (`native.c`). The library `constriction` takes four times as long, holds the interpreter's lock
meanwhile, and decodes one run after the other."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from kvshelf.kernels.ans.tables import Runs, Tables
from kvshelf.kernels.native import compiled, pointer


def decode(array: Runs, tables: Tables) -> tuple[Tensor, list[bool]]:
    starts, places = (torch.from_numpy(np.cumsum([0, *counts])) for counts in (array.sizes, array.rows))
    out = torch.empty(len(array.order), int(places[-1]), dtype=torch.float32)
    bad = torch.zeros(len(array.sizes), dtype=torch.int32)
    channels = torch.tensor(array.order, dtype=torch.int32)
    compiled().kvshelf_ans_decode(
        pointer(array.data), pointer(starts), pointer(places), pointer(channels), pointer(tables.slots), pointer(out),
        pointer(bad), (ctypes.c_int64 * 2)(len(array.sizes), len(array.order)), torch.get_num_threads(),
    )  # fmt: skip
    return out, (bad == 0).tolist()
